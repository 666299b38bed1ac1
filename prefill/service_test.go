package prefill_test

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

const (
	vocab  = 48
	eos    = 7
	blocks = 16
)

// rig is a prefill worker's inside and a decode that sends it tickets.
type rig struct {
	*prefill.Service
	t       *testing.T
	backend *enginetest.Backend
	cache   *kvcache.Cache
	engine  *engine.Engine
	recv    *kvconn.Receiver
	server  *kvconn.Server
	addr    string
	stop    context.CancelFunc
	slow    chan struct{} // tickets are looked at when it is closed; nil: at once
}

func (r *rig) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	if r.slow != nil {
		<-r.slow
	}
	r.Service.OnTicket(ctx, o)
}

// bubble runs f on a fresh rig under a fake clock; at its end nothing may be
// held.
func bubble(t *testing.T, change func(*prefill.Config), onStep func(*kernels.Step) error, f func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, change, onStep)
		f(r)
		time.Sleep(time.Second)
		r.empty()
		r.close()
	})
}

func newRig(t *testing.T, change func(*prefill.Config), onStep func(*kernels.Step) error) *rig {
	t.Helper()
	return newRigOf(t, 2, change, onStep)
}

// newRigOf is newRig with a model of so many layers.
func newRigOf(t *testing.T, layers int, change func(*prefill.Config), onStep func(*kernels.Step) error) *rig {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	r := &rig{t: t, backend: enginetest.New(enginetest.Config{Layers: layers, Blocks: blocks, BlockTokens: 4, Vocab: vocab})}
	r.backend.OnStep = onStep
	log := slog.New(slog.DiscardHandler)
	var err error
	r.cache, err = kvcache.New(kvcache.Config{Blocks: blocks, BlockTokens: 4, Fingerprint: "m", Numerics: "n"})
	must(err)
	ecfg := engine.DefaultConfig()
	ecfg.EOS, ecfg.MaxStepTime, ecfg.StepTokens, ecfg.MaxWaiting, ecfg.ShedLate = []int32{eos}, 0, 8, 4, true
	r.engine, err = engine.New(ecfg, r.backend, r.cache, log, prometheus.NewRegistry())
	must(err)
	cfg := prefill.DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	r.Service = prefill.New(cfg, r.engine, r.backend, r.backend.Layout(), log)
	kv := func(id string) kvconn.Config {
		c := kvconn.DefaultConfig()
		c.Identity = kvconn.Identity{PeerID: kvconn.PeerID{ID: id, Epoch: 1}, ModelFingerprint: "m", TokenizerFingerprint: "t", Numerics: "n",
			Layout: r.backend.Layout()}
		return c
	}
	mem := kvconntest.NewMemory(1 << 16)
	metrics, err := kvconn.NewMetrics(prometheus.NewRegistry())
	must(err)
	r.recv, err = kvconn.NewReceiver(kv("decode-0"), mem, log, metrics)
	must(err)
	metrics, err = kvconn.NewMetrics(prometheus.NewRegistry())
	must(err)
	r.server, err = kvconn.NewServer(kv("prefill-0"), log, metrics)
	must(err)
	ln, err := mem.Listen("")
	must(err)
	r.addr = ln.Addr().String()
	var ctx context.Context
	ctx, r.stop = context.WithCancel(t.Context())
	go func() {
		if err := r.server.Serve(ctx, ln, r); err != nil {
			t.Error(err)
		}
	}()
	return r
}

func (r *rig) empty() {
	r.t.Helper()
	synctest.Wait()
	if h := r.cache.Holders(); len(h) > 0 {
		r.t.Errorf("held: %+v", h)
	}
	if l := append(r.recv.Ledger(), r.server.Ledger()...); len(l) > 0 {
		r.t.Errorf("tickets: %+v", l)
	}
	if l := r.Ledger(); len(l) > 0 {
		r.t.Errorf("ledger: %+v", l)
	}
	if err := r.cache.Check(); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) close() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r.Close()
	if err := errors.Join(r.recv.Close(ctx), r.engine.Close(ctx)); err != nil {
		r.t.Error(err)
	}
	r.stop()
}

