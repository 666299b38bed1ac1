package prefill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Errors of Keep, besides the engine's.
var (
	ErrTooManyLeases = errors.New("too many leases") // Config.MaxLeases run or wait to be collected
	ErrLeaseExists   = errors.New("a lease of that id exists")
	ErrNoLease       = errors.New("the lease has ended, was claimed, or never was") // none waits for its claim
	// ErrClaimGone: the claimant left before the lease was ready, or the worker is shutting down.
	ErrClaimGone = errors.New("the claim of the lease is gone")
)

// The id of a lease that may be claimed before its prompt arrives, because decode and prefill were
// told at the same time, begins with one of these.
const (
	EarlyClaim = "xfer:" // then Mooncake's transfer_id
	EarlyRoom  = "room:" // then SGLang's bootstrap_room
)

// Early reports whether a lease may be claimed before its prompt arrives.
func Early(id string) bool {
	return strings.HasPrefix(id, EarlyClaim) || strings.HasPrefix(id, EarlyRoom)
}

// Kept describes a lease to the proxy, which passes it to decode.
type Kept struct {
	ID     string
	Blocks []int32
	First  []engine.Event // one per choice
	Info   engine.PromptInfo
}

// Keep runs r, a PrefillOnly request, and keeps its blocks for Config.Lease under id; "" makes a
// fresh id. A ticket with the id collects them; a later one is answered Late. Renew extends the
// lease. The peers have the beginning of the prompt.
func (s *Service) Keep(ctx context.Context, r *engine.Request, id string, peers ...ticket.Peer) (*Kept, error) {
	if id == "" {
		id = ticket.NewLink().String() // unique
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	k, err := s.leases.begin(id, r.Prompt, r.Salt, cancel)
	if err != nil {
		return nil, err
	}
	kept, err := s.keep(ctx, k, r, peers)
	if err != nil {
		s.leases.failed(k, err)
		return nil, err
	}
	return kept, nil
}

// Renew keeps the blocks of a lease for Config.Lease from now on, but at most for Config.MaxLease
// in all. It returns how long they are kept, and the most that further renewals could reach.
func (s *Service) Renew(id string) (left, most time.Duration, err error) { return s.leases.renew(id) }

func (s *Service) keep(ctx context.Context, k *lease, r *engine.Request, peers []ticket.Peer) (*Kept, error) {
	begun := time.Now()
	r.PrefillOnly, r.OnBlocks = true, nil
	if r.PromptLogprobs < 0 {
		r.Source = s.warm(ctx, Wanted{RequestID: r.ID, Tokens: r.Prompt, Salt: r.Salt, Peers: peers})
	}
	h, err := s.engine.Submit(ctx, r)
	if err != nil {
		return nil, err
	}
	events, info, err := drawn(ctx, h, max(r.N, 1))
	if err != nil {
		h.Release()
		return nil, err
	}
	s.ran(info, len(events), r.Urgent, begun)
	kept := &Kept{ID: k.id, Blocks: slices.Clone(h.Blocks()), First: events, Info: *info}
	if err := s.leases.keep(k, h, info); err != nil {
		h.Release()
		return nil, err
	}
	return kept, nil
}

// serveLease answers a ticket that names a lease. It accepts the ticket at once, since an early
// claim may have to wait for the prompt.
func (s *Service) serveLease(ctx context.Context, o *kvconn.Outgoing) {
	t := o.Ticket()
	src := newSource(s.pool, s.layers, len(t.Tokens), t.DestBlockTokens)
	if s.accept(o, src) != nil {
		return // it has ended
	}
	k, err := s.leases.claim(ctx, t.LeaseID)
	if err != nil {
		s.fail(o, err)
		return
	}
	defer k.handle.Release()
	if err := k.same(t); err != nil {
		s.fail(o, err)
		return
	}
	draft, err := (&handoff.Draft{Cached: k.info.CachedTokens, Prompt: k.info.Logprobs}).Encode()
	if err != nil {
		s.fail(o, err)
		return
	}
	src.fill(k.handle.Blocks())
	o.PushAll()
	o.Commit(draft)
	<-o.Done()
}

// same refuses a claim of another prompt, or of another tenant's.
func (k *lease) same(t *kvconn.Ticket) error {
	order, err := handoff.ParseOrder(t.First)
	switch {
	case err != nil:
		return &endError{ticket.Refused, err.Error()}
	case !slices.Equal(k.tokens, t.Tokens):
		return &endError{ticket.Refused, fmt.Sprintf("lease %s is of another prompt: %d tokens, the claim has %d", k.id, len(k.tokens), len(t.Tokens))}
	case order.Salt != k.salt:
		return &endError{ticket.Refused, fmt.Sprintf("lease %s is of another cache_salt", k.id)}
	}
	return nil
}

// lease is a prompt that runs or has run, whose blocks wait for their one claim, or a claim that
// waits for its prompt. The fields below ready are written once, before it is closed.
type lease struct {
	id      string
	since   time.Time               // the last change
	begun   chan struct{}           // closed when the prompt arrives
	cancel  context.CancelCauseFunc // of the prompt; nil before it arrives
	claimed bool
	timer   *time.Timer // ends an unclaimed lease at until; nil before
	until   time.Time
	last    time.Time // the latest until
	renewed int
	ready   chan struct{} // closed when the prompt has run, or failed

	tokens []int32
	salt   string
	handle *engine.Handle // nil: it failed
	info   *engine.PromptInfo
	err    error
}

type leases struct {
	ttl   time.Duration // of a finished prompt, and of each renewal
	most  time.Duration // with all renewals
	early time.Duration // how long a claim waits for its prompt
	limit int
	stats *Metrics

	mu      sync.Mutex
	byID    map[string]*lease
	gone    map[string]bool // early ones that were taken or have ended: nobody waits for them again
	goneBy  []string        // the same, oldest first
	lapsed  bool            // no prompts come any more
	closed  bool
	changed chan struct{} // closed and replaced when a lease leaves or fails
}

func newLeases(ttl, most, early time.Duration, limit int, stats *Metrics) *leases {
	return &leases{ttl: ttl, most: max(ttl, most), early: early, limit: limit, stats: stats,
		byID: map[string]*lease{}, gone: map[string]bool{}, changed: make(chan struct{})}
}

// add makes an entry; mu is held. In a full table it replaces a failed one, which only explains a
// late claim.
func (l *leases) add(id string) (*lease, error) {
	if len(l.byID) >= l.limit {
		for _, k := range l.byID {
			if k.err != nil && !k.claimed {
				l.remove(k)
				break
			}
		}
	}
	switch {
	case l.closed:
		return nil, engine.ErrClosed
	case len(l.byID) >= l.limit:
		return nil, fmt.Errorf("%w: %d", ErrTooManyLeases, l.limit)
	}
	k := &lease{id: id, since: time.Now(), begun: make(chan struct{}), ready: make(chan struct{})}
	l.byID[id] = k
	l.stats.began(id)
	return k, nil
}

// remove takes an entry out and reports whether it was in; mu is held.
func (l *leases) remove(k *lease) bool {
	if l.byID[k.id] != k {
		return false
	}
	if k.timer != nil {
		k.timer.Stop()
	}
	delete(l.byID, k.id)
	l.stats.ended(k.id, k.end())
	if Early(k.id) && !l.gone[k.id] && (k.handle != nil || k.err != nil) {
		l.gone[k.id] = true
		if l.goneBy = append(l.goneBy, k.id); len(l.goneBy) > remembered {
			delete(l.gone, l.goneBy[0])
			l.goneBy = l.goneBy[1:]
		}
	}
	l.tell()
	return true
}

// end says how an entry that leaves has ended.
func (k *lease) end() leaseEnd {
	switch {
	case k.err != nil:
		return leaseFailed
	case k.handle == nil:
		return leaseGivenUp
	case k.claimed:
		return leaseTaken
	}
	return leaseExpired
}

// tell wakes idle; mu is held.
func (l *leases) tell() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// begin adds the prompt of a lease; a claim may already wait for it.
func (l *leases) begin(id string, tokens []int32, salt string, cancel context.CancelCauseFunc) (*lease, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.byID[id]
	if k != nil && (k.cancel != nil || k.err != nil) {
		return nil, fmt.Errorf("%w: %s", ErrLeaseExists, id)
	}
	if k == nil {
		var err error
		if k, err = l.add(id); err != nil {
			return nil, err
		}
	}
	k.tokens, k.salt, k.cancel = tokens, salt, cancel
	close(k.begun)
	return k, nil
}

// keep gives the prompt's blocks to the claim, or keeps them for it.
func (l *leases) keep(k *lease, h *engine.Handle, info *engine.PromptInfo) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byID[k.id] != k { // closed, or the claim gave up
		return ErrClaimGone
	}
	k.handle, k.info, k.since = h, info, time.Now()
	close(k.ready)
	if k.claimed {
		l.remove(k)
		return nil
	}
	k.until, k.last = k.since.Add(l.ttl), k.since.Add(l.most)
	k.timer = time.AfterFunc(l.ttl, func() { l.expire(k) })
	return nil
}

