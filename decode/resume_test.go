package decode_test

import (
	"context"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// other adds a second prefill with the same model to the rig; close stops it.
func (r *rig) other(id string, answer func(ctx context.Context, o *kvconn.Outgoing)) (addr string, peer kvconn.PeerID, close func()) {
	r.t.Helper()
	metrics, err := kvconn.NewMetrics(nil)
	if err != nil {
		r.t.Fatal(err)
	}
	cfg := kvconn.DefaultConfig()
	peer = kvconn.PeerID{ID: id, Epoch: 1}
	cfg.Identity = identity(peer)
	srv, err := kvconn.NewServer(cfg, r.log, metrics)
	if err != nil {
		r.t.Fatal(err)
	}
	ln, err := r.chaos.Listen("")
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := srv.Serve(ctx, ln, handler(answer)); err != nil {
			r.t.Error(err)
		}
	})
	return ln.Addr().String(), peer, func() { cancel(); wg.Wait() }
}

type handler func(ctx context.Context, o *kvconn.Outgoing)

func (h handler) OnTicket(ctx context.Context, o *kvconn.Outgoing) { h(ctx, o) }

// pushes accepts and pushes some units, then waits for the end.
func pushes(units map[int][]int) func(ctx context.Context, o *kvconn.Outgoing) {
	return func(ctx context.Context, o *kvconn.Outgoing) {
		if o.Accept(&source{seed: o.Ticket().Tokens[0]}) != nil {
			return
		}
		for layer := range layout.Layers() {
			o.Push(layer, units[layer])
		}
		<-o.Done()
	}
}

// breaks fetches c from a prefill that pushes units and is then gone.
func (r *rig) breaks(c *decode.Claim, units map[int][]int) {
	r.t.Helper()
	addr, peer, stop := r.other("prefill-1", pushes(units))
	first := *c
	first.Addr, first.Peer, first.Link = addr, peer, ticket.NewLink()
	var wg sync.WaitGroup
	wg.Go(func() { r.fails(r.t.Context(), &first, ticket.Dead) })
	synctest.Wait() // what was pushed has arrived
	stop()
	wg.Wait()
	if h := r.cache.Holders(); len(h) > 0 {
		r.t.Errorf("held after the break: %+v", h)
	}
	if err := r.cache.Check(); err != nil {
		r.t.Error(err)
	}
}

// takes fetches c from the rig's prefill and returns the units that moved.
func (r *rig) takes(c *decode.Claim) (rep decode.Report, moved int) {
	r.t.Helper()
	before := r.pool.stores
	pre, rep, err := r.Fetch(r.t.Context(), c)
	if err != nil {
		r.t.Fatal(err)
	}
	if !r.pool.has(pre.Blocks, c.Tokens[0], len(c.Tokens)) {
		r.t.Error("wrong rows")
	}
	r.cache.Release(pre.Blocks, c.Owner)
	return rep, r.pool.stores - before
}

// TestTakenUp: after a prefill has died, another is asked for nothing that has
// arrived: (layer, block) by (layer, block), a partly filled last block too.
func TestTakenUp(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		c := claim(r.addr, 3, 18) // 5 blocks, the last with 2 rows
		r.breaks(c, map[int][]int{0: {0, 1, 4}, 1: {1, 3}})
		rep, moved := r.takes(c)
		if rep.Resumed != 5 || rep.Had != 0 || moved != 5 {
			t.Errorf("resumed %d, had %d, moved %d, want 5, 0, 5", rep.Resumed, rep.Had, moved)
		}
		if rep, moved := r.takes(c); rep.Resumed != 0 || moved != 10 {
			t.Errorf("taken up twice: %+v, %d moved", rep, moved)
		}
		r.clean()
	})
}

// Whole blocks at the front go to the prefix cache, for any request; the rest
// is taken up beside them.
func TestTakenUpWithPrefix(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		c := claim(r.addr, 5, 26) // 7 blocks; a hash covers 4
		r.breaks(c, map[int][]int{0: {0, 1, 2, 3, 4, 5}, 1: {0, 1, 2, 3, 4}})
		longer := claim(r.addr, 5, 40)
		longer.RequestID = "another"
		if rep, _ := r.takes(longer); rep.Had != 16 || rep.Resumed != 0 {
			t.Errorf("another prompt: %+v", rep)
		}
		if rep, moved := r.takes(c); rep.Had != 16 || rep.Resumed != 8+3 || moved != 3 {
			t.Errorf("%+v, %d moved", rep, moved)
		}
		r.clean()
	})
}

