package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// batch is what a prompt's goroutine sends to the writer of the response.
type batch struct {
	item   int
	events []engine.Event
	err    *failure // the prompt failed; nothing more comes from it
	end    bool     // the prompt is finished
}

// generation runs a job's prompts, a goroutine each, and merges their events. The goroutines wait
// for the reader of batches, and the engine pauses choices that get ahead.
type generation struct {
	w       *Worker
	j       *job
	from    *origin // nil: both phases here
	id      string  // unique among live requests
	arrived time.Time
	seed    uint64
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	batches chan batch

	choices []*choice
	emit    func(*choice) // is given a choice that has something to send; nil: all is sent at the end
	offer   func(*choice, engine.Offer)
	open    int // prompts not finished
	err     *failure
	usage   openai.Usage
	timing  timing
	events  []engine.Event // of item, received at now, not yet rendered
	item    int
	now     time.Time
	mem     *answerShare
	needs   need

	mu      sync.Mutex
	handles []*engine.Handle
}

// timing is for Server-Timing: each time is the slowest prompt's.
type timing struct{ queue, prefill, kv time.Duration }

func (w *Worker) generate(ctx context.Context, j *job, from *origin, id string, seed uint64) (*generation, error) {
	ctx, cancel := context.WithCancel(ctx)
	g := &generation{w: w, j: j, from: from, id: id, arrived: time.Now(), seed: seed, cancel: cancel,
		batches: make(chan batch), open: len(j.items), handles: make([]*engine.Handle, len(j.items))}
	g.usage.Reasons = j.reading.think != nil
	for i := range j.items {
		it := &j.items[i]
		g.usage.Prompt += len(it.tokens)
		for n := range j.N {
			g.choices = append(g.choices, newChoice(w, j, it, i*j.N+n))
		}
	}
	if err := g.replay(); err != nil {
		cancel()
		return nil, err
	}
	for i := range j.items {
		g.wg.Go(func() { g.runPrompt(ctx, i) })
	}
	return g, nil
}

// close cancels the prompts that still run and waits for their goroutines.
func (g *generation) close() {
	g.cancel()
	g.wg.Wait()
	if reason := g.reason(); reason != "" && !g.j.urgent {
		for _, c := range g.choices {
			if !c.done {
				g.w.vllm.ended(c, reason, time.Since(g.arrived), g.preemptions(c))
			}
		}
	}
}

// preemptions is how often a choice's prompt has lost its blocks.
func (g *generation) preemptions(c *choice) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if h := g.handles[c.index/g.j.N]; h != nil {
		return h.Preemptions()
	}
	return 0
}

// runPrompt drives one prompt to its end.
func (g *generation) runPrompt(ctx context.Context, i int) {
	send := func(b batch) bool {
		b.item = i
		select {
		case g.batches <- b:
			return true
		case <-ctx.Done():
			return false
		}
	}
	h, fail := g.submitPrompt(ctx, i)
	if fail != nil {
		send(batch{err: fail})
		return
	}
	defer h.Cancel()
	g.mu.Lock()
	g.handles[i] = h
	g.mu.Unlock()
	for {
		events, err := h.Next(ctx)
		if len(events) > 0 && !send(batch{events: events}) {
			return
		}
		switch {
		case errors.Is(err, io.EOF):
			send(batch{end: true})
			return
		case err != nil:
			send(batch{err: engineFailure(err)})
			return
		}
	}
}

// submitPrompt gives one prompt to the engine, with KV from a prefill worker if there is an origin.
func (g *generation) submitPrompt(ctx context.Context, i int) (*engine.Handle, *failure) {
	r := g.w.request(g.j, i, g.id, g.seed)
	if g.from != nil {
		pre, rep, err := g.w.decode.Fetch(ctx, g.from.claim(r, g.j.bound, i, len(g.j.items)))
		switch {
		case err == nil:
			g.noteTiming(timing{queue: rep.Reserve + rep.Queue, prefill: rep.Prefill, kv: max(0, rep.KV-rep.Queue-rep.Prefill)})
			r.Prefilled = pre
			g.j.items[i].had, g.j.items[i].waited = rep.Had, rep.Reserve
		case g.from.rooms == nil || ctx.Err() != nil:
			return nil, fetchFailure(err)
		default: // nobody else can be asked: the router sent this request to no other decode
			g.j.items[i].alone = true
		}
		if g.from.rooms != nil {
			g.w.met(g.from.requestID, g.from.rooms[i], err)
		}
	}
	if g.j.brought && !g.w.hasPrompt(r.Prompt, r.Salt) {
		return nil, failed(ticket.NoSpace, errUnbrought)
	}
	h, err := g.w.submitRequest(ctx, r, g.j.requestID, g.j.peers)
	if err != nil {
		if r.Prefilled != nil {
			g.w.cache.Release(r.Prefilled.Blocks, r.Owner)
		}
		return nil, engineFailure(err)
	}
	return h, nil
}

