// Package decode is the second half of a pair: it reserves blocks for a
// prompt, collects the prompt's KV from a prefill worker under a ticket, and
// hands the filled blocks to the engine, which goes on from there.
//
// Fetch is the whole of it: match the prefix cache, reserve, ticket, wait,
// and on any failure fence before a block is reused.
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

	"github.com/xpyd/xpyd/internal/engine"
	"github.com/xpyd/xpyd/internal/handoff"
	"github.com/xpyd/xpyd/internal/kvcache"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Config holds the service's deadlines.
type Config struct {
	// ReserveTimeout is how long a request waits for free blocks.
	ReserveTimeout time.Duration
	// FenceTimeout bounds one try to fence a failed ticket; blocks stay
	// quarantined until a try succeeds or the session is over.
	FenceTimeout time.Duration
}

// DefaultConfig returns the documented settings.
func DefaultConfig() Config {
	return Config{ReserveTimeout: 10 * time.Second, FenceTimeout: 2 * time.Second}
}

// Claim is what to collect, and from whom.
type Claim struct {
	Addr      string        // prefill's kvconn address
	Peer      kvconn.PeerID // who must answer there; zero fields are not checked
	Link      ticket.Link
	LeaseID   string // foreign exchange; the Order is then not used
	RequestID string
	Owner     string // label of the blocks; the engine request's Owner
	Tokens    []int32
	Order     handoff.Order
	Deadline  time.Time // zero: kvconn's own
}

// Report says where the time of a Fetch went.
type Report struct {
	Reserve time.Duration // waiting for blocks
	KV      time.Duration // from the ticket to the last verified block
	Queue   time.Duration // in prefill's queue
	Prefill time.Duration // computing
	Had     int           // prompt tokens that were here already
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
	Layout() kernels.Layout
	Arch() kernels.Arch
}

// Service collects prompts for one engine's pool.
type Service struct {
	cfg     Config
	recv    *kvconn.Receiver
	cache   *kvcache.Cache
	backend Backend
	log     *slog.Logger

	ctx    context.Context // ends with Close: the fencing goroutines' life
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// New makes a service that fills cache's blocks in backend's pool.
func New(cfg Config, recv *kvconn.Receiver, cache *kvcache.Cache, backend Backend, log *slog.Logger) *Service {
	ctx, cancel := context.WithCancel(context.Background())
	return &Service{cfg: cfg, recv: recv, cache: cache, backend: backend, log: log, ctx: ctx, cancel: cancel}
}

// Close waits for the fences that are still under way.
func (s *Service) Close() {
	s.cancel()
	s.wg.Wait()
}

// Fetch reserves blocks for c.Tokens and fills them. On success the blocks are
// held under c.Owner and belong to the caller, who gives them to the engine or
// releases them. On failure (*Error) nothing is held, except blocks that a
// silent peer could still write to: those are quarantined until it cannot.
func (s *Service) Fetch(ctx context.Context, c *Claim) (*engine.Prefilled, Report, error) {
	var rep Report
	session, err := s.recv.Open(ctx, c.Addr, c.Peer)
	if err != nil {
		return nil, rep, failure("open session", err, ticket.Dead)
	}
	start := time.Now()
	blocks, had, err := s.reserve(ctx, c)
	rep.Reserve = time.Since(start)
	if err != nil {
		return nil, rep, failure("reserve blocks", err, ticket.NoSpace)
	}
	start = time.Now()
	draft, err := s.collect(ctx, session, c, blocks, had)
	rep.KV = time.Since(start)
	if err != nil {
		return nil, rep, err
	}
	rep.Queue = time.Duration(draft.QueueUS) * time.Microsecond
	rep.Prefill = time.Duration(draft.ComputeUS) * time.Microsecond
	rep.Had = had * s.cache.BlockTokens()
	return &engine.Prefilled{Blocks: blocks, First: draft.First,
		CachedTokens: draft.Cached, PromptLogprobs: draft.Prompt}, rep, nil
}

// reserve returns the prompt's block table; the first had blocks were in the
// prefix cache and are pinned. It waits its turn among all who want blocks.
func (s *Service) reserve(ctx context.Context, c *Claim) (blocks []int32, had int, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.ReserveTimeout)
	defer cancel()
	chain := s.cache.NewChain(c.Order.Salt)
	chain.Extend(c.Tokens)
	// The last position is left out: an exchange without first tokens
	// computes it again, and its block must be ours alone.
	blocks, hit, err := s.cache.ReserveWait(ctx, &chain, len(c.Tokens)-1, s.cache.BlocksFor(len(c.Tokens)), c.Owner)
	return blocks, hit / s.cache.BlockTokens(), err
}

