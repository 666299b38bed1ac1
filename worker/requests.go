package worker

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Running is one request that a worker is busy with, for the ledger.
type Running struct {
	ID    string    `json:"id"`
	Kind  string    `json:"kind"`            // "generate", "keep" (a foreign proxy's prefill), "prefill" (our router's leg), "bring", "embed"
	State string    `json:"state"`           // "waiting" for memory, "started", "answering" once the first token is there
	Bytes int64     `json:"bytes,omitempty"` // of memory for its answer
	Since time.Time `json:"since"`
	Why   string    `json:"why"`
}

const stateWaiting = "waiting"

// why says for whom a kind of request runs.
var why = map[string]string{
	"generate": "a client, or the router, waits for its answer",
	"keep":     "a foreign proxy waits for its prompt to be computed",
	"prefill":  "the router waits for the transfer to end",
	"embed":    "a client, or the router, waits for its vectors",
	"bring":    "the KV of a stream that is to go on here is brought from where it runs",
}

// requests are those under way. Once shut it admits no more; quiet is closed when the last has
// left.
type requests struct {
	mu    sync.Mutex
	live  map[*Running]struct{}
	shut  bool
	quiet chan struct{}
}

func newRequests() *requests {
	return &requests{live: map[*Running]struct{}{}, quiet: make(chan struct{})}
}

// enter adds a request until leave is called; false when the worker is closing.
func (j *requests) enter(kind, id string) (r *Running, ok bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.shut {
		return nil, false
	}
	r = &Running{ID: id, Kind: kind, State: "started", Since: time.Now(), Why: why[kind]}
	j.live[r] = struct{}{}
	return r, true
}

func (j *requests) leave(r *Running) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.live, r)
	if j.shut && len(j.live) == 0 {
		close(j.quiet)
	}
}

// answering notes that a request has its first token.
func (j *requests) answering(r *Running) { j.note(r, "answering", 0) }

// note sets a request's state, and adds to its memory.
func (j *requests) note(r *Running, state string, bytes int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r.State, r.Why = state, why[r.Kind]
	if state == stateWaiting {
		r.Why = "it waits for memory for its answer: other answers have all of it"
	}
	r.Bytes += bytes
}

// close admits no more requests.
func (j *requests) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.shut {
		return
	}
	j.shut = true
	if len(j.live) == 0 {
		close(j.quiet)
	}
}

// wait waits until all have left, after close.
func (j *requests) wait(ctx context.Context) error {
	select {
	case <-j.quiet:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d requests still run: %w", len(j.ledger()), context.Cause(ctx))
	}
}

func (j *requests) ledger() []Running {
	j.mu.Lock()
	defer j.mu.Unlock()
	list := make([]Running, 0, len(j.live))
	for r := range j.live {
		list = append(list, *r)
	}
	slices.SortFunc(list, func(a, b Running) int { return a.Since.Compare(b.Since) })
	return list
}
