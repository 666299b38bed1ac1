package sense

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/discover"
	"github.com/xpyd/xpyd/router/h1"
)

// discovery is the running ways of finding engines.
type discovery struct {
	p2p  *discover.P2P
	kube *discover.Kube
}

// Discover starts what the configuration names.
func (ms *Members) Discover(cfg discover.Config) error {
	if cfg.P2PListen == "" && len(cfg.Kubernetes.Services) == 0 {
		return nil
	}
	ed, ok := ms.Fleet.(Editor)
	if !ok {
		return config.Bad("discovery", "this fleet cannot be added to")
	}
	var err error
	if cfg.P2PListen != "" {
		if ms.found.p2p, err = discover.ListenP2P(cfg, ed, ms.Log); err != nil {
			return fmt.Errorf("discovery.p2p_listen: %w", err)
		}
	}
	if len(cfg.Kubernetes.Services) > 0 {
		if ms.found.kube, err = discover.FollowKube(cfg.Kubernetes, ed, ms.Log); err != nil {
			return config.Within("discovery", err)
		}
	}
	return nil
}

// P2PAddr is where P2pNccl engines register, nil if nowhere.
func (ms *Members) P2PAddr() net.Addr {
	if ms.found.p2p == nil {
		return nil
	}
	return ms.found.p2p.Addr()
}

// close ends it.
func (d *discovery) close() error {
	var errs []error
	if d.p2p != nil {
		errs = append(errs, d.p2p.Close())
	}
	if d.kube != nil {
		errs = append(errs, d.kube.Close())
	}
	return errors.Join(errs...)
}

// refusals are the engines that were found lately and not added.
func (d *discovery) refusals() []discover.Refusal {
	out := []discover.Refusal{}
	if d.p2p != nil {
		out = append(out, d.p2p.Refusals()...)
	}
	if d.kube != nil {
		out = append(out, d.kube.Refusals()...)
	}
	return out
}

// learnTime bounds the questions to one engine before its probe.
const learnTime = 5 * time.Second

// learn asks the engines of a foreign pair what they are before they are
// probed, and reports whether something has become known that was not, or has
// changed meanwhile: the pair may be none any more. It refuses an engine that
// serves another model.
func (p *prober) learn(pr Pair) (changed bool, err error) {
	fl, ok := p.ms.Fleet.(Learner)
	if !ok {
		return false, nil
	}
	for _, m := range pr.Members() {
		if d := dialect.For(m.Dialect); m.Source == fleet.NATS || d == nil || d.Typed {
			continue
		}
		inst, err := p.ask(m)
		if err != nil {
			return false, err
		}
		if inst.Equal(&m.Instance) {
			continue // an engine need not tell
		}
		ok, err := fl.Learn(m.Instance, inst)
		if err != nil {
			p.ms.Log.Warn("note what an engine is", "id", m.ID, "err", err)
			continue
		}
		changed = true
		if !ok {
			p.ms.Log.Debug("engine taken out or changed while it was examined", "id", m.ID)
			continue
		}
		p.ms.Log.Info("engine found", "id", m.ID, "role", string(m.Role), "dialect", m.Dialect, "version", inst.Version,
			"block_tokens", inst.Layout.BlockTokens, "kv_events", inst.KVEvents)
	}
	return changed, nil
}

// ask returns a member with what its engine says of itself.
func (p *prober) ask(m *fleet.Member) (fleet.Instance, error) {
	ctx, cancel := context.WithTimeout(p.ms.Ctx, learnTime)
	defer cancel()
	inst := m.Instance
	facts, err := discover.Examine(ctx, p.ms.HTTP, strings.TrimSuffix(m.URL, "/"))
	if err != nil {
		facts = &discover.Facts{}
		facts.Add(ctx, p.ms.HTTP, strings.TrimSuffix(m.URL, "/"))
	} else if !slices.Contains(facts.Models, m.Model) {
		return inst, fmt.Errorf("%s serves %q, not %q", m.ID, h1.Clip(facts.Models[0]), m.Model)
	}
	host, _, err := net.SplitHostPort(m.URL[strings.Index(m.URL, "//")+2:])
	if err != nil {
		return inst, nil // the probe will say
	}
	if facts.Version != "" && !p.configured(m) {
		inst.Version = h1.Clip(facts.Version)
	}
	facts.Describe(&inst, host)
	return inst, nil
}
