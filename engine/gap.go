package engine

import "time"

// Where each gap between tokens is promised (Promise.ITL), a step is planned to end before the first of
// the streams beside its prompts has waited for so long: since its last token, so that what it has sat out,
// or the step that was under way when it came, counts too. What steps take must be predicted closer than
// for a mean, of which others make up: gaps has what that needs.

// gaps predicts steps beside which others decode.
type gaps struct {
	reading bool  // some request's gaps are promised, or were
	tiles   bool  // and the device takes as long for any part of a tile
	context slope // seconds that a step takes more for each position that what decodes sees
	// slack is how many times its prediction nearly all steps with prompts take at most, 0 for 1: it
	// grows with each that takes more, and shrinks with the others.
	slack float64
}

const (
	// slackRare is how many of the steps may take longer than slack says, slackPace how fast it learns.
	slackRare, slackPace = 0.02, 0.02
	mostSlack            = 1.5
)

// longer is slack.
func (g *gaps) longer() float64 { return max(1, g.slack) }

// readTime is how long a step reads so many positions of what decodes in it.
func (g *gaps) readTime(positions float64) time.Duration {
	return time.Duration(g.context.is * positions * float64(time.Second))
}

// reads is the time that a step's decodes take for their reads.
func (g *gaps) reads(members []member) time.Duration {
	if !g.reading {
		return 0
	}
	return g.readTime(seen(members))
}

// seen sums the positions that what decodes sees.
func seen(members []member) (positions float64) {
	for _, m := range members {
		if m.chunk == 1 {
			positions += float64(m.at)
		}
	}
	return positions
}

// learn learns of a step, and returns what it took for its decodes' reads.
func (p *pacer) learn(took time.Duration, members []member) (read time.Duration) {
	if !p.reading {
		return 0
	}
	at := seen(members)
	prefill, total, _ := count(members)
	switch {
	case prefill == 0:
		p.context.add(at, took.Seconds())
	case total > prefill && p.known(total): // else it was a guess
		if over := took.Seconds() / p.takes(members).Seconds(); over > p.longer() {
			p.slack = min(p.longer()+slackPace*(1-slackRare), mostSlack)
		} else {
			p.slack = p.longer() - slackPace*slackRare
		}
	}
	return min(p.readTime(at), took/2)
}

// known reports whether steps of so many tokens were measured.
func (p *pacer) known(tokens int) bool {
	at := (tokens - 1) / tile
	return at < len(p.rates) && p.rates[at] > 0
}

// whole is the tokens of n's tiles, where a part takes as long.
func (g *gaps) whole(n int) int {
	if g.tiles {
		n = (n + tile - 1) / tile * tile
	}
	return n
}

// fits is within of a step of its own, from a prompt's beginning; 0 where nothing fits.
func (p *pacer) fits(n int, d time.Duration) int {
	if d <= 0 {
		return 0
	}
	n = p.within(n, 0, d)
	if p.measured() && p.seconds(n, 0) > d.Seconds() {
		return 0
	}
	return n
}

// hoped is the rate of steps of more tiles that where each gap is promised is worth a try, once one
// with fewer was measured: the first few cost a device that reads all its weights anyway little.
func hoped(rate float64, tiles, more int) float64 {
	const each = 0.5 // of the mean cost of a tile
	return rate * float64(tiles+more) / (float64(tiles) + each*float64(more))
}

// retry has sizes that seem to be too slow to be planned tried again in a while, of which something
// measured was perhaps odd; rarely, since a step that is too long breaks the promises of all that decode.
func (p *pacer) retry(at int, rate float64) {
	const rarely = 1 << 14 // steps
	for i := at + 1; p.tiles && i < len(p.rates); i++ {
		if old, best := p.rates[i], hoped(rate, at+1, i-at); old > 0 && best > old {
			p.rates[i] += (best - old) / rarely
		}
	}
}

// untilGap is how long the step that is planned may take: until the time of the first is up of whose
// gaps are promised. 0: nothing is.
func (e *Engine) untilGap() (left time.Duration) {
	if e.cfg.Promise.ITL == 0 && e.own == 0 {
		return 0
	}
	begins := e.nextBegins()
	for _, q := range e.running {
		itl := time.Duration(promptness * float64(q.h.promise.ITL))
		if itl == 0 || q.length() == len(q.h.req.Prompt) || q.missing() > 1 || q.h.req.PrefillOnly || q.paused() {
			continue
		}
		if q.draw > 0 && e.full(q.h.req, len(q.output())+1) { // its last
			continue
		}
		switch last := q.last; {
		case q.draw > 0 && e.foreseen(q): // its token comes when the step begins
		case q.draw > 0: // and it is in the step after this one
			itl -= e.pace.decodes
		case last.IsZero(): // it was drawn elsewhere
			itl -= begins.Sub(q.h.arrived)
		default:
			itl -= begins.Sub(last)
		}
		if left == 0 || itl < left {
			left = max(itl, 1) // if it is too late it has to be soon
		}
	}
	return left
}

// nextBegins is when the step that is planned begins: when those under way have ended.
func (e *Engine) nextBegins() time.Time {
	now := e.now()
	if len(e.flights) == 0 {
		return now
	}
	end := e.deviceBegan(e.flights[0])
	for _, f := range e.flights {
		end = end.Add(e.pace.takes(f.members))
	}
	if end.Before(now) {
		return now
	}
	return end
}

// withinGap has a step keep to what untilGap says. The time that its decodes take for their reads is not
// in the pacer's rates.
func (e *Engine) withinGap(l *limits) {
	if !e.pace.reading {
		return
	}
	at := 0.0
	for _, q := range e.batch {
		at += float64(q.next())
	}
	read := e.pace.readTime(at)
	if l.target > 0 {
		l.target = max(l.target-read, 1)
	}
	if e.longest == 0 {
		return
	}
	e.longest = max(time.Duration(float64(e.longest)/e.pace.longer())-read, 1)
	l.longest = e.longest
	if l.target == 0 || l.target > l.longest {
		l.target = l.longest
	}
	l.room = min(l.room, l.longest-l.target)
}

// cutToGap shortens a chunk, so that the step with all that is planned ends in time: prompts that are
// further on than the first take longer than the budget knows.
func (e *Engine) cutToGap(q *sequence, n int) int {
	if e.longest == 0 || !e.pace.measured() {
		return n
	}
	total, before, prefill := 0, 0.0, false
	for _, b := range e.batch {
		total += b.chunk
		if b.chunk > 1 {
			before += positions(b.chunk, b.next())
			prefill = true
		}
	}
	least := 0
	if !prefill { // the first goes on, however slowly
		least = min(leastChunk, n)
	}
	for ; n > least; n = (total+n-1)/tile*tile - total {
		if e.pace.seconds(total+n, before+positions(n, q.next())) <= e.longest.Seconds() {
			return n
		}
	}
	return least
}

// firstForeseen reports whether a prompt's first token, which is being drawn, is as any other: it is the
// only choice's, and tells nothing of the prompt. Then it does not sit a step out.
func (q *sequence) firstForeseen() bool {
	r := q.h.req
	return q.draws == 1 && r.N == 1 && !r.PrefillOnly && r.PromptLogprobs < 0 && q.arriving == nil && !q.takesOver()
}
