package tier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/engine"
	"github.com/xpyd/xpyd/internal/engine/enginetest"
	"github.com/xpyd/xpyd/internal/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// stepRig is an engine on a device whose pool has tiers under it.
type stepRig struct {
	t      *testing.T
	model  *enginetest.Pipelined
	dev    *fakeDevice
	cache  *kvcache.Cache
	tiers  *Tiers
	engine *engine.Engine
	reg    *prometheus.Registry
	closed bool
}

// digested is the fake model's pool with digests: made of the rows, as the model
// would have, or as they were set.
type digested struct {
	*enginetest.Backend
	mu   sync.Mutex
	pos  map[int32]int         // of a block's first row
	sums map[[2]int32][]uint64 // set, by layer and block; until a step writes there
}

func (d *digested) onStep(s *kernels.Step) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	bt := d.Layout().BlockTokens
	for _, q := range s.Seqs {
		for i := q.Pos / bt; i*bt < q.Pos+len(q.Tokens); i++ {
			d.pos[q.Blocks[i]] = i * bt
			for layer := range int32(d.Layout().Layers) {
				delete(d.sums, [2]int32{layer, q.Blocks[i]})
			}
		}
	}
	return nil
}

func (d *digested) Digest(layer int, block int32, dst []uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if set, ok := d.sums[[2]int32{int32(layer), block}]; ok {
		copy(dst, set)
		return
	}
	l := d.Layout()
	rows := make([]byte, l.BlockBytes())
	d.Gather(layer, block, 0, l.BlockTokens, rows)
	kernels.DigestRows(l, layer, d.pos[block], l.BlockTokens, rows, dst)
}

func (d *digested) SetDigest(layer int, block int32, _ int, sums []uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sums[[2]int32{int32(layer), block}] = slices.Clone(sums)
}

