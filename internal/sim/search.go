package sim

import (
	"cmp"
	"context"
	"math"
	"slices"
	"sync/atomic"
	"time"
)

// Requests makes requests that come so many times as fast as they are described.
type Requests func(speed float64) []Request

// Case is what fleets are asked to do.
type Case struct {
	Config   Config // of any fleet; how many workers it has does not count
	Load     Requests
	Promise  Promise
	Patience time.Duration // how long the last requests of a load may take
	// Span is how long a load takes to come; nil: until its last request.
	Span func([]Request) time.Duration
	// Probes are how many times a goodput a search looks beyond it: more load may do where less does not, as steps get fuller and
	// queues are of other lengths. nil: it believes that what is above what does not, does not.
	Probes []float64
	// Progress, if set, counts what is done.
	Progress *Progress
	// Resolution is how close a search goes: a load by this part above the highest that does may do, too;
	// 0 is DefaultResolution.
	Resolution float64
}

// Progress counts what searches do. It may be read meanwhile.
type Progress struct{ Tries, Requests atomic.Int64 } // that were begun, and that have ended

// DefaultResolution is that of xpyd plan.
const DefaultResolution = 0.02

const (
	farthest   = 40      // doublings or halvings until one of each is found
	mostTried  = 1 << 20 // requests of a load
	leastSpan  = time.Second
	mostProbed = 4    // goodputs of a search that are not its last
	near       = 1.1  // in place of 2, at first, where the goodput is known, but for the seed
	hopeless   = 0.02 // a share of good requests below which a curve tells nothing more
)

// Search looks for a fleet's goodput: by doubling and halving, and then between.
func (c *Case) Search(ctx context.Context, s Split) (Goodput, error) {
	t := c.trial(s)
	err := t.search(ctx, 1, 2)
	return t.out, err
}

// SearchNear looks for a goodput that is thought to be near a speed.
func (c *Case) SearchNear(ctx context.Context, s Split, speed float64) (Goodput, error) {
	t := c.trial(s)
	err := t.search(ctx, speed, near)
	return t.out, err
}

// Keeps reports whether a fleet keeps up the load, which is not empty, if it comes so many times as fast as it is described.
func (c *Case) Keeps(ctx context.Context, s Split, speed float64) (bool, error) {
	return c.trial(s).run(ctx, speed, false)
}

// fill adds points to a fleet's curve, evenly spaced up to a speed, where there are none yet.
func (c *Case) fill(ctx context.Context, g *Goodput, upTo float64, points int) error {
	t := c.trial(g.Split)
	t.out.Curve, t.out.Runs = g.Curve, g.Runs
	step := upTo / float64(points)
	for i := range points {
		speed := step * float64(i+1)
		if slices.ContainsFunc(t.out.Curve, func(p Point) bool { return p.Speed > speed-step/2 && p.Speed < speed+step/2 }) {
			continue
		}
		if _, err := t.run(ctx, speed, true); err != nil {
			return err
		}
		if list := t.out.Curve; list[len(list)-1].Good < hopeless {
			break
		}
	}
	g.Curve, g.Runs = t.out.Curve, t.out.Runs // the goodput stays what the search has found
	return nil
}

// trial is a fleet, and what came of the loads that it was sent.
type trial struct {
	*Case
	cfg Config
	out Goodput
}

func (c *Case) trial(s Split) *trial {
	return &trial{c, s.Of(c.Config), Goodput{Split: s, Fleet: s.String()}}
}

// search looks for the highest load that does, from a speed on in steps of a factor, which grows to 2, then
// between, and then beyond.
func (t *trial) search(ctx context.Context, speed, factor float64) error {
	does, err := t.climb(ctx, 0, speed, factor)
	for n := 0; n < mostProbed && err == nil && does > 0 && !t.out.AtLeast; n++ {
		further := false
		for _, by := range t.Probes {
			speed = does * by
			if further, err = t.run(ctx, speed, false); further || err != nil {
				break
			}
		}
		if err != nil || !further || t.out.AtLeast {
			return err
		}
		does, err = t.climb(ctx, speed, speed*near, near)
	}
	return err
}

// climb looks for the highest load that does, from a speed on, where one may be known to do.
func (t *trial) climb(ctx context.Context, does, speed, factor float64) (float64, error) {
	doesNot := 0.0
	for n := 0; (does == 0 || doesNot == 0) && n < farthest && !t.out.AtLeast; n++ {
		ok, err := t.run(ctx, speed, false)
		if err != nil {
			return 0, err
		}
		if ok {
			does, speed = speed, speed*factor
		} else {
			doesNot, speed = speed, speed/factor
		}
		factor = min(factor*factor, 2)
	}
	for does > 0 && doesNot > does*(1+cmp.Or(t.Resolution, DefaultResolution)) {
		middle := (does + doesNot) / 2
		ok, err := t.run(ctx, middle, false)
		if err != nil {
			return 0, err
		}
		if ok {
			does = middle
		} else {
			doesNot = middle
		}
	}
	return does, nil
}

