package engine

import (
	"io"
	"slices"

	"github.com/xpyd/xpyd/kernels"
)

// deliver hands out what a step found for q. The result belongs to the
// backend: what outlives the step is copied.
func (e *Engine) deliver(q *sequence, res *kernels.Result) {
	if !q.running {
		return // ended with a sibling earlier in the batch, or while the step was under way
	}
	h := q.h
	if h.req.Pooling != PoolNone {
		e.pooled(q, res)
		return
	}
	for _, p := range res.Prompt {
		p.Top = slices.Clone(p.Top)
		h.logprobs = append(h.logprobs, p)
	}
	if len(res.Samples) == 0 {
		if q.hasRows() {
			e.finish(h, io.EOF)
		}
		return
	}
	if len(q.drafting.tokens) > 0 {
		e.deliverDrafts(q, res)
		return
	}
	if h.prompted {
		e.accept(q, own(h.req, res.Samples[0]))
		return
	}
	drawn := make([]kernels.Sampled, len(res.Samples))
	for i, s := range res.Samples {
		drawn[i] = own(h.req, s)
	}
	if n := len(h.logprobs); n > 0 && h.req.Prefilled == nil {
		h.logprobs = h.logprobs[:n-1] // nothing follows the last prompt token
	}
	e.firstDraw(q, drawn)
}

// firstDraw turns the sequence that computed the prompt into one for each choice still wanted.
// They share its blocks; whoever first writes to the partial last one copies it (grow).
func (e *Engine) firstDraw(q *sequence, drawn []kernels.Sampled) {
	h := q.h
	e.computedPrompt(q)
	choices := h.survivors()
	if h.req.PrefillOnly {
		e.prefilled(h, choices, drawn)
		return
	}
	if len(choices) == 0 {
		e.finish(h, io.EOF)
		return
	}
	if h.req.resumes() >= 0 {
		e.resumed(q, choices, drawn[0])
		return
	}
	family := []*sequence{q}
	for _, c := range choices[1:] {
		e.cache.Retain(q.table, h.owner)
		fork := &sequence{
			h: h, choice: c, tokens: q.tokens,
			table: slices.Clone(q.table), computed: q.computed,
			chain: q.chain.Fork(q.computed), indexed: q.indexed, guide: h.guideOf(c),
			running: q.running,
		}
		h.seqs = append(h.seqs, fork)
		if q.running {
			e.running = insertByAge(e.running, fork)
		} else {
			e.waiting = insertByAge(e.waiting, fork)
		}
		family = append(family, fork)
	}
	q.choice = choices[0] // still the first of its family: age order holds
	q.guide = h.guideOf(q.choice)
	for _, q := range family {
		q.draws = 1
		q.tokens = slices.Clip(q.tokens) // the first append copies
		q.shared = q.shared || len(family) > 1
	}
	for _, q := range family {
		if given := h.given(q.choice); len(given) > 0 {
			q.tokens = append(q.tokens, given...)
		} else {
			e.accept(q, drawn[q.choice])
		}
	}
}

// computedPrompt notes that a prompt is computed, and how long that took.
func (e *Engine) computedPrompt(q *sequence) {
	h := q.h
	h.prompted = true
	if !h.told {
		h.info = h.promptInfo()
		h.info.Queued, h.info.Prefill = h.started.Sub(h.arrived), e.now().Sub(h.started)
	}
	e.overran(h)
	h.logprobs = nil
	if h.req.Prefilled == nil {
		e.metrics.hits.Add(float64(h.info.CachedTokens))
		if !q.takesOver() {
			e.turns.computed(len(h.req.Prompt) - h.info.CachedTokens)
		}
	}
}

// tellFirst tells the first tokens, which another worker drew, as the request is submitted: the loop
// would wait for the end of the step under way.
func (e *Engine) tellFirst(h *Handle) {
	h.told, h.info = true, h.promptInfo()
	for c, s := range h.req.Prefilled.First {
		if len(h.given(c)) == 0 {
			h.push(Event{Choice: c, Sampled: s, Finish: e.finishOf(h.req, s.Token, 1)})
		}
	}
}

// promptInfo is without times.
func (h *Handle) promptInfo() *PromptInfo {
	return &PromptInfo{Tokens: len(h.req.Prompt), CachedTokens: h.CachedTokens(), Logprobs: h.logprobs}
}

// resumed goes on with the choices of a request that was begun elsewhere, once the first has drawn
// its next token. The others are placed by themselves, as after a preemption: the index has the
// prompt by now, and perhaps what they were given.
func (e *Engine) resumed(q *sequence, choices []int, s kernels.Sampled) {
	h := q.h
	for _, c := range choices {
		if c == q.choice {
			continue
		}
		other := &sequence{h: h, choice: c, draws: 1, tokens: slices.Concat(h.req.Prompt, h.given(c)), guide: h.guideOf(c), chain: q.chain.Fork(len(h.req.Prompt))}
		h.seqs = append(h.seqs, other)
		e.waiting = insertByAge(e.waiting, other)
	}
	if slices.Contains(choices, q.choice) {
		e.accept(q, s)
	} else { // cancelled meanwhile
		e.drop(q)
	}
}

// prefilled ends a PrefillOnly request with its first tokens.
func (e *Engine) prefilled(h *Handle, choices []int, drawn []kernels.Sampled) {
	for _, c := range choices {
		finish := e.finishOf(h.req, drawn[c].Token, 1)
		if finish == FinishNone {
			finish = FinishLength
		}
		h.push(Event{Choice: c, Sampled: drawn[c], Finish: finish})
	}
	e.finish(h, io.EOF)
}

// accept appends a drawn token to its sequence and tells the reader.
func (e *Engine) accept(q *sequence, s kernels.Sampled) {
	h := q.h
	q.tokens = append(q.tokens, s.Token)
	n := len(q.output())
	finish := e.finishOf(h.req, s.Token, n)
	if q.guide != nil && finish == FinishNone && !q.guide.Accept(s.Token) {
		e.finish(h, &GuideError{Position: len(q.tokens) - 1, Token: s.Token})
		return
	}
	if n > 1 || !h.told {
		h.push(Event{Choice: q.choice, Index: n - 1, Sampled: s, Finish: finish})
		if h.promise.ITL > 0 {
			q.last = e.now()
		}
	}
	if finish == FinishNone {
		return
	}
	e.drop(q)
	if len(h.seqs) == 0 {
		e.finish(h, io.EOF)
	}
}

// Ends reports whether a request's n-th output token ends its choice.
func (e *Engine) Ends(r *Request, token int32, n int) Finish { return e.finishOf(r, token, n) }

// finishOf reports whether the n-th output token ends its choice.
func (e *Engine) finishOf(r *Request, token int32, n int) Finish {
	eos := slices.Contains(e.cfg.EOS, token)
	stops := !r.IgnoreEOS && eos || slices.Contains(r.StopTokens, token)
	switch {
	case eos && r.Guide != nil: // nothing may follow
		return FinishStop
	case stops && n >= r.MinTokens:
		return FinishStop
	case e.full(r, n):
		return FinishLength
	}
	return FinishNone
}

// full says that n output tokens are as many as there may be.
func (e *Engine) full(r *Request, n int) bool {
	return r.MaxTokens > 0 && n >= r.MaxTokens || len(r.Prompt)+n >= e.maxLen
}
