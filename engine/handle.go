package engine

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/kernels"
)

// Handle is a submitted request. One goroutine reads Next; the other methods
// may be called from any.
type Handle struct {
	e       *Engine
	req     *Request // normalised copy
	owner   string
	order   uint64
	arrived time.Time
	promise Promise       // the request's, and the engine's in what that leaves out
	unwatch func() bool   // ends the watch on the request's context
	ready   chan struct{} // wakes Next
	done    chan struct{}

	flagged bool // in the engine's inbox; guarded by Engine.mu
	waits   bool // counted in Engine.queued; guarded by Engine.mu

	mu        sync.Mutex // guards the fields below; Engine.mu may be taken before it, never inside
	events    []Event
	unread    []int  // events of each choice
	dropped   []bool // choices cancelled
	err       error  // how it ended
	cancelled bool
	released  bool
	blocks    []int32 // PrefillOnly: the block table, until given back
	cached    int

	preempted atomic.Int32 // times that one of its sequences lost its blocks

	// The loop's own.
	begun     bool
	over      bool // finished
	offered   offered
	flights   int // of its sequences, in steps under way
	seqs      []*sequence
	info      *PromptInfo // to go with the first event; nil once gone
	told      bool        // the first tokens are: see tellFirst
	prompted  bool        // the prompt's logits were drawn from
	logprobs  []kernels.PromptLogprob
	pool      pool
	started   time.Time // of the first step
	stepped   bool      // some step carried it
	due       time.Time // when its first token should be there; zero: not foretold
	allBanned []int32   // EOS and stop ids, while MinTokens is not reached
	bans      bans
}

// Preemptions is how often the request's sequences have lost their blocks to others so far.
func (h *Handle) Preemptions() int { return int(h.preempted.Load()) }

// Next waits for events and returns all there are, in order for each choice. After the last one
// it returns io.EOF. A request that failed or was aborted ends with *StepError or ErrClosed after
// the events before, a cancelled one with ErrCancelled at once. When ctx ends first, Next returns
// its error and loses nothing. One that was shed ends with ErrLate, and nothing before.
func (h *Handle) Next(ctx context.Context) ([]Event, error) {
	for {
		if events, err := h.take(); len(events) > 0 || err != nil {
			return events, err
		}
		select {
		case <-h.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (h *Handle) take() ([]Event, error) {
	h.mu.Lock()
	if len(h.events) == 0 {
		defer h.mu.Unlock()
		return nil, h.err
	}
	events := h.events
	h.events = nil
	resume := slices.Max(h.unread) > h.e.cfg.MaxBacklog
	clear(h.unread)
	h.mu.Unlock()
	if resume {
		h.e.signal()
	}
	return events, nil
}

// CancelChoice ends one choice, for instance at a stop string: its unread events are dropped and
// no more come.
func (h *Handle) CancelChoice(choice int) {
	h.mu.Lock()
	if choice < 0 || choice >= len(h.dropped) || h.dropped[choice] {
		h.mu.Unlock()
		return
	}
	h.dropped[choice] = true
	h.unread[choice] = 0
	h.events = slices.DeleteFunc(h.events, func(ev Event) bool { return ev.Choice == choice })
	h.mu.Unlock()
	h.e.attend(h)
}

// Cancel ends the request, for instance when the client left. Its blocks are free at the end of
// the steps under way at the latest, except a PrefillOnly request's, which wait for Release.
// Cancelling an ended request does nothing.
func (h *Handle) Cancel() {
	h.mu.Lock()
	h.cancelled = true
	h.mu.Unlock()
	h.e.attend(h)
}

// Release gives back a PrefillOnly request's blocks, at the end of the steps under way at the
// latest. It cancels a request that still runs. Each PrefillOnly request needs it, however it
// ended. For others it is Cancel.
func (h *Handle) Release() {
	h.mu.Lock()
	h.released, h.cancelled = true, true
	h.mu.Unlock()
	h.e.attend(h)
}

// Blocks returns a PrefillOnly request's block table, read only: nil until it is started and
// after its release.
func (h *Handle) Blocks() []int32 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.blocks
}

// CachedTokens returns how many prompt tokens the prefix cache had; valid
// from the first OnBlocks call or event on.
func (h *Handle) CachedTokens() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return min(h.cached, len(h.req.Prompt))
}

// Owner returns the label of the request's blocks in the ledger.
func (h *Handle) Owner() string { return h.owner }

// Done is closed once the engine holds nothing for the request any more.
func (h *Handle) Done() <-chan struct{} { return h.done }

// push hands an event to the reader, unless its choice was cancelled.
func (h *Handle) push(ev Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dropped[ev.Choice] {
		return
	}
	if h.info != nil {
		ev.Prompt, h.info = h.info, nil
	}
	h.events = append(h.events, ev)
	h.unread[ev.Choice]++
	poke(h.ready)
}

// end records how the request ended. A request cancelled during its last step ends cancelled.
func (h *Handle) end(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cancelled {
		err = ErrCancelled
	}
	h.err = err
	if err == ErrCancelled {
		h.events = nil
		clear(h.unread)
	}
	poke(h.ready)
}

// giveBack frees the blocks of an ended and released PrefillOnly request, and reports whether it
// did.
func (h *Handle) giveBack() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err == nil || !h.released || h.blocks == nil {
		return false
	}
	h.e.cache.Release(h.blocks, h.owner)
	h.blocks = nil
	close(h.done)
	return true
}

// unreadOf counts a choice's unread events.
func (h *Handle) unreadOf(choice int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.unread[choice]
}

// given are a choice's tokens that another worker drew.
func (h *Handle) given(choice int) []int32 {
	if len(h.req.Given) == 0 {
		return nil
	}
	return h.req.Given[choice].Tokens
}

// survivors lists the choices not cancelled.
func (h *Handle) survivors() []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []int
	for i, dropped := range h.dropped {
		if !dropped {
			list = append(list, i)
		}
	}
	return list
}
