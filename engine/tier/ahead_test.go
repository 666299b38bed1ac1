package tier

import (
	"context"
	"errors"
	"testing"

	"github.com/xpyd/xpyd/kernels"
)

// bringer is a link that can bring prefixes, when the test says how they end.
type bringer struct {
	*link
	refuse error // of Prepare
	plain  bool  // Prepare has no way

	prepared int // calls of it
	got      []*Fetch
	ends     []func(tokens int, err error)
	few      bool // nothing comes
}

func (b *bringer) Prepare(_ context.Context, f *Fetch) (Bring, error) {
	b.prepared++
	if b.refuse != nil || b.plain {
		return nil, b.refuse
	}
	return func(f *Fetch, table []int32, from int, wake func(), ended func(int, error)) Coming {
		if b.few {
			return nil
		}
		b.got, b.ends = append(b.got, f), append(b.ends, ended)
		return brought{f.Upto}
	}, nil
}

type brought struct{ upto int }

func (b brought) Move() kernels.Arrival { return nil }
func (b brought) Upto() int             { return b.upto }
func (b brought) Begun() bool           { return true }
func (b brought) Over() bool            { return false }
func (b brought) Good() (int, bool)     { return b.upto, false }

// TestAhead: what a peer can give is fetched once the request has its blocks, unless it
// is here or cannot come that way. It is fetched once for all requests that want it,
// within the bounds of all fetches, and counts as one.
func TestAhead(t *testing.T) {
	r, giver := newRig(t, config("")), newRig(t, config(""))
	peers, links := join(t, peersConfig(), false, r, giver)
	p, b := peers[0], &bringer{link: links[0]}
	p.from = b
	long := prompt(1, 16*10)
	if _, err := giver.compute(long, "", "run"); err != nil {
		t.Fatal(err)
	}
	giver.quiet()
	stage := func(tokens []int32, list ...Peer) *Ahead {
		return p.Stage(t.Context(), "r", tokens, "", len(tokens), list)
	}
	table := make([]int32, 10)
	if stage(long) != nil || stage(long, at(1, 15)) != nil || links[0].calls > 0 {
		t.Error("there was nothing to bring")
	}
	a := stage(long, at(9, 32), at(1, 160), at(8, 48))
	if a == nil || a.f.Peer.ID != "1" || links[0].calls > 0 {
		t.Fatalf("%+v, %d fetches", a, links[0].calls)
	}
	woken := 0
	wake := func() { woken++ }
	c, busy := a.Bring(table, 32, wake)
	if c == nil || busy || c.Upto() != 160 || b.got[0].Blocks != 8 || b.got[0].Deadline.IsZero() || p.Stats().Fetching != 8 {
		t.Fatalf("%v, busy %t, %+v, %+v", c, busy, b.got, p.Stats())
	}
	if f := b.got[0]; f.Upto != 160 || f.Chain.Tokens() < f.Upto {
		t.Errorf("the chain has %d tokens of %d", f.Chain.Tokens(), f.Upto)
	}
	if c, busy := stage(long, at(1, 160)).Bring(table, 32, wake); c != nil || !busy {
		t.Error("it is brought twice at a time")
	}
	b.ends[0](128, nil)
	if woken != 1 || p.Stats().Fetching != 0 || r.value("peer_fetches_total", "done") != 1 || r.value("loaded_units_total", "peer") != 8 {
		t.Errorf("woken %d times, %+v", woken, p.Stats())
	}
	if c, _ := stage(long, at(1, 160)).Bring(table, 160-8, wake); c != nil {
		t.Error("8 tokens are worth it")
	}
	b.few = true
	if c, busy := stage(long, at(1, 160)).Bring(table, 0, wake); c != nil || busy || p.Stats().Fetching != 0 {
		t.Error("nothing comes, and something is under way")
	}
	b.few = false

	// It waits for no room, and looks again where the first unit is here by now.
	all := r.tiers.lend(1<<20, 1)
	if c, busy := stage(long, at(1, 160)).Bring(table, 0, wake); c != nil || busy || r.value("peer_fetches_total", "no_room") != 1 {
		t.Error("there is no room for it")
	}
	r.tiers.settle(-all)
	a, woken = stage(long, at(1, 160)), 0
	if _, err := r.compute(long[:16], "", "run"); err != nil {
		t.Fatal(err)
	}
	r.quiet()
	if c, busy := a.Bring(table, 0, wake); c != nil || !busy || woken != 1 || p.Stats().Fetching != 0 {
		t.Errorf("what is here is fetched, or not looked at: busy %t, woken %d times", busy, woken)
	}
	r.cache.Clear()
	if err := r.tiers.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}

	// What fails is left alone, and computed.
	stage(long, at(1, 160)).Bring(table, 0, wake)
	b.ends[1](0, errDead)
	if len(p.Stats().Shut) != 1 || r.value("peer_fetches_total", "failed") != 1 {
		t.Errorf("%+v", p.Stats())
	}
	b.prepared = 0
	if c, busy = stage(long, at(1, 160)).Bring(table, 0, wake); c != nil || busy || b.prepared > 0 {
		t.Errorf("a peer that has failed is asked, and dialled %d times", b.prepared)
	}
	clear(p.guards.m)

	// Another way is taken where this one is not open.
	for _, no := range []func(){func() { b.refuse = errors.New("no") }, func() { b.refuse, b.plain = nil, true }, func() { p.from = b.link }} {
		no()
		r.cache.Clear()
		if err := r.tiers.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		before := links[0].calls
		if a := stage(long, at(1, 160)); a != nil || links[0].calls != before+1 {
			t.Errorf("%v, %d fetches", a, links[0].calls-before)
		}
		r.quiet()
	}
	// So it is where our own tiers have a part.
	p.from, b.plain = b, false
	r.cache.Clear()
	before := links[0].calls
	if a := stage(append(long[:96:96], prompt(300, 64)...), at(1, 160)); a != nil || links[0].calls != before+1 {
		t.Errorf("%v, %d fetches", a, links[0].calls-before)
	}
}
