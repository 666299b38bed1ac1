package planner

import (
	"fmt"
	"math"
	"time"
)

const (
	// answerWeight is how many prompt tokens a token of an answer costs as much as, in whole workers. Only a
	// change of the mix makes it matter: what they cost together is measured.
	answerWeight = 4
	// level is the time over which load is averaged, surge that in which a steep rise shows.
	level = 2 * time.Minute
	surge = 30 * time.Second
	// costLasts is for how long a measured cost counts, drainIn how soon a queue is to be worked off.
	costLasts = 15 * time.Minute
	drainIn   = time.Minute
	// full is a queue, in time of what is computed, that only workers without any time left have.
	full = 10 * time.Second
	// fewGaps are too few to say how long gaps are.
	fewGaps = 32
	// slack is how much less than full a smaller fleet has to be.
	slack = 0.05
)

// pool is the workers of a role, and what is known of them.
type pool struct {
	role Role
	at   time.Time // of the last sample
	load series
	// cost is workers that are busy by the load that keeps them so, known for how long it was seen. atFull is the
	// same where all had queues, which no estimate of how busy they are can get wrong.
	cost, atFull fading
	known        time.Duration
	fullAt       time.Time // when all had queues last
	// base is the least gap between tokens, in seconds, that a minute had: that of a worker which hardly does
	// anything else. With gaps twice as long a worker is half used.
	base float64
	line line
	gaps fading // a minute's
	busy fading // the last minute's utilisation
	part part

	here, serving, running, waiting, queued, queues, gpus int
	blocked                                               bool // what waits, waits for another role

	wanted int
	fits   int        // of them, within the budget
	need   float64    // workers, as it was judged last
	enough [slots]int // fewer workers that would have done, at the last judgements
	judged int
	hold   time.Duration // how long they must have done
	least  time.Duration // that, at its shortest
	fell   time.Time     // when wanted fell last, and when it rose soon after a fall
	flap   time.Time
	late   bool // a queue is to be worked off
	why    string
}

// part is what has been seen since the cost was measured last.
type part struct {
	took, streaming time.Duration
	gaps            int
	served          float64
	workers, queued float64 // times seconds
	queues          float64 // workers that have one, times seconds
}

// measure learns from what has come of the load in some time, of which served has been computed.
func (l *pool) measure(s *Sample, took time.Duration, served, output float64) {
	l.at = s.At
	if l.role == Prefill {
		busy := 0
		for i := range s.Workers {
			if w := &s.Workers[i]; w.Role == Prefill && w.State != Starting && w.Running+w.Waiting > 0 {
				busy++
			}
		}
		l.note(float64(busy), served, took)
		return
	}
	x := &l.part
	x.took += took
	x.streaming += s.Streaming
	x.gaps += s.Gaps
	x.served += served
	x.workers += float64(l.serving) * took.Seconds()
	x.queued += l.waits(output) * took.Seconds()
	x.queues += float64(l.queues) * took.Seconds()
	if s.Gaps == 0 && s.OutputTokens > 0 { // no streams: by Little's law
		x.gaps += s.OutputTokens
		x.streaming += time.Duration(running(s, l.role)) * took
	}
	if x.gaps < fewGaps || x.took < grain {
		if x.took > level { // they say nothing
			l.part = part{}
		}
		return
	}
	l.gaps.add(x.streaming.Seconds(), float64(x.gaps), x.took, time.Minute)
	gap := x.streaming.Seconds() / float64(x.gaps)
	smooth := l.gaps.ratio()
	if l.base *= 1 + 0.02*x.took.Hours(); l.base == 0 || smooth < l.base {
		l.base = smooth
	}
	used := 0.0
	if x.queued > full.Seconds()*x.served && x.queues > 0.8*x.workers {
		used = 1
		l.atFull.add(x.workers, x.served, x.took, costLasts)
		l.fullAt = s.At
	} else if gap > 0 {
		l.line.add(x)
		base := l.base
		if b := l.line.base(); b > 0 {
			base = min(base, max(b, l.base/4))
		}
		used = max(0, 1-base/gap)
	}
	workers := x.workers / x.took.Seconds()
	l.note(used*workers, x.served, x.took)
	l.part = part{}
}

func running(s *Sample, r Role) (n int) {
	for i := range s.Workers {
		if s.Workers[i].Role == r {
			n += s.Workers[i].Running
		}
	}
	return n
}

// note takes in how many workers were busy with what was computed in some time.
func (l *pool) note(workers, served float64, took time.Duration) {
	if served > 0 || workers > 0 {
		l.known += took
		l.cost.add(workers*took.Seconds(), served, took, costLasts)
	}
	l.busy.add(workers*took.Seconds(), float64(max(l.serving, 1))*took.Seconds(), took, time.Minute)
}

// span is the time over which a trend shows, and in which less load has to have come for fewer workers.
const span = 5 * time.Minute

