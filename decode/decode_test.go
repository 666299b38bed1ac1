package decode_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

func TestFetch(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		for _, n := range []int{1, 3, 4, 5, 17} {
			c := claim(r.addr, int32(n), n)
			pre, rep, err := r.Fetch(r.t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			if !r.pool.has(pre.Blocks, int32(n), n) || len(pre.First) != 2 || pre.First[1].Token != 1 || pre.CachedTokens != 1 {
				t.Errorf("%d tokens: %+v", n, pre)
			}
			if rep.Queue != 2*time.Millisecond || rep.Prefill != 3*time.Millisecond || rep.Had != 0 {
				t.Errorf("%d tokens: %+v", n, rep)
			}
			if h := r.cache.Holders(); len(h) != 1 || h[0].Owner != c.Owner || h[0].State != "receiving" || len(h[0].Blocks) != (n+3)/4 {
				t.Errorf("%d tokens: held %+v", n, h)
			}
			r.cache.Release(pre.Blocks, c.Owner)
		}
		r.clean()
	})
}

// TestSetDelta: blocks of a known prefix are pinned and do not move again; the
// block of the last position always does.
func TestSetDelta(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		var asked []int
		r.answer = func(ctx context.Context, o *kvconn.Outgoing) {
			for i := range o.Ticket().Dest {
				if !o.Has(0, i) {
					asked = append(asked, i)
				}
			}
			r.serve(ctx, o)
		}
		c := claim(r.addr, 7, 32)
		pre, _, err := r.Fetch(r.t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		chain := r.cache.NewChain("")
		chain.Extend(c.Tokens)
		r.cache.InsertChain(&chain, c.Tokens, pre.Blocks, 0)
		r.cache.Release(pre.Blocks, c.Owner)
		asked = nil
		pre, rep, err := r.Fetch(r.t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		if rep.Had != 16 || len(asked) != 4 || asked[0] != 4 || !r.pool.has(pre.Blocks, 7, 32) {
			t.Errorf("had %d tokens, moved blocks %v", rep.Had, asked)
		}
		r.cache.Release(pre.Blocks, c.Owner)
		longer := claim(r.addr, 7, 33) // now the last position is in a block of its own
		if pre, rep, err = r.Fetch(r.t.Context(), longer); err != nil || rep.Had != 32 || !r.pool.has(pre.Blocks, 7, 33) {
			t.Fatalf("had %d tokens of 33, %v", rep.Had, err)
		}
		r.cache.Release(pre.Blocks, longer.Owner)
		// A failure gives the pinned ones back too, still cached.
		r.answer = func(_ context.Context, o *kvconn.Outgoing) { o.Fail(ticket.NoSpace, "full") }
		r.fails(r.t.Context(), c, ticket.NoSpace)
		if s := r.cache.Stats(); s.Cached != 8 {
			t.Errorf("%+v", s)
		}
		r.clean()
	})
}

func TestLease(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		c := claim(r.addr, 3, 9)
		c.LeaseID = "lease"
		pre, _, err := r.Fetch(r.t.Context(), c)
		if err != nil || len(pre.First) != 0 || !r.pool.has(pre.Blocks, 3, 9) {
			t.Fatalf("%+v, %v", pre, err)
		}
		r.cache.Release(pre.Blocks, c.Owner)
		r.clean()
	})
}