func newStepRig(t *testing.T, cfg engine.Config, blocks int) *stepRig {
	t.Helper()
	if !bulk {
		t.Skip("the pool is host memory: nothing arrives")
	}
	r := &stepRig{t: t, reg: prometheus.NewRegistry()}
	pool := &digested{Backend: enginetest.New(enginetest.Config{Layers: 4, Blocks: blocks, BlockTokens: 16, MaxPositions: 2048}),
		pos: make(map[int32]int), sums: make(map[[2]int32][]uint64)}
	pool.OnStep = pool.onStep
	r.model, r.dev = &enginetest.Pipelined{Backend: pool.Backend}, &fakeDevice{fakePool: pool}
	log := slog.New(slog.DiscardHandler)
	tc := config("")
	tc.HostBytes = 1 << 20
	var err error
	if r.tiers, err = New(tc, r.dev, 1, log, r.reg); err != nil {
		t.Fatal(err)
	}
	if r.cache, err = kvcache.New(kvcache.Config{Blocks: blocks, BlockTokens: 16, Fingerprint: identity, Listener: r.tiers}); err != nil {
		t.Fatal(err)
	}
	r.tiers.Attach(r.cache)
	if r.engine, err = engine.New(cfg, r.model, r.cache, log, r.reg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

func stepConfig() engine.Config {
	cfg := engine.DefaultConfig()
	cfg.EOS, cfg.MaxBacklog = nil, 1<<20
	return cfg
}

// close ends all, and looks at the ledger.
func (r *stepRig) close() {
	if r.closed {
		return
	}
	r.closed = true
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := errors.Join(r.engine.Close(ctx), r.tiers.Close(ctx), r.cache.Check()); err != nil {
		r.t.Error(err)
	}
	if held := r.cache.Holders(); len(held) > 0 {
		r.t.Errorf("still held: %+v", held)
	}
}

func (r *stepRig) setGate(f func(layer int)) {
	r.dev.mu.Lock()
	defer r.dev.mu.Unlock()
	r.dev.gate = f
}

// lose makes arrivals end in an error.
func (r *stepRig) lose(err error) {
	r.dev.mu.Lock()
	defer r.dev.mu.Unlock()
	r.dev.lost = err
}

func talk(seed uint64, n int) []int32 {
	r := rand.New(rand.NewPCG(seed, 2))
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32(r.IntN(48))
	}
	return tokens
}

// begin submits a prompt; what arrives of it comes out of the channel.
func (r *stepRig) begin(tokens []int32, most int, change func(*engine.Request)) (*engine.Handle, spy) {
	r.t.Helper()
	s := spy{r.tiers, make(chan *Arrival, 8)}
	req := &engine.Request{ID: "r", Prompt: tokens, MaxTokens: most, IgnoreEOS: true, Logprobs: -1, PromptLogprobs: -1, Source: s}
	if n := r.tiers.Stage(r.t.Context(), tokens, "", len(tokens)-1); n > 0 {
		r.t.Errorf("%d tokens were loaded, and all are in host memory", n)
	}
	if change != nil {
		change(req)
	}
	h, err := r.engine.Submit(r.t.Context(), req)
	if err != nil {
		r.t.Fatal(err)
	}
	return h, s
}

// spy notes what the engine is brought.
type spy struct {
	tiers *Tiers
	got   chan *Arrival
}

func (s spy) Bring(chain kvcache.Chain, tokens, table []int32, from, upto int, ended func()) (engine.Arriving, bool) {
	a, busy := s.tiers.Bring(chain, tokens, table, from, upto, ended)
	if a == nil {
		return nil, busy
	}
	s.got <- a
	return a, false
}

// read returns a request's tokens, and how many of its prompt were cached.
func read(h *engine.Handle) (tokens []int32, cached int, err error) {
	for {
		events, err := h.Next(context.Background())
		if errors.Is(err, io.EOF) {
			return tokens, cached, nil
		}
		if err != nil {
			return tokens, cached, err
		}
		for _, ev := range events {
			if tokens = append(tokens, ev.Sampled.Token); ev.Prompt != nil {
				cached = ev.Prompt.CachedTokens
			}
		}
	}
}

// cold computes a prompt, and leaves it in host memory alone.
func (r *stepRig) cold(tokens []int32, most int) []int32 {
	r.t.Helper()
	h, _ := r.begin(tokens, most, nil)
	out, _, err := read(h)
	if err != nil {
		r.t.Fatal(err)
	}
	<-h.Done()
	r.quiet()
	r.cache.Clear()
	return out
}

func (r *stepRig) quiet() { (&rig{t: r.t, tiers: r.tiers}).quiet() }

// spoil changes a byte of a prompt's rows in host memory.
func (r *stepRig) spoil(tokens []int32, unit, layer int) {
	r.t.Helper()
	ch := r.cache.NewChain("")
	ch.Extend(tokens)
	l := r.tiers.host.peek(ch.Name((unit + 1) * 16))
	if l == nil {
		r.t.Fatalf("unit %d is not in host memory", unit)
	}
	defer l.release()
	l.record()[headerSize+layer*r.dev.Layout().BlockBytes()+5] ^= 1
}

func (r *stepRig) voided() float64 {
	all, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == "xpyd_engine_voided_prefixes_total" {
			return f.Metric[0].GetCounter().GetValue()
		}
	}
	return -1
}