// forecast is the load a second that is to be expected in some time, and the most that it seems to be if it is
// about to fall.
func (l *pool) forecast(ahead time.Duration) (expect, most float64) {
	expect = l.load.mean(0, span)
	most = expect + 0.5*l.load.strays(span) // the highest of those of the cool-down counts
	expect = max(expect, l.load.mean(0, level)-l.load.strays(level), l.load.mean(0, surge)-3*l.load.strays(surge))
	if before := l.load.mean(span, span); l.load.n >= int(2*span/grain) {
		if rise := l.load.mean(0, span) - before; rise > 2*l.load.strays(span)*math.Sqrt2 {
			expect = max(expect, l.load.mean(0, span)+rise*(span/2+ahead).Seconds()/span.Seconds())
		}
	}
	return expect, most
}

// costs is the cost that plans are made with; 0: nothing is known yet.
func (l *pool) costs() float64 {
	if l.known < time.Minute {
		return 0
	}
	if l.at.Sub(l.fullAt) > longest/2 { // of other requests, perhaps
		l.atFull = fading{}
	}
	if l.atFull.under > 0 {
		return max(l.cost.ratio(), l.atFull.ratio())
	}
	return l.cost.ratio()
}

// backlog is the load a second that works a queue off in time, above what always waits: what comes in two seconds,
// and two requests at each worker.
func (l *pool) backlog(expect, output, prompt float64) float64 {
	usual := max(2*expect, 2*float64(l.serving)*prompt)
	if l.role == Decode {
		usual = max(2*expect, 2*float64(l.serving)*output)
	}
	return max(0, l.waits(output)-usual) / drainIn.Seconds()
}

// waits is the load that waits.
func (l *pool) waits(output float64) float64 {
	switch {
	case l.role != Decode:
		return float64(l.queued)
	case l.blocked:
		return 0
	}
	return float64(l.waiting) * output
}

// judge says how many workers are wanted now.
func (l *pool) judge(now time.Time, b Bounds, aim float64, ahead time.Duration, output, prompt float64) {
	expect, most := l.forecast(ahead)
	cost := l.costs()
	late := l.backlog(expect, output, prompt)
	least := b.Min
	switch {
	case expect+late == 0:
		l.need = 0
	case cost == 0: // it is not known yet what it takes
		least, l.need = l.wanted, float64(l.wanted)
		if l.waiting > 0 && l.queued > 0 && l.here == l.serving {
			l.need++
		}
	default:
		l.need = (expect + late) * cost / aim
		if l.role == Prefill && l.busy.ratio() > 0.95 { // prompts may wait where they do not show, for decode's room
			l.need = max(l.need, float64(l.serving)/aim)
		}
		least = ceil((most + late) * cost / (aim * (1 - slack)))
	}
	if l.late = late > 0; l.late { // whatever is thought of what workers compute
		least = max(least, l.wanted)
	}
	want := b.clamp(ceil(l.need))
	l.enough[l.judged%slots] = max(b.clamp(least), want)
	l.judged++
	hold := l.hold
	if l.need == 0 && l.load.mean(0, l.least) == 0 {
		hold = l.least // nothing that comes and goes
	}
	spans := int(hold / grain) // between judgements
	for i := range min(l.judged, spans+1) {
		least = max(least, l.enough[(l.judged-1-i)%slots])
	}
	long := l.judged > spans
	switch least = b.clamp(least); {
	case want > l.wanted:
		l.steady(now)
		if cost == 0 {
			l.why = fmt.Sprintf("%s requests wait, and how much a worker computes is not known yet", l.role)
		} else {
			l.why = fmt.Sprintf("%s needs %.1f workers: %.0f tokens/s are expected, and a worker is given %.0f", l.role, l.need, expect+late, aim/cost)
		}
		if late > 0 && cost > 0 {
			l.why += fmt.Sprintf("; %.0f of them work off a queue", late)
		}
		l.wanted = want
	case least < l.wanted && long:
		l.why = fmt.Sprintf("%d %s workers have been enough for %v, %.0f tokens/s are expected", least, l.role, hold, expect)
		l.wanted, l.fell = least, now
	case now.Sub(l.flap) > longest:
		l.hold = max(l.hold/2, l.least)
		l.flap = now
	}
}

// steady doubles how long fewer workers must have done, if it has just been too short.
func (l *pool) steady(now time.Time) {
	if !l.fell.IsZero() && now.Sub(l.fell) < 4*l.hold {
		l.hold, l.flap, l.fell = min(2*l.hold, 4*l.least, longest), now, time.Time{}
	}
}

// ceil is the workers for a need: a hundredth of one more is none.
func ceil(need float64) int { return int(math.Ceil(min(need, mostWorkers) - 0.01)) }

func (l *pool) seen(at time.Time) Forecast {
	return Forecast{At: at, Load: l.load.mean(0, level), Workers: l.serving, Utilisation: l.busy.ratio(), Queued: l.queued}
}
