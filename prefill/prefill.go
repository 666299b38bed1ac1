// Package prefill is the first half of a pair: it runs prompts and pushes
// their KV blocks to whoever holds a ticket.
//
// A ticket arrives over kvconn (Service is its handler) and names the prompt
// and decode's blocks; the prompt goes through the engine, every layer's
// finished blocks are pushed while the next layer is computed, and the commit
// carries the first token of each choice. The router's own leg for the same
// link (Await) only watches: it learns how the exchange ended, and its end
// ends the exchange.
//
// For foreign proxies a prompt can also be run first (Keep) and collected
// later under a lease.
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

	"github.com/xpyd/xpyd/internal/engine"
	"github.com/xpyd/xpyd/internal/handoff"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Config bounds what the service keeps.
type Config struct {
	// TicketWait is how long the router's leg waits for decode's ticket.
	TicketWait time.Duration
	// Lease is how long finished blocks are kept for a claim (Keep).
	Lease time.Duration
	// MaxLeases bounds the leases kept at a time.
	MaxLeases int
	// Remembered is how many finished links are remembered for a router leg
	// that comes after its ticket is over.
	Remembered int
}

// DefaultConfig returns the documented settings.
func DefaultConfig() Config {
	return Config{TicketWait: 10 * time.Second, Lease: 30 * time.Second, MaxLeases: 256, Remembered: 4096}
}

// Engine is what the service needs of internal/engine.
type Engine interface {
	Submit(ctx context.Context, r *engine.Request) (*engine.Handle, error)
}

// Service answers tickets. It is a kvconn.Handler.
type Service struct {
	cfg    Config
	engine Engine
	pool   kernels.Pool
	layout kernels.Layout
	log    *slog.Logger
	links  *links
	leases *leases
}

// New makes a service over one engine and the pool that it fills.
func New(cfg Config, e Engine, pool kernels.Pool, layout kernels.Layout, log *slog.Logger) *Service {
	return &Service{
		cfg: cfg, engine: e, pool: pool, layout: layout, log: log,
		links:  newLinks(cfg.Remembered),
		leases: newLeases(cfg.Lease, cfg.MaxLeases),
	}
}

// Close gives back every lease. Tickets end with the kvconn server.
func (s *Service) Close() { s.leases.close() }

// OnTicket implements kvconn.Handler: it serves one ticket to its end.
func (s *Service) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	if o.Ticket().LeaseID != "" {
		s.serveLease(ctx, o)
		return
	}
	order, err := handoff.ParseOrder(o.Ticket().First)
	if err != nil {
		s.fail(o, ticket.Refused, err)
		return
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	end, err := s.links.begin(o.Ticket().Link, order.Index, order.Of, cancel)
	if err != nil {
		s.fail(o, ticket.Refused, err)
		return
	}
	report := s.serve(ctx, o, order)
	end(report)
}

// serve runs the prompt of one ticket and pushes it.
func (s *Service) serve(ctx context.Context, o *kvconn.Outgoing, order *handoff.Order) Report {
	t := o.Ticket()
	src := newSource(s.pool, s.layout, len(t.Tokens), t.DestBlockTokens)
	if err := o.Accept(src); err != nil {
		return reportOf(kvconn.OutcomeOf(err, ticket.Dead), err)
	}
	h, err := s.engine.Submit(ctx, &engine.Request{
		ID: t.RequestID, Prompt: t.Tokens, N: order.N, Sampling: order.Sampling,
		MaxTokens: 1, MinTokens: order.MinTokens, StopTokens: order.StopTokens, IgnoreEOS: order.IgnoreEOS,
		Salt: order.Salt, Logprobs: order.Logprobs, PromptLogprobs: order.PromptLogprobs,
		PrefillOnly: true,
		OnBlocks: func(layer int, ready []engine.Ready) {
			o.Push(layer, src.ready(layer, ready))
		},
	})
	if err != nil {
		return s.fail(o, outcomeOf(err), err)
	}
	defer h.Release()
	draft, err := drawn(ctx, h, order.N)
	if err != nil {
		report := s.fail(o, outcomeOf(err), err)
		<-o.Done() // the pusher reads our blocks until then
		return report
	}
	o.Commit(draft.Encode())
	<-o.Done()
	if err := o.Err(); err != nil {
		return reportOf(kvconn.OutcomeOf(err, ticket.Dead), err)
	}
	return Report{Outcome: ticket.Done, PromptTokens: len(t.Tokens), CachedTokens: draft.Cached,
		QueueUS: draft.QueueUS, ComputeUS: draft.ComputeUS}
}

// fail tells the receiver why and returns the same as a report.
func (s *Service) fail(o *kvconn.Outgoing, outcome ticket.Outcome, err error) Report {
	o.Fail(outcome, err.Error())
	s.log.Warn("ticket failed", "request_id", o.Ticket().RequestID, "ticket", o.Ticket().ID,
		"peer", o.Peer().PeerID.String(), "outcome", string(outcome), "error", err)
	return reportOf(outcome, err)
}

// drawn collects the first token of each of n choices.
func drawn(ctx context.Context, h *engine.Handle, n int) (*handoff.Draft, error) {
	d := &handoff.Draft{First: make([]kernels.Sampled, n)}
	for got := 0; ; {
		events, err := h.Next(ctx)
		if errors.Is(err, io.EOF) {
			if got < n {
				return nil, fmt.Errorf("prompt ended with %d of %d first tokens", got, n)
			}
			return d, nil
		}
		if err != nil {
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			}
			return nil, fmt.Errorf("run prompt: %w", err)
		}
		for _, e := range events {
			d.First[e.Choice] = e.Sampled
			got++
			if p := e.Prompt; p != nil {
				d.Cached, d.Prompt = p.CachedTokens, p.Logprobs
				d.QueueUS, d.ComputeUS = p.Queued.Microseconds(), p.Prefill.Microseconds()
			}
		}
	}
}

// outcomeOf names an engine error for the peer and the router.
func outcomeOf(err error) ticket.Outcome {
	var bad *engine.RequestError
	var long *engine.TooLongError
	switch {
	case errors.As(err, &bad), errors.As(err, &long):
		return ticket.Refused
	case errors.Is(err, engine.ErrQueueFull):
		return ticket.NoSpace
	case errors.Is(err, context.DeadlineExceeded):
		return ticket.Late
	case errors.Is(err, context.Canceled), errors.Is(err, engine.ErrCancelled), errors.Is(err, errLegGone):
		return ticket.Cancelled
	}
	return ticket.Dead
}

// Entry is one thing the service holds, for the ledger.
type Entry struct {
	Kind  string    `json:"kind"` // "leased", "awaited"
	ID    string    `json:"id"`
	Since time.Time `json:"since"`
	Why   string    `json:"why"`
}

// Ledger lists leases and router legs that wait; tickets are kvconn's.
func (s *Service) Ledger() []Entry {
	return append(s.leases.ledger(), s.links.ledger()...)
}

var _ kvconn.Handler = (*Service)(nil)