// TestPrefillFails: every way that prefill, its bytes or its process can fail
// ends with a typed outcome and nothing held.
func TestPrefillFails(t *testing.T) {
	say := func(o ticket.Outcome) func(*rig) {
		return func(r *rig) {
			r.answer = func(_ context.Context, g *kvconn.Outgoing) { g.Fail(o, "says the test") }
		}
	}
	commit := func(payload string) func(*rig) {
		return func(r *rig) {
			r.answer = func(_ context.Context, o *kvconn.Outgoing) {
				if o.Accept(&source{seed: o.Ticket().Tokens[0]}) == nil {
					r.push(o)
					o.Commit([]byte(payload))
				}
			}
		}
	}
	arm := func(rule kvconntest.Rule) func(*rig) {
		return func(r *rig) { r.chaos.Arm(rule) }
	}
	for name, c := range map[string]struct {
		spoil func(*rig)
		want  ticket.Outcome
	}{
		"no space":              {say(ticket.NoSpace), ticket.NoSpace},
		"refused":               {say(ticket.Refused), ticket.Refused},
		"lease late":            {say(ticket.Late), ticket.Late},
		"engine dead":           {say(ticket.Dead), ticket.Dead},
		"draft is no JSON":      {commit(`{`), ticket.Corrupt},
		"draft has a choice":    {commit(`{"first":[{"token":1}]}`), ticket.Corrupt},
		"draft has a big id":    {commit(`{"first":[{"token":1},{"token":100}]}`), ticket.Corrupt},
		"draft has a bad top":   {commit(`{"first":[{"token":1,"top":[{"id":-1}]},{"token":1}]}`), ticket.Corrupt},
		"draft cached too much": {commit(`{"first":[{"token":1},{"token":1}],"cached":99}`), ticket.Corrupt},
		"draft has logprobs":    {commit(`{"first":[{"token":1},{"token":1}],"prompt":[{}]}`), ticket.Corrupt},
		"rows always wrong": {func(r *rig) {
			r.answer = func(_ context.Context, o *kvconn.Outgoing) {
				if o.Accept(&source{seed: o.Ticket().Tokens[0], wrong: true}) == nil {
					r.push(o)
					o.Commit(r.draft(o))
				}
			}
		}, ticket.Corrupt},
		"no answer to the ticket": {func(r *rig) {
			r.answer = func(ctx context.Context, _ *kvconn.Outgoing) { <-ctx.Done() }
		}, ticket.Late},
		"accepts and computes for ever": {func(r *rig) {
			r.answer = func(ctx context.Context, o *kvconn.Outgoing) {
				_ = o.Accept(&source{})
				<-ctx.Done()
			}
		}, ticket.Late},
		"never commits": {func(r *rig) {
			r.answer = func(_ context.Context, o *kvconn.Outgoing) {
				if o.Accept(&source{seed: o.Ticket().Tokens[0]}) == nil {
					r.push(o)
				}
			}
		}, ticket.Refused},
		"killed at the ticket": {arm(kvconntest.Rule{Step: kvconntest.Ticket, To: kvconntest.ToSender, Action: kvconntest.Kill}), ticket.Dead},
		"killed at a unit":     {arm(kvconntest.Rule{Step: kvconntest.Unit, To: kvconntest.ToReceiver, Nth: 3, Action: kvconntest.Kill}), ticket.Dead},
		"killed at the commit": {arm(kvconntest.Rule{Step: kvconntest.Commit, To: kvconntest.ToReceiver, Action: kvconntest.Kill}), ticket.Dead},
		"silent at a unit":     {arm(kvconntest.Rule{Step: kvconntest.Unit, To: kvconntest.ToReceiver, Nth: 2, Action: kvconntest.Pause}), ticket.Dead},
		"silent at the ticket": {arm(kvconntest.Rule{Step: kvconntest.Ticket, To: kvconntest.ToSender, Action: kvconntest.Pause}), ticket.Dead},
		"nobody there":         {func(r *rig) { r.addr = "nowhere" }, ticket.Dead},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, nil, func(r *rig) {
				c.spoil(r)
				cl := claim(r.addr, 5, 14)
				cl.Deadline = time.Now().Add(20 * time.Second)
				r.fails(r.t.Context(), cl, c.want)
				r.clean()
			})
		})
	}
}

// TestRepaired: what is lost, doubled or bent on the way once is made good.
func TestRepaired(t *testing.T) {
	for _, act := range []kvconntest.Action{kvconntest.Drop, kvconntest.Duplicate, kvconntest.Reorder, kvconntest.Slow, kvconntest.FlipTail} {
		t.Run(string(act), func(t *testing.T) {
			bubble(t, nil, func(r *rig) {
				r.chaos.Arm(kvconntest.Rule{Step: kvconntest.Unit, To: kvconntest.ToReceiver, Nth: 1, Action: act})
				c := claim(r.addr, 8, 14)
				pre, _, err := r.Fetch(r.t.Context(), c)
				if err != nil || !r.pool.has(pre.Blocks, 8, 14) {
					t.Fatalf("%+v, %v", pre, err)
				}
				r.cache.Release(pre.Blocks, c.Owner)
				r.clean()
			})
		})
	}
}

