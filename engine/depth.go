package engine

import "time"

// depth decides how many drafts a step carries: as many as bring tokens faster than the step does
// without. It measures how long steps take by their rows, and how often guesses are right.
type depth struct {
	took   []float64      // seconds of steps that only decode, by rows, moving average; 0: not measured
	each   float64        // seconds that a slow Drafter takes for one more draft of all that are asked
	scores [classes]score // of all sequences
}

// score is how often guesses were right, the latest counting for more.
type score struct{ right, all float64 }

const (
	firstGuess = 0.6  // how often a guess is right before anything is known
	ownScore   = 2    // guesses after which a sequence's own score counts as much as those of all
	fadeOwn    = 0.9  // weight of the past, draft by draft
	fadeAll    = 0.99 //
	fadeIdle   = 0.99 // of a sequence's own score, step by step without drafts: one that was wrong is tried again some day
	mostRows   = 512  // of steps that are told apart
	pays       = 1.04 // times as fast must a step with drafts bring tokens: what just pays is not worth its risk
	unknownRow = 0.25 // of a row's share of the step: what one more is thought to cost where nobody measured
	takeMemory = 0.8  // weight of the past in took
	retake     = 1.0 / 512
)

// add adds a run of drafts of which the first were right.
func (s *score) add(n, right int, fade float64) {
	tried := min(right+1, n) // nobody knows of those behind the first wrong one
	s.right, s.all = fade*s.right+float64(right), fade*s.all+float64(tried)
}

// verified learns of one sequence's drafts.
func (d *depth) verified(q *drafting, n, right int) {
	q.score.add(n, right, fadeOwn)
	d.scores[q.class].add(n, right, fadeAll)
}

// chance is how likely the next guess of a class is right for a sequence.
func (d *depth) chance(q *drafting, class int) float64 {
	all := &d.scores[class]
	p := (all.right + firstGuess) / (all.all + 1)
	p = (q.score.right + ownScore*p) / (q.score.all + ownScore)
	q.score.right, q.score.all = fadeIdle*q.score.right, fadeIdle*q.score.all
	return p
}

// measure learns of a step that only decoded.
func (d *depth) measure(rows int, took time.Duration) {
	if rows < 1 || rows > mostRows || took <= 0 {
		return
	}
	for len(d.took) <= rows {
		d.took = append(d.took, 0)
	}
	s := took.Seconds()
	if old := d.took[rows]; old > 0 {
		s = min(s, odd*old)
		s = takeMemory*old + (1-takeMemory)*s
	}
	d.took[rows] = s
	// One that was slow once is tried again some day, and so is a slow Drafter.
	d.each -= d.each * retake
	for i := rows + 1; i < min(len(d.took), rows+16); i++ {
		if hope := s * (1 + unknownRow*float64(i-rows)/float64(rows)); d.took[i] > hope {
			d.took[i] += (hope - d.took[i]) * retake
		}
	}
}

// seconds predicts a step of so many rows; 0: nothing is known.
func (d *depth) seconds(rows int) float64 {
	rows = min(rows, mostRows)
	below, above := min(rows, len(d.took)-1), rows
	for below > 0 && d.took[below] == 0 {
		below--
	}
	for above < len(d.took) && d.took[above] == 0 {
		above++
	}
	switch {
	case below <= 0:
		return 0
	case below == rows:
		return d.took[rows]
	case above < len(d.took) && d.took[above] >= d.took[below]:
		return d.took[below] + (d.took[above]-d.took[below])*float64(rows-below)/float64(above-below)
	}
	each := unknownRow * d.took[below] / float64(below)
	for less := below - 1; less >= below/2 && less > 0; less-- {
		if old := d.took[less]; old > 0 { // as those before, a little cheaper
			each = max(marginal*(d.took[below]-old)/float64(below-less), 0)
			break
		}
	}
	return d.took[below] + each*float64(rows-below)
}

// worth reports whether up to so many drafts that are surely right would pay in a step of so many rows.
func (d *depth) worth(rows, most int, longest time.Duration) bool {
	now := d.seconds(rows)
	for n := 1; n <= most && now > 0; n++ { // the first steps are measured without
		then := d.seconds(rows+n) + float64(n)*d.each
		if d.inTime(then, longest) && float64(rows+n)*now > pays*then*float64(rows) {
			return true
		}
	}
	return false
}

func (d *depth) inTime(seconds float64, longest time.Duration) bool {
	return longest == 0 || seconds <= longest.Seconds()
}

// chance is a sequence that may have drafts.
type chance struct {
	right float64 // how likely each is
	most  int
}

// deepen returns how many drafts each gets in a step of so many rows, which brings so many tokens
// without. It takes them by how likely they count, and as many as bring tokens fastest.
func (d *depth) deepen(rows, tokens int, list []chance, longest time.Duration) []int {
	depths, best := make([]int, len(list)), make([]int, len(list))
	next := make([]float64, len(list)) // how likely one more counts
	for i := range list {
		next[i] = list[i].right
	}
	now := d.seconds(rows)
	brings, rate, deepest := float64(tokens), pays*float64(tokens)/now, 0
	for n := 1; now > 0; n++ {
		at := -1
		for i := range list {
			if depths[i] < list[i].most && (at < 0 || next[i] > next[at]) {
				at = i
			}
		}
		if at < 0 {
			break
		}
		brings += next[at]
		next[at] *= list[at].right
		depths[at]++
		deepest = max(deepest, depths[at])
		takes := max(d.seconds(rows+n), now) + float64(deepest)*d.each
		if !d.inTime(takes, longest) {
			break
		}
		if brings > rate*takes {
			rate = brings / takes
			copy(best, depths)
		}
	}
	return best
}

// asked learns how long the Drafter took.
func (d *depth) asked(took time.Duration, asks []Ask) {
	deepest := 0
	for i := range asks {
		if asks[i].Caught {
			return
		}
		deepest = max(deepest, len(asks[i].Drafts))
	}
	if deepest == 0 {
		return
	}
	each := took.Seconds() / float64(deepest)
	if d.each == 0 {
		d.each = each
		return
	}
	d.each = takeMemory*d.each + (1-takeMemory)*min(each, odd*d.each)
}