// renew extends a lease that waits for its claim.
func (l *leases) renew(id string) (left, most time.Duration, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.byID[id]
	if k == nil || k.claimed || k.handle == nil {
		return 0, 0, ErrNoLease
	}
	now := time.Now()
	if k.until = now.Add(l.ttl); k.until.After(k.last) {
		k.until = k.last
	}
	k.renewed++
	left = max(0, k.until.Sub(now))
	k.timer.Reset(left)
	return left, max(0, k.last.Sub(now)), nil
}

// failed tells the claim that the prompt failed, even if it comes later.
func (l *leases) failed(k *lease, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byID[k.id] != k {
		return
	}
	k.err = err
	close(k.ready)
	if k.claimed || !Early(k.id) {
		l.remove(k)
		return
	}
	k.timer = time.AfterFunc(l.early, func() { l.expire(k) })
	l.tell()
}

func (l *leases) expire(k *lease) {
	l.mu.Lock()
	mine := !k.claimed && !time.Now().Before(k.until) && l.remove(k) // it may have been renewed
	l.mu.Unlock()
	if mine && k.handle != nil {
		k.handle.Release()
	}
}

// claim takes a lease out of the table once it is ready; the caller releases its handle. Each lease
// has one claim.
func (l *leases) claim(ctx context.Context, id string) (*lease, error) {
	k, err := l.reserve(id)
	if err != nil {
		return nil, err
	}
	timer := time.NewTimer(l.early)
	defer timer.Stop()
	select {
	case <-k.begun:
		select {
		case <-k.ready:
		case <-ctx.Done():
		}
	case <-timer.C:
	case <-ctx.Done():
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	waits := l.remove(k)
	switch {
	case k.handle != nil:
		return k, nil
	case k.err != nil:
		return nil, fmt.Errorf("lease %s: %w", id, k.err)
	case waits && k.cancel != nil:
		k.cancel(&endError{ticket.Cancelled, "decode gave up the lease"})
	}
	if cause := context.Cause(ctx); cause != nil {
		return nil, fmt.Errorf("wait for lease %s: %w", id, cause)
	}
	return nil, &endError{ticket.Late, fmt.Sprintf("no prompt for lease %s within %v", id, l.early)}
}

// reserve marks a lease as claimed.
func (l *leases) reserve(id string) (*lease, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.byID[id]
	switch {
	case k != nil && k.claimed:
		return nil, &endError{ticket.Refused, fmt.Sprintf("lease %s is claimed already", id)}
	case k == nil && (l.gone[id] || !Early(id)):
		return nil, &endError{ticket.Late, fmt.Sprintf("lease %s has ended or never was", id)}
	case k == nil && l.lapsed:
		return nil, engine.ErrClosed
	case k == nil:
		var err error
		if k, err = l.add(id); err != nil {
			return nil, err
		}
	}
	k.claimed = true
	return k, nil
}

// idle waits until no lease waits for its claim.
func (l *leases) idle(ctx context.Context) error {
	for {
		n := 0
		l.mu.Lock()
		for _, k := range l.byID {
			if k.err == nil {
				n++
			}
		}
		changed := l.changed
		l.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%d leases are not collected: %w", n, context.Cause(ctx))
		}
	}
}