// TestArriveBehindStep: the step is launched before the first layer is there, and
// answers as if all had been computed, whole prefixes and parts, in one chunk and
// in many.
func TestArriveBehindStep(t *testing.T) {
	for _, chunk := range []int{16, 512} {
		cfg := stepConfig()
		cfg.StepTokens, cfg.MaxStepTime = chunk, 0
		r := newStepRig(t, cfg, 64)
		for _, part := range []int{321, 160} {
			tokens := talk(uint64(chunk+part), 321)
			want := r.cold(tokens, 8)
			if part < len(tokens) { // then only its begin is to be in host memory
				if err := r.tiers.Flush(); err != nil {
					t.Fatal(err)
				}
				r.cold(tokens[:part+1], 1)
			}
			layers := make(chan struct{})
			r.setGate(func(int) { <-layers })
			h, s := r.begin(tokens, 8, nil)
			a := <-s.got
			for h.CachedTokens() == 0 { // it has been placed on what is not there
				time.Sleep(time.Millisecond)
			}
			if a.Move().Layers() != 0 {
				t.Error("a layer is there already")
			}
			close(layers)
			got, cached, err := read(h)
			if err != nil || !slices.Equal(got, want) || cached != part/16*16 {
				t.Errorf("chunks of %d, %d of %d tokens in host memory: %v with %d cached, want %v: %v", chunk, part, len(tokens), got, cached, want, err)
			}
			<-a.Done()
			if n := r.cache.Reach(new(r.chain(tokens)), len(tokens)-1); n != 320 {
				t.Errorf("%d tokens in the index", n)
			}
			r.setGate(nil)
			<-h.Done()
			r.quiet()
			r.cache.Clear()
		}
		if r.voided() != 0 {
			t.Error("right rows were dropped")
		}
		r.close()
	}
}

func (r *stepRig) chain(tokens []int32) kvcache.Chain {
	c := r.cache.NewChain("")
	c.Extend(tokens)
	return c
}

// TestArriveWrong: rows that are not what their digests say never become a token,
// nor get into the index, nor are they told of; what computes with right ones in
// the same step is not hurt.
func TestArriveWrong(t *testing.T) {
	for _, chunk := range []int{16, 512} {
		for _, unit := range []int{0, 7, 19} {
			for layer := range 4 {
				cfg := stepConfig()
				cfg.StepTokens, cfg.MaxStepTime = chunk, 0
				r := newStepRig(t, cfg, 128)
				tokens, other := talk(1, 401), talk(2, 100)
				want, beside := r.cold(tokens, 8), r.cold(other, 8)
				if err := r.tiers.Flush(); err != nil {
					t.Fatal(err)
				}
				r.cold(tokens[:321], 1)
				r.spoil(tokens, unit, layer)
				h2, _ := r.begin(other, 8, nil)
				placed := make(chan struct{})
				r.setGate(func(int) { <-placed })
				told := newTold(r, tokens)
				var h *engine.Handle
				if chunk == 16 {
					h, _ = r.begin(tokens, 8, func(q *engine.Request) { q.PrefillOnly, q.OnBlocks = true, told.on })
				} else {
					h, _ = r.begin(tokens, 8, nil)
				}
				for h.CachedTokens() == 0 {
					time.Sleep(time.Millisecond)
				}
				close(placed)
				got, cached, err := read(h)
				if err != nil || cached != unit*16 || !slices.Equal(got, want[:len(got)]) || len(got) == 0 {
					t.Errorf("unit %d, layer %d is wrong: %v with %d cached, want %v: %v", unit, layer, got, cached, want, err)
				}
				if chunk == 16 {
					h.Release()
					<-h.Done()
					told.check()
				}
				if out, _, err := read(h2); err != nil || !slices.Equal(out, beside) {
					t.Errorf("beside it: %v, want %v: %v", out, beside, err)
				}
				if r.voided() != 1 {
					t.Errorf("%v prefixes dropped, want 1", r.voided())
				}
				r.close()
			}
		}
	}
}

// told notes what OnBlocks hears.
type told struct {
	r      *stepRig
	tokens []int32
	mu     sync.Mutex
	times  map[[2]int]int // by layer and index
	rows   map[[2]int][]byte
}

func newTold(r *stepRig, tokens []int32) *told {
	return &told{r: r, tokens: tokens, times: make(map[[2]int]int), rows: make(map[[2]int][]byte)}
}

func (o *told) on(layer int, ready []engine.Ready) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, b := range ready {
		at := [2]int{layer, b.Index}
		o.times[at]++
		rows := make([]byte, o.r.dev.Layout().RowsBytes(b.Rows))
		o.r.dev.Gather(layer, b.Block, 0, b.Rows, rows)
		o.rows[at] = rows
	}
}