func TestIncompatible(t *testing.T) {
	bubble(t, func(_ *decode.Config, c *kvconn.Config) { c.Identity.ModelFingerprint = "another" }, func(r *rig) {
		r.fails(r.t.Context(), claim(r.addr, 1, 5), ticket.Incompatible)
		r.clean()
	})
	bubble(t, nil, func(r *rig) { // another run of that worker answers
		c := claim(r.addr, 1, 5)
		c.Peer.Epoch = 2
		pre, _, err := r.Fetch(r.t.Context(), c)
		var e *decode.Error
		if !errors.As(err, &e) || !e.Outcome.Retryable() {
			t.Errorf("%+v, %v", pre, err)
		}
		r.clean()
	})
}

// TestNoSpace: a request waits its turn for blocks, and no longer than it may.
func TestNoSpace(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		held, err := r.cache.Alloc(blocks-1, "other")
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		r.fails(r.t.Context(), claim(r.addr, 1, 8), ticket.NoSpace)
		if d := time.Since(began); d != decode.DefaultConfig(blocks).ReserveTimeout {
			t.Errorf("waited %v", d)
		}
		r.fails(r.t.Context(), claim(r.addr, 1, blocks*blockTokens+1), ticket.NoSpace) // never

		go func() {
			time.Sleep(3 * time.Second)
			r.cache.Release(held, "other")
		}()
		c := claim(r.addr, 1, 8)
		pre, rep, err := r.Fetch(r.t.Context(), c)
		if err != nil || rep.Reserve != 3*time.Second {
			t.Fatalf("%+v, %v", rep, err)
		}
		r.cache.Release(pre.Blocks, c.Owner)
		r.clean()
	})
}

// TestCallerLeaves: at every step of a Fetch the caller's end frees everything
// and ends prefill's side.
func TestCallerLeaves(t *testing.T) {
	left := errors.New("the client left")
	for name, wait := range map[string]func(r *rig){
		"in the queue for blocks": func(r *rig) {
			if _, err := r.cache.Alloc(blocks, "other"); err != nil {
				r.t.Fatal(err)
			}
		},
		"before the ticket is accepted": func(r *rig) {
			r.answer = func(ctx context.Context, _ *kvconn.Outgoing) { <-ctx.Done() }
		},
		"in mid transfer": func(r *rig) {
			r.answer = func(ctx context.Context, o *kvconn.Outgoing) {
				if o.Accept(&source{seed: o.Ticket().Tokens[0]}) == nil {
					o.Push(0, []int{0, 1})
				}
				<-ctx.Done()
			}
		},
		"before the commit": func(r *rig) {
			r.answer = func(ctx context.Context, o *kvconn.Outgoing) {
				if o.Accept(&source{seed: o.Ticket().Tokens[0]}) == nil {
					r.push(o)
				}
				<-ctx.Done()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, nil, func(r *rig) {
				wait(r)
				ctx, cancel := context.WithCancelCause(r.t.Context())
				done := make(chan struct{})
				go func() {
					defer close(done)
					r.fails(ctx, claim(r.addr, 1, 14), ticket.Cancelled)
				}()
				time.Sleep(200 * time.Millisecond)
				began := time.Now()
				cancel(left)
				<-done
				if d := time.Since(began); d > 100*time.Millisecond {
					t.Errorf("took %v", d)
				}
				r.cache.ReleaseAll("other")
				r.clean()
			})
		})
	}
	bubble(t, nil, func(r *rig) { // a deadline is Late
		r.answer = func(ctx context.Context, _ *kvconn.Outgoing) { <-ctx.Done() }
		ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
		defer cancel()
		r.fails(ctx, claim(r.addr, 1, 5), ticket.Late)
		r.clean()
	})
}

// TestQuarantine: while a store does not end, its blocks belong to nobody: they are neither free
// nor the failed request's. They are free once it ends.
func TestQuarantine(t *testing.T) {
	few := func(c *decode.Config, _ *kvconn.Config) { c.MaxQuarantined = 4 }
	bubble(t, few, func(r *rig) {
		r.pool.stall = make(chan struct{})
		ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
		defer cancel()
		r.fails(ctx, claim(r.addr, 1, 14), ticket.Late)
		h := r.cache.Holders()
		if len(h) != 1 || h[0].State != kvcache.StateQuarantined || len(h[0].Blocks) != 4 {
			t.Fatalf("held: %+v", h)
		}
		// At the cap nothing more is risked.
		r.fails(r.t.Context(), claim(r.addr, 1, 5), ticket.NoSpace)
		time.Sleep(time.Hour) // no timeout makes memory reusable
		if s := r.cache.Stats(); s.Quarantined != 4 || s.Free != blocks-4 {
			t.Errorf("%+v", s)
		}
		close(r.pool.stall)
		r.clean()
		c := claim(r.addr, 1, 14)
		pre, _, err := r.Fetch(r.t.Context(), c)
		if err != nil || !r.pool.has(pre.Blocks, 1, 14) {
			t.Fatalf("%+v, %v", pre, err)
		}
		r.cache.Release(pre.Blocks, c.Owner)
		r.clean()
	})
}

