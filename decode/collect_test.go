package decode_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// spotted is a source with wrong rows from a position on, in the last layer: all that
// is right has then been sent before a receiver tires of them.
type spotted struct {
	source
	from int
}

func (s *spotted) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	err := s.source.Load(layer, index, firstPos, rows, dst, digests)
	if firstPos >= s.from && layer == layout.Layers()-1 {
		dst[0] ^= 1
	}
	return err
}

// giving answers a ticket for what is cached.
func (r *rig) giving(o *kvconn.Outgoing, src kvconn.Source, layers int) {
	order, err := handoff.ParseOrder(o.Ticket().First)
	if err != nil || !order.Cached || order.Logprobs >= 0 || order.PromptLogprobs >= 0 || len(o.Ticket().Tokens) != o.Ticket().Positions {
		r.t.Errorf("%+v, %v", order, err)
	}
	if o.Accept(src) != nil {
		return
	}
	all := make([]int, len(o.Ticket().Dest))
	for i := range all {
		all[i] = i
	}
	if layers == layout.Layers() {
		o.PushAll() // none waits behind what is asked for again
		o.Commit(nil)
		return
	}
	for layer := range layers {
		o.Push(layer, all)
	}
}

func prefix(addr string, seed int32, upto int) *decode.Prefix {
	p := &decode.Prefix{Addr: addr, Peer: self, RequestID: "r", Owner: "peer/fetch-1", Upto: upto, Least: 16, Most: blocks}
	for i := range 60 {
		p.Tokens = append(p.Tokens, (seed+int32(i))%vocab)
	}
	return p
}

// holds checks that the index has that many tokens of a prompt, and right rows.
func (r *rig) holds(p *decode.Prefix, tokens int) {
	r.t.Helper()
	ids, n := enginetest.HoldPrefix(r.cache, p.Tokens, p.Salt, "test")
	if n != tokens || !r.pool.has(ids, p.Tokens[0], n) {
		r.t.Errorf("the index has %d tokens, want %d; rows right: %t", n, tokens, r.pool.has(ids, p.Tokens[0], n))
	}
	r.cache.Release(ids, "test")
}

