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

// KVEvents says where changes of the prefix cache are published, in vLLM's format.
type KVEvents struct {
	Listen string `key:"listen"` // host:port; empty: nowhere
	Replay string `key:"replay"` // host:port of the replay socket; empty: none
	Topic  string `key:"topic"`
	Open   bool   `key:"open"` // readers need not know the fleet's secret
}

// maxPendingEvents bounds the events that wait for the publisher. On overflow they are lost, and
// readers are told.
const maxPendingEvents = 1 << 16

// eventWriter publishes the events of the cache, which must not wait for it: a goroutine of its own
// encodes and sends them.
//
// Prefixes under a cache salt are not published: the salt is their client's secret, and without it
// they would look like other prefixes.
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
	if at, ok := pub.Addr().(*net.TCPAddr); ring == nil && !(ok && at.IP.IsLoopback()) {
		w.log.Warn("KV events are open: whoever reaches this address can read the token ids of every prompt", "addr", pub.Addr().String())
	}
	root := kvcache.Root(w.model.Fingerprint, w.backend.Info().Numerics, "")
	e := &eventWriter{pub: pub, root: root, poke: make(chan struct{}, 1), quit: make(chan struct{})}
	e.wg.Go(e.sendBatches)
	w.events = e
	w.later("stop publishing KV events", func(context.Context) error {
		close(e.quit)
		e.wg.Wait()
		return pub.Close()
	})
	return nil
}

// eventAddrs are the addresses at which others dial the publisher.
func (w *Worker) eventAddrs() (events, replay string) {
	if w.events == nil {
		return "", ""
	}
	events, err := w.advertised(w.events.pub.Addr())
	if a := w.events.pub.ReplayAddr(); a != nil && err == nil {
		replay, _ = w.advertised(a) // "" on an error
	}
	return events, replay
}

// KVEvent publishes a change of the prefix index.
func (e *eventWriter) KVEvent(ev kvcache.Event) {
	out := kvevents.Event{Hashes: []uint64{shortHash(ev.Hash)}}
	switch ev.Kind {
	case kvcache.Stored:
		if ev.Root != e.root {
			return
		}
		describeUnit(&out, ev.Pos, ev.Parent, ev.Tokens)
	case kvcache.Removed:
		out.Kind = kvevents.Removed
	case kvcache.Cleared:
		out = kvevents.Event{Kind: kvevents.Cleared}
	default:
		return // for the tiers
	}
	e.publish(out)
}

// tierChange publishes a change of a lower tier. Units without tokens were in the pool before, so
// readers know them.
func (e *eventWriter) tierChange(c tier.Change) {
	if c.Stored && c.Root != e.root {
		return
	}
	out := kvevents.Event{Kind: kvevents.Removed, Hashes: []uint64{shortHash(c.Key)}, Tier: kvevents.Host}
	if !c.Memory {
		out.Tier = kvevents.Disk
	}
	if c.Stored {
		out.Kind = kvevents.Stored
		if len(c.Tokens) > 0 {
			describeUnit(&out, c.Pos, c.Parent, c.Tokens)
		}
	}
	e.publish(out)
}

// describeUnit adds a unit's tokens, and its parent unless it is the first.
func describeUnit(out *kvevents.Event, pos int, parent kvcache.Hash, tokens []int32) {
	out.Tokens, out.BlockSize = make([]uint32, len(tokens)), len(tokens)
	for i, t := range tokens {
		out.Tokens[i] = uint32(t)
	}
	if pos > 0 {
		out.Parent, out.HasParent = shortHash(parent), true
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

// shortHash is the last 8 bytes of a hash, like vLLM's integer hashes.
func shortHash(h kvcache.Hash) uint64 { return binary.BigEndian.Uint64(h[8:]) }

// sendBatches publishes pending events, a batch at a time, until quit.
func (e *eventWriter) sendBatches() {
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
