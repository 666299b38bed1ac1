// Package decode is the second half of a pair: it reserves blocks for a prompt, collects the
// prompt's KV from a prefill worker under a ticket, and gives the blocks to the engine, which
// continues from there.
//
// Fetch matches the prefix cache, reserves, sends the ticket and waits. On any failure it fences
// the blocks before they are reused.
//
// Non-goals: HTTP, tokenising, sampling (the engine's), choosing the peer.
package decode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// Config holds the service's deadlines.
type Config struct {
	// ReserveTimeout is how long a request waits for free blocks.
	ReserveTimeout time.Duration
	// MaxQuarantined is how many blocks may be in quarantine before nothing more is fetched
	// (NoSpace), so that silent peers cannot take the pool bit by bit. Fetches under way can still
	// add to them.
	MaxQuarantined int
	// MaxRemains bounds the broken transfers whose arrived part is kept for another attempt. Its
	// blocks are not held: others may take them.
	MaxRemains int
	Metrics    *Metrics // may be nil
	// Warm, if set, loads what lower tiers have of a prompt into the cache, so that it need not
	// come from prefill. It is bounded in time.
	Warm func(ctx context.Context, tokens []int32, salt string)
	// Self, if set, says where prefill can fetch what this worker has of a prompt, without Tokens.
	Self func() ticket.Peer
}

// fenceTimeout is how long a failed Fetch waits for its fence. After it the blocks are quarantined
// until the fence holds.
const fenceTimeout = 500 * time.Millisecond

// DefaultConfig returns the documented settings for a pool of blocks.
func DefaultConfig(blocks int) Config {
	return Config{ReserveTimeout: 10 * time.Second, MaxQuarantined: max(blocks/4, 1), MaxRemains: 256}
}

// Claim says what to collect, and from whom.
type Claim struct {
	Addr      string        // prefill's kvconn address
	Peer      kvconn.PeerID // who must answer there; zero fields are not checked
	Link      ticket.Link
	LeaseID   string // for a foreign proxy; then only Salt and PromptLogprobs of the Order count
	RequestID string
	Owner     string // label of the blocks; the engine request's Owner
	Tokens    []int32
	Order     handoff.Order
	Deadline  time.Time // zero: kvconn's own
}

func (c *Claim) chain(in *kvcache.Cache) kvcache.Chain {
	chain := in.NewChain(c.Order.Salt)
	chain.Priority = c.Order.Priority
	chain.Extend(c.Tokens)
	return chain
}

// Report says where the time of a Fetch went.
type Report struct {
	Reserve time.Duration // waiting for blocks
	KV      time.Duration // from the ticket to the last verified block
	Queue   time.Duration // in prefill's queue
	Prefill time.Duration // computing
	Had     int           // prompt tokens that were already here
	Resumed int           // blocks of one layer that a broken transfer had brought
}

// Error is a failed Fetch with the outcome that the router acts on.
type Error struct {
	Outcome ticket.Outcome
	Err     error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Backend is what the service needs of kernels.Backend.
type Backend interface {
	kernels.Pool
	Layout() kvlayout.Layout
	Arch() arch.Config
}

// Opener opens sessions to prefill workers: a kvconn.Receiver, or a way.Chooser.
type Opener interface {
	Open(ctx context.Context, addr string, peer kvconn.PeerID) (*kvconn.Session, error)
}

// Service collects prompts for one engine's pool.
type Service struct {
	cfg     Config
	recv    Opener
	cache   *kvcache.Cache
	backend Backend
	layers  []kvlayout.Layer // of its pool
	log     *slog.Logger

	ctx    context.Context // of fencing goroutines; ends with Close
	cancel context.CancelFunc

	remains *remains

	mu     sync.Mutex // guards closed, and wg.Go against Wait
	closed bool
	wg     sync.WaitGroup
}

// New makes a service that fills cache's blocks in backend's pool.
func New(cfg Config, recv Opener, cache *kvcache.Cache, backend Backend, log *slog.Logger) *Service {
	ctx, cancel := context.WithCancel(context.Background())
	return &Service{cfg: cfg, recv: recv, cache: cache, backend: backend, layers: backend.Layout().Resolve(), log: log,
		ctx: ctx, cancel: cancel, remains: newRemains(cfg.MaxRemains)}
}

// Close gives up fences that do not hold yet, and waits for their goroutines. Their blocks stay
// quarantined: the pool must outlive the receiver's sessions.
func (s *Service) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.wg.Wait()
}