// TestCollect: the missing part of a peer's prefix comes into the index, verified. After any fault no
// block is held, no wrong row is found, and whole blocks stay.
func TestCollect(t *testing.T) {
	ended := errors.New("test")
	f := func(name string, answer func(r *rig, ctx context.Context, o *kvconn.Outgoing), change func(*rig, *decode.Prefix), want ticket.Outcome, tokens, held int) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, nil)
				defer r.close()
				r.answer = func(ctx context.Context, o *kvconn.Outgoing) { answer(r, ctx, o) }
				p := prefix(r.addr, 7, 48)
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				defer cancel()
				p.Deadline, _ = ctx.Deadline()
				if change != nil {
					change(r, p)
				}
				began := time.Now()
				got, err := r.Collect(ctx, p)
				if took := time.Since(began); took > 600*time.Millisecond {
					t.Errorf("it took %v", took)
				}
				outcome := ticket.Outcome("")
				var e *decode.Error
				if errors.As(err, &e) {
					outcome = e.Outcome
				}
				if got != tokens || outcome != want {
					t.Errorf("%d tokens, %v; want %d, %q", got, err, tokens, want)
				}
				r.holds(p, held)
				r.cache.ReleaseAll("storm")
				r.clean()
			})
		})
	}
	good := func(r *rig, _ context.Context, o *kvconn.Outgoing) {
		r.giving(o, &source{seed: o.Ticket().Tokens[0]}, layout.Layers())
	}
	f("whole", good, nil, "", 48, 48)
	f("the ledger says what for", func(r *rig, ctx context.Context, o *kvconn.Outgoing) {
		if h := r.cache.Holders(); len(h) != 1 || h[0].Owner != "peer/fetch-1" || h[0].State != kvcache.StateReceiving {
			r.t.Errorf("%+v", h)
		}
		good(r, ctx, o)
	}, nil, "", 48, 48)
	f("less than a unit is left out", good, func(_ *rig, p *decode.Prefix) { p.Upto = 47 }, "", 32, 32)
	f("few blocks", good, func(_ *rig, p *decode.Prefix) { p.Most = 9 }, "", 32, 32)
	f("just enough", good, func(_ *rig, p *decode.Prefix) { p.Least = 48 }, "", 48, 48)
	f("too few", good, func(_ *rig, p *decode.Prefix) { p.Least = 49 }, "", 0, 0)
	f("too late to ask", good, func(_ *rig, p *decode.Prefix) { p.Deadline = time.Now() }, ticket.Late, 0, 0)
	f("a part is here", func(r *rig, ctx context.Context, o *kvconn.Outgoing) {
		for i := range o.Ticket().Dest {
			if len(o.Ticket().Dest) == 12 && o.Has(0, i) != (i < 4) {
				r.t.Errorf("block %d: had %t", i, o.Has(0, i))
			}
		}
		good(r, ctx, o)
	}, func(r *rig, p *decode.Prefix) {
		first := *p
		first.Upto = 16
		if n, err := r.Collect(r.t.Context(), &first); n != 16 || err != nil {
			r.t.Error(n, err)
		}
	}, "", 32, 48)
	lacking := func(upto int) func(*rig, context.Context, *kvconn.Outgoing) {
		return func(r *rig, ctx context.Context, o *kvconn.Outgoing) {
			if len(o.Ticket().Tokens) > upto {
				o.Fail(ticket.Refused, "not cached here")
				return
			}
			good(r, ctx, o)
		}
	}
	f("is not asked", good, func(r *rig, p *decode.Prefix) {
		p.Reach = func(context.Context, *kvcache.Chain, int, int, int) (int, error) {
			r.t.Error("it had all")
			return 0, nil
		}
	}, "", 48, 48)
	f("reaches less", lacking(32), func(r *rig, p *decode.Prefix) {
		p.Reach = func(_ context.Context, ch *kvcache.Chain, unit, from, upto int) (int, error) {
			if unit != 16 || from != 0 || upto != 48 || ch.Tokens() != 48 {
				r.t.Errorf("unit %d, %d to %d of %d", unit, from, upto, ch.Tokens())
			}
			return 40, nil
		}
	}, "", 32, 32)
	f("loses it", lacking(16), func(_ *rig, p *decode.Prefix) {
		p.Reach = func(context.Context, *kvcache.Chain, int, int, int) (int, error) { return 40, nil }
	}, ticket.Refused, 0, 0)
	f("reaches nothing", lacking(0), func(_ *rig, p *decode.Prefix) {
		p.Reach = func(context.Context, *kvcache.Chain, int, int, int) (int, error) { return 0, nil }
	}, "", 0, 0)
	f("reaches just enough", lacking(32), func(_ *rig, p *decode.Prefix) {
		p.Least = 32
		p.Reach = func(context.Context, *kvcache.Chain, int, int, int) (int, error) { return 32, nil }
	}, "", 32, 32)
	f("reaches too little", lacking(16), func(_ *rig, p *decode.Prefix) {
		p.Least = 32
		p.Reach = func(context.Context, *kvcache.Chain, int, int, int) (int, error) { return 16, nil }
	}, "", 0, 0)
	f("says nonsense", lacking(0), func(_ *rig, p *decode.Prefix) {
		p.Reach = func(context.Context, *kvcache.Chain, int, int, int) (int, error) { return 1 << 30, ended }
	}, ticket.Dead, 0, 0)
	f("no room", good, func(r *rig, _ *decode.Prefix) {
		if _, err := r.cache.Alloc(8, "storm"); err != nil {
			r.t.Error(err)
		}
	}, ticket.NoSpace, 0, 0)
	f("evicted", func(_ *rig, _ context.Context, o *kvconn.Outgoing) { o.Fail(ticket.Refused, "gone") }, nil, ticket.Refused, 0, 0)
	f("wrong bytes", func(r *rig, _ context.Context, o *kvconn.Outgoing) {
		r.giving(o, &source{seed: o.Ticket().Tokens[0], wrong: true}, layout.Layers())
	}, nil, ticket.Corrupt, 0, 0)
	f("wrong bytes at the end", func(r *rig, _ context.Context, o *kvconn.Outgoing) {
		r.giving(o, &spotted{source{seed: o.Ticket().Tokens[0]}, 36}, layout.Layers())
	}, nil, ticket.Corrupt, 32, 32)
	f("a layer short", func(r *rig, ctx context.Context, o *kvconn.Outgoing) {
		r.giving(o, &source{seed: o.Ticket().Tokens[0]}, layout.Layers()-1)
		<-ctx.Done()
	}, nil, ticket.Late, 0, 0)
	f("no answer", func(_ *rig, ctx context.Context, o *kvconn.Outgoing) { <-ctx.Done() }, nil, ticket.Late, 0, 0)
	f("killed", func(r *rig, ctx context.Context, o *kvconn.Outgoing) {
		r.giving(o, &source{seed: o.Ticket().Tokens[0]}, 1)
		r.stop()
		<-ctx.Done()
	}, nil, ticket.Dead, 0, 0)
	f("nobody there", good, func(_ *rig, p *decode.Prefix) { p.Addr = "nowhere" }, ticket.Dead, 0, 0)
	f("another run", good, func(_ *rig, p *decode.Prefix) { p.Peer.Epoch = 2 }, ticket.Dead, 0, 0)
}
