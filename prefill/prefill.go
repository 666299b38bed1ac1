// Package prefill is the first half of a pair: it runs prompts and pushes their KV blocks to the
// decode workers whose tickets ask for them.
//
// A ticket arrives over kvconn (Service is its handler) and names the prompt and decode's blocks.
// The engine runs the prompt, each layer's finished blocks are pushed while the next layer is
// computed, and the commit carries the first token of each choice. The router's leg of the same
// link (Await) only watches: it learns how the transfer ended, and ends it by leaving.
//
// For foreign proxies a prompt can also be run first (Keep) and collected later under a lease.
// Workers also give cached beginnings of prompts to others (give.go).
//
// Non-goals: HTTP, tokenising, choosing peers.
package prefill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/convert"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// Config bounds what the service keeps.
type Config struct {
	// TicketWait is how long a link waits for decode's next ticket, and an early claim for its
	// prompt.
	TicketWait time.Duration
	// Lease is how long finished blocks are kept for a claim (Keep), and from each Renew on;
	// MaxLease is the most in all.
	Lease, MaxLease time.Duration
	// MaxLeases bounds the number of leases, and of claims that wait for theirs.
	MaxLeases int
	Metrics   *Metrics // may be nil
	// Warm, if set, loads what lower tiers and the peers have of a prompt into the cache, or
	// returns a source that will once the request has its blocks. It is bounded in time.
	Warm func(ctx context.Context, w Wanted) engine.Source
	// Ran, if set, is told of each prompt that has its first tokens, except a router's probes, and
	// how long that took since its ticket or request.
	Ran func(info *engine.PromptInfo, choices int, took time.Duration)
	// Guide, if set, makes what binds an order's output. Without it, or with an error, a bound order gets its
	// prompt's rows and decode draws.
	Guide func(ctx context.Context, g *handoff.Guide) (engine.Guide, error)
	// Give, if set, answers tickets for cached blocks; see give.go. GiveTime bounds such a ticket,
	// whatever its deadline.
	Give     func(ctx context.Context, a Asked) (blocks []int32, release func(), err error)
	GiveTime time.Duration
}

// Wanted is a prompt to be computed.
type Wanted struct {
	RequestID string
	Tokens    []int32
	Salt      string
	Peers     []ticket.Peer // that have its beginning
}

// remembered is how many finished links are kept for a router's leg that comes late.
const remembered = 4096

// DefaultConfig returns the documented settings.
func DefaultConfig() Config {
	return Config{TicketWait: 10 * time.Second, Lease: 30 * time.Second, MaxLease: 8 * time.Minute, MaxLeases: 1024}
}

// Engine is what the service needs of engine.
type Engine interface {
	Submit(ctx context.Context, r *engine.Request) (*engine.Handle, error)
}

// Service answers tickets. It is a kvconn.Handler.
type Service struct {
	cfg    Config
	engine Engine
	pool   kernels.Pool
	layout kvlayout.Layout
	layers []kvlayout.Layer // of it
	log    *slog.Logger
	links  *links
	leases *leases
}

// New makes a service for an engine and the pool that it fills.
func New(cfg Config, e Engine, pool kernels.Pool, layout kvlayout.Layout, log *slog.Logger) *Service {
	return &Service{
		cfg: cfg, engine: e, pool: pool, layout: layout, layers: layout.Resolve(), log: log,
		links:  newLinks(cfg.TicketWait, remembered),
		leases: newLeases(cfg.Lease, cfg.MaxLease, cfg.TicketWait, cfg.MaxLeases, cfg.Metrics),
	}
}

// Idle waits until every lease is collected or has ended.
func (s *Service) Idle(ctx context.Context) error { return s.leases.idle(ctx) }

// Lapse ends the claims that wait for their prompts: none come any more.
func (s *Service) Lapse() { s.leases.lapse() }

// Close ends every link and lease. Tickets end with the kvconn server.
func (s *Service) Close() {
	s.links.close()
	s.leases.close()
}

// OnTicket implements kvconn.Handler: it serves one ticket to its end.
func (s *Service) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	t := o.Ticket()
	switch {
	case t.Positions != len(t.Tokens):
		s.fail(o, &endError{ticket.Refused, fmt.Sprintf("a ticket for %d positions of %d tokens", t.Positions, len(t.Tokens))})
		return
	case t.LeaseID != "":
		s.serveLease(ctx, o)
		return
	}
	order, err := handoff.ParseOrder(t.First)
	if err != nil {
		s.fail(o, &endError{ticket.Refused, err.Error()})
		return
	}
	if order.Cached {
		s.serveCached(ctx, o, order.Salt)
		return
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	end, err := s.links.begin(t.Link, order.Index, order.Of, cancel)
	if err != nil {
		s.fail(o, err)
		return
	}
	end(s.servePrompt(ctx, o, order))
}

