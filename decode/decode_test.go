package decode_test

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/internal/handoff"
	"github.com/xpyd/xpyd/internal/kvcache"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

const (
	blocks, blockTokens = 16, 4
	vocab               = 100
)

var layout = kernels.Layout{Layers: 2, KVHeads: 2, HeadDim: 2, BlockTokens: blockTokens, DType: "f32", RowBytes: 8}

// fill makes the rows that a prompt has at these positions.
func fill(dst []byte, seed int32, layer, firstPos, n int) {
	for part := range 2 * layout.KVHeads {
		for i := range n {
			row := dst[(part*n+i)*layout.RowBytes:]
			binary.LittleEndian.PutUint64(row, uint64(seed)<<40|uint64(layer)<<32|uint64(part)<<24|uint64(firstPos+i))
		}
	}
}

// pool is decode's memory.
type pool struct {
	stall chan struct{} // when set, a Scatter waits for it

	mu      sync.Mutex
	rows    map[[2]int]string // layer, block
	digests map[[2]int]uint64 // of KV head 0
	stores  int
}

func (*pool) Layout() kernels.Layout                    { return layout }
func (*pool) Arch() kernels.Arch                        { return kernels.Arch{Vocab: vocab} }
func (*pool) Gather(int, int32, int, int, []byte)       {}
func (*pool) Digest(int, int32, []uint64)               {}
func (*pool) CopyBlock(dst, src int32, firstPos, n int) {}

func (p *pool) Scatter(layer int, block int32, row, n int, src []byte) {
	if p.stall != nil {
		<-p.stall
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rows[[2]int{layer, int(block)}] = string(src)
	p.stores++
}

func (p *pool) SetDigest(layer int, block int32, filled int, digest []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.digests[[2]int{layer, int(block)}] = digest[0]
}

// has says whether the blocks hold a prompt's rows.
func (p *pool) has(table []int32, seed int32, positions int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for layer := range layout.Layers {
		for i, b := range table {
			n := min(blockTokens, positions-i*blockTokens)
			want, sums := make([]byte, layout.RowsBytes(n)), make([]uint64, layout.KVHeads)
			fill(want, seed, layer, i*blockTokens, n)
			kernels.DigestRows(layout, layer, i*blockTokens, n, want, sums)
			if at := [2]int{layer, int(b)}; p.rows[at] != string(want) || p.digests[at] != sums[0] {
				return false
			}
		}
	}
	return true
}

// source is prefill's memory of one prompt.
type source struct {
	seed  int32
	wrong bool // its rows do not agree with their digests
}

func (s *source) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	fill(dst, s.seed, layer, firstPos, rows)
	kernels.DigestRows(layout, layer, firstPos, rows, dst, digests)
	if s.wrong {
		dst[0] ^= 1
	}
	return nil
}

// rig is a decode service and a prefill that answers as the test says.
type rig struct {
	*decode.Service
	t      *testing.T
	chaos  *kvconntest.Chaos
	cache  *kvcache.Cache
	pool   *pool
	recv   *kvconn.Receiver
	server *kvconn.Server
	addr   string
	log    *slog.Logger
	stop   context.CancelFunc // of the server

	answer func(ctx context.Context, o *kvconn.Outgoing) // of prefill; set before a Fetch
}

var self = kvconn.PeerID{ID: "prefill-0", Epoch: 1}

func identity(peer kvconn.PeerID) kvconn.Identity {
	return kvconn.Identity{PeerID: peer, ModelFingerprint: "m", TokenizerFingerprint: "t", Numerics: "n",
		Layout: kvconn.Layout{BlockTokens: blockTokens, Groups: []kvconn.Group{{Kind: "full", Layers: layout.Layers,
			KVHeads: layout.KVHeads, HeadDim: layout.HeadDim, RowBytes: layout.RowBytes, DType: layout.DType}}}}
}