// run reports whether a load is kept up: enough requests are good, it would go on so (see lasts), and what that takes is not more
// than devices compute at all. If not enough are, it ends once that is certain, unless
// it is to run it all. A run that went to its end is a point of the curve.
func (t *trial) run(ctx context.Context, speed float64, all bool) (kept bool, err error) {
	requests := t.Load(speed)
	if err := ctx.Err(); err != nil { // who makes loads may then make less
		return false, err
	}
	if len(requests) == 0 {
		return true, nil
	}
	if t.Progress != nil {
		t.Progress.Tries.Add(1)
	}
	last := requests[len(requests)-1].At
	most, bad := int(float64(len(requests))*(1-t.Promise.Share)+1e-9), 0
	out, err := Run(ctx, t.cfg, Load{Requests: requests, Until: last + t.Patience, Ended: func(o *Outcome) bool {
		if t.Progress != nil {
			t.Progress.Requests.Add(1)
		}
		if !t.Promise.Kept(o) {
			bad++
		}
		return all || bad <= most
	}})
	if err != nil {
		return false, err
	}
	t.out.Runs++
	good, tokens := 0, 0
	for i := range out {
		if t.Promise.Kept(&out[i]) {
			good++
			tokens += out[i].Tokens
		}
	}
	span, short := t.span(requests)
	rate := float64(len(requests)) / span.Seconds()
	kept = len(out)-good <= most && t.lasts(out) && rate <= Bound(&t.cfg.Worker, t.out.Split.Workers(), requests, t.Promise)
	if !kept && !all {
		return false, nil
	}
	p := Point{Speed: speed, Rate: rate, Good: float64(good) / float64(len(out)), Tokens: float64(tokens) / span.Seconds(),
		TTFT: SpreadOf(out, (*Outcome).TTFT), Gap: SpreadOf(out, (*Outcome).Gap), Worst: SpreadOf(out, func(o *Outcome) time.Duration { return o.Longest })}
	at, _ := slices.BinarySearchFunc(t.out.Curve, speed, func(p Point, speed float64) int { return cmp.Compare(p.Speed, speed) })
	t.out.Curve = slices.Insert(t.out.Curve, at, p)
	if kept && speed > t.out.Speed {
		t.out.Point, t.out.AtLeast = p, short || len(out) > mostTried
	}
	return kept, nil
}

// lasts reports whether first tokens do not come later and later. Where they may come late, a fleet
// gets through a window with more than it computes, by leaving the rest for afterwards; it would not go on so. So the good requests of the
// last quarter may not have waited longer than those of the first one by more than a part of the time between them, and what a Poisson load
// brings more in one half than in the other by chance (its standard deviation). A limit that
// is shorter than that is not affected, and neither are loads of too few requests to tell.
func (t *trial) lasts(out []Outcome) bool {
	const (
		growth = 0.05
		few    = 16
	)
	n := len(out) / 4
	if len(out) < few {
		return true
	}
	wait := func(of []Outcome) (median time.Duration, ok bool) {
		var list []time.Duration
		for i := range of {
			if t.Promise.Kept(&of[i]) {
				list = append(list, of[i].TTFT())
			}
		}
		if len(list) == 0 {
			return 0, false
		}
		slices.Sort(list)
		return list[len(list)/2], true
	}
	early, some := wait(out[:n])
	late, others := wait(out[len(out)-n:])
	between := out[len(out)-1-n/2].At - out[n/2].At
	chance := float64(out[len(out)-1].At-out[0].At) / math.Sqrt(2*float64(len(out)))
	return !some || !others || late-early <= time.Duration(growth*float64(between)+chance)
}

// span is how long a load that is not empty takes to come, at least leastSpan, and whether it is less.
func (c *Case) span(load []Request) (span time.Duration, short bool) {
	if span = load[len(load)-1].At; c.Span != nil {
		span = c.Span(load)
	}
	return max(span, leastSpan), span < leastSpan
}

// Rate is how many requests of a load come in a second.
func (c *Case) Rate(load []Request) float64 {
	if len(load) == 0 {
		return 0
	}
	span, _ := c.span(load)
	return float64(len(load)) / span.Seconds()
}

// Highest is the Bound of the load as it comes when it is as fast as that: at a higher speed other requests of it come
// within its time, and more of their prompts are the same.
func (c *Case) Highest(ctx context.Context, workers int) (bound float64, err error) {
	const steps, same = 20, 0.01
	for n, speed := 0, 1.0; n < steps; n++ {
		list := c.Load(speed)
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if len(list) == 0 {
			speed *= 2
			continue
		}
		bound = Bound(&c.Config.Worker, workers, list, c.Promise)
		faster := bound / c.Rate(list)
		if math.Abs(faster-1) < same || bound == 0 || faster*float64(len(list)) > mostTried {
			break
		}
		speed *= faster
	}
	return bound, nil
}
