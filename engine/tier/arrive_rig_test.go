package tier

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
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
	over   chan struct{} // closed when it closes
	dir    string        // of the SSD
	levelsOf
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
			for layer := range int32(d.Layout().Layers()) {
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
	rows := make([]byte, l.Resolve()[0].BlockBytes())
	d.Gather(layer, block, 0, l.BlockTokens, rows)
	kernels.DigestRows(&l.Resolve()[layer], d.pos[block], l.BlockTokens, rows, dst)
}

func (d *digested) SetDigest(layer int, block int32, _ int, sums []uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sums[[2]int32{int32(layer), block}] = slices.Clone(sums)
}

func newStepRig(t *testing.T, cfg engine.Config, blocks int) *stepRig {
	t.Helper()
	tc := config("")
	tc.HostBytes = 1 << 20
	return newStepRigOn(t, cfg, blocks, tc)
}

func newStepRigOn(t *testing.T, cfg engine.Config, blocks int, tc testConfig) *stepRig {
	t.Helper()
	if !bulk {
		t.Skip("the pool is host memory: nothing arrives")
	}
	r := &stepRig{t: t, reg: prometheus.NewRegistry(), over: make(chan struct{})}
	pool := &digested{Backend: enginetest.New(enginetest.Config{Layers: 4, Blocks: blocks, BlockTokens: 16, MaxPositions: 2048}),
		pos: make(map[int32]int), sums: make(map[[2]int32][]uint64)}
	pool.OnStep = pool.onStep
	r.model, r.dev = &enginetest.Pipelined{Backend: pool.Backend}, &fakeDevice{fakePool: pool}
	log := slog.New(slog.DiscardHandler)
	var err error
	if r.tiers, err = New(t.Context(), tc.levels(nil), r.dev, 1, log, r.reg); err != nil {
		t.Fatal(err)
	}
	r.levelsOf, r.dir = levelsIn(r.tiers), tc.Dir
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
	select {
	case <-r.over:
		return
	default:
		close(r.over)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
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

// await is how a gate waits: a test that failed leaves nothing that waits for it.
func (r *stepRig) await(c <-chan struct{}) {
	select {
	case <-c:
	case <-r.over:
	}
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
	select {
	case s.got <- a:
	default: // more than anybody looks at: the engine's goroutine must not wait
	}
	return a, false
}

// read returns a request's tokens, and how many of its prompt were cached.
func read(h *engine.Handle) (tokens []int32, cached int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		events, err := h.Next(ctx)
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
	come(r.t, "the request's end", h.Done())
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
	l := r.host.Peek(ch.Name((unit + 1) * 16))
	if l == nil {
		r.t.Fatalf("unit %d is not in host memory", unit)
	}
	defer l.Release()
	l.Record()[headerSize+layer*r.dev.Layout().Resolve()[0].BlockBytes()+5] ^= 1
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
