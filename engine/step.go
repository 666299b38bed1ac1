package engine

import (
	"fmt"

	"github.com/xpyd/xpyd/kernels"
)

// stepBuffers are reused from step to step.
type stepBuffers struct {
	seqs    []kernels.Seq
	samples []kernels.Sample
	targets []int32
	drafted []int32 // tokens of sequences with drafts
	tells   []tell
	// arrivals are what the step waits for.
	arrivals []kernels.Arrival
	guided   []guided
	masks    []uint32 // theirs
	words    int      // of a mask
	behind   bool     // some of them depend on what the step before draws
}

// tell is what one sequence's OnBlocks is told during a step.
type tell struct {
	q        *sequence
	told     int  // blocks that it was told of before
	late     bool // it was not told: the step was not judged then
	onBlocks func(layer int, ready []Ready)
	ready    []Ready
}

// unknown is the token of a sequence whose token is being drawn.
var unknown = []int32{0}

// build describes the batch to the backend.
func (e *Engine) build(b *stepBuffers) *kernels.Step {
	b.seqs, b.samples, b.targets, b.tells, b.drafted = b.seqs[:0], b.samples[:0], b.targets[:0], b.tells[:0], b.drafted[:0]
	b.arrivals, b.behind = b.arrivals[:0], false
	e.guides(b)
	for _, q := range e.batch {
		from, length := q.next(), q.length()
		end := from + q.chunk
		s := kernels.Seq{Pos: from, Blocks: q.table[:e.cache.BlocksFor(end+len(q.drafting.tokens))]}
		if q.arriving != nil {
			b.arrivals = append(b.arrivals, q.arriving.Move())
		}
		if q.draw > 0 {
			s.Tokens, s.After = unknown, q.draw
		} else {
			s.Tokens = q.tokens[from:end]
		}
		if end == length {
			from, mask := len(b.samples), e.guide(b, q, 0)
			for i := range q.draws {
				b.samples = append(b.samples, q.sample(i, 0, q.output(), mask))
			}
			if len(q.drafting.tokens) > 0 {
				e.buildDrafts(b, q, &s)
			}
			s.Samples = b.samples[from:len(b.samples):len(b.samples)]
		}
		s.Hidden = q.states(end == length)
		if q.wantsPrompt() {
			from := len(b.targets)
			b.targets = append(b.targets, q.tokens[q.next()+1:min(end+1, length)]...)
			if end == length {
				b.targets = append(b.targets, -1)
			}
			s.Targets = b.targets[from:len(b.targets):len(b.targets)]
			s.TargetLogprobs = q.h.req.PromptLogprobs
		}
		if on := q.h.req.OnBlocks; on != nil {
			whole := end
			if end < length {
				whole -= end % e.blockToks
			}
			if from := q.told * e.blockToks; whole > from {
				b.tells = append(b.tells, tell{q: q, told: q.told, onBlocks: on, ready: e.ready(q, from, whole)})
				q.told = e.cache.BlocksFor(whole)
			}
		}
		b.seqs = append(b.seqs, s)
	}
	step := &kernels.Step{Seqs: b.seqs, Arrivals: b.arrivals, Hold: e.holdsDraws(b)}
	if len(b.tells) > 0 {
		step.OnLayer = func(layer int) {
			for i := range b.tells {
				t := &b.tells[i]
				if t.late = t.q.arriving != nil || t.q.void > 0; !t.late {
					t.onBlocks(layer, t.ready)
				}
			}
		}
	}
	return step
}

// untell takes back what build noted about a step that was not launched.
func (b *stepBuffers) untell() {
	for _, t := range b.tells {
		t.q.told = t.told
	}
}

// sample describes q's i-th draw behind so many drafts, which output has where it matters. Its mask may be
// filled in later.
func (q *sequence) sample(i, drafts int, output []int32, mask []uint32) kernels.Sample {
	r := q.h.req
	s := kernels.Sample{
		Seed: r.Seed, Choice: uint32(q.choice + i), Position: q.length() + drafts,
		Temperature: r.Temperature, TopK: r.TopK, TopP: r.TopP, MinP: r.MinP,
		Repetition: r.Repetition, Presence: r.Presence, Frequency: r.Frequency,
		Prompt: r.Prompt, Output: output, Bias: r.Bias, Logprobs: q.h.e.told(r), Mask: mask,
	}
	s.Ban = q.banned(mask == nil, drafts, output)
	if mask == nil {
		s.Mask = q.h.shape().allowed
	}
	return s
}

// wantsPrompt reports whether the sequence's steps yield prompt log probabilities.
func (q *sequence) wantsPrompt() bool {
	return q.h.req.PromptLogprobs >= 0 && !q.h.prompted && q.h.req.Prefilled == nil
}

// computesAll reports whether nothing of the prompt may come from a cache.
func (q *sequence) computesAll() bool { return q.wantsPrompt() || q.h.req.Pooling == PoolMean }

// advance counts the step's new KV rows, and indexes the blocks that they completed.
func (e *Engine) advance(m member) {
	if m.q.running { // else it ended while the step was under way
		m.q.computed += m.chunk
		e.index(m.q)
	}
}

func (e *Engine) index(q *sequence) {
	done := q.tokens[:q.computed]
	q.chain.Extend(done)
	q.indexed = e.cache.InsertChain(&q.chain, done, q.table, q.indexed)
}

// record counts failures for Health.
func (e *Engine) record(err error) {
	if err == nil && e.failures == 0 {
		return
	}
	e.failures++
	if err == nil {
		e.failures = 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case err == nil:
		e.failure = nil
	case e.failures >= e.cfg.MaxFailures:
		e.failure = fmt.Errorf("%d steps in a row failed: %w", e.failures, err)
	}
}

// checkResults checks the shape of a backend's results.
func checkResults(step *kernels.Step, results []kernels.Result) error {
	if len(results) != len(step.Seqs) {
		return fmt.Errorf("%d results for %d sequences", len(results), len(step.Seqs))
	}
	for i := range results {
		r, s := &results[i], &step.Seqs[i]
		if len(r.Samples) != len(s.Samples) || len(r.Prompt) != len(s.Targets) || len(r.Hidden) != s.Hidden.Rows(len(s.Tokens)) {
			return fmt.Errorf("sequence %d: %d draws, %d prompt entries and %d hidden states, want %d, %d and %d",
				i, len(r.Samples), len(r.Prompt), len(r.Hidden), len(s.Samples), len(s.Targets), s.Hidden.Rows(len(s.Tokens)))
		}
	}
	return nil
}