// TestCloseWithQuarantine: Close does not wait for a fence that does not hold.
func TestCloseWithQuarantine(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		r.pool.stall = make(chan struct{})
		ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
		defer cancel()
		r.fails(ctx, claim(r.addr, 1, 14), ticket.Late)
		began := time.Now()
		r.Close()
		if d := time.Since(began); d != 0 {
			t.Errorf("close took %v", d)
		}
		if s := r.cache.Stats(); s.Quarantined != 4 {
			t.Errorf("%+v", s)
		}
		close(r.pool.stall)
	})
}

// TestWithPeers: prefill is told of the workers that have parts of the prompt, this one first with
// what it holds, unless it is to compute all of it; what lower tiers have is looked for before.
func TestWithPeers(t *testing.T) {
	other := ticket.Peer{ID: "other", Epoch: 2, URL: "http://h", KV: "h:2", Tokens: 8}
	me := ticket.Peer{ID: "decode-0", Epoch: 1, KV: "h:1"}
	warmed := 0
	bubble(t, func(c *decode.Config, _ *kvconn.Config) {
		c.Self = func() ticket.Peer { return me }
		c.Warm = func(_ context.Context, tokens []int32, salt string) {
			if warmed++; len(tokens) != 32 || salt != "s" {
				t.Errorf("looked for %d tokens with salt %q", len(tokens), salt)
			}
		}
	}, func(r *rig) {
		var peers []ticket.Peer
		r.answer = func(ctx context.Context, o *kvconn.Outgoing) {
			order, err := handoff.ParseOrder(o.Ticket().First)
			if err != nil {
				t.Error(err)
			}
			peers = order.Peers
			r.serve(ctx, o)
		}
		f := func(change func(*decode.Claim), want ...ticket.Peer) *decode.Claim {
			t.Helper()
			c := claim(r.addr, 7, 32)
			c.Order.Salt, c.Order.Peers = "s", []ticket.Peer{other}
			if change != nil {
				change(c)
			}
			pre, _, err := r.Fetch(r.t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(peers, want) {
				t.Errorf("peers %+v, want %+v", peers, want)
			}
			if len(c.Order.Peers) != 1 {
				t.Errorf("the caller's order has %d peers now", len(c.Order.Peers))
			}
			chain := r.cache.NewChain("s")
			chain.Extend(c.Tokens)
			r.cache.InsertChain(&chain, c.Tokens, pre.Blocks, 0)
			r.cache.Release(pre.Blocks, c.Owner)
			return c
		}
		f(nil, other)
		mine := me
		mine.Tokens = 16
		f(nil, mine, other)
		if warmed != 2 {
			t.Errorf("lower tiers were asked %d times", warmed)
		}
		for name, change := range map[string]func(*decode.Claim){
			"all of it is to be computed": func(c *decode.Claim) { c.Order.PromptLogprobs = 0 },
			"it is computed already":      func(c *decode.Claim) { c.LeaseID = "lease" },
		} {
			c := claim(r.addr, 7, 32)
			c.Order.Salt, c.Order.Peers = "s", []ticket.Peer{other}
			change(c)
			if pre, _, err := r.Fetch(r.t.Context(), c); err == nil {
				r.cache.Release(pre.Blocks, c.Owner)
			}
			if !slices.Equal(peers, c.Order.Peers) {
				t.Errorf("%s: peers %+v", name, peers)
			}
		}
		r.clean()
	})
}

// TestNoOrder: an order that cannot be sent fails before anybody is asked.
func TestNoOrder(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		r.answer = func(context.Context, *kvconn.Outgoing) { t.Error("it was asked") }
		c := claim(r.addr, 7, 8)
		c.Order.Sampling.Temperature = float32(math.NaN())
		r.fails(r.t.Context(), c, ticket.Refused)
		r.clean()
	})
}

