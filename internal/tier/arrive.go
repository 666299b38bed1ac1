package tier

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/xpyd/xpyd/internal/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// Arrive is Load for who can compute while it goes on: a prefix that host memory
// has all of comes layer by layer, and Arrive returns as soon as the device has
// been told to. Nil: there is nothing to wait for, what was to be had is in the
// index, n tokens of it newly.
//
// Nobody need do anything with an Arrival. The tiers wait for its end, tell the
// index of the units that are right, and let go of the blocks.
func (t *Tiers) Arrive(ctx context.Context, tokens []int32, salt string, upto int) (n int, a *Arrival) {
	return t.bring(ctx, tokens, salt, upto, lookup{}, true)
}

// Arrival is a prefix on its way into the pool. It implements engine.Arriving.
type Arrival struct {
	t          *Tiers
	room       *room
	from, upto int // tokens; the index had those before
	move       kernels.Arrival
	fetches    []*fetch
	units      []moving

	done chan struct{}

	mu   sync.Mutex // held while a table is being taken
	over bool
}

// arrive begins to load tokens from .. to-1; nil: it has not begun, and load may.
// done is called at the end of one that has.
func (t *Tiers) arrive(chain *kvcache.Chain, tokens []int32, from, to int, done func()) *Arrival {
	device, ok := t.mover.(arriver)
	if !ok {
		return nil
	}
	for at, unit := from, t.cacheUnit(); at < to; at += unit {
		if !t.host.has(chain.Name(at + unit)) {
			return nil
		}
	}
	r := t.room(chain, from, to)
	if r == nil {
		return nil
	}
	a := &Arrival{t: t, room: r, from: r.from, upto: r.to, done: make(chan struct{})}
	if !a.lease(chain) || !t.enter() {
		a.drop()
		return nil
	}
	var err error
	if a.move, err = device.arrive(a.units); err != nil {
		if !errors.Is(err, errors.ErrUnsupported) {
			t.complain(fmt.Errorf("move to the pool: %w", err))
		}
		a.drop()
		t.wg.Done()
		return nil
	}
	go func() {
		defer t.wg.Done()
		defer done()
		defer close(a.done)
		a.run(chain, tokens)
	}()
	return a
}

// enter counts one more goroutine in wg, unless the tiers are closed.
func (t *Tiers) enter() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.wg.Add(1)
	return true
}

// lease takes the units' records; false: one has gone since.
func (a *Arrival) lease(chain *kvcache.Chain) bool {
	t, unit := a.t, a.t.cacheUnit()
	for at := a.from; at < a.upto; at += unit {
		key := chain.Name(at + unit)
		l := t.host.get(key)
		if l == nil {
			return false
		}
		a.fetches = append(a.fetches, &fetch{key: key, pos: at, tier: tierHost, have: l})
		a.units = append(a.units, moving{l, a.room.table[at/t.shape.BlockTokens:][:t.shape.blocks], at})
	}
	return true
}

// drop undoes what has not begun.
func (a *Arrival) drop() {
	for _, u := range a.units {
		u.release()
	}
	a.t.vacate(a.room)
}

func (a *Arrival) run(chain *kvcache.Chain, tokens []int32) {
	err := a.move.Wait(context.Background()) // see bulkMover
	good := a.Good()
	a.t.landed(&landing{units: a.fetches, from: a.units, wait: func() (int, error) { return (good - a.from) / a.t.cacheUnit(), err }})
	a.t.index(a.room, chain, tokens, good)
	a.mu.Lock()
	a.over = true // the index has it; the blocks are still held
	a.mu.Unlock()
	a.t.filled(a.room, good)
}

// Hold calls f with the block table of the first tokens, of which nobody may
// take the blocks until f has returned; false, without: the arrival is over,
// and the index has what is good of it.
func (a *Arrival) Hold(f func(table []int32, tokens int)) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over {
		return false
	}
	f(a.room.table, a.upto)
	return true
}

// Done is closed when the index has what is good, and nothing is held any more.
func (a *Arrival) Done() <-chan struct{} { return a.done }

// Move is what steps wait for.
func (a *Arrival) Move() kernels.Arrival { return a.move }

// Good is how many tokens, from the first, have right rows, once all have
// arrived; before, how many the index had.
func (a *Arrival) Good() int {
	good, err := a.move.Good()
	if err != nil {
		return a.from
	}
	n := a.from
	for i := range a.units {
		for _, ok := range good[i*a.t.shape.blocks:][:a.t.shape.blocks] {
			if !ok {
				return n
			}
		}
		n += a.t.cacheUnit()
	}
	return n
}