// newRig must be closed inside the bubble.
func newRig(t *testing.T, change func(*decode.Config, *kvconn.Config)) *rig {
	t.Helper()
	r := &rig{t: t, chaos: kvconntest.NewChaos(kvconntest.NewMemory(1 << 16)),
		pool: &pool{rows: map[[2]int]string{}, digests: map[[2]int]uint64{}}}
	r.answer = r.serve
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	log := slog.New(slog.DiscardHandler)
	r.log = log
	var err error
	r.cache, err = kvcache.New(kvcache.Config{Blocks: blocks, BlockTokens: blockTokens, Fingerprint: "m", Numerics: "n"})
	must(err)
	metrics, err := kvconn.NewMetrics(prometheus.NewRegistry())
	must(err)
	cfg, dcfg := kvconn.DefaultConfig(), decode.DefaultConfig(blocks)
	cfg.Identity = identity(kvconn.PeerID{ID: "decode-0", Epoch: 1})
	if change != nil {
		change(&dcfg, &cfg)
	}
	r.recv, err = kvconn.NewReceiver(cfg, r.chaos, log, metrics)
	must(err)
	scfg := kvconn.DefaultConfig()
	scfg.BatchBytes = 1                                  // a frame for each block of a layer, so that faults hit single ones
	scfg.Identity, scfg.Unchecked = identity(self), true // which says nothing alone
	metrics, err = kvconn.NewMetrics(prometheus.NewRegistry())
	must(err)
	r.server, err = kvconn.NewServer(scfg, log, metrics)
	must(err)
	ln, err := r.chaos.Listen("")
	must(err)
	r.addr = ln.Addr().String()
	ctx, stop := context.WithCancel(t.Context())
	r.stop = stop
	go func() {
		if err := r.server.Serve(ctx, ln, r); err != nil {
			t.Error(err)
		}
	}()
	r.Service = decode.New(dcfg, r.recv, r.cache, r.pool, log)
	return r
}

func (r *rig) OnTicket(ctx context.Context, o *kvconn.Outgoing) { r.answer(ctx, o) }

// serve is a good prefill.
func (r *rig) serve(ctx context.Context, o *kvconn.Outgoing) {
	t := o.Ticket()
	src := &source{seed: t.Tokens[0]}
	if o.Accept(src) != nil {
		return
	}
	r.push(o)
	o.Commit(r.draft(o))
	<-o.Done()
}

func (r *rig) push(o *kvconn.Outgoing) {
	all := make([]int, len(o.Ticket().Dest))
	for i := range all {
		all[i] = i
	}
	for layer := range layout.Layers {
		o.Push(layer, all)
	}
}

// draft is what a good prefill drew.
func (r *rig) draft(o *kvconn.Outgoing) []byte {
	d := &handoff.Draft{Cached: 1, QueueUS: 2000, ComputeUS: 3000}
	if o.Ticket().LeaseID == "" {
		order, err := handoff.ParseOrder(o.Ticket().First)
		if err != nil {
			r.t.Error(err)
			return nil
		}
		d.First = make([]kernels.Sampled, order.N)
		for i := range d.First {
			d.First[i].Token = int32(i)
		}
	}
	b, err := d.Encode()
	if err != nil {
		r.t.Error(err)
	}
	return b
}

func claim(addr string, seed int32, n int) *decode.Claim {
	c := &decode.Claim{Addr: addr, Peer: self, Link: ticket.NewLink(), RequestID: "r", Owner: "r#1/0",
		Order: handoff.Order{N: 2, Logprobs: -1, PromptLogprobs: -1, Of: 1}}
	for i := range n {
		c.Tokens = append(c.Tokens, (seed+int32(i))%vocab)
	}
	return c
}

// fails checks a Fetch's outcome.
func (r *rig) fails(ctx context.Context, c *decode.Claim, want ticket.Outcome) {
	r.t.Helper()
	pre, _, err := r.Fetch(ctx, c)
	var e *decode.Error
	if !errors.As(err, &e) || e.Outcome != want || pre != nil {
		r.t.Errorf("fetch: %+v, %v, want %s", pre, err, want)
	}
}

// clean checks that nothing is held a second later.
func (r *rig) clean() {
	r.t.Helper()
	time.Sleep(time.Second)
	if h := r.cache.Holders(); len(h) > 0 {
		r.t.Errorf("held: %+v", h)
	}
	if l := append(r.recv.Ledger(), r.server.Ledger()...); len(l) > 0 {
		r.t.Errorf("tickets: %+v", l)
	}
	if err := r.cache.Check(); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) close() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.recv.Close(ctx); err != nil {
		r.t.Error(err)
	}
	r.Close()
	r.stop()
}

// bubble runs f on a fresh rig under a fake clock.
func bubble(t *testing.T, change func(*decode.Config, *kvconn.Config), f func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, change)
		f(r)
		r.close()
	})
}

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
		r.cache.Insert(c.Tokens, "", pre.Blocks)
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
		// A failure gives the pinned ones back too, still cached.
		r.answer = func(_ context.Context, o *kvconn.Outgoing) { o.Fail(ticket.NoSpace, "full") }
		r.fails(r.t.Context(), c, ticket.NoSpace)
		if s := r.cache.Stats(); s.Cached != 8 && s.Cached != 4 {
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

// TestQuarantine: while a store does not end, its blocks are nobody's: not
// free, not the failed request's. They are free when it does.
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
