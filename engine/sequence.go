package engine

import (
	"cmp"
	"slices"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// sequence is a growing list of tokens: a request's prompt until its first draw, then one for
// each of its choices. It belongs to the loop.
type sequence struct {
	h      *Handle
	choice int
	draws  int     // choices the next draw is for: N before the first, then 1
	tokens []int32 // prompt, then output

	table    []int32 // blocks; nil while it waits for memory
	computed int     // leading tokens whose KV rows lie in table
	shared   bool    // others may hold the block of row computed
	guide    Guide   // behind tokens; nil: nothing binds the output
	chain    kvcache.Chain
	indexed  int // leading tokens the prefix index knows, or refused
	told     int // leading blocks that OnBlocks heard of

	arriving Arriving // rows below computed that no step has proved; nil: none
	asked    time.Time
	last     time.Time // when its last token was drawn, if its gaps are promised; zero: not here
	behind   uint64    // another request brings its prefix: it waits until Engine.brought is this; 0: none does
	void     int       // steps under way whose results are dropped; see arrive.go
	lost     bool      // others may still write into its blocks: it needs fresh ones

	running  bool // in Engine.running, else in Engine.waiting
	ended    bool // its table is to be freed once flights is 0
	chunk    int  // tokens in the step that is planned
	drafting drafting

	// Of the steps under way.
	flights int // that carry it
	ahead   int // tokens in them, whose rows do not count yet
	draw    int // 1 + the place of its next token among the last one's draws; 0: none
}

// next is the position of the next row to compute.
func (q *sequence) next() int { return q.computed + q.ahead }

// length counts its tokens, including one that is being drawn.
func (q *sequence) length() int { return len(q.tokens) + min(q.draw, 1) }

// missing is how many tokens have no KV rows; 1 means that it decodes.
func (q *sequence) missing() int { return q.length() - q.next() }

// takesOver reports whether a sequence is of a stream that another worker has begun.
func (q *sequence) takesOver() bool { return q.h.req.RowsOnly || len(q.h.req.Given) > 0 }

// goesOn reports whether a sequence is the only one that goes on of a request begun elsewhere, and
// its rows are here: nobody else waits for its next token, and its prompt has nothing to tell.
func (q *sequence) goesOn() bool {
	i := q.h.req.resumes()
	return i >= 0 && q.arriving == nil && !q.wantsPrompt() && !slices.ContainsFunc(q.h.req.Given[i+1:], func(g Given) bool { return !g.Done })
}

// isPrompt reports whether it is one that nobody has begun.
func (q *sequence) isPrompt() bool { return !q.takesOver() && len(q.output()) == 0 }

// hasRows reports whether a sequence that draws nothing has all that it is for.
func (q *sequence) hasRows() bool {
	return q.draws == 0 && q.computed == q.length() && q.arriving == nil
}

// paused reports whether its reader has too many unread events, counting that of a token being
// drawn.
func (q *sequence) paused() bool { return q.h.unreadOf(q.choice)+min(q.draw, 1) > q.h.e.cfg.MaxBacklog }

// output is what was drawn so far.
func (q *sequence) output() []int32 { return q.tokens[len(q.h.req.Prompt):] }

func (q *sequence) older(than *sequence) bool { return compareAge(q, than) < 0 }

// compareAge orders sequences by arrival, then choice.
func compareAge(a, b *sequence) int {
	return cmp.Or(cmp.Compare(a.h.order, b.h.order), cmp.Compare(a.choice, b.choice))
}

func insertByAge(list []*sequence, q *sequence) []*sequence {
	i, _ := slices.BinarySearchFunc(list, q, compareAge)
	return slices.Insert(list, i, q)
}

func without(list []*sequence, q *sequence) []*sequence {
	if i := slices.Index(list, q); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// enqueue moves a running sequence to the waiting ones; enroll does the opposite.
func (e *Engine) enqueue(q *sequence) {
	e.running, q.running = without(e.running, q), false
	e.waiting = insertByAge(e.waiting, q)
}

func (e *Engine) enroll(q *sequence) {
	e.waiting, q.running = without(e.waiting, q), true
	e.running = insertByAge(e.running, q)
}

// drop ends a sequence and frees its blocks, or leaves that to land while steps under way may
// write them. A PrefillOnly request's blocks stay in its handle.
func (e *Engine) drop(q *sequence) {
	e.waiting, e.running, q.running = without(e.waiting, q), without(e.running, q), false
	q.h.seqs = without(q.h.seqs, q)
	e.forget(q)
	switch {
	case q.h.req.PrefillOnly:
		q.table = nil
	case q.flights > 0:
		q.ended = true
	default:
		e.cache.Release(q.table, q.h.owner)
		q.table = nil
	}
}

// finish ends a request: err is io.EOF when all its choices are complete.
func (e *Engine) finish(h *Handle, err error) {
	for len(h.seqs) > 0 {
		e.drop(h.seqs[0])
	}
	h.unwatch()
	e.unqueue(h)
	e.live--
	if h.req.Promise != (Promise{}) {
		e.own--
	}
	e.metrics.ended(err)
	if h.Blocks() != nil {
		e.cache.SetState(h.owner, kvcache.StateFinished)
		e.held++
	}
	h.end(err)
	h.over = true
	if h.flights == 0 {
		e.close(h)
	}
}

// close ends a request that is over and in no step under way.
func (e *Engine) close(h *Handle) {
	if h.Blocks() == nil {
		close(h.done)
	} else if h.giveBack() {
		e.held--
	}
}