// check compares with what a request hears that computes everything.
func (o *told) check() {
	o.r.t.Helper()
	o.r.quiet()
	o.r.cache.Clear()
	if err := o.r.tiers.Flush(); err != nil {
		o.r.t.Fatal(err)
	}
	all := newTold(o.r, o.tokens)
	h, _ := o.r.begin(o.tokens, 8, func(q *engine.Request) { q.PrefillOnly, q.OnBlocks = true, all.on })
	if _, _, err := read(h); err != nil {
		o.r.t.Fatal(err)
	}
	h.Release()
	<-h.Done()
	for at, rows := range all.rows {
		if o.times[at] != 1 || !slices.Equal(o.rows[at], rows) {
			o.r.t.Errorf("layer %d, block %d: told %d times, right rows %t", at[0], at[1], o.times[at], slices.Equal(o.rows[at], rows))
		}
	}
	if len(o.rows) != len(all.rows) {
		o.r.t.Errorf("told of %d, want %d", len(o.rows), len(all.rows))
	}
}

// TestArriveEnds: a request that is cancelled, or released (revoked), with some
// layers there leaves nothing held, and the index gets the prefix all the same.
func TestArriveEnds(t *testing.T) {
	for name, end := range map[string]func(*engine.Handle){
		"cancelled": (*engine.Handle).Cancel, "released": (*engine.Handle).Release,
	} {
		for layer := range 4 {
			r := newStepRig(t, stepConfig(), 64)
			tokens := talk(3, 321)
			want := r.cold(tokens, 4)
			reached, pass := make(chan struct{}), make(chan struct{})
			r.setGate(func(l int) {
				if l == layer {
					close(reached)
					<-pass
				}
			})
			h, s := r.begin(tokens, 4, func(q *engine.Request) { q.PrefillOnly = name == "released" })
			a := <-s.got
			<-reached
			end(h)
			if len(r.cache.Holders()) == 0 {
				t.Errorf("%s at layer %d: nothing is held while blocks are written", name, layer)
			}
			close(pass)
			<-a.Done()
			<-h.Done()
			r.setGate(nil)
			h, again := r.begin(tokens, 4, nil)
			if got, cached, err := read(h); err != nil || len(again.got) > 0 || cached != 320 || !slices.Equal(got, want) {
				t.Errorf("%s at layer %d: then %v with %d cached, want %v: %v", name, layer, got, cached, want, err)
			}
			r.close()
		}
	}
}

// TestArriveFails: an arrival that does not begin, or ends in an error, costs the
// hit and nothing else.
func TestArriveFails(t *testing.T) {
	r := newStepRig(t, stepConfig(), 64)
	tokens := talk(4, 321)
	want := r.cold(tokens, 4)
	fault := fmt.Errorf("a fault")
	r.lose(fault)
	h, s := r.begin(tokens, 4, nil)
	a := <-s.got
	if got, cached, err := read(h); err != nil || cached != 0 || !slices.Equal(got, want) {
		t.Errorf("%v with %d cached, want %v: %v", got, cached, want, err)
	}
	<-a.Done()
	<-h.Done()
	r.lose(nil)
	r.quiet()
	r.cache.Clear()
	r.dev.mu.Lock()
	r.dev.fail = fault
	r.dev.mu.Unlock()
	h, s = r.begin(tokens, 4, nil)
	if got, cached, err := read(h); len(s.got) > 0 || err != nil || cached != 0 || !slices.Equal(got, want) {
		t.Errorf("%v with %d cached, want %v: %v", got, cached, want, err)
	}
	<-h.Done()
}

