package sense

import (
	"errors"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/router/discover"
)

// Sources is how the router learns who is there and what they can.
type Sources struct {
	// ProbeTimeout bounds the one-token request that a worker must pass
	// before it gets users' requests.
	ProbeTimeout time.Duration `key:"probe_timeout"`
	// Static is workers and engines that do not announce themselves;
	// reloadable with SetStatic.
	Static []Static `key:"static"`
	Events Events   `key:"kv_events"`
	// Discovery is how engines are found that do not announce themselves.
	Discovery discover.Config `key:"discovery"`
}

// DefaultSources is for one machine.
func DefaultSources() Sources {
	return Sources{ProbeTimeout: 10 * time.Second, Events: DefaultEvents(), Discovery: discover.DefaultConfig()}
}

// Validate returns *config.KeyErrors.
func (c *Sources) Validate() error {
	return errors.Join(config.Positive("probe_timeout", c.ProbeTimeout), validStatics(c.Static),
		config.Within("kv_events", c.Events.Validate()), config.Within("discovery", c.Discovery.Validate()))
}