// What is forgotten for want of places gives its blocks back.
func TestForgottenGivesBack(t *testing.T) {
	bubble(t, func(c *decode.Config, _ *kvconn.Config) { c.MaxRemains = 1 }, func(r *rig) {
		for seed := range int32(3) {
			r.breaks(claim(r.addr, 3+seed, 18), map[int][]int{0: {0, 1, 4}, 1: {1, 3}})
			if s := r.cache.Stats(); s.Cached != 4 || s.Held != 0 {
				r.t.Errorf("after %d: %+v, want 4 blocks kept", seed+1, s)
			}
		}
		r.clean()
	})
}

// What a broken transfer left is of use for the same tokens under the same
// salt only, and blocks that are needed are taken from it.
func TestNotTakenUp(t *testing.T) {
	units := map[int][]int{0: {0, 1, 2, 3}, 1: {0}}
	f := func(name string, between func(r *rig, c *decode.Claim)) {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(c *decode.Config, _ *kvconn.Config) { c.MaxRemains = 2 }, func(r *rig) {
				c := claim(r.addr, 7, 14)
				r.breaks(c, units)
				between(r, c)
				if rep, moved := r.takes(c); rep.Resumed != 0 || moved != 8 {
					t.Errorf("%+v, %d moved", rep, moved)
				}
				r.clean()
			})
		})
	}
	f("salt", func(r *rig, c *decode.Claim) { c.Order.Salt = "tenant" })
	f("last token", func(r *rig, c *decode.Claim) { c.Tokens = slices.Clone(c.Tokens); c.Tokens[13]++; c.RequestID = "x" })
	f("evicted", func(r *rig, c *decode.Claim) {
		ids, err := r.cache.Alloc(blocks, "big")
		if err != nil {
			t.Fatal(err)
		}
		r.cache.Release(ids, "big")
	})
	f("forgotten", func(r *rig, c *decode.Claim) {
		for n := range int32(2) {
			r.breaks(claim(r.addr, 20+n, 9), map[int][]int{0: {0}})
		}
	})
}

// A second break keeps what both transfers have brought; a repeated attempt
// that comes before the former one is over waits for it.
// TestTakenUpBehindAnother: what another request has brought in between is used, and the blocks
// kept for it serve for the rest.
func TestTakenUpBehindAnother(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		c := claim(r.addr, 5, 40) // 10 blocks; a hash covers 4
		r.breaks(c, map[int][]int{0: {0, 1, 2, 3, 5}})
		shorter := claim(r.addr, 5, 26)
		shorter.RequestID = "another"
		r.breaks(shorter, map[int][]int{0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}}) // and they are in the prefix cache
		if rep, moved := r.takes(c); rep.Had != 16 || rep.Resumed != 1 || moved != 2*6-1 {
			t.Errorf("%+v, %d moved", rep, moved)
		}
		r.clean()
	})
}

// TestFormerAttempt: an attempt that gives up while the former one still has the blocks gets
// nothing, and leaves the way free for the next.
func TestFormerAttempt(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		c := claim(r.addr, 11, 16)
		addr, peer, stop := r.other("prefill-2", pushes(map[int][]int{0: {0}}))
		first := *c
		first.Addr, first.Peer, first.Link = addr, peer, ticket.NewLink()
		var wg sync.WaitGroup
		wg.Go(func() { r.fails(r.t.Context(), &first, ticket.Dead) })
		synctest.Wait()
		ctx, cancel := context.WithTimeout(r.t.Context(), time.Millisecond)
		defer cancel()
		r.fails(ctx, c, ticket.Late)
		stop()
		wg.Wait()
		r.takes(c)
		r.clean()
	})
}

// TestNothingKept: where no broken transfer may be kept, its blocks are free, and all of it moves
// again; but whole blocks are cached for anybody.
func TestNothingKept(t *testing.T) {
	bubble(t, func(c *decode.Config, _ *kvconn.Config) { c.MaxRemains = 0 }, func(r *rig) {
		c := claim(r.addr, 3, 18)
		r.breaks(c, map[int][]int{0: {0, 1, 4}, 1: {1, 3}})
		if s := r.cache.Stats(); s.Free != blocks {
			t.Errorf("%+v", s)
		}
		if rep, moved := r.takes(c); rep.Resumed != 0 || rep.Had != 0 || moved != 10 {
			t.Errorf("%+v, %d moved", rep, moved)
		}
		longer := claim(r.addr, 5, 26)
		r.breaks(longer, map[int][]int{0: {0, 1, 2, 3, 4}, 1: {0, 1, 2, 3}})
		if rep, moved := r.takes(longer); rep.Resumed != 0 || rep.Had != 16 || moved != 6 {
			t.Errorf("%+v, %d moved", rep, moved)
		}
		r.clean()
	})
}