// collect runs one ticket into blocks, of which the first had are filled.
func (s *Service) collect(ctx context.Context, session *kvconn.Session, c *Claim, blocks []int32, had int) (*handoff.Draft, error) {
	spec := kvconn.TicketSpec{
		Link: c.Link, RequestID: c.RequestID, Tokens: c.Tokens, LeaseID: c.LeaseID,
		First: c.Order.Encode(), Deadline: c.Deadline,
		Dest: make([]kvconn.Dest, len(blocks)), Have: make([]bool, len(blocks)),
		Sink: &sink{backend: s.backend, layout: s.backend.Layout()},
	}
	for i, g := range s.cache.Generations(blocks) {
		spec.Dest[i] = kvconn.Dest{Block: blocks[i], Generation: g}
		spec.Have[i] = i < had
	}
	in, err := session.Request(ctx, spec)
	if err != nil {
		s.cache.Release(blocks, c.Owner)
		return nil, failure("send ticket", err, ticket.Dead)
	}
	commit, err := in.Wait(ctx)
	if err != nil {
		s.fence(in, c.Owner, blocks, had)
		if cause := context.Cause(ctx); cause != nil {
			return nil, &Error{Outcome: cancelOutcome(cause), Err: fmt.Errorf("collect prompt: %w", cause)}
		}
		return nil, failure("collect prompt", err, ticket.Dead)
	}
	n := c.Order.N
	if c.LeaseID != "" {
		n = 0
	}
	draft, err := handoff.ParseDraft(commit.Payload, n, s.backend.Arch().Vocab)
	if err != nil {
		s.cache.Release(blocks, c.Owner)
		return nil, &Error{Outcome: ticket.Corrupt, Err: err}
	}
	return draft, nil
}

// fence makes the blocks of a failed ticket reusable: first the generation
// moves, then no store may be running or come. A fence that does not succeed
// at once leaves the blocks quarantined and is retried until it does or the
// session is over.
func (s *Service) fence(in *kvconn.Incoming, owner string, blocks []int32, had int) {
	fresh := blocks[had:]
	s.cache.Revoke(fresh, owner)
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.FenceTimeout)
	defer cancel()
	if in.Revoke(ctx) == nil {
		s.cache.Release(blocks, owner)
		return
	}
	s.cache.Release(blocks[:had], owner)
	s.cache.Quarantine(fresh, owner)
	s.log.Warn("blocks quarantined: the peer does not acknowledge a revoke", "owner", owner, "blocks", len(fresh))
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		for s.ctx.Err() == nil {
			try, cancel := context.WithTimeout(s.ctx, s.cfg.FenceTimeout)
			err := in.Revoke(try)
			cancel()
			if err == nil {
				s.cache.Unquarantine(fresh, owner)
				return
			}
		}
	}()
}

func failure(op string, err error, fallback ticket.Outcome) *Error {
	outcome := kvconn.OutcomeOf(err, fallback)
	switch {
	case errors.Is(err, kvcache.ErrTooLarge):
		outcome = ticket.Refused
	case errors.Is(err, kvcache.ErrNoSpace), errors.Is(err, kvcache.ErrTooManyWaiters):
		outcome = ticket.NoSpace
	case errors.Is(err, context.Canceled):
		outcome = ticket.Cancelled
	case errors.Is(err, context.DeadlineExceeded) && outcome == fallback:
		outcome = ticket.Late
	}
	return &Error{Outcome: outcome, Err: fmt.Errorf("%s: %w", op, err)}
}

func cancelOutcome(cause error) ticket.Outcome {
	if errors.Is(cause, context.DeadlineExceeded) {
		return ticket.Late
	}
	return ticket.Cancelled
}
