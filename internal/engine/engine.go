// Package engine runs requests on a backend: one loop goroutine schedules
// continuous batches over the KV cache, steps the backend, and delivers
// tokens.
package engine

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// Engine is a running loop. Make it with New, end it with Close.
type Engine struct{}

// New checks that cache and backend agree, registers metrics, and starts the
// loop. The engine becomes the cache's Notify receiver. The backend stays the
// caller's to close, after Close.
func New(cfg Config, backend kernels.Backend, cache *kvcache.Cache, log *slog.Logger, reg prometheus.Registerer) (*Engine, error) {
	return nil, ErrClosed
}

// Submit queues a request. When ctx ends before the request does, the request
// is cancelled. Errors: *RequestError, *TooLongError, ErrQueueFull, ErrClosed.
func (e *Engine) Submit(ctx context.Context, r *Request) (*Handle, error) { return nil, ErrClosed }

// MaxModelLen is the longest prompt plus output, in tokens.
func (e *Engine) MaxModelLen() int { return 0 }

// Stats returns the current load.
func (e *Engine) Stats() Stats { return Stats{} }

// Holders lists who holds blocks, for the ledger.
func (e *Engine) Holders() []kvcache.Holder { return nil }

// Health is nil while steps succeed, else the last failure.
func (e *Engine) Health() error { return nil }

// Close lets queued and running requests finish until ctx ends, then aborts
// them with ErrClosed; it waits for the loop either way.
func (e *Engine) Close(ctx context.Context) error { return nil }

// Handle is a submitted request.
type Handle struct{}

// Next waits for events and returns all there are, per choice in order. After
// the last one it returns io.EOF; a request that was cancelled or failed ends
// with ErrCancelled, ErrClosed or *StepError after what was drawn before.
// When ctx ends first: its error, and nothing is lost.
func (h *Handle) Next(ctx context.Context) ([]Event, error) { return nil, ErrClosed }

// CancelChoice ends one choice (a stop string was hit): its unread events are
// dropped and no more come.
func (h *Handle) CancelChoice(choice int) {}

// Cancel ends the request (the client left). Its blocks are free at the end
// of the running step at the latest, except a PrefillOnly request's, which
// wait for Release.
func (h *Handle) Cancel() {}

// Release gives back a PrefillOnly request's blocks; it cancels the request
// if that still runs. Each PrefillOnly request needs it, whatever its end.
// On others it is Cancel.
func (h *Handle) Release() {}

// Blocks returns a PrefillOnly request's block table: nil until it is
// started, valid until Release. Read only.
func (h *Handle) Blocks() []int32 { return nil }

// CachedTokens returns how many prompt tokens the prefix cache had; valid
// from the first OnBlocks call or event on.
func (h *Handle) CachedTokens() int { return 0 }

// Owner returns the label of the request's blocks in the ledger.
func (h *Handle) Owner() string { return "" }

// Done is closed once the engine holds nothing for the request any more.
func (h *Handle) Done() <-chan struct{} { return nil }
