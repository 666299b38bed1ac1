package steer

import (
	"fmt"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/router/planner"
)

// Modes of a planner.
const (
	Off    = "off"    // there is none
	Advise = "advise" // it says what it wants
	Act    = "act"    // it starts, ends and turns workers
)

// Config is the configuration of a router's planner.
type Config struct {
	// Mode is Off, Advise or Act. A router that cannot start workers advises.
	Mode           string `key:"mode"`
	planner.Config        // of all models together
	// TTFT and TPOT are what requests are to see: the time to a stream's first token, and the mean time between its
	// tokens. 0: nothing, and then the planner goes by utilisation and queues alone.
	TTFT time.Duration `key:"ttft"`
	TPOT time.Duration `key:"tpot"`
}

// DefaultConfig advises.
func DefaultConfig() Config { return Config{Mode: Advise, Config: planner.DefaultConfig()} }

// Validate returns a *config.KeyError.
func (c Config) Validate() error {
	switch {
	case c.Mode != Off && c.Mode != Advise && c.Mode != Act:
		return config.Bad("mode", "%s", fmt.Sprintf("want %s, %s or %s, not %q", Off, Advise, Act, c.Mode))
	case c.TTFT < 0 || c.TTFT > time.Hour:
		return config.Bad("ttft", "%v is not in 0s..1h", c.TTFT)
	case c.TPOT < 0 || c.TPOT > time.Hour:
		return config.Bad("tpot", "%v is not in 0s..1h", c.TPOT)
	}
	return c.Config.Validate()
}