func (g *generation) noteTiming(t timing) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.timing.queue = max(g.timing.queue, t.queue)
	g.timing.prefill = max(g.timing.prefill, t.prefill)
	g.timing.kv = max(g.timing.kv, t.kv)
}

func (g *generation) timings() timing {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.timing
}

// nextEvent waits for the next event and renders it. It returns false at the end, with g.err set if
// the generation failed.
func (g *generation) nextEvent(ctx context.Context) bool {
	if len(g.events) > 0 && g.err == nil {
		g.renderEvent()
		return g.err == nil
	}
	if g.open == 0 || g.err != nil {
		return false
	}
	select {
	case b := <-g.batches:
		switch g.item, g.events, g.err = b.item, b.events, b.err; {
		case b.end:
			g.open--
		case len(b.events) > 0:
			g.now = time.Now()
			g.renderEvent()
		}
		return g.err == nil
	case <-ctx.Done():
		g.err = failed(ticket.Cancelled, context.Cause(ctx))
		if errors.Is(context.Cause(ctx), errClosing) {
			g.err = closing()
		}
		return false
	}
}

// renderEvent renders the first of g.events.
func (g *generation) renderEvent() {
	e, counts := &g.events[0], !g.j.urgent // a router's probes are urgent and not counted
	g.events = g.events[1:]
	if p := e.Prompt; p != nil {
		it := &g.j.items[g.item]
		it.info = p
		g.usage.Cached += p.CachedTokens
		if g.from == nil || it.alone {
			g.noteTiming(timing{queue: p.Queued, prefill: p.Prefill})
			it.had = p.CachedTokens
		}
		if counts {
			g.w.vllm.prompted(p.Tokens, it.had, it.waited+p.Queued)
		}
	}
	c := g.choices[g.item*g.j.N+e.Choice]
	if c.done {
		return
	}
	if e.Offer != engine.OfferNone {
		g.offer(c, e.Offer)
		return
	}
	before, thought := c.size(), c.thought
	if c.tokens == 0 && g.j.fronts() {
		before += len(c.item.text) // its memory is reserved
	}
	stopped := c.addToken(e)
	g.usage.Reasoning += c.thought - thought
	if !g.j.echoOnly() {
		g.usage.Completion++
		if counts {
			g.w.vllm.token(c, g.arrived, g.now)
		}
	}
	if c.done && counts {
		g.w.vllm.ended(c, c.finish, g.now.Sub(g.arrived), g.preemptions(c))
	}
	if g.emit != nil {
		if c.ready() {
			g.emit(c)
		}
	} else if !g.reserveText(c.size() - before) {
		g.err = memoryFailure(errMemory)
		return
	}
	if stopped {
		g.mu.Lock()
		h := g.handles[g.item]
		g.mu.Unlock()
		h.CancelChoice(e.Choice)
	}
}

// reserveText accounts for a token with so many bytes of text. It returns false when the answer's
// share is used up and no more memory is free.
func (g *generation) reserveText(text int) bool {
	const step = 64 << 10
	g.needs.tokens -= textTimes*int64(text) + g.needs.each
	if g.needs.tokens >= 0 {
		return true
	}
	more := -g.needs.tokens + step
	g.needs.tokens = step
	return g.mem.grow(more)
}

// timed is what the answer tells of its time: nil if the worker is not set to, or if there are several choices.
func (g *generation) timed() *openai.Timing {
	if !g.w.cfg.PerRequestMetrics || len(g.choices) != 1 || g.choices[0].first.IsZero() {
		return nil
	}
	c, queue := g.choices[0], g.timings().queue
	return &openai.Timing{Queue: queue, First: c.first.Sub(g.arrived) - queue, Decode: c.last.Sub(c.first), Tokens: c.tokens - c.given}
}

// describe sets the headers of an answer that begins.
func (g *generation) describe(h *fasthttp.ResponseHeader) {
	h.Set("Server-Timing", g.timings().header())
	h.Set(ticket.HeaderPrompt, fmt.Sprintf("%d %d", g.usage.Prompt, g.usage.Cached))
}

// header is the worker's part of Server-Timing. wait is the time spent waiting for blocks and in
// prefill's queue. The router adds its own queue, and ttft.
func (t timing) header() string {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	return fmt.Sprintf("wait;dur=%.3f, prefill;dur=%.3f, kv;dur=%.3f", ms(t.queue), ms(t.prefill), ms(t.kv))
}
