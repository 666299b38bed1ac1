package prefill

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/engine"
	"github.com/xpyd/xpyd/internal/handoff"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// ErrTooManyLeases says that MaxLeases prompts are kept already.
var ErrTooManyLeases = errors.New("too many leases")

// lease is a finished prompt whose blocks wait for a claim.
type lease struct {
	tokens []int32
	handle *engine.Handle
	since  time.Time
	timer  *time.Timer
}

// leases keeps finished prompts by id, and lets a claim come before its lease.
type leases struct {
	mu      sync.Mutex
	kept    map[string]*lease
	waiting map[string]chan struct{} // closed when that lease is kept
	ttl     time.Duration
	limit   int
	closed  bool
}

func newLeases(ttl time.Duration, limit int) *leases {
	return &leases{kept: map[string]*lease{}, waiting: map[string]chan struct{}{}, ttl: ttl, limit: limit}
}

// Kept describes a lease to the proxy that will hand it to decode.
type Kept struct {
	ID     string
	Blocks []int32
	First  engine.Event // the token that the prompt was answered with
	Info   engine.PromptInfo
}

// Keep runs r, a PrefillOnly request, and keeps its blocks for Config.Lease
// under id, or under a fresh one when id is "". A ticket that names the id
// collects them; a claim after that is answered late.
func (s *Service) Keep(ctx context.Context, r *engine.Request, id string) (*Kept, error) {
	if id == "" {
		var raw [16]byte
		rand.Read(raw[:]) // never fails (crypto/rand)
		id = hex.EncodeToString(raw[:])
	}
	if err := s.leases.room(id); err != nil {
		return nil, err
	}
	r.PrefillOnly, r.OnBlocks = true, nil
	h, err := s.engine.Submit(ctx, r)
	if err != nil {
		return nil, err
	}
	draft, err := drawn(ctx, h, max(r.N, 1))
	if err != nil {
		h.Release()
		return nil, err
	}
	k := &Kept{ID: id, Blocks: slices.Clone(h.Blocks()), First: engine.Event{Sampled: draft.First[0]},
		Info: engine.PromptInfo{Tokens: len(r.Prompt), CachedTokens: draft.Cached, Logprobs: draft.Prompt}}
	if err := s.leases.keep(id, r.Prompt, h); err != nil {
		h.Release()
		return nil, err
	}
	return k, nil
}

// serveLease answers a ticket that names a lease: everything in one pass.
func (s *Service) serveLease(ctx context.Context, o *kvconn.Outgoing) {
	t := o.Ticket()
	l, err := s.leases.claim(ctx, t.LeaseID)
	if err != nil {
		s.fail(o, ticket.Late, err)
		return
	}
	defer l.handle.Release()
	if !slices.Equal(l.tokens, t.Tokens) {
		s.fail(o, ticket.Refused, fmt.Errorf("lease %s is of another prompt (%d tokens, the claim has %d)", t.LeaseID, len(l.tokens), len(t.Tokens)))
		return
	}
	src := newKeptSource(s.pool, s.layout, len(l.tokens), t.DestBlockTokens, l.handle.Blocks())
	if err := o.Accept(src); err != nil {
		return // the session is gone; kvconn logged it
	}
	for layer := range s.layout.Layers {
		o.Push(layer, src.all())
	}
	o.Commit((&handoff.Draft{Cached: l.handle.CachedTokens()}).Encode())
	<-o.Done()
}

func (l *leases) room(id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return engine.ErrClosed
	case l.kept[id] != nil:
		return fmt.Errorf("lease %s exists", id)
	case len(l.kept) >= l.limit:
		return fmt.Errorf("%w: %d prompts wait to be collected", ErrTooManyLeases, l.limit)
	}
	return nil
}

func (l *leases) keep(id string, tokens []int32, h *engine.Handle) error {
	if err := l.room(id); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	k := &lease{tokens: tokens, handle: h, since: time.Now()}
	k.timer = time.AfterFunc(l.ttl, func() { l.expire(id, k) })
	l.kept[id] = k
	if w := l.waiting[id]; w != nil {
		close(w)
		delete(l.waiting, id)
	}
	return nil
}

func (l *leases) expire(id string, k *lease) {
	l.mu.Lock()
	mine := l.kept[id] == k
	if mine {
		delete(l.kept, id)
	}
	l.mu.Unlock()
	if mine {
		k.handle.Release()
	}
}

// EarlyClaim begins the id of a lease that may be claimed before it is kept:
// decode and prefill were told at the same time.
const EarlyClaim = "xfer:"

// claim takes the lease out of the table; the caller releases its handle.
func (l *leases) claim(ctx context.Context, id string) (*lease, error) {
	late := fmt.Errorf("lease %s has ended or never was", id)
	for {
		l.mu.Lock()
		if k := l.kept[id]; k != nil {
			delete(l.kept, id)
			l.mu.Unlock()
			k.timer.Stop() // expire finds the table empty if it runs all the same
			return k, nil
		}
		early := len(id) > len(EarlyClaim) && id[:len(EarlyClaim)] == EarlyClaim
		if !early || l.closed || len(l.waiting) >= l.limit {
			l.mu.Unlock()
			return nil, late
		}
		w := l.waiting[id]
		if w == nil {
			w = make(chan struct{})
			l.waiting[id] = w
		}
		l.mu.Unlock()
		select {
		case <-w:
		case <-ctx.Done():
			l.mu.Lock()
			if l.waiting[id] == w {
				delete(l.waiting, id)
			}
			l.mu.Unlock()
			return nil, late
		}
	}
}

func (l *leases) close() {
	l.mu.Lock()
	kept := l.kept
	l.kept, l.closed = map[string]*lease{}, true
	l.mu.Unlock()
	for _, k := range kept {
		k.timer.Stop()
		k.handle.Release()
	}
}

func (l *leases) ledger() []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Entry
	for id, k := range l.kept {
		out = append(out, Entry{Kind: "leased", ID: id, Since: k.since, Why: "finished prompt waits to be collected"})
	}
	return out
}