// servePrompt runs the prompt of a ticket and pushes its blocks.
func (s *Service) servePrompt(ctx context.Context, o *kvconn.Outgoing, order *handoff.Order) Report {
	t, begun := o.Ticket(), time.Now()
	src := newSource(s.pool, s.layers, len(t.Tokens), t.DestBlockTokens)
	if err := s.accept(o, src); err != nil {
		return Report{Outcome: kvconn.OutcomeOf(err, ticket.Dead), Message: err.Error()}
	}
	var source engine.Source
	if order.PromptLogprobs < 0 { // else all of it is computed
		source = s.warm(ctx, Wanted{t.RequestID, t.Tokens, order.Salt, order.Peers})
	}
	guide := s.guide(ctx, t.RequestID, order)
	h, err := s.engine.Submit(ctx, &engine.Request{
		ID: t.RequestID, Prompt: t.Tokens, N: order.N, Sampling: order.Sampling,
		MinTokens: order.MinTokens, StopTokens: order.StopTokens, IgnoreEOS: order.IgnoreEOS,
		Salt: order.Salt, Priority: order.Priority, Logprobs: order.Logprobs, PromptLogprobs: order.PromptLogprobs, LogprobIDs: order.LogprobIDs,
		PrefillOnly: true, RowsOnly: order.Rows, Urgent: order.Urgent, Keep: !order.MayShed, Promise: engine.Promise{TTFT: order.TTFT}, Source: source, Guide: guide,
		OnBlocks: func(layer int, ready []engine.Ready) { o.Push(layer, src.ready(layer, ready)) },
	})
	if err != nil {
		return s.fail(o, err)
	}
	defer h.Release() // after Done: the pusher reads our blocks until then
	draft, payload, err := s.draft(ctx, h, order, guide != nil, begun)
	if err != nil {
		return s.fail(o, err)
	}
	o.Commit(payload)
	<-o.Done()
	if err := o.Err(); err != nil {
		return Report{Outcome: kvconn.OutcomeOf(err, ticket.Dead), Message: err.Error()}
	}
	return Report{Outcome: ticket.Done, PromptTokens: len(t.Tokens), CachedTokens: draft.Cached,
		QueueUS: draft.QueueUS, ComputeUS: draft.ComputeUS}
}

// guide makes what binds an order's output. Where it cannot, the order becomes one for rows alone.
func (s *Service) guide(ctx context.Context, id string, order *handoff.Order) engine.Guide {
	if order.Guide == nil || order.Rows {
		return nil
	}
	if s.cfg.Guide != nil {
		g, err := s.cfg.Guide(ctx, order.Guide)
		if err == nil {
			return g
		}
		s.log.Warn("the first token is left to decode: the grammar cannot be followed here", "request_id", id, "error", err)
	}
	order.Rows = order.PromptLogprobs < 0 // else drawn for them, and not sent
	return nil
}

func (s *Service) warm(ctx context.Context, w Wanted) engine.Source {
	if s.cfg.Warm == nil {
		return nil
	}
	return s.cfg.Warm(ctx, w)
}

// accept accepts the ticket, with src converted to the receiver's dtype. src already has its block
// size.
func (s *Service) accept(o *kvconn.Outgoing, src *source) error {
	rows, err := convert.New(src, s.layout, o.Layout(), kernels.DigestPart)
	if err != nil {
		o.Fail(ticket.Incompatible, err.Error())
		return err
	}
	return o.Accept(rows)
}

// fail tells the receiver why, waits until the source is no longer read, and returns how the ticket
// ended, which may have been earlier and for another reason.
func (s *Service) fail(o *kvconn.Outgoing, err error) Report {
	o.Fail(outcomeOf(err), err.Error())
	<-o.Done()
	r := Report{Outcome: outcomeOf(err), Message: err.Error()}
	if e := o.Err(); e != nil {
		r.Outcome = kvconn.OutcomeOf(e, r.Outcome)
	}
	level := slog.LevelWarn
	if r.Outcome == ticket.Cancelled || r.Outcome == ticket.Shed { // the latter is counted
		level = slog.LevelDebug
	}
	s.log.Log(context.Background(), level, "ticket failed", "request_id", o.Ticket().RequestID, "ticket", o.Ticket().ID,
		"peer", o.Peer().PeerID.String(), "outcome", string(r.Outcome), "error", err)
	return r
}

