package engine

import "time"

const (
	firstChunk = 128  // tokens, before anything was measured
	leastChunk = 16   // tokens, however slow
	paceMemory = 0.7  // weight of the past in the moving average
	forget     = 256  // steps of other sizes after which a rate is theirs, about
	marginal   = 0.75 // of the mean cost of a tile: that of one more
	odd        = 4    // times its prediction: a step counts for no more
	tile       = 128  // tokens that a GPU's projections compute at once: steps of one more take a tile's time longer
	// efficient is the size of a step from which on its time is proportional to its
	// tokens: a larger one computes no more of them a second, it only keeps those who
	// decode waiting for longer.
	efficient = 512
)

// pacer measures how fast steps compute tokens, by their size, to size prefill chunks.
type pacer struct {
	rates     []float64     // tokens a second of steps with prefill, attention aside, by their tiles less one; 0 when not measured
	attention slope         // seconds a prompt token takes more for each position before it
	decodes   time.Duration // of a step without
	adds      float64       // seconds that a prompt's token adds to that; 0 when not measured
	gaps                    // where each gap is promised
}

// slope is a line's, through points that count for less the older they are: by least squares.
type slope struct{ w, x, y, xx, xy, is float64 }

// add adds a point. Points too close together tell nothing of the slope, which stays then.
func (s *slope) add(x, y float64) {
	const memory, spread = 0.98, 500
	s.w, s.x, s.y, s.xx, s.xy = memory*s.w+1, memory*s.x+x, memory*s.y+y, memory*s.xx+x*x, memory*s.xy+x*y
	if d := s.w*s.xx - s.x*s.x; d > s.w*s.w*spread*spread {
		s.is = max(0, (s.w*s.xy-s.x*s.y)/d)
	}
}

// measured reports whether any step was.
func (p *pacer) measured() bool { return len(p.rates) > 0 }

// rate is the speed of steps of n tokens: as measured, or as the times of the next smaller and
// larger ones have it that were. Beyond the largest, a tile more is thought to cost a little less
// than those before, as it mostly does: or larger steps would never be tried where a small one
// takes a target's time.
func (p *pacer) rate(n int) float64 {
	at := (n - 1) / tile
	below, above := min(at, len(p.rates)-1), at
	for below >= 0 && p.rates[below] == 0 {
		below--
	}
	for above < len(p.rates) && p.rates[above] == 0 {
		above++
	}
	switch {
	case above >= len(p.rates) && below < 0:
		return 0
	case p.tiles && below >= 0 && below < at:
		return hoped(p.rates[below], below+1, at-below)
	case above >= len(p.rates):
		known := float64(below + 1)
		return p.rates[below] * float64(at+1) / (known + marginal*(float64(at+1)-known))
	case below < 0 || below == above:
		return p.rates[above]
	}
	few, many := float64(below+1), float64(above+1)
	time := few / p.rates[below]
	time += (many/p.rates[above] - time) * (float64(at+1) - few) / (many - few)
	return float64(at+1) / time
}

// seconds predicts a step of n tokens; before is as of count.
func (p *pacer) seconds(n int, before float64) float64 {
	n = p.whole(n)
	return float64(n)/p.rate(n) + p.attention.is*before
}

// positions sums, over n tokens from a position on, the positions before each.
func positions(n, at int) float64 { return float64(n) * (float64(at) + float64(n)/2) }

// within returns how many tokens of at most total, of a prompt from a position on, a step
// computes in a time.
func (p *pacer) within(total, at int, target time.Duration) int {
	if !p.measured() {
		return min(total, firstChunk)
	}
	for n := total; n > tile; n = (n - 1) / tile * tile {
		if p.seconds(n, positions(n, at)) <= target.Seconds() {
			return n
		}
	}
	return int(min(float64(min(total, tile)), target.Seconds()/(1/p.rate(1)+p.attention.is*float64(at))))
}

// drain returns the size of the smallest efficient step, up to most tokens, such that steps
// of this size, with so many decodes in each, compute the queued tokens in a time.
func (p *pacer) drain(most, at, decodes, queued int, within time.Duration) int {
	n := min(efficient, most)
	for ; n < most; n += tile {
		if steps := float64(queued) / float64(n-decodes); n > decodes && steps*p.seconds(n, positions(n, at)) <= within.Seconds() {
			break
		}
	}
	return min(n, most)
}

// draining is how long steps of n tokens take for the queued ones.
func (p *pacer) draining(n int, l limits) time.Duration {
	steps := float64(l.queued) / float64(max(n-l.decodes, leastChunk))
	return time.Duration(steps * p.seconds(n, positions(n, l.at)) * float64(time.Second))
}

// besides returns how many tokens of prompts a step takes in a time, besides what decodes.
func (p *pacer) besides(d time.Duration) int {
	switch d -= p.decodes; {
	case d <= 0 || p.decodes == 0:
		return 0
	case p.adds == 0:
		return firstChunk
	}
	return int(d.Seconds() / p.adds)
}