// Fetch reserves blocks for c.Tokens and fills them. On success they are held under c.Owner, and
// the caller gives them to the engine or releases them. On failure (*Error) nothing is held, except
// blocks that a silent peer could still write to, which are quarantined until it cannot.
func (s *Service) Fetch(ctx context.Context, c *Claim) (*engine.Prefilled, Report, error) {
	var rep Report
	fail := func(op string, err error, fallback ticket.Outcome) (*engine.Prefilled, Report, error) {
		return nil, rep, failure(ctx, op, err, fallback)
	}
	if err := s.checkQuarantine(); err != nil {
		return fail("reserve blocks", err, ticket.NoSpace)
	}
	order, err := c.Order.Encode()
	if err != nil {
		return fail("send ticket", err, ticket.Refused)
	}
	session, err := s.recv.Open(ctx, c.Addr, c.Peer)
	if err != nil {
		return fail("open session", err, ticket.Dead)
	}
	start := time.Now()
	name := nameOf(c)
	over, err := s.remains.begin(ctx, c, name, fenceTimeout)
	if err != nil {
		return fail("wait for the former attempt", err, ticket.Late)
	}
	defer over()
	if s.cfg.Warm != nil {
		s.cfg.Warm(ctx, c.Tokens, c.Order.Salt)
	}
	table, err := s.assemble(ctx, c, name, session.Peer().Numerics)
	rep.Reserve = time.Since(start)
	if err != nil {
		return fail("reserve blocks", err, ticket.NoSpace)
	}
	order = s.withPeers(c, order, table)
	s.cache.SetState(c.Owner, kvcache.StateReceiving)
	start = time.Now()
	in, err := session.Request(ctx, s.ticket(c, order, table, session.Unchecked()))
	if err != nil {
		s.cache.Release(table.blocks, c.Owner)
		return fail("send ticket", err, ticket.Dead)
	}
	commit, err := in.Wait(ctx)
	rep.KV = time.Since(start)
	if err != nil {
		s.fence(in, c, name, table, session)
		return fail("collect prompt", err, ticket.Dead)
	}
	draft, err := handoff.ParseDraft(commit.Payload, &c.Order, c.LeaseID != "", len(c.Tokens), s.backend.Arch().Vocab)
	if err != nil {
		s.cache.Release(table.blocks, c.Owner)
		return fail("collect prompt", err, ticket.Corrupt)
	}
	rep.Queue = time.Duration(draft.QueueUS) * time.Microsecond
	rep.Prefill = time.Duration(draft.ComputeUS) * time.Microsecond
	rep.Had = table.had * s.cache.BlockTokens()
	if rep.Resumed = table.resumed; rep.Resumed > 0 {
		s.cfg.Metrics.takenUp(rep.Resumed, len(c.Tokens)-draft.Cached)
		s.log.Info("transfer taken up", "request_id", c.RequestID, "peer", session.Peer().PeerID.String(), "units", rep.Resumed)
	}
	return &engine.Prefilled{Blocks: table.blocks, First: draft.First,
		CachedTokens: draft.Cached, PromptLogprobs: draft.Prompt}, rep, nil
}

// checkQuarantine refuses to fetch while too many blocks are quarantined.
func (s *Service) checkQuarantine() error {
	if n := s.cache.Stats().Quarantined; n >= s.cfg.MaxQuarantined {
		return fmt.Errorf("%d blocks are quarantined: %w", n, kvcache.ErrNoSpace)
	}
	return nil
}