// TestCollectFences: blocks are reused at once when the last store into them ends soon after a
// failure.
func TestCollectFences(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		r.answer = func(_ context.Context, o *kvconn.Outgoing) {
			r.giving(o, &source{seed: o.Ticket().Tokens[0]}, layout.Layers())
		}
		r.pool.stall = make(chan struct{})
		ctx, cancel := context.WithTimeout(r.t.Context(), 500*time.Millisecond)
		defer cancel()
		time.AfterFunc(520*time.Millisecond, func() { close(r.pool.stall) })
		p := prefix(r.addr, 7, 48)
		p.Deadline, _ = ctx.Deadline()
		var e *decode.Error
		if n, err := r.Collect(ctx, p); n != 0 || !errors.As(err, &e) || e.Outcome != ticket.Late {
			t.Errorf("%d tokens, %v", n, err)
		}
		if s := r.cache.Stats(); s.Quarantined != 0 || s.Free != blocks {
			t.Errorf("%+v", s)
		}
		r.clean()
	})
}

// TestCollectQuarantines: a prefix whose stores do not end costs its blocks, which count against
// what may be in quarantine, and nothing else.
func TestCollectQuarantines(t *testing.T) {
	bubble(t, func(c *decode.Config, _ *kvconn.Config) { c.MaxQuarantined = 12 }, func(r *rig) {
		r.answer = func(_ context.Context, o *kvconn.Outgoing) {
			r.giving(o, &source{seed: o.Ticket().Tokens[0]}, layout.Layers())
		}
		r.pool.stall = make(chan struct{})
		for i, want := range []ticket.Outcome{ticket.Late, ticket.NoSpace} {
			ctx, cancel := context.WithTimeout(r.t.Context(), 500*time.Millisecond)
			defer cancel()
			p := prefix(r.addr, 7, 48)
			p.Deadline, _ = ctx.Deadline()
			n, err := r.Collect(ctx, p)
			var e *decode.Error
			if n != 0 || !errors.As(err, &e) || e.Outcome != want {
				t.Errorf("%d: %d tokens, %v, want %s", i, n, err, want)
			}
			if s := r.cache.Stats(); s.Quarantined != 12 || s.Free != blocks-12 {
				t.Errorf("%d: %+v", i, s)
			}
		}
		close(r.pool.stall)
		r.clean()
		if s := r.cache.Stats(); s.Quarantined != 0 || s.Free != blocks {
			t.Errorf("%+v", s)
		}
	})
}

// TestCollectOfChain: a chain that the caller has is used, with its priority, and left as it is;
// rows of other numerics are not taken.
func TestCollectOfChain(t *testing.T) {
	bubble(t, nil, func(r *rig) {
		r.answer = func(_ context.Context, o *kvconn.Outgoing) {
			r.giving(o, &source{seed: o.Ticket().Tokens[0]}, layout.Layers())
		}
		p := prefix(r.addr, 7, 32)
		p.Salt, p.Deadline = "s", time.Now().Add(time.Second)
		chain := r.cache.NewChain("s")
		chain.Extend(p.Tokens)
		p.Chain = &chain
		if n, err := r.Collect(r.t.Context(), p); n != 32 || err != nil || chain.Tokens() != 48 {
			t.Errorf("%d tokens, %v; the chain has %d", n, err, chain.Tokens())
		}
		r.holds(p, 32)
		r.clean()
	})
	bubble(t, func(_ *decode.Config, c *kvconn.Config) { c.Identity.Numerics = "others" }, func(r *rig) {
		r.answer = func(context.Context, *kvconn.Outgoing) { t.Error("it was asked all the same") }
		var e *decode.Error
		if n, err := r.Collect(r.t.Context(), prefix(r.addr, 7, 32)); n != 0 || !errors.As(err, &e) || e.Outcome != ticket.Incompatible {
			t.Errorf("%d tokens, %v", n, err)
		}
		if way, err := r.Prepare(r.t.Context(), prefix(r.addr, 7, 32)); way != nil || !errors.As(err, &e) || e.Outcome != ticket.Incompatible {
			t.Errorf("%v, %v", way, err)
		}
		r.clean()
	})
}
