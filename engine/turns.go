package engine

import "slices"

// takeoverShare is how much of what is computed of prompts, in per cent, takeovers get while
// prompts wait that nobody has begun. They can save up takeoverCredit tokens of it.
const takeoverShare, takeoverCredit = 30, tile

// turns shares what is computed between takeovers of other workers' streams, which go first, and
// prompts that wait.
type turns struct {
	prompts bool    // some wait
	credit  int     // tokens that takeovers may compute before them
	usual   float64 // tokens that a prompt has to compute; 0: none has come
}

// computed notes how many tokens a prompt had to compute.
func (t *turns) computed(tokens int) {
	const memory = 0.9
	if t.usual == 0 {
		t.usual = float64(tokens)
	}
	t.usual = memory*t.usual + (1-memory)*float64(tokens)
}

// briefly is how many tokens, of at most so many, takeovers may have in a step for which nobody waits: a
// prompt that comes meanwhile waits for half as long as it takes itself, if it is a usual one.
func (t *turns) briefly(most int) int {
	const least = 2 * leastChunk // or takeovers of many short streams would be slow
	if t.usual == 0 {            // none comes
		return most
	}
	return min(most, max(int(t.usual/2), least))
}

// begin looks at who waits, and leaves out takeovers that have had their share.
func (t *turns) begin(waiting []*sequence) []*sequence {
	t.prompts = slices.ContainsFunc(waiting, (*sequence).isPrompt)
	switch {
	case t.prompts:
	case slices.ContainsFunc(waiting, (*sequence).takesOver): // they have all
		t.credit = 0
	default:
		t.credit = takeoverCredit
	}
	return slices.DeleteFunc(waiting, t.over)
}

// shares reports whether a sequence has but a share.
func (t *turns) shares(q *sequence) bool { return t.prompts && q.takesOver() }

// over reports whether a sequence has had its share.
func (t *turns) over(q *sequence) bool { return t.shares(q) && t.credit <= 0 }

// most is how many of n tokens a sequence may compute: takeovers keep to their share.
func (t *turns) most(q *sequence, n int) int {
	if t.shares(q) {
		return min(n, max(t.credit, leastChunk))
	}
	return n
}

// count counts tokens that a sequence is to compute.
func (t *turns) count(q *sequence, n int) {
	switch {
	case q.isPrompt():
		t.credit = min(t.credit+n*takeoverShare/(100-takeoverShare), takeoverCredit)
	case t.shares(q):
		t.credit -= n
	}
}

// back is how many tokens streams that stand still have to compute, preempted ones or takeovers, as
// far as their share goes.
func (t turns) back(waiting []*sequence) (tokens int) {
	for _, q := range waiting {
		n := q.missing()
		if t.shares(q) {
			n = min(n, t.credit)
			t.credit -= n
		}
		if len(q.output()) > 0 {
			tokens += n
		}
	}
	return tokens
}
