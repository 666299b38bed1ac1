package sim

import (
	"cmp"
	"context"
	"slices"
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
	// Resolution is how close a search goes: a load by this part above the highest that does may do, too;
	// 0 is DefaultResolution.
	Resolution float64
}

// DefaultResolution is that of xpyd plan.
const DefaultResolution = 0.02

const (
	farthest  = 40      // doublings or halvings until one of each is found
	mostTried = 1 << 20 // requests of a load
	leastSpan = time.Second
	near      = 1.1  // in place of 2, at first, where the goodput is known, but for the seed
	hopeless  = 0.02 // a share of good requests below which a curve tells nothing more
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

// Keeps reports whether enough requests are good if the load comes so many times as fast as it is described.
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

// search looks for the highest load that does, from a speed on in steps of a factor, which grows to 2, and
// then between.
func (t *trial) search(ctx context.Context, speed, factor float64) error {
	var does, doesNot float64
	for n := 0; (does == 0 || doesNot == 0) && n < farthest && !t.out.AtLeast; n++ {
		ok, err := t.run(ctx, speed, false)
		if err != nil {
			return err
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
			return err
		}
		if ok {
			does = middle
		} else {
			doesNot = middle
		}
	}
	return nil
}

// run reports whether enough requests are good. If they are not, it ends once that is certain, unless
// it is to run it all. A run that went to its end is a point of the curve.
func (t *trial) run(ctx context.Context, speed float64, all bool) (kept bool, err error) {
	requests := t.Load(speed)
	if len(requests) == 0 {
		return true, nil
	}
	last := requests[len(requests)-1].At
	most, bad := int(float64(len(requests))*(1-t.Promise.Share)+1e-9), 0
	out, err := Run(ctx, t.cfg, Load{Requests: requests, Until: last + t.Patience, Ended: func(o *Outcome) bool {
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
	if kept = len(out)-good <= most; !kept && !all {
		return false, nil
	}
	p := Point{Speed: speed, Rate: Rate(requests), Good: float64(good) / float64(len(out)), Tokens: float64(tokens) / span(requests).Seconds(),
		TTFT: SpreadOf(out, (*Outcome).TTFT), Gap: SpreadOf(out, (*Outcome).Gap), Worst: SpreadOf(out, func(o *Outcome) time.Duration { return o.Longest })}
	at, _ := slices.BinarySearchFunc(t.out.Curve, speed, func(p Point, speed float64) int { return cmp.Compare(p.Speed, speed) })
	t.out.Curve = slices.Insert(t.out.Curve, at, p)
	if kept && speed > t.out.Speed {
		t.out.Point, t.out.AtLeast = p, last < leastSpan || len(out) > mostTried
	}
	return kept, nil
}

// span is how long a load that is not empty takes to come, or leastSpan.
func span(load []Request) time.Duration { return max(load[len(load)-1].At, leastSpan) }

// Rate is how many requests of a load come in a second.
func Rate(load []Request) float64 {
	if len(load) == 0 {
		return 0
	}
	return float64(len(load)) / span(load).Seconds()
}