// draft waits for the prompt's end and encodes what was drawn.
func (s *Service) draft(ctx context.Context, h *engine.Handle, order *handoff.Order, guided bool, begun time.Time) (*handoff.Draft, []byte, error) {
	n := order.N
	if order.Rows {
		return undrawn(ctx, h, begun)
	}
	events, info, err := drawn(ctx, h, n)
	if err != nil {
		return nil, nil, err
	}
	s.ran(info, n, order.Urgent, begun)
	d := &handoff.Draft{First: make([]kernels.Sampled, n), Prompt: info.Logprobs, Cached: info.CachedTokens,
		QueueUS: info.Queued.Microseconds(), ComputeUS: info.Prefill.Microseconds()}
	for i := range events {
		d.First[i] = events[i].Sampled
	}
	d.Guided = guided
	payload, err := d.Encode()
	return d, payload, err
}

// undrawn is draft where nothing is drawn.
func undrawn(ctx context.Context, h *engine.Handle, begun time.Time) (*handoff.Draft, []byte, error) {
	if _, err := h.Next(ctx); err != io.EOF { //nolint:errorlint // never wrapped
		return nil, nil, runError(ctx, err)
	}
	d := &handoff.Draft{Cached: h.CachedTokens(), ComputeUS: time.Since(begun).Microseconds()}
	payload, err := d.Encode()
	return d, payload, err
}

// runError is why a prompt did not run to its end.
func runError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return fmt.Errorf("run prompt: %w", err)
}

func (s *Service) ran(info *engine.PromptInfo, choices int, probe bool, begun time.Time) {
	if s.cfg.Ran != nil && !probe {
		s.cfg.Ran(info, choices, time.Since(begun))
	}
}

// drawn collects the first token of each of n choices.
func drawn(ctx context.Context, h *engine.Handle, n int) ([]engine.Event, *engine.PromptInfo, error) {
	first := make([]engine.Event, n)
	var info *engine.PromptInfo
	for got := 0; ; {
		events, err := h.Next(ctx)
		for _, e := range events {
			first[e.Choice] = e
			got++
			if e.Prompt != nil {
				info = e.Prompt
			}
		}
		switch {
		case errors.Is(err, io.EOF) && got == n && info != nil:
			return first, info, nil
		case errors.Is(err, io.EOF):
			return nil, nil, fmt.Errorf("prompt ended with %d of %d first tokens", got, n)
		case err != nil:
			return nil, nil, runError(ctx, err)
		}
	}
}

// outcomeOf maps an error to the outcome for the peer and the router.
func outcomeOf(err error) ticket.Outcome {
	var end *endError
	var bad *engine.RequestError
	var long *engine.TooLongError
	var spoilt *engine.OutputError
	var dead *engine.GuideError
	switch {
	case errors.As(err, &end):
		return end.outcome
	case errors.As(err, &spoilt):
		return ticket.Invalid
	case errors.Is(err, engine.ErrLate):
		return ticket.Shed
	case errors.As(err, &bad), errors.As(err, &dead), errors.Is(err, ErrLeaseExists), errors.Is(err, ErrNotCached):
		return ticket.Refused
	case errors.As(err, &long), // for this worker; decode had room
		errors.Is(err, engine.ErrQueueFull), errors.Is(err, engine.ErrClosed), errors.Is(err, ErrTooManyLeases), errors.Is(err, ErrGivesEnough):
		return ticket.NoSpace
	case errors.Is(err, context.DeadlineExceeded):
		return ticket.Late
	case errors.Is(err, context.Canceled), errors.Is(err, engine.ErrCancelled), errors.Is(err, ErrClaimGone):
		return ticket.Cancelled
	}
	return ticket.Dead
}

// Entry is one thing the service holds, for the ledger.
type Entry struct {
	Kind   string    `json:"kind"` // "leasing", "leased", "claimed"; "awaited", "linked"
	ID     string    `json:"id"`   // of the lease, or the link
	Owner  string    `json:"owner,omitempty"`
	Blocks int       `json:"blocks,omitempty"`
	Since  time.Time `json:"since"`
	Why    string    `json:"why"`
}

// Ledger lists leases and live links; tickets are kvconn's.
func (s *Service) Ledger() []Entry {
	return append(s.leases.ledger(), s.links.ledger()...)
}

var _ kvconn.Handler = (*Service)(nil)
