package engine

// Lookup is the Drafter that needs no model: what followed the latest tokens where they came before,
// in the prompt or the answer. Summaries, edits and code repeat much of what was given.
type Lookup struct{}

const (
	// leastMatch is how many tokens must have come before. One alone guesses wrong too often.
	leastMatch = 2
	// mostMatch is where a longer match is not looked for.
	mostMatch = 8
	// lookBack bounds the positions that are looked at for one guess.
	lookBack = 1 << 14
)

// Name implements Drafter.
func (Lookup) Name() string { return "ngram" }

// Forget implements Drafter: nothing is kept.
func (Lookup) Forget(uint64) {}

// Slow implements Drafter.
func (Lookup) Slow() bool { return false }

// Draft implements Drafter.
func (Lookup) Draft(asks []Ask) {
	for i := range asks {
		a := &asks[i]
		a.Drafts, a.Class = lookUp(a.Drafts[:0], a.Tokens, a.Most)
	}
}

// lookUp appends what followed the longest match of the last tokens, of equally long ones the latest.
// Its class grows with the length of the match.
func lookUp(drafts, tokens []int32, most int) (list []int32, class int) {
	n := len(tokens)
	if n <= leastMatch {
		return drafts, 0
	}
	last, before := tokens[n-1], tokens[n-2]
	best, from := 0, 0
	for i := n - 2; i >= 1 && i >= n-lookBack; i-- {
		if tokens[i] != last || tokens[i-1] != before {
			continue
		}
		long := leastMatch
		for long < mostMatch && i-long >= 0 && tokens[i-long] == tokens[n-1-long] {
			long++
		}
		if long > best {
			best, from = long, i+1
		}
		if long == mostMatch {
			break
		}
	}
	if best == 0 {
		return drafts, 0
	}
	for j := range most {
		if from+j < n {
			drafts = append(drafts, tokens[from+j])
		} else { // the match runs into the end: it repeats itself
			drafts = append(drafts, drafts[from+j-n])
		}
	}
	return drafts, min(best-leastMatch, classes-1)
}