// TestResumeMetrics: what is taken up is counted, and what that spared.
func TestResumeMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	bubble(t, func(c *decode.Config, _ *kvconn.Config) {
		var err error
		if c.Metrics, err = decode.NewMetrics(reg); err != nil {
			t.Fatal(err)
		}
	}, func(r *rig) {
		c := claim(r.addr, 3, 18)
		r.breaks(c, map[int][]int{0: {0, 1, 4}, 1: {1, 3}})
		r.takes(c)
		r.takes(claim(r.addr, 4, 18)) // nothing is left of it
		one := claim(r.addr, 5, 10)
		r.breaks(one, map[int][]int{1: {2}})
		if rep, moved := r.takes(one); rep.Resumed != 1 || moved != 5 {
			t.Errorf("resumed %d, moved %d, want 1 and 5", rep.Resumed, moved)
		}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			got[f.GetName()] = f.GetMetric()[0].GetCounter().GetValue()
		}
		want := map[string]float64{"xpyd_kv_resumed_transfers_total": 2, "xpyd_kv_resumed_units_total": 6, "xpyd_kv_recomputed_tokens_total": 17 + 9}
		if !maps.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	})
	if _, err := decode.NewMetrics(reg); err == nil {
		t.Error("registered twice")
	}
}

func TestTakenUpTwice(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		c := claim(r.addr, 9, 16)
		r.breaks(c, map[int][]int{0: {0, 1}})
		r.breaks(c, map[int][]int{0: {2, 3}, 1: {3}})
		if rep, moved := r.takes(c); rep.Resumed != 5 || moved != 3 {
			t.Errorf("%+v, %d moved", rep, moved)
		}

		c = claim(r.addr, 11, 16)
		addr, peer, stop := r.other("prefill-2", pushes(map[int][]int{0: {0, 1, 2, 3}}))
		first := *c
		first.Addr, first.Peer, first.Link = addr, peer, ticket.NewLink()
		var wg sync.WaitGroup
		wg.Go(func() { r.fails(r.t.Context(), &first, ticket.Dead) })
		synctest.Wait()
		wg.Go(func() {
			if rep, moved := r.takes(c); rep.Resumed != 4 || moved != 4 {
				t.Errorf("%+v, %d moved", rep, moved)
			}
		})
		time.Sleep(10 * time.Millisecond) // of the bubble
		stop()
		wg.Wait()
		r.clean()
	})
}

// With others waiting for blocks, an attempt goes to the end of their queue
// instead of holding what it took up.
func TestTakenUpUnderPressure(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		c := claim(r.addr, 13, 16)
		r.breaks(c, map[int][]int{0: {0, 1}})
		ids, err := r.cache.Alloc(blocks-2, "big")
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if rep, _ := r.takes(c); rep.Resumed != 0 {
				t.Errorf("%+v", rep)
			}
		})
		time.Sleep(time.Second)
		if h := r.cache.Holders(); !slices.ContainsFunc(h, func(h kvcache.Holder) bool { return h.Owner == "big" }) || len(h) != 1 {
			t.Errorf("held while it waits: %+v", h)
		}
		r.cache.Release(ids, "big")
		wg.Wait()
		r.clean()
	})
}

// With kv.digest off on both sides rows are believed as they come; with one
// side's word they are checked.
func TestUnchecked(t *testing.T) {
	wrong := func(r *rig) func(ctx context.Context, o *kvconn.Outgoing) {
		return func(ctx context.Context, o *kvconn.Outgoing) {
			if o.Accept(&source{seed: o.Ticket().Tokens[0], wrong: true}) != nil {
				return
			}
			r.push(o)
			o.Commit(r.draft(o))
			<-o.Done()
		}
	}
	bubble(t, nil, func(r *rig) {
		r.answer = wrong(r)
		r.fails(r.t.Context(), claim(r.addr, 3, 9), ticket.Corrupt)
		r.clean()
	})
	bubble(t, func(_ *decode.Config, c *kvconn.Config) { c.Unchecked = true }, func(r *rig) {
		r.answer = wrong(r)
		c := claim(r.addr, 3, 9)
		pre, _, err := r.Fetch(r.t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		r.cache.Release(pre.Blocks, c.Owner)
		r.clean()
	})
}
