package engine

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// Submit queues a request. When ctx ends before the request does, the request
// is cancelled. Errors: *RequestError, *TooLongError, ErrQueueFull, ErrClosed, and
// kernels.ErrNoHidden for a Pooling that the backend cannot do.
func (e *Engine) Submit(ctx context.Context, r *Request) (*Handle, error) {
	req, err := e.normalise(r)
	if err != nil {
		return nil, err
	}
	h := &Handle{e: e, req: req, owner: req.Owner, arrived: e.now(), promise: req.Promise.Or(e.cfg.Promise),
		ready: make(chan struct{}, 1), done: make(chan struct{}), unread: make([]int, req.N), dropped: make([]bool, req.N)}
	for i, g := range req.Given {
		h.dropped[i] = g.Done
	}
	if req.MinTokens > 0 {
		h.allBanned = append(append(h.allBanned, e.cfg.EOS...), req.StopTokens...)
	}
	q := &sequence{h: h, draws: req.N, tokens: req.Prompt, chain: e.cache.NewChain(req.Salt)}
	if req.RowsOnly || req.Pooling != PoolNone {
		q.draws = 0
	}
	if first := req.resumes(); first >= 0 {
		q.choice, q.draws, q.tokens = first, 1, req.Resumed()
		q.guide = h.guideOf(first)
	} else if req.Guide != nil {
		q.guide = req.Guide.Fork()
	}
	q.chain.Priority = req.Priority
	q.chain.Extend(q.tokens) // here rather than on the loop: it takes a while
	if p := req.Prefilled; p != nil {
		q.table, q.computed, q.shared = slices.Clone(p.Blocks), len(req.Prompt), true
		if len(p.First) == 0 && !req.begun() {
			q.computed--
		}
		h.cached, h.logprobs = p.CachedTokens, p.PromptLogprobs
	}
	h.seqs = []*sequence{q}
	if p := req.Prefilled; p != nil && len(p.First) > 0 && !req.PrefillOnly {
		e.tellFirst(h)
	}
	if err := e.enter(ctx, h); err != nil {
		return nil, err
	}
	e.signal()
	return h, nil
}

// begun is added to the arrival numbers of requests that are not urgent, and ordinary to those of
// others whose streams have not begun elsewhere, so that urgent ones are older than any other, and
// streams that stand still older than those that have not begun here.
const begun, ordinary = 1 << 62, 1 << 63

// enter gives the request its place in the queue.
func (e *Engine) enter(ctx context.Context, h *Handle) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closing:
		return ErrClosed
	case e.queued >= e.cfg.MaxWaiting:
		return fmt.Errorf("%d requests wait: %w", e.queued, ErrQueueFull)
	}
	e.orders++
	if h.owner == "" {
		h.owner = fmt.Sprintf("%s#%d", h.req.ID, e.orders)
	}
	switch h.order = e.orders; {
	case h.req.Urgent:
	case len(h.req.Given) > 0 || h.req.RowsOnly:
		h.order += begun
	default:
		h.order += ordinary
	}
	e.queued++
	h.waits = true
	e.unseen.Waiting++
	e.unseen.QueuedTokens += len(h.req.Prompt)
	h.unwatch = context.AfterFunc(ctx, h.Cancel)
	e.inbox = append(e.inbox, h)
	h.flagged = true
	return nil
}

// unqueue removes the request from the count that ErrQueueFull limits.
func (e *Engine) unqueue(h *Handle) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if h.waits {
		h.waits = false
		e.queued--
	}
}

// attend makes the loop look at a handle. Once the loop is gone, it does what is left to do.
func (e *Engine) attend(h *Handle) {
	e.mu.Lock()
	if e.stopped {
		e.mu.Unlock()
		h.giveBack()
		return
	}
	if !h.flagged {
		h.flagged = true
		e.inbox = append(e.inbox, h)
	}
	e.mu.Unlock()
	e.signal()
}

// intake begins new requests and acts on cancellations and releases.
func (e *Engine) intake() {
	e.mu.Lock()
	inbox, aborting := e.inbox, e.aborting
	e.inbox = nil
	e.taken = e.unseen
	for _, h := range inbox {
		h.flagged = false
	}
	e.mu.Unlock()
	for _, h := range inbox {
		if !h.begun {
			e.begin(h)
		}
		e.heed(h)
	}
	for aborting && len(e.waiting) > 0 {
		e.finish(e.waiting[0].h, ErrClosed)
	}
	for aborting && len(e.running) > 0 {
		e.finish(e.running[0].h, ErrClosed)
	}
}

// begin queues a new request's first sequence. One with first tokens forks at once.
func (e *Engine) begin(h *Handle) {
	h.begun = true
	e.live++
	if h.req.Promise != (Promise{}) {
		e.own++
	}
	if h.promise.ITL > 0 && !h.req.PrefillOnly {
		e.pace.reading, e.pace.tiles = true, e.timed()
	}
	if len(h.req.Given) > 0 {
		e.expected.Store(0)
	}
	q := h.seqs[0]
	e.waiting = insertByAge(e.waiting, q)
	p := h.req.Prefilled
	if p == nil {
		return
	}
	e.cache.SetState(h.owner, kvcache.StateWaiting)
	if len(p.First) > 0 || h.req.begun() {
		h.started = e.now()
		e.index(q)
		e.firstDraw(q, p.First)
	}
}

// heed acts on Cancel, CancelChoice and Release.
func (e *Engine) heed(h *Handle) {
	h.mu.Lock()
	cancelled, ended := h.cancelled, h.err != nil
	h.mu.Unlock()
	switch {
	case ended:
		if h.flights == 0 && h.giveBack() {
			e.held--
		}
	case cancelled:
		e.finish(h, ErrCancelled)
	default:
		e.prune(h)
	}
}

// prune drops the sequences whose choices were cancelled. A sequence that has not drawn yet stands
// for all choices.
func (e *Engine) prune(h *Handle) {
	alive := h.survivors()
	for _, q := range slices.Clone(h.seqs) {
		if !h.prompted && len(alive) > 0 || slices.Contains(alive, q.choice) {
			continue
		}
		e.drop(q)
	}
	if len(h.seqs) == 0 {
		e.finish(h, io.EOF)
	}
}