// sink collects what prefill pushes.
type sink struct {
	mu   sync.Mutex
	rows map[[2]int]string // layer, destination block
}

func (s *sink) Store(layer int, dst int32, _, _, _ int, packed []byte, _ []uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rows[[2]int{layer, int(dst)}] = string(packed)
	return nil
}

// tokens makes a prompt.
func tokens(seed, n int) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = int32(8 + (seed+i*i)%40)
	}
	return p
}

func order(change func(*handoff.Order)) []byte {
	o := &handoff.Order{N: 1, Logprobs: -1, PromptLogprobs: -1, Of: 1}
	if change != nil {
		change(o)
	}
	b, err := o.Encode()
	if err != nil {
		panic(err)
	}
	return b
}

func spec(prompt []int32) kvconn.TicketSpec {
	s := kvconn.TicketSpec{Link: ticket.NewLink(), RequestID: "r", Tokens: prompt, First: order(nil), Sink: &sink{rows: map[[2]int]string{}},
		Dest: make([]kvconn.Dest, (len(prompt)+3)/4)}
	for i := range s.Dest {
		s.Dest[i].Block = int32(i)
	}
	return s
}

// send sends a ticket.
func (r *rig) send(s kvconn.TicketSpec) *kvconn.Incoming {
	r.t.Helper()
	session, err := r.recv.Open(r.t.Context(), r.addr, kvconn.PeerID{})
	if err != nil {
		r.t.Fatal(err)
	}
	in, err := session.Request(r.t.Context(), s)
	if err != nil {
		r.t.Fatal(err)
	}
	return in
}

// gets waits for a ticket's end.
func (r *rig) gets(in *kvconn.Incoming, want ticket.Outcome, msg string) *handoff.Draft {
	r.t.Helper()
	c, err := in.Wait(r.t.Context())
	if o := kvconn.OutcomeOf(err, "untyped"); o != want || err != nil && !strings.Contains(err.Error(), msg) {
		r.t.Errorf("the ticket ended as %s: %v; want %s %q", o, err, want, msg)
	}
	if err != nil {
		return nil
	}
	d := &handoff.Draft{}
	for n := range 9 { // of so many choices
		o := &handoff.Order{N: n, Logprobs: 5, PromptLogprobs: -1}
		if d, err = handoff.ParseDraft(c.Payload, o, false, 1000, vocab); err == nil {
			return d
		}
	}
	r.t.Errorf("draft %s: %v", c.Payload, err)
	return d
}

// alone is what the engine draws first for each choice, without any exchange.
func (r *rig) alone(q *engine.Request) []int32 {
	r.t.Helper()
	h, err := r.engine.Submit(r.t.Context(), q)
	if err != nil {
		r.t.Fatal(err)
	}
	out := make([]int32, q.N)
	for {
		events, err := h.Next(r.t.Context())
		for _, e := range events {
			if e.Index == 0 {
				out[e.Choice] = e.Sampled.Token
			}
		}
		if err != nil {
			return out
		}
	}
}

// TestTicket: a prompt's rows arrive as they are in the pool, with the tokens
// that a plain request draws.
func TestTicket(t *testing.T) {
	for _, n := range []int{1, 4, 5, 23} {
		bubble(t, nil, nil, func(r *rig) {
			p := tokens(n, n)
			s := spec(p)
			s.First = order(func(o *handoff.Order) {
				o.N, o.Sampling = 3, engine.Sampling{Seed: 9, Temperature: 1}
				o.MinTokens = 5 // more than prefill's one token
			})
			want := r.alone(&engine.Request{ID: "plain", Prompt: p, N: 3, MaxTokens: 5, MinTokens: 5,
				Sampling: engine.Sampling{Seed: 9, Temperature: 1}, Logprobs: -1, PromptLogprobs: -1})
			report := make(chan prefill.Report, 1)
			go func() { report <- r.Await(r.t.Context(), s.Link) }()
			d := r.gets(r.send(s), ticket.Done, "")
			for i, f := range d.First {
				if f.Token != want[i] {
					r.t.Errorf("choice %d: %d, alone %v", i, f.Token, want)
				}
			}
			if got := s.Sink.(*sink).rows; len(got) != len(s.Dest)*2 {
				r.t.Errorf("%d blocks of layers arrived, want %d", len(got), len(s.Dest)*2)
			}
			if rep := <-report; rep.Outcome != ticket.Done || rep.PromptTokens != n {
				r.t.Errorf("%+v", rep)
			}
			// The engine has the prompt's blocks in its index still.
			table, hit := enginetest.HoldPrefix(r.cache, p[:n], "", "test")
			buf := make([]byte, r.backend.Layout().Resolve()[0].PackedBytes(4))
			for i := range hit / 4 {
				r.backend.Gather(1, table[i], 0, 4, buf)
				if s.Sink.(*sink).rows[[2]int{1, i}] != string(buf) {
					r.t.Errorf("block %d differs", i)
				}
			}
			r.cache.Release(table, "test")
		})
	}
}

