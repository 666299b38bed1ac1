package sense

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/discover"
	"github.com/xpyd/xpyd/router/h1"
)

// Sources is how the router learns which workers there are and what they can do.
type Sources struct {
	// ProbeTimeout bounds the one-token request that a worker must pass before it gets
	// users' requests.
	ProbeTimeout time.Duration `key:"probe_timeout"`
	// Static lists workers and engines that do not announce themselves; reloadable.
	Static []Static `key:"static"`
	Events Events   `key:"kv_events"`
	// Discovery finds engines that do not announce themselves.
	Discovery discover.Config `key:"discovery"`
}

// DefaultSources is for one machine.
func DefaultSources() Sources {
	return Sources{ProbeTimeout: 10 * time.Second, Events: DefaultEvents(), Discovery: discover.DefaultConfig()}
}

// Validate returns errors that are each a *config.KeyError.
func (c *Sources) Validate() error {
	return errors.Join(config.Positive("probe_timeout", c.ProbeTimeout), validStatics(c.Static),
		config.Within("kv_events", c.Events.Validate()), config.Within("discovery", c.Discovery.Validate()))
}

// Static is one worker or engine of the configuration.
type Static struct {
	ID   string     `key:"id"`
	Role fleet.Role `key:"role"` // prefill or decode; decode for dialect openai
	URL  string     `key:"url"`  // http://host:port
	// Dialect is one of dialect.Names except native: native workers announce themselves.
	Dialect string `key:"dialect"`
	Model   string `key:"model"` // the name clients use

	// Version is the engine's; empty asks GET /version.
	Version string `key:"version"`
	// Bootstrap is host:port where decode finds this prefill engine; empty means the URL's
	// host and the dialect's usual port. For vllm-p2pnccl it is the ZMQ address, in both
	// roles.
	Bootstrap   string `key:"bootstrap"`
	EngineID    string `key:"engine_id"` // vllm-nixl-push
	TP          int    `key:"tp"`        // vllm-nixl-push
	PP          int    `key:"pp"`        // vllm-nixl-push
	DPRanks     int    `key:"dp_ranks"`  // data-parallel ranks behind the URL
	MaxModelLen int    `key:"max_model_len"`
	// KVEvents and KVReplay are host:port of rank 0's publisher of KV events and of its
	// replay socket; KVTopic is the prefix of its topics.
	KVEvents string `key:"kv_events"`
	KVReplay string `key:"kv_replay"`
	KVTopic  string `key:"kv_topic"`
	Topology string `key:"topology"`  // "zone-a/rack-3", for pick.topology_level
	MaxBatch int    `key:"max_batch"` // sequences that decode runs at once; 0: unknown
}

func (s *Static) instance() fleet.Instance {
	i := fleet.Instance{ID: s.ID, Role: s.Role, URL: s.URL, Dialect: s.Dialect, Model: s.Model, Version: s.Version,
		Bootstrap: s.Bootstrap, EngineID: s.EngineID, TP: s.TP, PP: s.PP, DPRanks: s.DPRanks, MaxModelLen: s.MaxModelLen, MaxBatch: s.MaxBatch,
		KVEvents: s.KVEvents, KVReplay: s.KVReplay, KVTopic: s.KVTopic, Topology: s.Topology}
	if i.Role == "" && i.Alone() {
		i.Role = fleet.Decode
	}
	return i
}

// validStatics returns a *config.KeyError.
func validStatics(list []Static) error {
	seen := map[string]bool{}
	for n, s := range list {
		i := s.instance()
		err := i.Validate()
		switch {
		case err != nil:
		case !slices.Contains(foreignNames(), s.Dialect):
			err = fmt.Errorf("dialect: want one of %s; native workers announce themselves, with --join-file", strings.Join(foreignNames(), ", "))
		case seen[s.ID]:
			err = fmt.Errorf("id: %q is there twice", s.ID)
		default:
			err = CheckInstance(&i)
		}
		if err != nil {
			return config.Bad("static", "entry %d: %v", n+1, err)
		}
		seen[s.ID] = true
	}
	return nil
}

func foreignNames() []string {
	return slices.DeleteFunc(dialect.Names(), func(n string) bool { return n == fleet.Native })
}

// SetStatic makes the list the fleet's static members. New and changed ones are probed,
// those that are no longer listed end, the others keep their requests.
func (ms *Members) SetStatic(list []Static) error {
	if err := validStatics(list); err != nil {
		return err
	}
	ms.staticMu.Lock()
	defer ms.staticMu.Unlock()
	if len(list) == 0 && len(ms.statics) == 0 {
		return nil
	}
	next := map[string]Static{}
	var errs []error
	for _, s := range list {
		next[s.ID] = s
		if old, ok := ms.statics[s.ID]; ok && old == s {
			continue
		}
		inst := s.instance()
		inst.Epoch = ms.NextEpoch(s.ID)
		if err := ms.Fleet.AddStatic(inst, fleet.Static); err != nil {
			errs = append(errs, err)
			delete(next, s.ID)
		}
	}
	for id := range ms.statics {
		if _, ok := next[id]; !ok {
			ms.Fleet.Remove(id, "taken out of the configuration")
		}
	}
	ms.statics = next
	return errors.Join(errs...)
}

// NextEpoch is an epoch for an instance that does not tell its own: newer than any known of
// that ID, so that a removed one can be added again.
func (ms *Members) NextEpoch(id string) uint64 {
	now := fleet.NewEpoch()
	if m := ms.Fleet.Snapshot().Get(id); m != nil {
		return max(now, m.Epoch+1)
	}
	return now
}

// CheckInstance refuses an instance that the router could not reach or use. The error is a
// *config.KeyError.
func CheckInstance(inst *fleet.Instance) error {
	_, err := h1.Address(inst.URL)
	switch {
	case inst.ID == "" || strings.ContainsAny(inst.ID, "/? \r\n"):
		return config.Bad("id", "%q is no id", openai.Clip(inst.ID))
	case inst.Role != fleet.Prefill && inst.Role != fleet.Decode:
		return config.Bad("role", "want prefill or decode, not %q", openai.Clip(string(inst.Role)))
	case inst.Model == "":
		return config.Bad("model", "it is required: what clients call it")
	case dialect.For(inst.Dialect) == nil:
		return config.Bad("dialect", "%q is unknown", openai.Clip(inst.Dialect))
	case err != nil:
		return config.Bad("url", "%v", err)
	}
	return nil
}
