package discover

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/zmtp"
)

// P2P is the ZMQ ROUTER at which vLLM engines with the legacy P2pNccl connector register: every 3 s
// they send a msgpack map {"type": "P" or "D", "http_address", "zmq_address"}, and get no answer.
// Nobody is authenticated, so an engine may only name its own address, or one that is allowed.
type P2P struct {
	cfg    Config
	allow  []netip.Prefix
	fleet  Fleet
	log    *slog.Logger
	client *http.Client
	router *zmtp.Router
	no     refusals

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	slots  chan struct{} // examinations at once

	mu    sync.Mutex
	known map[string]*engine // by http address
}

// engine is one that registers.
type engine struct {
	ping kvevents.Ping
	seen time.Time
	next time.Time // when it may be examined again
	busy bool      // it is being examined
	id   string    // in the fleet; "" until it is there
}

const (
	maxEngines    = 4096
	examineAtOnce = 16
	examinePause  = time.Second // of one engine: it registers every 3 s
	fromZMQ       = "zmq"
)

// ListenP2P starts to listen. The caller closes it.
func ListenP2P(cfg Config, f Fleet, log *slog.Logger) (*P2P, error) {
	p := &P2P{cfg: cfg, fleet: f, log: log, client: NewClient(), no: refusals{while: time.Minute}, slots: make(chan struct{}, examineAtOnce), known: map[string]*engine{}}
	for _, n := range cfg.P2PAllow {
		prefix, err := netip.ParsePrefix(n)
		if err != nil {
			return nil, config.Bad("p2p_allow", "%v", err)
		}
		p.allow = append(p.allow, prefix)
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	var err error
	// Before the handler's first call nothing of p changes any more.
	if p.router, err = zmtp.ListenRouter(cfg.P2PListen, zmtp.Config{MaxMessage: 64 << 10, Log: log}, p.handle); err != nil {
		p.cancel()
		return nil, err
	}
	p.wg.Go(p.expire)
	return p, nil
}

// Addr is where it listens.
func (p *P2P) Addr() net.Addr { return p.router.Addr() }

// Close stops listening, and waits. Members stay as they are.
func (p *P2P) Close() error {
	p.cancel()
	err := p.router.Close()
	p.wg.Wait()
	p.client.CloseIdleConnections()
	return err
}

// Refusals are the engines that registered lately and were not added.
func (p *P2P) Refusals() []Refusal { return p.no.all(time.Now()) }

// handle takes one ping.
func (p *P2P) handle(peer zmtp.Peer, frames [][]byte, _ func(...[]byte) error) error {
	ping, err := kvevents.DecodePing(frames[len(frames)-1])
	if err == nil {
		err = p.valid(peer, ping)
	}
	if err != nil {
		p.refuse(cmp.Or(ping.HTTP, peer.Addr), err)
		return nil
	}
	p.seen(ping)
	return nil
}

func (p *P2P) refuse(name string, err error) {
	name = openai.Clip(name)
	if p.no.note(Refusal{From: fromZMQ, Name: name, Reason: err.Error(), At: time.Now()}) {
		p.log.Warn("registration refused", "engine", name, "reason", err.Error())
	}
}

// valid refuses addresses that are none, or not the engine's to name.
func (p *P2P) valid(peer zmtp.Peer, ping kvevents.Ping) error {
	if ping.Type != "P" && ping.Type != "D" {
		return fmt.Errorf("type %q is neither P nor D", ping.Type)
	}
	from, err := netip.ParseAddrPort(peer.Addr)
	if err != nil {
		return err
	}
	for _, a := range []struct{ name, addr string }{{"http_address", ping.HTTP}, {"zmq_address", ping.ZMQ}} {
		host, port, err := net.SplitHostPort(a.addr)
		if err != nil {
			return fmt.Errorf("%s %q is not host:port", a.name, a.addr)
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return fmt.Errorf("%s %q has no port", a.name, a.addr)
		}
		ip, err := netip.ParseAddr(host)
		if err != nil {
			return fmt.Errorf("%s %q: engines register with IP addresses", a.name, a.addr)
		}
		if ip.Unmap() != from.Addr().Unmap() && !slices.ContainsFunc(p.allow, func(n netip.Prefix) bool { return n.Contains(ip.Unmap()) }) {
			return fmt.Errorf("%s %s is not its own address, %s, nor within p2p_allow", a.name, a.addr, from.Addr())
		}
	}
	return nil
}

// seen notes a valid ping, and starts to examine a new engine.
func (p *P2P) seen(ping kvevents.Ping) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.known[ping.HTTP]
	if e == nil {
		if len(p.known) >= maxEngines {
			p.refuse(ping.HTTP, fmt.Errorf("there are %d engines already", maxEngines))
			return
		}
		e = &engine{}
		p.known[ping.HTTP] = e
	}
	e.seen = time.Now()
	if e.id != "" && e.ping != ping { // it was restarted as something else
		p.fleet.Remove(e.id, "registered anew")
		e.id = ""
	}
	e.ping = ping
	if e.id != "" || e.busy || e.seen.Before(e.next) || p.ctx.Err() != nil {
		return
	}
	select {
	case p.slots <- struct{}{}:
	default:
		return // it will ping again
	}
	e.busy, e.next = true, e.seen.Add(examinePause)
	p.wg.Go(func() {
		defer func() { <-p.slots }()
		p.examine(e, ping)
	})
}

// examine asks an engine what it is and adds it to the fleet.
func (p *P2P) examine(e *engine, ping kvevents.Ping) {
	ctx, cancel := context.WithTimeout(p.ctx, 10*time.Second)
	defer cancel()
	facts, err := Examine(ctx, p.client, "http://"+ping.HTTP)
	p.mu.Lock()
	defer p.mu.Unlock()
	e.busy = false
	switch {
	case p.ctx.Err() != nil:
		return
	case err == nil && (e.ping != ping || p.known[ping.HTTP] != e):
		return // it has changed meanwhile
	case err == nil:
		inst := fleet.Instance{ID: named("p2p-", ping.HTTP), Epoch: fleet.NewEpoch(), Role: fleet.Prefill, URL: "http://" + ping.HTTP,
			Dialect: "vllm-p2pnccl", Model: facts.Models[0], Bootstrap: ping.ZMQ}
		if ping.Type == "D" {
			inst.Role = fleet.Decode
		}
		host, _, _ := net.SplitHostPort(ping.HTTP) // valid has split it
		facts.Describe(&inst, host)
		if err = p.fleet.AddStatic(inst, fleet.ZMQ); err == nil {
			e.id = inst.ID
			p.no.forget(fromZMQ, ping.HTTP)
			p.log.Info("engine registered", "id", inst.ID, "role", string(inst.Role), "model", inst.Model, "version", inst.Version)
			return
		}
	}
	if !errors.Is(err, context.Canceled) {
		p.refuse(ping.HTTP, err)
	}
}

// expire removes engines that have not registered for a while.
func (p *P2P) expire() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case now := <-tick.C:
			p.mu.Lock()
			for addr, e := range p.known {
				if now.Sub(e.seen) <= p.cfg.P2PExpiry {
					continue
				}
				if e.id != "" {
					p.fleet.Remove(e.id, fmt.Sprintf("has not registered for %v", p.cfg.P2PExpiry))
				}
				delete(p.known, addr)
			}
			p.mu.Unlock()
		}
	}
}