// TestTicketForRows: where decode goes on behind tokens that it has, nothing is drawn, and of what
// the pool has nothing is computed.
func TestTicketForRows(t *testing.T) {
	for _, n := range []int{3, 16, 18, 32} {
		draws := 0
		bubble(t, nil, func(s *kernels.Step) error {
			for _, q := range s.Seqs {
				draws += len(q.Samples)
			}
			return nil
		}, func(r *rig) {
			p := tokens(n, n)
			first := spec(p)
			want := r.gets(r.send(first), ticket.Done, "")
			steps, _ := r.backend.Steps()
			s := spec(p)
			s.First, draws = order(func(o *handoff.Order) { o.Rows = true }), 0
			got := r.gets(r.send(s), ticket.Done, "")
			again, _ := r.backend.Steps()
			if len(want.First) != 1 || len(got.First) != 0 || got.Cached != n/16*16 || draws > 0 || again-steps != min(n%16, 1) {
				t.Errorf("%d tokens: %+v after %+v; %d steps with %d draws", n, got, want, again-steps, draws)
			}
			if a, b := first.Sink.(*sink).rows, s.Sink.(*sink).rows; len(b) == 0 || !maps.Equal(a, b) {
				t.Errorf("%d tokens: %d blocks of layers, and before %d, or others", n, len(b), len(a))
			}
		})
	}
}

// oneOf is a guide that allows one token alone.
type oneOf int32

func (g oneOf) Fork() engine.Guide      { return g }
func (g oneOf) Accept(token int32) bool { return token == int32(g) }
func (g oneOf) Mask(bits []uint32) {
	clear(bits)
	bits[g/32] |= 1 << (g % 32)
}

// TestTicketGuided: first tokens are drawn as decode's guide has it. One that cannot be made here gets
// the rows alone, unless log probabilities are asked for, and never tokens that count as guided.
func TestTicketGuided(t *testing.T) {
	make := func(_ context.Context, g *handoff.Guide) (engine.Guide, error) {
		if g.Kind != "one" {
			return nil, errors.New("no such kind")
		}
		return oneOf(len(g.Text)), nil
	}
	for name, c := range map[string]struct {
		make   func(context.Context, *handoff.Guide) (engine.Guide, error)
		kind   string
		listed int
		drawn  int
		want   int32
		guided bool
	}{
		"followed":            {make, "one", -1, 2, 5, true},
		"followed, listed":    {make, "one", 0, 2, 5, true},
		"unknown":             {make, "other", -1, 0, 0, false},
		"unknown, listed":     {make, "other", 0, 0, 0, false},
		"of an older release": {nil, "one", -1, 0, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(cfg *prefill.Config) { cfg.Guide = c.make }, nil, func(r *rig) {
				s := spec(tokens(18, 18))
				s.First = order(func(o *handoff.Order) {
					o.N, o.PromptLogprobs = 2, c.listed
					o.Guide = &handoff.Guide{Kind: c.kind, Text: "12345"}
				})
				in := r.send(s)
				commit, err := in.Wait(r.t.Context())
				if err != nil {
					r.t.Fatal(err)
				}
				o, err := handoff.ParseOrder(s.First)
				if err != nil {
					r.t.Fatal(err)
				}
				d, err := handoff.ParseDraft(commit.Payload, o, false, 18, vocab)
				if err != nil {
					r.t.Fatal(err)
				}
				if len(d.First) != c.drawn || d.Guided != c.guided || (len(d.Prompt) > 0) != (c.listed >= 0) {
					r.t.Errorf("%+v: want %d first tokens", d, c.drawn)
				}
				for _, f := range d.First {
					if f.Token != c.want {
						r.t.Errorf("drew %d, want %d", f.Token, c.want)
					}
				}
			})
		})
	}
}

func TestTicketRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*kvconn.TicketSpec)
		want   ticket.Outcome
	}{
		"read order":    {func(s *kvconn.TicketSpec) { s.First = []byte("{}") }, ticket.Refused},
		"positions":     {func(s *kvconn.TicketSpec) { s.Tokens = s.Tokens[:5]; s.Positions = 8 }, ticket.Refused},
		"vocabulary":    {func(s *kvconn.TicketSpec) { s.Tokens[2] = vocab }, ticket.Refused},
		"has ended":     {func(s *kvconn.TicketSpec) { s.LeaseID = "nope" }, ticket.Late},
		"choices":       {func(s *kvconn.TicketSpec) { s.First = order(func(o *handoff.Order) { o.N = 500 }) }, ticket.Refused},
		"prompt has 68": {func(s *kvconn.TicketSpec) { *s = spec(tokens(1, 68)) }, ticket.NoSpace},
	} {
		bubble(t, nil, nil, func(r *rig) {
			s := spec(tokens(1, 8))
			c.change(&s)
			if name == "choices" {
				name = "n is 500"
			}
			r.gets(r.send(s), c.want, name)
		})
	}
}

// TestLinkIsOver: a ticket of a link that has ended is refused, as are one that comes twice and one
// that announces another number; nothing of them is computed.
func TestLinkIsOver(t *testing.T) {
	bubble(t, nil, nil, func(r *rig) {
		s := spec(tokens(1, 8))
		r.gets(r.send(s), ticket.Done, "")
		synctest.Wait() // prefill ends the link a moment after decode has all
		steps, _ := r.backend.Steps()
		r.gets(r.send(s), ticket.Refused, "is over")
		two := spec(tokens(2, 8))
		two.First = order(func(o *handoff.Order) { o.Of = 2 })
		r.gets(r.send(two), ticket.Done, "")
		r.gets(r.send(two), ticket.Refused, "came twice")
		three := spec(tokens(2, 8))
		three.Link, three.First = two.Link, order(func(o *handoff.Order) { o.Index, o.Of = 1, 3 })
		r.gets(r.send(three), ticket.Refused, "2 tickets announced, now 3")
		if now, _ := r.backend.Steps(); now != steps+1 {
			r.t.Errorf("%d steps, want one", now-steps)
		}
		if rep := r.Await(r.t.Context(), two.Link); rep.Outcome != ticket.Late || rep.PromptTokens != 8 {
			r.t.Errorf("%+v", rep)
		}
	})
}

// TestEngineFails: a failed step ends the ticket and the leg as dead.
func TestEngineFails(t *testing.T) {
	for _, rows := range []bool{false, true} {
		bubble(t, nil, func(*kernels.Step) error { return errors.New("broken") }, func(r *rig) {
			s := spec(tokens(1, 8))
			s.First = order(func(o *handoff.Order) { o.Rows = rows })
			r.gets(r.send(s), ticket.Dead, "broken")
			if rep := r.Await(r.t.Context(), s.Link); rep.Outcome != ticket.Dead || !strings.Contains(rep.Message, "broken") {
				r.t.Errorf("rows %t: %+v", rows, rep)
			}
		})
	}
}

// full is a sink whose memory takes nothing.
type full struct{}

func (full) Store(int, int32, int, int, int, []byte, []uint64) error { return errors.New("full") }

// TestFailsAtTheEnd: rows that the other side could not take in are an error in the
// report too, though the engine did all that it was asked.
func TestFailsAtTheEnd(t *testing.T) {
	bubble(t, nil, nil, func(r *rig) {
		s := spec(tokens(1, 8))
		s.Sink = full{}
		r.gets(r.send(s), ticket.Corrupt, "full")
		if rep := r.Await(r.t.Context(), s.Link); rep.Outcome != ticket.Cancelled || rep.PromptTokens != 0 {
			r.t.Errorf("%+v", rep)
		}
	})
}

