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
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/discover"
)

// finder is a running way of finding engines.
type finder interface {
	Refusals() []discover.Refusal
	Close() error
}

// Discover starts what the configuration names.
func (ms *Members) Discover(cfg discover.Config) (err error) {
	if cfg.P2PListen != "" {
		if ms.p2p, err = discover.ListenP2P(cfg, ms.Fleet, ms.Log); err != nil {
			return fmt.Errorf("discovery.p2p_listen: %w", err)
		}
		ms.found = append(ms.found, ms.p2p)
	}
	if len(cfg.Kubernetes.Services) > 0 {
		kube, err := discover.FollowKube(cfg.Kubernetes, ms.Fleet, ms.Log)
		if err != nil {
			return config.Within("discovery", err)
		}
		ms.found = append(ms.found, kube)
	}
	return nil
}

// P2PAddr is where P2pNccl engines register, nil if nowhere.
func (ms *Members) P2PAddr() net.Addr {
	if ms.p2p == nil {
		return nil
	}
	return ms.p2p.Addr()
}

// Close ends discovery.
func (ms *Members) Close() error {
	ms.HTTP.CloseIdleConnections()
	var errs []error
	for _, f := range ms.found {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// Refusals are the engines that were found lately and not added.
func (ms *Members) Refusals() []discover.Refusal {
	out := []discover.Refusal{}
	for _, f := range ms.found {
		out = append(out, f.Refusals()...)
	}
	return out
}

// learnTime bounds the questions to one engine before its probe.
const learnTime = 5 * time.Second

// learn asks the engines of a foreign pair what they are before they are probed, and reports
// whether anything new has become known: the pair may no longer be one. It refuses an engine
// that serves another model.
func (ms *Members) learn(pr Pair) (changed bool, err error) {
	for _, m := range pr.Members() {
		if d := dialect.For(m.Dialect); m.Source == fleet.NATS || d == nil || d.Typed {
			continue
		}
		inst, err := ms.examine(m)
		if err != nil {
			return false, err
		}
		if inst.Equal(&m.Instance) {
			continue // an engine need not tell
		}
		ok, err := ms.Fleet.Learn(m.Instance, inst)
		if err != nil {
			ms.Log.Warn("note what an engine is", "id", m.ID, "err", err)
			continue
		}
		changed = true
		if !ok {
			ms.Log.Debug("engine taken out or changed while it was examined", "id", m.ID)
			continue
		}
		ms.Log.Info("engine found", "id", m.ID, "role", string(m.Role), "dialect", m.Dialect, "version", inst.Version,
			"block_tokens", inst.Layout.BlockTokens, "kv_events", inst.KVEvents)
	}
	return changed, nil
}

// examine returns a member with what its engine says of itself.
func (ms *Members) examine(m *fleet.Member) (fleet.Instance, error) {
	ctx, cancel := context.WithTimeout(ms.Ctx, learnTime)
	defer cancel()
	inst, url := m.Instance, strings.TrimSuffix(m.URL, "/")
	facts, err := discover.Examine(ctx, ms.HTTP, url)
	if err != nil {
		facts = &discover.Facts{}
		facts.Add(ctx, ms.HTTP, url)
	} else if !slices.Contains(facts.Models, m.Model) {
		return inst, fmt.Errorf("%s serves %q, not %q", m.ID, openai.Clip(facts.Models[0]), m.Model)
	}
	host, _, err := net.SplitHostPort(m.URL[strings.Index(m.URL, "//")+2:])
	if err != nil {
		return inst, nil // the probe will say
	}
	ms.staticMu.Lock()
	configured := ms.statics[m.ID].Version != ""
	ms.staticMu.Unlock()
	if facts.Version != "" && !configured {
		inst.Version = openai.Clip(facts.Version)
	}
	facts.Describe(&inst, host)
	return inst, nil
}