// lapse ends the claims whose prompts have not come.
func (l *leases) lapse() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lapsed = true
	for _, k := range l.byID {
		if k.cancel == nil && k.err == nil {
			k.err = engine.ErrClosed
			close(k.begun)
			close(k.ready)
		}
	}
}

// close releases all leases and cancels prompts that run.
func (l *leases) close() {
	l.mu.Lock()
	l.closed = true
	var kept []*engine.Handle
	for _, k := range l.byID {
		l.remove(k)
		switch {
		case k.handle != nil:
			kept = append(kept, k.handle)
		case k.cancel != nil:
			k.cancel(engine.ErrClosed)
		}
	}
	l.mu.Unlock()
	for _, h := range kept {
		h.Release()
	}
}

func (l *leases) ledger() []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Entry
	for id, k := range l.byID {
		e := Entry{Kind: "leased", ID: id, Since: k.since, Why: "finished prompt waits to be collected"}
		switch {
		case k.handle != nil:
			e.Owner, e.Blocks = k.handle.Owner(), len(k.handle.Blocks())
			if k.renewed > 0 {
				e.Why += fmt.Sprintf(", renewed %d times", k.renewed)
			}
		case k.err != nil:
			continue // holds nothing
		case k.cancel != nil:
			e.Kind, e.Why = "leasing", "the prompt runs"
		default:
			e.Kind, e.Why = "claimed", "decode waits for the prompt to arrive"
		}
		out = append(out, e)
	}
	return out
}
