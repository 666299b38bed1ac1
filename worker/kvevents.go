package worker

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/internal/kvevents"
)

// KVEvents says where the prefix cache's changes are published, as vLLM does.
type KVEvents struct {
	Listen string `koanf:"listen"` // host:port; empty: nowhere
	Replay string `koanf:"replay"` // the same, of the replay socket; empty: none
	Topic  string `koanf:"topic"`
	Open   bool   `koanf:"open"` // nobody is asked for the fleet's secret
}

// maxPendingEvents bounds what waits for the publisher, in events; what does
// not fit is lost, and readers are told so.
const maxPendingEvents = 1 << 16

// eventWriter hands the cache's events to a publisher. It is the cache's
// listener, which must not block, so a goroutine of its own encodes and sends.
//
// Prefixes under a cache salt are not published: the salt is their client's
// secret, and without it they would look like others' prefixes.
type eventWriter struct {
	pub  *kvevents.Publisher
	root kvcache.Hash // of unsalted prefixes
	poke chan struct{}
	quit chan struct{}
	wg   sync.WaitGroup

	mu      sync.Mutex
	pending []kvevents.Event
	lost    bool
}

// startEvents opens the publisher, if one is configured: to the fleet alone, or to
// whoever connects.
func (w *Worker) startEvents() error {
	if w.cfg.KVEvents.Listen == "" {
		return nil
	}
	ring := w.ring
	if w.cfg.KVEvents.Open {
		ring = nil
	}
	pub, err := kvevents.Publish(kvevents.PublisherConfig{Listen: w.cfg.KVEvents.Listen, Replay: w.cfg.KVEvents.Replay, Topic: w.cfg.KVEvents.Topic,
		Ring: ring, Log: w.log, Failed: w.failedAccepts.WithLabelValues("kv_events")})
	if err != nil {
		return fmt.Errorf("kv_events: %w", err)
	}
	if ring == nil && !onLoopback(pub.Addr()) {
		w.log.Warn("KV events are open: whoever reaches this address can read the token ids of every prompt", "addr", pub.Addr().String())
	}
	root := kvcache.Root(w.model.Fingerprint, w.backend.Info().Numerics, "")
	e := &eventWriter{pub: pub, root: root, poke: make(chan struct{}, 1), quit: make(chan struct{})}
	e.wg.Go(e.run)
	w.events = e
	w.later("stop publishing KV events", func(context.Context) error {
		close(e.quit)
		e.wg.Wait()
		return pub.Close()
	})
	return nil
}

func onLoopback(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// eventAddrs are the publisher's addresses as others dial them.
func (w *Worker) eventAddrs() (events, replay string) {
	if w.events == nil {
		return "", ""
	}
	events, err := w.advertised(w.events.pub.Addr())
	if err != nil {
		return "", ""
	}
	if a := w.events.pub.ReplayAddr(); a != nil {
		if replay, err = w.advertised(a); err != nil {
			replay = ""
		}
	}
	return events, replay
}

// KVEvent takes one change of the index in.
func (e *eventWriter) KVEvent(ev kvcache.Event) {
	out := kvevents.Event{Hashes: []uint64{short(ev.Hash)}}
	switch ev.Kind {
	case kvcache.Stored:
		if ev.Root != e.root {
			return
		}
		describe(&out, ev.Pos, ev.Parent, ev.Tokens)
	case kvcache.Removed:
		out.Kind = kvevents.Removed
	case kvcache.Cleared:
		out = kvevents.Event{Kind: kvevents.Cleared}
	default:
		return // for the tiers
	}
	e.publish(out)
}

// tierChange takes one change of a lower tier in. Units whose tokens are not
// at hand were in the pool before, and are known.
func (e *eventWriter) tierChange(c tier.Change) {
	if c.Stored && c.Root != e.root {
		return
	}
	out := kvevents.Event{Kind: kvevents.Removed, Hashes: []uint64{short(c.Key)}, Tier: kvevents.Host}
	if !c.Memory {
		out.Tier = kvevents.Disk
	}
	if c.Stored {
		out.Kind = kvevents.Stored
		if len(c.Tokens) > 0 {
			describe(&out, c.Pos, c.Parent, c.Tokens)
		}
	}
	e.publish(out)
}

// describe says what a unit is that extends parent, if it is not the first.
func describe(out *kvevents.Event, pos int, parent kvcache.Hash, tokens []int32) {
	out.Tokens, out.BlockSize = make([]uint32, len(tokens)), len(tokens)
	for i, t := range tokens {
		out.Tokens[i] = uint32(t)
	}
	if pos > 0 {
		out.Parent, out.HasParent = short(parent), true
	}
}

func (e *eventWriter) publish(out kvevents.Event) {
	e.mu.Lock()
	if len(e.pending) >= maxPendingEvents {
		e.pending, e.lost = nil, true
	}
	e.pending = append(e.pending, out)
	e.mu.Unlock()
	select {
	case e.poke <- struct{}{}:
	default:
	}
}

// short is a hash's last 8 bytes, as vLLM's integers are.
func short(h kvcache.Hash) uint64 { return binary.BigEndian.Uint64(h[8:]) }

// run sends what has come in, as one batch a time.
func (e *eventWriter) run() {
	for {
		select {
		case <-e.poke:
		case <-e.quit:
			return
		}
		e.mu.Lock()
		batch, lost := e.pending, e.lost
		e.pending, e.lost = nil, false
		e.mu.Unlock()
		if lost {
			e.pub.Lose()
		}
		if len(batch) > 0 {
			e.pub.Send(&kvevents.Batch{Time: float64(time.Now().UnixMicro()) / 1e6, Events: batch})
		}
	}
}