// limits are what a step must keep to.
type limits struct {
	total   int           // tokens
	target  time.Duration // that it may take; 0: any
	drain   time.Duration // in which queued tokens are to be computed, by steps of this size; 0: by the largest steps
	decodes int           // sequences that decode in it
	queued  int           // tokens of prompts that wait
	at      int           // position of the oldest prompt
	// Where the queued tokens are not computed in patience, a step may take room longer than target.
	patience, room time.Duration
	longest        time.Duration // that it may take, stretched or not; 0: any
}

// budget is how many prefill tokens a step gets: as few as drain the queue in time, no more
// than the target and the total have room for, and a few however slow it is. A large step ends
// with a tile. most is the room for a step of twice the target.
func (p *pacer) budget(l limits) (tokens, most int) {
	n := l.total
	most = n
	if l.target > 0 {
		stretched := mostStretch * l.target
		if l.longest > 0 {
			stretched = min(stretched, l.longest)
		}
		n, most = p.within(n, l.at, l.target), p.within(n, l.at, stretched)
		if l.room > 0 && p.measured() && p.draining(n, l) > l.patience {
			n = p.within(l.total, l.at, l.target+l.room)
		}
	}
	if l.target > 0 && l.drain > 0 && p.measured() {
		n = p.drain(n, l.at, l.decodes, l.queued, l.drain)
	}
	if n >= efficient {
		n -= n % tile
	}
	return max(n-l.decodes, min(leastChunk, l.total)), most - l.decodes
}

// takes predicts how long a step takes; 0 when nothing like it was measured.
func (p *pacer) takes(members []member) time.Duration {
	prefill, total, before := count(members)
	switch {
	case prefill == 0:
		return p.decodes
	case !p.measured():
		return 0
	}
	return time.Duration(p.seconds(total, before)*float64(time.Second)) + p.reads(members)
}

// count returns the tokens of prompts in a step, all of its tokens, and, summed over the former,
// the positions before each.
func count(members []member) (prefill, total int, before float64) {
	for _, m := range members {
		total += m.chunk
		if m.chunk > 1 {
			prefill += m.chunk
			before += positions(m.chunk, m.at)
		}
	}
	return prefill, total, before
}

// step records a step. Of one that took unheard-of long, most was something else.
func (p *pacer) step(took time.Duration, members []member) {
	if known := p.takes(members); known > 0 {
		took = min(took, odd*known)
	}
	prefill, total, before := count(members)
	read := p.learn(took, members)
	switch {
	case prefill > 0:
		p.add(prefill, total, took)
		took -= read
		heavy := p.attention.is*before > took.Seconds()/2 // it tells of attention, and little of the rest
		if heavy || total >= efficient {
			p.attention.add(before/float64(total), took.Seconds()/float64(total))
		}
		if !heavy || !p.measured() {
			p.observe(total, max(took/4, took-time.Duration(p.attention.is*before*float64(time.Second))))
		}
	case p.decodes == 0 || took < p.decodes: // streams that end together make the next steps shorter at once
		p.decodes = took
	default:
		p.decodes += (took - p.decodes) / 4
	}
}

// add records what so many tokens of prompts, of the total, added to a step. Of few tokens, most is
// what any step takes.
func (p *pacer) add(prefill, total int, took time.Duration) {
	if prefill < tile/2 || took <= 0 {
		return
	}
	if total > prefill {
		took = max(took-p.decodes, took/odd)
	}
	each := took.Seconds() / float64(prefill)
	if p.adds > 0 {
		each = paceMemory*p.adds + (1-paceMemory)*min(each, odd*p.adds)
	}
	p.adds = each
}

// observe records a step of so many tokens, attention aside, unless it is too small to mean much.
func (p *pacer) observe(tokens int, took time.Duration) {
	if tokens < leastChunk || took <= 0 {
		return
	}
	at := (tokens - 1) / tile
	tokens = p.whole(tokens)
	rate := float64(tokens) / took.Seconds()
	switch sparse := (at+1)*tile-tokens > tokens/8; { // a GPU takes as long as for the whole tile
	case sparse && !p.measured():
		at = max(0, at-1)
	case sparse && at > 0 && rate <= p.rate(tokens):
		return
	}
	for len(p.rates) <= at {
		p.rates = append(p.rates, 0)
	}
	for i, old := range p.rates {
		switch {
		case i == at && old > 0:
			p.rates[i] = paceMemory*old + (1-paceMemory)*rate
		case i == at:
			p.rates[i] = rate
		case old > 0 && rate > old: // one that is avoided as slow is tried again some day
			p.rates[i] += (rate - old) / forget
		}
	}
	p.retry(at, rate)
}