// reserve returns the prompt's blocks; the first had were in the prefix cache and are pinned. It
// waits its turn for blocks.
func (s *Service) reserve(ctx context.Context, c *Claim) (blocks []int32, had int, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.ReserveTimeout)
	defer cancel()
	chain := c.chain(s.cache)
	// Without the last position: a transfer without first tokens computes it again, so its block
	// must be ours alone.
	blocks, hit, err := s.cache.ReserveWait(ctx, &chain, len(c.Tokens)-1, s.cache.BlocksFor(len(c.Tokens)), c.Owner)
	return blocks, hit / s.cache.BlockTokens(), err
}

// withPeers adds the workers that have parts of the prompt to an encoded order. This worker's part
// is held until the ticket is over.
func (s *Service) withPeers(c *Claim, order []byte, t *table) []byte {
	o := c.Order
	if s.cfg.Self == nil || c.LeaseID != "" || o.PromptLogprobs >= 0 {
		return order
	}
	if had := t.had * s.cache.BlockTokens(); had > 0 {
		self := s.cfg.Self()
		self.Tokens = had
		o.Peers = append([]ticket.Peer{self}, o.Peers...)
	}
	if more, err := o.Encode(); err == nil {
		return more
	}
	return order
}

// ticket asks for what the table's blocks lack.
func (s *Service) ticket(c *Claim, order []byte, t *table, trust bool) kvconn.TicketSpec {
	spec := kvconn.TicketSpec{
		Link: c.Link, RequestID: c.RequestID, Tokens: c.Tokens, LeaseID: c.LeaseID, First: order, Deadline: c.Deadline,
		Stored: t.stored, Sink: &sink{backend: s.backend, layers: s.layers, trust: trust},
	}
	spec.Dest, spec.Have = s.dests(t.blocks, t.had)
	return spec
}

// dests names the blocks of a table to the sender; the first had need nothing.
func (s *Service) dests(blocks []int32, had int) (to []kvconn.Dest, have []bool) {
	to, have = make([]kvconn.Dest, len(blocks)), make([]bool, len(blocks))
	for i, g := range s.cache.Generations(blocks) {
		to[i], have[i] = kvconn.Dest{Block: blocks[i], Generation: g}, i < had
	}
	return to, have
}

// fence makes the blocks of a failed ticket reusable: it moves the generation, then waits until no
// store runs or can come. If that takes too long, the blocks are quarantined until it holds;
// otherwise what has arrived is left for another attempt.
func (s *Service) fence(in *kvconn.Incoming, c *Claim, name kvcache.Hash, t *table, from *kvconn.Session) {
	fresh := t.blocks[t.had:]
	s.cache.Revoke(fresh, c.Owner)
	ctx, cancel := context.WithTimeout(context.Background(), fenceTimeout)
	defer cancel()
	if in.Revoke(ctx) == nil {
		s.salvage(c, name, t, in.Stored(), from)
		return
	}
	s.cache.Release(t.blocks[:t.had], c.Owner)
	s.quarantine(in, c.Owner, fresh)
}

// quarantine takes blocks out of use until in's fence holds.
func (s *Service) quarantine(in *kvconn.Incoming, owner string, fresh []int32) {
	s.cache.Quarantine(fresh, owner)
	s.log.Warn("blocks quarantined: a store into them does not end", "owner", owner, "blocks", len(fresh))
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.wg.Go(func() {
		if in.Revoke(s.ctx) == nil {
			s.cache.Unquarantine(fresh, owner)
			s.log.Info("quarantine over", "owner", owner, "blocks", len(fresh))
		}
	})
}

// failure gives err the outcome that the router acts on. Once the caller has left, that is the
// cause, whatever broke.
func failure(ctx context.Context, op string, err error, fallback ticket.Outcome) *Error {
	outcome := kvconn.OutcomeOf(err, fallback)
	cause := context.Cause(ctx)
	switch {
	case errors.Is(cause, context.DeadlineExceeded):
		outcome = ticket.Late
	case cause != nil:
		outcome, err = ticket.Cancelled, cause
	case scarce.Ours(err), errors.Is(err, kvcache.ErrTooLarge), errors.Is(err, kvcache.ErrNoSpace), errors.Is(err, kvcache.ErrTooManyWaiters):
		outcome = ticket.NoSpace
	}
	return &Error{Outcome: outcome, Err: fmt.Errorf("%s: %w", op, err)}
}
