package decode_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// TestBringNoWay: without a session to the peer nothing is brought or held.
func TestBringNoWay(t *testing.T) {
	bubble(t, func(_ *decode.Config, c *kvconn.Config) { c.Identity.ModelFingerprint = "another" }, func(r *rig) {
		way, err := r.Prepare(r.t.Context(), prefix(r.addr, 7, 48))
		var e *decode.Error
		if way != nil || !errors.As(err, &e) || e.Outcome != ticket.Incompatible {
			t.Errorf("%v, %v", way, err)
		}
		r.clean()
	})
}

// Gate implements kernels.Gated.
func (p *pool) Gate() (kernels.Gate, error) { return kernels.NewHostGate(layout.Layers()), p.noGate }

// TestBring: a peer's prefix arrives in blocks of another request, layer by layer. After any
// fault, waiting steps go on, rows that Good vouches for are right, and blocks that may still be
// written count as lost and stay in quarantine.
func TestBring(t *testing.T) {
	const holder = "request"
	type coming struct {
		*decode.Coming
		r     *rig
		table []int32
		wakes atomic.Int32
	}
	type want struct {
		tokens  int // in the index
		outcome ticket.Outcome
		good    int
		lost    bool
		begun   bool // a step could begin
	}
	f := func(name string, answer func(c *coming, ctx context.Context, o *kvconn.Outgoing), change func(*coming, *decode.Prefix), w want) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, nil)
				defer r.close()
				c := &coming{r: r}
				r.answer = func(ctx context.Context, o *kvconn.Outgoing) { answer(c, ctx, o) }
				p := prefix(r.addr, 7, 48)
				p.Deadline = time.Now().Add(500 * time.Millisecond)
				if change != nil {
					change(c, p)
				}
				way, err := r.Prepare(t.Context(), p)
				if err != nil || way == nil {
					t.Fatal(way, err)
				}
				ids, err := r.cache.Alloc(13, holder)
				if err != nil {
					t.Fatal(err)
				}
				c.table = ids
				began := time.Now()
				ended := make(chan error, 1)
				tokens := 0
				c.Coming = way.Bring(p, c.table, 0, func() { c.wakes.Add(1) }, func(n int, err error) {
					tokens = n
					ended <- err
				})
				if c.Coming == nil {
					t.Fatal("nothing comes")
				}
				r.cache.Release(ids[12:], holder) // those that come are held for it
				if c.Upto() != 48 {
					t.Errorf("up to %d", c.Upto())
				}
				waited := make(chan struct{})
				go func() { // as a step does
					defer close(waited)
					if err := c.Move().Wait(t.Context()); err != nil {
						t.Error(err)
					}
				}()
				good, lost := c.Good()
				<-waited
				if took := time.Since(began); took > 600*time.Millisecond {
					t.Errorf("it took %v", took)
				}
				err = <-ended
				outcome := ticket.Outcome("")
				var e *decode.Error
				if errors.As(err, &e) {
					outcome = e.Outcome
				}
				if !c.Over() {
					t.Error("it has ended, and is not over")
				}
				if good != w.good || lost != w.lost || tokens != w.tokens || outcome != w.outcome || c.Begun() != w.begun {
					t.Errorf("good %d, lost %t, %d tokens, begun %t, %v; want %+v", good, lost, tokens, c.Begun(), err, w)
				}
				if n := c.wakes.Load(); n < 1 || n > 2 || w.begun != (n == 2) {
					t.Errorf("woken %d times", n)
				}
				if !r.pool.has(ids[:good/blockTokens], p.Tokens[0], good) {
					t.Error("what is said to be good is not")
				}
				if n := r.cache.Stats().Quarantined; (n > 0) != lost {
					t.Errorf("%d blocks in quarantine, lost %t", n, lost)
				}
				if r.pool.stall != nil {
					close(r.pool.stall)
				}
				r.cache.ReleaseAll(holder)
				r.holds(p, w.tokens)
				synctest.Wait()
				r.clean()
			})
		})
	}
	good := func(c *coming, _ context.Context, o *kvconn.Outgoing) {
		c.r.giving(o, &source{seed: o.Ticket().Tokens[0]}, layout.Layers())
	}
	whole := want{tokens: 48, good: 48, begun: true}
	rest := func(o *kvconn.Outgoing) { // the last layer
		all := make([]int, len(o.Ticket().Dest))
		for i := range all {
			all[i] = i
		}
		o.Push(layout.Layers()-1, all)
		o.Commit(nil)
	}
	f("whole", good, nil, whole)
	f("layer by layer", func(c *coming, ctx context.Context, o *kvconn.Outgoing) {
		c.r.giving(o, &source{seed: o.Ticket().Tokens[0]}, layout.Layers()-1)
		synctest.Wait()
		if n := c.Move().Layers(); n != layout.Layers()-1 || !c.Begun() || c.Over() {
			c.r.t.Errorf("%d layers, begun %t, over %t", n, c.Begun(), c.Over())
		}
		if h := c.r.cache.Holders(); !slices.ContainsFunc(h, func(h kvcache.Holder) bool { return h.Owner == "peer/fetch-1" && h.State == kvcache.StateReceiving }) {
			c.r.t.Errorf("held by %+v", h)
		}
		rest(o)
	}, nil, whole)
	lacking := func(upto int) func(*coming, context.Context, *kvconn.Outgoing) {
		return func(c *coming, ctx context.Context, o *kvconn.Outgoing) {
			if len(o.Ticket().Tokens) > upto {
				o.Fail(ticket.Refused, "not cached here")
				return
			}
			good(c, ctx, o)
		}
	}
	f("reaches less", lacking(32), func(c *coming, p *decode.Prefix) {
		p.Reach = func(_ context.Context, ch *kvcache.Chain, unit, from, upto int) (int, error) {
			if unit != 16 || from != 0 || upto != 48 || ch.Tokens() != 48 {
				c.r.t.Errorf("unit %d, %d to %d of %d", unit, from, upto, ch.Tokens())
			}
			return 40, nil
		}
	}, want{tokens: 32, good: 32})
	f("reaches nothing", lacking(0), func(_ *coming, p *decode.Prefix) {
		p.Reach = func(context.Context, *kvcache.Chain, int, int, int) (int, error) { return 0, nil }
	}, want{})
	reaches := func(least, n int, err error) func(*coming, *decode.Prefix) {
		return func(_ *coming, p *decode.Prefix) {
			p.Least = least
			p.Reach = func(context.Context, *kvcache.Chain, int, int, int) (int, error) { return n, err }
		}
	}
	f("reaches just enough", lacking(32), reaches(32, 32, nil), want{tokens: 32, good: 32})
	f("reaches too little", lacking(16), reaches(32, 16, nil), want{})
	f("says nonsense", lacking(32), reaches(0, 32, errors.New("test")), want{outcome: ticket.Dead})
	f("loses it", lacking(16), reaches(16, 32, nil), want{outcome: ticket.Refused})
	f("evicted", lacking(0), nil, want{outcome: ticket.Refused})
	f("wrong bytes", func(c *coming, _ context.Context, o *kvconn.Outgoing) {
		c.r.giving(o, &source{seed: o.Ticket().Tokens[0], wrong: true}, layout.Layers())
	}, nil, want{outcome: ticket.Corrupt})
	f("wrong bytes at the end", func(c *coming, _ context.Context, o *kvconn.Outgoing) {
		c.r.giving(o, &spotted{source{seed: o.Ticket().Tokens[0]}, 36}, layout.Layers())
	}, nil, want{tokens: 32, outcome: ticket.Corrupt, good: 32, begun: true})
	f("no answer", func(_ *coming, ctx context.Context, o *kvconn.Outgoing) { <-ctx.Done() }, nil, want{outcome: ticket.Late})
	f("a standstill", func(c *coming, ctx context.Context, o *kvconn.Outgoing) {
		began := time.Now()
		c.r.giving(o, &source{seed: o.Ticket().Tokens[0]}, 1)
		<-ctx.Done()
		if took := time.Since(began); took > 200*time.Millisecond {
			c.r.t.Errorf("a step would have waited %v", took)
		}
	}, nil, want{outcome: ticket.Dead, begun: true})
	f("a slow peer", func(c *coming, ctx context.Context, o *kvconn.Outgoing) {
		time.Sleep(150 * time.Millisecond)
		c.r.giving(o, &source{seed: o.Ticket().Tokens[0]}, layout.Layers()-1)
		synctest.Wait()
		if n := c.Move().Layers(); n != layout.Layers()-1 || c.Begun() {
			c.r.t.Errorf("%d layers, begun %t: a step would wait for as long again", n, c.Begun())
		}
		time.Sleep(150 * time.Millisecond)
		rest(o)
	}, nil, whole)
	f("killed", func(c *coming, ctx context.Context, o *kvconn.Outgoing) {
		c.r.giving(o, &source{seed: o.Ticket().Tokens[0]}, 1)
		synctest.Wait()
		c.r.stop()
		<-ctx.Done()
	}, nil, want{outcome: ticket.Dead, begun: true})
	f("too late to ask", good, func(_ *coming, p *decode.Prefix) { p.Deadline = time.Now() }, want{outcome: ticket.Late})
	f("a store hangs", good, func(c *coming, _ *decode.Prefix) { c.r.pool.stall = make(chan struct{}) },
		want{outcome: ticket.Late, lost: true})
}