// TestArriveHoldsUpNobody: who decodes goes on while another's prefix is on its
// way; its request is let in when it has come.
func TestArriveHoldsUpNobody(t *testing.T) {
	r := newStepRig(t, stepConfig(), 128)
	tokens, other := talk(5, 321), talk(6, 20)
	want := r.cold(tokens, 4)
	first := make(chan struct{})
	var once sync.Once
	r.model.OnStep = chain(r.model.OnStep, func(s *kernels.Step) {
		if len(s.Arrivals) > 0 && len(s.Seqs) > 1 {
			for _, a := range s.Arrivals {
				if a.Layers() == 0 {
					t.Error("a step with others waits for what has not begun to come")
				}
			}
		}
	})
	long, _ := r.begin(other, 400, nil)
	if _, err := long.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.setGate(func(layer int) {
		if layer == 0 {
			<-first
		}
	})
	h, s := r.begin(tokens, 4, nil)
	a := <-s.got
	for n := 0; n < 50; { // fifty tokens while nothing comes
		events, err := long.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		n += len(events)
	}
	once.Do(func() { close(first) })
	<-a.Done()
	if got, _, err := read(h); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, want %v: %v", got, want, err)
	}
	if _, _, err := read(long); err != nil {
		t.Error(err)
	}
}

func chain(first func(*kernels.Step) error, then func(*kernels.Step)) func(*kernels.Step) error {
	return func(s *kernels.Step) error {
		then(s)
		return first(s)
	}
}

// TestArriveRandom: many at once on a small pool, with wrong rows, cancels and
// slow layers among them: right tokens, and nothing held at the end.
func TestArriveRandom(t *testing.T) {
	r := newStepRig(t, stepConfig(), 96)
	var prompts, want [][]int32
	for i := range uint64(6) {
		prompts = append(prompts, talk(10+i, 200+int(i)*16))
		want = append(want, r.cold(prompts[i], 6))
	}
	r.setGate(func(int) {
		if rand.IntN(4) == 0 {
			time.Sleep(time.Millisecond)
		}
	})
	for round := range 25 {
		gen := rand.New(rand.NewPCG(uint64(round), 3))
		r.quiet()
		r.cache.Clear()
		for i := range prompts {
			ch := r.chain(prompts[i])
			if gen.IntN(4) == 0 && r.tiers.host.has(ch.Name(48)) {
				r.spoil(prompts[i], 2, gen.IntN(4))
			}
		}
		var all sync.WaitGroup
		for range 6 {
			i, cancel := gen.IntN(len(prompts)), gen.IntN(4) == 0
			h, _ := r.begin(prompts[i], 6, nil)
			all.Go(func() {
				if cancel {
					h.Cancel()
				}
				got, _, err := read(h)
				if err == nil && !slices.Equal(got, want[i]) || err != nil && !errors.Is(err, engine.ErrCancelled) {
					t.Errorf("round %d, prompt %d: %v, want %v: %v", round, i, got, want[i], err)
				}
				<-h.Done()
			})
		}
		all.Wait()
	}
}

// TestArriveOnce: requests for one prefix that wait for memory, or come while it
// arrives, cost one way of it; the others find it in the index.
func TestArriveOnce(t *testing.T) {
	r := newStepRig(t, stepConfig(), 96)
	tokens := talk(7, 321)
	want := r.cold(tokens, 4)
	open := make(chan struct{})
	r.setGate(func(int) { <-open })
	var all sync.WaitGroup
	var spies []spy
	for i := range 12 {
		h, s := r.begin(tokens, 4, nil)
		spies = append(spies, s)
		if i == 0 {
			s.got <- <-s.got // it has begun
		}
		all.Go(func() {
			if got, cached, err := read(h); err != nil || cached != 320 || !slices.Equal(got, want) {
				t.Errorf("%v with %d cached, want %v: %v", got, cached, want, err)
			}
			<-h.Done()
		})
	}
	close(open)
	all.Wait()
	n := 0
	for _, s := range spies {
		n += len(s.got)
	}
	if n != 1 {
		t.Errorf("the prefix came %d times", n)
	}
}
