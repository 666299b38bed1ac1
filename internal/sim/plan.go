package sim

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/xpyd/xpyd/internal/loadgen/record"
)

// Promise is what makes a request good.
type Promise struct {
	record.SLO
	PerToken time.Duration // added to TTFT for each token of the prompt
	Share    float64       // of requests that are to be good
}

// Kept reports whether a request was good.
func (p *Promise) Kept(o *Outcome) bool {
	within := func(limit, took time.Duration) bool { return limit == 0 || took <= limit }
	return !o.Failed && within(p.TTFT+p.PerToken*time.Duration(o.Prompt), o.TTFT()) && within(p.TPOT, o.Gap()) &&
		within(p.ITL, o.Longest) && within(p.E2E, o.Last-o.At)
}

// Split is a fleet: whole workers, or prefill and decode apart.
type Split struct{ Whole, Prefill, Decode int }

func (s Split) String() string {
	if s.Whole > 0 {
		return fmt.Sprintf("%d whole", s.Whole)
	}
	return fmt.Sprintf("%dP%dD", s.Prefill, s.Decode)
}

// Splits are all fleets of n workers, the whole ones first.
func Splits(n int) []Split {
	list := []Split{{Whole: n}}
	for p := 1; p < n; p++ {
		list = append(list, Split{Prefill: p, Decode: n - p})
	}
	return list
}

// Requests makes requests that come so many times as fast as they are described.
type Requests func(speed float64) []Request

// Goodput is the highest load of which a fleet has enough good requests.
type Goodput struct {
	Split Split   `json:"-"`
	Fleet string  `json:"fleet"`
	Speed float64 `json:"speed"` // of the load; 0: it has not at any that was tried
	Rate  float64 `json:"rate"`  // requests a second
	Good  float64 `json:"good"`  // their share
	TTFT  Spread  `json:"ttft_s"`
	Gap   Spread  `json:"gap_s"`     // means of requests
	Worst Spread  `json:"longest_s"` // longest gaps of requests
	Runs  int     `json:"runs"`
	// AtLeast: no load was too much. It came all at once, or was as large as is tried.
	AtLeast bool `json:"at_least,omitempty"`
}

// Spread is percentiles, in seconds.
type Spread struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// SpreadOf is that of the requests that have not failed.
func SpreadOf(out []Outcome, of func(*Outcome) time.Duration) Spread {
	var list []time.Duration
	for i := range out {
		if !out[i].Failed {
			list = append(list, of(&out[i]))
		}
	}
	if len(list) == 0 {
		return Spread{}
	}
	slices.Sort(list)
	at := func(p int) float64 { return list[min(len(list)-1, len(list)*p/100)].Seconds() }
	return Spread{at(50), at(99)}
}

const (
	closeEnough = 1.02    // between the highest load that does and the lowest that does not
	farthest    = 40      // doublings or halvings until one of each is found
	mostTried   = 1 << 20 // requests of a load
	leastSpan   = time.Second
)

// Search looks for a fleet's goodput: by doubling and halving, and then between. patience is how long
// the last requests of a load may take.
func Search(ctx context.Context, cfg Config, load Requests, p Promise, patience time.Duration) (Goodput, error) {
	g := Goodput{Split: Split{cfg.Whole, cfg.Prefill, cfg.Decode}}
	g.Fleet = g.Split.String()
	try := func(speed float64) (bool, error) {
		requests := load(speed)
		if len(requests) == 0 {
			return true, nil
		}
		last := requests[len(requests)-1].At
		most, bad := int(float64(len(requests))*(1-p.Share)+1e-9), 0
		out, err := Run(ctx, cfg, Load{Requests: requests, Until: last + patience, Ended: func(o *Outcome) bool {
			if !p.Kept(o) {
				bad++
			}
			return bad <= most
		}})
		if err != nil {
			return false, err
		}
		g.Runs++
		bad = 0
		for i := range out {
			if !p.Kept(&out[i]) {
				bad++
			}
		}
		if bad > most {
			return false, nil
		}
		share := float64(len(out)-bad) / float64(len(out))
		g.Speed, g.Good = speed, share
		g.Rate = float64(len(out)) / max(last, leastSpan).Seconds()
		g.AtLeast = last < leastSpan || len(out) > mostTried
		g.TTFT, g.Gap = SpreadOf(out, (*Outcome).TTFT), SpreadOf(out, (*Outcome).Gap)
		g.Worst = SpreadOf(out, func(o *Outcome) time.Duration { return o.Longest })
		return true, nil
	}
	var does, doesNot float64
	for speed, n := 1.0, 0; (does == 0 || doesNot == 0) && n < farthest && !g.AtLeast; n++ {
		ok, err := try(speed)
		if err != nil {
			return g, err
		}
		if ok {
			does, speed = speed, speed*2
		} else {
			doesNot, speed = speed, speed/2
		}
	}
	for does > 0 && doesNot > does*closeEnough {
		middle := (does + doesNot) / 2
		ok, err := try(middle)
		if err != nil {
			return g, err
		}
		if ok {
			does = middle
		} else {
			doesNot = middle
		}
	}
	return g, nil
}

// Compare searches the goodput of several fleets, as many at once as there are processors, and
// returns them in order, the best first. done is told of each.
func Compare(ctx context.Context, cfg Config, splits []Split, load Requests, p Promise, patience time.Duration, done func(Goodput)) ([]Goodput, error) {
	out := make([]Goodput, len(splits))
	found := make(chan Goodput, len(splits))
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(runtime.GOMAXPROCS(0))
	for i, s := range splits {
		all.Go(func() (err error) {
			cfg := cfg
			cfg.Whole, cfg.Prefill, cfg.Decode = s.Whole, s.Prefill, s.Decode
			if out[i], err = Search(ctx, cfg, load, p, patience); err != nil {
				return fmt.Errorf("%v: %w", s, err)
			}
			found <- out[i]
			return nil
		})
	}
	go func() {
		_ = all.Wait() // told again below
		close(found)
	}()
	for g := range found {
		done(g)
	}
	if err := all.Wait(); err != nil {
		return nil, err
	}
	slices.SortStableFunc(out, func(a, b Goodput) int { return cmp.Compare(b.Rate, a.Rate) })
	return out, nil
}