// TestBringPart: what is there is not asked for, and too little is left there.
func TestBringPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		defer r.close()
		r.answer = func(_ context.Context, o *kvconn.Outgoing) {
			for i := range o.Ticket().Dest {
				if o.Has(0, i) != (i < 4) {
					t.Errorf("block %d: had %t", i, o.Has(0, i))
				}
			}
			r.giving(o, &source{seed: o.Ticket().Tokens[0]}, layout.Layers())
		}
		p := prefix(r.addr, 7, 48)
		p.Deadline = time.Now().Add(500 * time.Millisecond)
		way, err := r.Prepare(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		ids, err := r.cache.Alloc(12, "request")
		if err != nil {
			t.Fatal(err)
		}
		if c := way.Bring(p, ids, 36, func() {}, func(int, error) {}); c != nil {
			t.Error("12 tokens come, and are not worth it")
		}
		ended := make(chan int, 1)
		c := way.Bring(p, ids, 16, func() {}, func(n int, _ error) { ended <- n })
		if good, lost := c.Good(); good != 48 || lost {
			t.Errorf("good %d, lost %t", good, lost)
		}
		if n := <-ended; n != 32 {
			t.Errorf("%d tokens have come", n)
		}
		r.cache.ReleaseAll("request")
		synctest.Wait()
		r.clean()
	})
}

// TestBringCloses: once the service is closed, or if no step can wait, nothing comes and no block is
// held.
func TestBringCloses(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		p := prefix(r.addr, 7, 48)
		p.Deadline = time.Now().Add(500 * time.Millisecond)
		way, err := r.Prepare(r.t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		ids, err := r.cache.Alloc(12, "request")
		if err != nil {
			t.Fatal(err)
		}
		f := func(why string, from int) {
			t.Helper()
			if c := way.Bring(p, ids, from, func() { t.Error("woken") }, func(int, error) { t.Error("ended") }); c != nil {
				t.Errorf("%s: it comes", why)
			}
			if h := r.cache.Holders(); len(h) != 1 || h[0].Owner != "request" {
				t.Errorf("%s: held %+v", why, h)
			}
		}
		p.Least = 0
		f("all is here", 48)
		r.pool.noGate = errors.New("no gate")
		f("no gate", 0)
		r.pool.noGate = nil
		r.Close()
		f("closed", 0)
		r.cache.ReleaseAll("request")
		synctest.Wait()
	})
}
