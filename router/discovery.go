package router

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router/dialect"
	"github.com/xpyd/xpyd/router/discover"
)

// discovery is the running ways of finding engines.
type discovery struct {
	client *http.Client // asks engines what they are
	p2p    *discover.P2P
	kube   *discover.Kube
}

// discover starts what the configuration names.
func (r *Router) discover() error {
	cfg := r.cfg.Discovery
	if cfg.P2PListen == "" && len(cfg.Kubernetes.Services) == 0 {
		return nil
	}
	ed, ok := r.fleet.(Editor)
	if !ok {
		return bad("discovery", "this fleet cannot be added to")
	}
	var err error
	if cfg.P2PListen != "" {
		if r.found.p2p, err = discover.ListenP2P(cfg, ed, r.log); err != nil {
			return fmt.Errorf("discovery.p2p_listen: %w", err)
		}
	}
	if len(cfg.Kubernetes.Services) > 0 {
		if r.found.kube, err = discover.FollowKube(cfg.Kubernetes, ed, r.log); err != nil {
			return within("discovery", err)
		}
	}
	return nil
}

// P2PAddr is where P2pNccl engines register, nil if nowhere.
func (r *Router) P2PAddr() net.Addr {
	if r.found.p2p == nil {
		return nil
	}
	return r.found.p2p.Addr()
}

func (d *discovery) close() error {
	var errs []error
	if d.p2p != nil {
		errs = append(errs, d.p2p.Close())
	}
	if d.kube != nil {
		errs = append(errs, d.kube.Close())
	}
	d.client.CloseIdleConnections()
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
// probed, and says whether something has become known that was not, or has
// changed meanwhile: the pair may be none any more. It refuses an engine that
// serves another model.
func (p *prober) learn(pr pair) (changed bool, err error) {
	fl, ok := p.r.fleet.(Learner)
	if !ok {
		return false, nil
	}
	for _, m := range pr.members() {
		if d := dialect.For(m.Dialect); m.Source == fleet.NATS || d == nil || d.Rules().Typed {
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
			p.r.log.Warn("note what an engine is", "id", m.ID, "err", err)
			continue
		}
		changed = true
		if !ok {
			p.r.log.Debug("engine taken out or changed while it was examined", "id", m.ID)
			continue
		}
		p.r.log.Info("engine found", "id", m.ID, "role", string(m.Role), "dialect", m.Dialect, "version", inst.Version,
			"block_tokens", inst.Layout.BlockTokens, "kv_events", inst.KVEvents)
	}
	return changed, nil
}

// ask returns a member with what its engine says of itself.
func (p *prober) ask(m *fleet.Member) (fleet.Instance, error) {
	ctx, cancel := context.WithTimeout(p.r.ctx, learnTime)
	defer cancel()
	inst := m.Instance
	facts, err := discover.Examine(ctx, p.r.found.client, strings.TrimSuffix(m.URL, "/"))
	if err != nil {
		facts = &discover.Facts{}
		facts.Add(ctx, p.r.found.client, strings.TrimSuffix(m.URL, "/"))
	} else if !slices.Contains(facts.Models, m.Model) {
		return inst, fmt.Errorf("%s serves %q, not %q", m.ID, clip(facts.Models[0]), m.Model)
	}
	host, _, err := net.SplitHostPort(m.URL[strings.Index(m.URL, "//")+2:])
	if err != nil {
		return inst, nil // the probe will say
	}
	if facts.Version != "" && !p.configured(m) {
		inst.Version = clip(facts.Version)
	}
	facts.Describe(&inst, host)
	return inst, nil
}