// hold makes the engine's steps wait until release is called.
func hold() (onStep func(*kernels.Step) error, release func()) {
	gate := make(chan struct{})
	return func(*kernels.Step) error { <-gate; return nil }, sync.OnceFunc(func() { close(gate) })
}

// TestShed: of prompts that are late, that is shed whose decode knows the outcome and says that nothing of the
// request has begun.
func TestShed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		onStep, release := hold()
		r := newRig(t, nil, onStep)
		ask := func(seed int, shed bool) *kvconn.Incoming {
			s := spec(tokens(seed, 8))
			s.First = order(func(o *handoff.Order) { o.TTFT, o.MayShed = time.Millisecond, shed })
			in := r.send(s)
			synctest.Wait()
			return in
		}
		first, begun, late := ask(1, true), ask(2, false), ask(3, true)
		time.Sleep(10 * time.Millisecond)
		release()
		r.gets(first, ticket.Done, "") // its step was under way
		r.gets(begun, ticket.Done, "")
		r.gets(late, ticket.Shed, "cannot be kept")
		time.Sleep(time.Second)
		r.empty()
		r.close()
	})
}

// TestPromised: of two prompts that wait the one goes first whose request is promised something.
func TestPromised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		onStep, release := hold()
		var ran [][]int32
		r := newRig(t, nil, func(s *kernels.Step) error {
			ran = append(ran, slices.Clone(s.Seqs[0].Tokens))
			return onStep(s)
		})
		var in []*kvconn.Incoming
		for i, ttft := range []time.Duration{0, 0, time.Second} { // the first runs while the others come
			s := spec(tokens(i+1, 8))
			s.First = order(func(o *handoff.Order) { o.TTFT = ttft })
			in = append(in, r.send(s))
			synctest.Wait()
		}
		release()
		for _, i := range in {
			r.gets(i, ticket.Done, "")
		}
		if len(ran) != 3 || !slices.Equal(ran[1], tokens(3, 8)) || !slices.Equal(ran[2], tokens(2, 8)) {
			t.Errorf("steps of %v", ran)
		}
		r.empty()
		r.close()
	})
}

// TestEitherEnd: in mid prompt, the end of either side ends the other.
func TestEitherEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		onStep, release := hold()
		r := newRig(t, nil, onStep)
		ctx, leave := context.WithCancel(t.Context())
		s := spec(tokens(1, 8))
		report := make(chan prefill.Report, 1)
		go func() { report <- r.Await(ctx, s.Link) }()
		in := r.send(s)
		synctest.Wait()
		leave() // the router
		if rep := <-report; rep.Outcome != ticket.Cancelled {
			t.Errorf("%+v", rep)
		}
		r.gets(in, ticket.Cancelled, "gave up")

		s = spec(tokens(2, 8))
		go func() { report <- r.Await(t.Context(), s.Link) }()
		in = r.send(s)
		synctest.Wait()
		if err := in.Revoke(t.Context()); err != nil { // decode
			t.Fatal(err)
		}
		if rep := <-report; rep.Outcome != ticket.Cancelled {
			t.Errorf("%+v", rep)
		}

		s = spec(tokens(3, 8))
		go func() { report <- r.Await(t.Context(), s.Link) }()
		r.send(s)
		synctest.Wait()
		if err := r.recv.Close(t.Context()); err != nil { // decode's process
			t.Fatal(err)
		}
		if rep := <-report; rep.Outcome != ticket.Dead {
			t.Errorf("%+v", rep)
		}
		release()
		r.empty()
		r.close()
	})
}

// TestQueueFull: prefill has no room, which is not the request's fault.
func TestQueueFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		onStep, release := hold()
		r := newRig(t, nil, onStep)
		var all []*kvconn.Incoming
		for i := range 8 {
			all = append(all, r.send(spec(tokens(i, 30))))
			synctest.Wait()
		}
		r.gets(all[7], ticket.NoSpace, "queue is full")
		release()
		for _, in := range all[:2] {
			r.gets(in, ticket.Done, "")
		}
		time.Sleep(time.Second)
		r.empty()
		r.close()
	})
}
