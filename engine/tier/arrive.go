package tier

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/kernels"
)

// Arrival is a prefix on its way into the pool. The tiers wait for its end, index the units that
// are right, and release the blocks. Others who hold the blocks may release them at any time.
type Arrival struct {
	t          *Tiers
	began      time.Time
	owner      string
	table      []int32
	from, upto int // tokens
	move       kernels.HostArrival
	fetches    []*fetch
	units      []host.Move
	done       chan struct{}
}

// Bring begins to move what host memory has of a prompt, from token from on, into blocks that
// the caller holds: table is the prompt's, chain covers upto tokens. It returns once the device
// has been told. Nil and not busy: there is nothing to bring. Busy: another call brings the same
// prefix, or just has; the index has it when ended of either call has been called.
func (t *Tiers) Bring(chain kvcache.Chain, tokens, table []int32, from, upto int, ended func()) (a *Arrival, busy bool) {
	if t == nil || !t.host.Arrives() {
		return nil, false
	}
	unit := t.shape.Tokens()
	to := t.inHost(&chain, from, min(upto, chain.Tokens()))
	if to-from < max(t.cfg.MinLoadTokens, unit) {
		return nil, false
	}
	first := chain.Name(from + unit)
	wait, mine := t.bringing.begin(first)
	if wait != nil {
		return nil, true
	}
	if t.cache.Knows(first) { // since the caller looked
		mine()
		ended()
		return nil, true
	}
	a = &Arrival{t: t, began: time.Now(), table: table[:to/t.shape.BlockTokens], from: from, upto: from, done: make(chan struct{})}
	if a.lease(&chain, to); !a.admit() {
		a.release()
		mine()
		return nil, false
	}
	var err error
	if a.move, err = t.host.Arrive(a.units); err != nil {
		t.complain(fmt.Errorf("move to the pool: %w", err))
		t.credit(len(a.units), t.shape.Record())
		a.release()
		mine()
		t.wg.Done()
		return nil, false
	}
	// The caller holds the blocks until this returns, and the bytes are on their way.
	t.cache.Retain(a.taken(), a.owner)
	t.cache.SetState(a.owner, kvcache.StateReceiving)
	go func() {
		defer t.wg.Done()
		defer ended()
		defer close(a.done)
		a.finish(&chain, tokens, mine)
	}()
	return a, false
}

// lease takes the records of units up to token to, as far as they are still here.
func (a *Arrival) lease(chain *kvcache.Chain, to int) {
	t, unit := a.t, a.t.shape.Tokens()
	list := make([]fetch, (to-a.upto)/unit)
	a.fetches, a.units = make([]*fetch, 0, len(list)), make([]host.Move, 0, len(list))
	for i := range list {
		key := chain.Name(a.upto + unit)
		l := t.host.Get(key)
		if l == nil {
			return
		}
		list[i].key, list[i].pos, list[i].have = key, a.upto, l
		a.fetches = append(a.fetches, &list[i])
		a.units = append(a.units, host.Move{Lease: l, Blocks: a.table[a.upto/t.shape.BlockTokens:][:t.shape.Blocks], Pos: a.upto})
		a.upto += unit
	}
}

// admit names the load and counts its goroutine in wg. It returns false if nothing may be
// loaded, or the tiers are being closed.
func (a *Arrival) admit() bool {
	t := a.t
	t.mu.Lock()
	defer t.mu.Unlock()
	units := t.afford(len(a.units))
	for _, u := range a.units[units:] {
		u.Release()
	}
	a.fetches, a.units, a.upto = a.fetches[:units], a.units[:units], a.from+units*t.shape.Tokens()
	if t.closed || units == 0 {
		return false
	}
	t.loads++
	a.owner = fmt.Sprintf("tier/load-%d", t.loads)
	t.wg.Add(1)
	return true
}

// taken lists the blocks that the arrival writes.
func (a *Arrival) taken() []int32 {
	return a.table[a.from/a.t.shape.BlockTokens : a.upto/a.t.shape.BlockTokens]
}

func (a *Arrival) release() {
	for _, u := range a.units {
		u.Release()
	}
}

// finish waits for the end. The claim on the prefix ends after the index has it and before its
// blocks are released: those who wait for either look again then.
func (a *Arrival) finish(chain *kvcache.Chain, tokens []int32, mine func()) {
	t := a.t
	err := a.move.Wait(context.Background()) // a device that does not end it computes nothing either
	good, _ := a.Good()
	t.landed(&landing{units: a.fetches, from: a.units, wait: func() (int, error) { return (good - a.from) / t.shape.Tokens(), err }})
	t.cache.InsertChain(chain, tokens[:good], a.table[:good/t.shape.BlockTokens], a.from)
	mine()
	t.cache.ReleaseAll(a.owner)
	t.filled(a.began, good-a.from)
}

// Done is closed when the index has what is right, and nothing is held any more.
func (a *Arrival) Done() <-chan struct{} { return a.done }

// Move implements engine.Arriving, as do the methods below.
func (a *Arrival) Move() kernels.Arrival { return a.move }

// Upto is where the arrival ends, in tokens of the prompt.
func (a *Arrival) Upto() int { return a.upto }

// Begun is true: the device needs nobody to go on.
func (a *Arrival) Begun() bool { return true }

// Over reports whether Good is known.
func (a *Arrival) Over() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

// Good is how many tokens, from the first, have right rows once all have arrived; before that,
// how many had them without the arrival. No block is lost: nobody else writes.
func (a *Arrival) Good() (tokens int, lost bool) {
	good, err := a.move.Good()
	if err != nil {
		return a.from, false
	}
	right := slices.Index(good, false)
	if right < 0 {
		right = len(a.units) * a.t.shape.Blocks
	}
	return a.from + right/a.t.shape.Blocks*a.t.shape.Tokens(), false
}
