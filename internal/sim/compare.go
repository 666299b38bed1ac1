package sim

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"
)

// each calls f for 0 to n-1, as many at once as there are processors, and after each, from here, done.
func each(ctx context.Context, n int, f func(ctx context.Context, i int) error, done func(i int)) error {
	over, outer := make(chan int, n), ctx
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(runtime.GOMAXPROCS(0))
	ended := make(chan error)
	go func() {
		for i := range n {
			if ctx.Err() != nil {
				break
			}
			all.Go(func() error {
				err := f(ctx, i)
				if err == nil {
					over <- i
				}
				return err
			})
		}
		err := cmp.Or(all.Wait(), outer.Err())
		close(over)
		ended <- err
	}()
	for i := range over {
		done(i)
	}
	return <-ended
}

// Compare searches the goodput of several fleets and returns them in order, the best first. done is
// told of each.
func (c *Case) Compare(ctx context.Context, splits []Split, done func(*Goodput)) ([]Goodput, error) {
	out := make([]Goodput, len(splits))
	err := each(ctx, len(splits), func(ctx context.Context, i int) (err error) {
		if out[i], err = c.Search(ctx, splits[i]); err != nil {
			return fmt.Errorf("%v: %w", splits[i], err)
		}
		return nil
	}, func(i int) { done(&out[i]) })
	slices.SortStableFunc(out, func(a, b Goodput) int { return cmp.Compare(b.Rate, a.Rate) })
	return out, err
}

// Curves adds points to the curves of fleets, evenly spaced up to a speed. done is told of each.
func (c *Case) Curves(ctx context.Context, fleets []Goodput, upTo float64, points int, done func(*Goodput)) error {
	return each(ctx, len(fleets), func(ctx context.Context, i int) error {
		if err := c.fill(ctx, &fleets[i], upTo, points); err != nil {
			return fmt.Errorf("%s: %w", fleets[i].Fleet, err)
		}
		return nil
	}, func(i int) { done(&fleets[i]) })
}

// Repeat searches the goodput of fleets, which is known, in other cases, which differ from the first one
// by their seeds. It returns them by fleet and case. done is told of each.
func Repeat(ctx context.Context, cases []Case, fleets []Goodput, done func(i int, g *Goodput)) ([][]Goodput, error) {
	out := make([][]Goodput, len(fleets))
	for f := range out {
		out[f] = make([]Goodput, len(cases))
	}
	at := func(n int) (f, i int) { return n % len(fleets), n / len(fleets) }
	err := each(ctx, len(fleets)*len(cases), func(ctx context.Context, n int) (err error) {
		f, i := at(n)
		if out[f][i], err = cases[i].SearchNear(ctx, fleets[f].Split, fleets[f].Speed); err != nil {
			return fmt.Errorf("%s, seed %d: %w", fleets[f].Fleet, cases[i].Config.Seed, err)
		}
		return nil
	}, func(n int) {
		f, i := at(n)
		done(i, &out[f][i])
	})
	return out, err
}

// Fewest looks for the smallest number of workers of which a fleet keeps what is promised of a load that
// comes as it is described. It returns 0 if there is none up to most. done is told of each number.
func (c *Case) Fewest(ctx context.Context, least, most int, done func(workers int, fits []Split)) (int, error) {
	for n := least; n <= most; n++ {
		splits := Splits(n)
		keeps := make([]bool, len(splits))
		err := each(ctx, len(splits), func(ctx context.Context, i int) (err error) {
			if keeps[i], err = c.Keeps(ctx, splits[i], 1); err != nil {
				return fmt.Errorf("%v: %w", splits[i], err)
			}
			return nil
		}, func(int) {})
		if err != nil {
			return 0, err
		}
		var fits []Split
		for i, ok := range keeps {
			if ok {
				fits = append(fits, splits[i])
			}
		}
		if done(n, fits); len(fits) > 0 {
			return n, nil
		}
	}
	return 0, nil
}
