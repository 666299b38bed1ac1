//go:build cuda && cgo && linux

package worker_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// What tiers under a GPU's pool must show: right tokens, and how long the first
// one takes. On the device:
//
//	go test -tags cuda ./worker -run GPUTiers
//	XPYD_CUDA_BENCH="8k 32k overlap itl" go test -tags cuda ./worker -run HiCache
//	XPYD_CUDA_BENCH=multiturn go test -tags cuda ./worker -run HiCache

// gpuRig is a GPU's engine with host memory under its pool.
type gpuRig struct {
	t      *testing.T
	b      *cuda.Backend
	cache  *kvcache.Cache
	tiers  *tier.Tiers // nil: none
	engine *engine.Engine
	reg    *prometheus.Registry
	ended  bool
}

func newGPURig(t *testing.T, b *cuda.Backend, host int64) *gpuRig {
	t.Helper()
	return newGPURigOn(t, b, host, "")
}

// newGPURigOn has an SSD under it as well, in a folder; "": none.
func newGPURigOn(t *testing.T, b *cuda.Backend, memory int64, dir string, change ...func(*engine.Config)) *gpuRig {
	t.Helper()
	began := time.Now()
	defer func() {
		t.Logf("%d MiB of host memory: %.1f s; this process has in huge pages: %s", memory>>20, time.Since(began).Seconds(), hugePages())
	}()
	r := &gpuRig{t: t, b: b, reg: prometheus.NewRegistry()}
	log, blockTokens := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})), b.Layout().BlockTokens
	pool := kvcache.Config{Blocks: b.Blocks(), BlockTokens: blockTokens, Fingerprint: "random", Numerics: b.Info().Numerics}
	var err error
	if memory > 0 {
		cfg := tier.Config{Host: host.Config{Bytes: memory}, Identity: "random", LoadTimeout: 10 * time.Second, LoadBlocks: b.Blocks() * 3 / 4}
		if dir != "" {
			cfg.Levels = append(cfg.Levels, ssd.Config{Dir: dir, Bytes: 4 * memory})
		}
		r.tiers, err = tier.New(t.Context(), cfg, b, kvcache.UnitBlocks(blockTokens), log, r.reg)
		if err != nil {
			t.Fatal(err)
		}
		r.tiers.Tune(&pool)
		pool.Listener = r.tiers
	}
	if r.cache, err = kvcache.New(pool); err != nil {
		t.Fatal(err)
	}
	if r.tiers != nil {
		r.tiers.Attach(r.cache)
	}
	cfg := engine.DefaultConfig()
	for _, f := range change {
		f(&cfg)
	}
	if r.engine, err = engine.New(cfg, b, r.cache, log, r.reg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.end)
	return r
}

// hugePages is how much of this process's memory they are: a device reads small
// pages at four fifths of the link's rate.
func hugePages() string {
	maps, err := os.ReadFile("/proc/self/smaps_rollup")
	if err != nil {
		return err.Error()
	}
	for line := range strings.Lines(string(maps)) {
		if size, ok := strings.CutPrefix(line, "AnonHugePages:"); ok {
			return strings.TrimSpace(size)
		}
	}
	return "unknown"
}

func (r *gpuRig) end() {
	if r.ended {
		return
	}
	r.ended = true
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.engine.Close(ctx); err != nil {
		r.t.Error(err)
	}
	if r.tiers != nil {
		if err := r.tiers.Close(ctx); err != nil {
			r.t.Error(err)
		}
	}
	if err := r.cache.Check(); err != nil {
		r.t.Error(err)
	}
	if held := r.cache.Holders(); len(held) > 0 {
		r.t.Errorf("still held: %+v", held)
	}
}

// gpuSource is the tiers as one request's source.
type gpuSource struct {
	tiers  *tier.Tiers
	tokens int           // that were brought
	took   time.Duration // to begin
	layers int
	began  time.Time // the request
	there  chan time.Duration
}

func (s *gpuSource) Bring(chain kvcache.Chain, tokens, table []int32, from, upto int, ended func()) (engine.Arriving, bool) {
	began := time.Now()
	a, busy := s.tiers.Bring(chain, tokens, table, from, upto, ended)
	if a == nil {
		return nil, busy
	}
	s.tokens, s.took = a.Upto()-from, time.Since(began)
	go func() { // finer than the tiers' own look
		for a.Move().Layers() < s.layers {
			syscall.Nanosleep(&syscall.Timespec{Nsec: 100_000}, nil)
		}
		s.there <- time.Since(s.began)
	}()
	return a, false
}

// reply is what a request got, and when.
type reply struct {
	tokens []int32
	loaded int           // tokens that came from the tiers
	begun  time.Duration // how long it took until they were under way
	there  time.Duration // from its arrival until all was there; 0: nothing came
	first  time.Duration // from its arrival to its first token
	gaps   []time.Duration
}

// ask runs a prompt as a worker does: the tiers first, then the engine.
func (r *gpuRig) ask(prompt []int32, most int) (a reply) {
	r.t.Helper()
	began := time.Now()
	s := &gpuSource{tiers: r.tiers, began: began, layers: r.b.Arch().Layers, there: make(chan time.Duration, 1)}
	defer func() {
		if s.tokens > 0 && a.there == 0 {
			a.there = <-s.there
		}
	}()
	req := &engine.Request{ID: "ask", Prompt: prompt, MaxTokens: most, IgnoreEOS: true, Logprobs: -1, PromptLogprobs: -1, Sampling: engine.Sampling{TopP: 1}, Source: s}
	r.tiers.Stage(r.t.Context(), prompt, "", len(prompt)-1)
	h, err := r.engine.Submit(r.t.Context(), req)
	if err != nil {
		r.t.Error(err)
		return a
	}
	for last := began; ; {
		events, err := h.Next(r.t.Context())
		now := time.Now()
		if err != nil {
			r.t.Error(err)
			return a
		}
		for _, ev := range events {
			if len(a.tokens) == 0 {
				a.first, a.loaded, a.begun = now.Sub(began), s.tokens, s.took
			} else {
				a.gaps = append(a.gaps, now.Sub(last))
			}
			last = now
			a.tokens = append(a.tokens, ev.Sampled.Token)
			if ev.Finish != "" {
				return a
			}
		}
	}
}

// saved waits until nothing is on its way to host memory.
func (r *gpuRig) saved() {
	r.t.Helper()
	for {
		all, err := r.reg.Gather()
		if err != nil {
			r.t.Fatal(err)
		}
		waiting := 1.0
		for _, f := range all {
			if f.GetName() == "xpyd_kvtier_waiting_units" {
				waiting = f.Metric[0].GetGauge().GetValue()
			}
		}
		if waiting == 0 {
			return
		}
		select {
		case <-time.After(time.Millisecond):
		case <-r.t.Context().Done():
			r.t.Fatal("units still wait")
		}
	}
}

// TestGPUTiers: what host memory gives back is what the pool had: the same
// tokens as with a warm pool, at every block size, and after evictions.
func TestGPUTiers(t *testing.T) {
	shape := arch.Config{ModelType: "llama", Layers: 4, Hidden: 512, Intermediate: 1024, Heads: 8, KVHeads: 4, HeadDim: 64, Vocab: 4096, MaxPositions: 8192, NormEps: 1e-5, RopeTheta: 10000}
	for _, blockTokens := range []int{1, 16, 64, 256} {
		t.Run(fmt.Sprint(blockTokens), func(t *testing.T) {
			b, err := cuda.NewRandom(shape, 1, cuda.Options{BlockTokens: blockTokens, Blocks: 16384 / blockTokens, MaxTokens: 2048, MaxSeqs: 256})
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			r := newGPURig(t, b, 256<<20)
			defer r.end()
			const n = 3000
			prompt := randomPrompt(1, n, shape.Vocab)
			unit := max(blockTokens, kvcache.Grain)
			whole := (n - 1) / unit * unit
			r.ask(prompt, 1)
			warm := r.ask(prompt, 32)
			for round := range 3 {
				r.saved()
				r.cache.Clear()
				for i := range uint64(round) { // other rows where its own lay
					r.ask(randomPrompt(100+i, n, shape.Vocab), 8)
				}
				if a := r.ask(prompt, 32); a.loaded < whole-unit || !slices.Equal(a.tokens, warm.tokens) {
					t.Errorf("round %d: %d of %d tokens loaded, tokens %v, want %v", round, a.loaded, whole, a.tokens, warm.tokens)
				}
			}
		})
	}
}

// TestGPUTiersInvariant: in batch-invariant mode a prompt's tokens are the same cold, from the pool,
// from host memory, from the SSD, from both in parts, and in a batch, at every block size.
func TestGPUTiersInvariant(t *testing.T) {
	shape := arch.Config{ModelType: "llama", Layers: 4, Hidden: 512, Intermediate: 1024, Heads: 8, KVHeads: 4, HeadDim: 64, Vocab: 4096, MaxPositions: 8192, NormEps: 1e-5, RopeTheta: 10000}
	for _, blockTokens := range []int{1, 16, 64, 256} {
		t.Run(fmt.Sprint(blockTokens), func(t *testing.T) {
			b, err := cuda.NewRandom(shape, 1, cuda.Options{BlockTokens: blockTokens, Blocks: 16384 / blockTokens, MaxTokens: 2048, MaxSeqs: 256, BatchInvariant: true})
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			const n = 3000
			dir := t.TempDir()
			r := newGPURigOn(t, b, 256<<20, dir)
			prompt := randomPrompt(1, n, shape.Vocab)
			unit := max(blockTokens, kvcache.Grain)
			whole := (n - 1) / unit * unit
			cold := r.ask(prompt, 32)
			same := func(where string, from int) {
				t.Helper()
				if a := r.ask(prompt, 32); a.loaded != from || !slices.Equal(a.tokens, cold.tokens) {
					t.Errorf("%s: %d tokens loaded, want %d; %v, want %v", where, a.loaded, from, a.tokens, cold.tokens)
				}
			}
			same("pool", 0)
			r.saved()
			r.cache.Clear()
			same("host memory", whole)
			r.saved()
			r.end()
			r = newGPURigOn(t, b, 256<<20, dir) // with nothing but the SSD
			same("SSD", whole)
			r.saved()
			r.end()
			r = newGPURigOn(t, b, 256<<20, dir)
			r.tiers.Stage(t.Context(), prompt[:n/2], "", n/2)
			same("the first half in host memory, the rest on the SSD", whole)
			r.cache.Clear()
			others := make(chan reply)
			for i := range uint64(8) {
				go func() { others <- r.ask(randomPrompt(100+i, 700, shape.Vocab), 64) }()
			}
			same("host memory, beside others", whole)
			for range 8 {
				<-others
			}
			r.end()
		})
	}
}

// TestHiCache prints a JSON line per figure: the time to the first token with a prefix in host memory,
// and what writing through costs requests that decode. XPYD_CUDA_BENCH names what to run:
// "8k 32k overlap itl".
func TestHiCache(t *testing.T) {
	what := strings.Fields(os.Getenv("XPYD_CUDA_BENCH"))
	if len(what) == 0 {
		t.Skip("XPYD_CUDA_BENCH is not set")
	}
	shape := arch.Config{ModelType: "llama", Layers: 32, Hidden: 4096, Intermediate: 14336, Heads: 32, KVHeads: 8, HeadDim: 128, Vocab: 128256, MaxPositions: 40960,
		NormEps: 1e-5, RopeTheta: 500000}
	opt := cuda.Options{MaxTokens: 2048, MaxSeqs: 256}
	if slices.Contains(what, "multiturn") { // on its own: the pool is capped
		opt.Blocks = 12 << 30 / (16 * 131072)
	}
	b, err := cuda.NewRandom(shape, 1, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	t.Logf("%s, %d blocks", b.Info().Device, b.Blocks())
	for _, w := range what {
		switch w {
		case "8k":
			hitSpeed(t, b, w, 8192, 5)
		case "32k":
			hitSpeed(t, b, w, 32768, 3)
		case "overlap":
			overlap(t, b)
		case "itl":
			writeThrough(t, b)
		case "multiturn":
			multiturn(t, b)
		default:
			t.Fatalf("no benchmark %q", w)
		}
	}
}

func hitSpeed(t *testing.T, b *cuda.Backend, name string, n, rounds int) {
	r := newGPURig(t, b, 10<<30)
	defer r.end()
	var cold, warm, hit, load, ratio, begun, there []float64
	for i := range rounds + 1 {
		prompt := randomPrompt(uint64(i), n, b.Arch().Vocab)
		c := r.ask(prompt, 2)
		r.saved()
		r.cache.Clear()
		alone := r.load(prompt, n-1)
		w := r.ask(prompt, 2)
		r.cache.Clear()
		h := r.ask(prompt, 2)
		if h.loaded < n-32 {
			t.Errorf("%s: %d of %d tokens came from host memory", name, h.loaded, n)
		}
		if i == 0 { // the memory's first use
			continue
		}
		cold, warm, hit, load = append(cold, ms(c.first)), append(warm, ms(w.first)), append(hit, ms(h.first)), append(load, ms(alone))
		ratio = append(ratio, ms(h.first)/ms(c.first))
		begun, there = append(begun, ms(h.begun)), append(there, ms(h.there))
	}
	t.Logf("%s: a hit: Bring took %.2f ms, all was there after %.1f ms, %.1f more than alone, and the first token came %.1f later", name, median(begun), median(there),
		median(there)-median(load), median(hit)-median(there))
	t.Logf("%s: computed %.1f ms, in the pool %.1f ms, loaded alone in %.1f ms (%.1f GB/s), first token of a hit after %.1f ms", name, median(cold), median(warm),
		median(load), float64(n)*131072/1e6/median(load), median(hit))
	result("hicache.hit_ttft_ms."+name, "ms", hit, "the same prompt computed", median(cold))
	result("hicache.hit_ttft_ratio."+name, "", ratio, "the same prompt computed", 1)
}

// load loads the first upto tokens of a prompt, and says how long it takes until
// all have been verified.
func (r *gpuRig) load(prompt []int32, upto int) time.Duration {
	r.t.Helper()
	const owner = "load"
	began := time.Now()
	chain := r.cache.NewChain("")
	chain.Extend(prompt)
	table, _, err := r.cache.Reserve(&chain, upto, r.cache.BlocksFor(upto), 0, began, owner)
	if err != nil {
		r.t.Fatal(err)
	}
	defer r.cache.ReleaseAll(owner)
	a, _ := r.tiers.Bring(chain, prompt, table, 0, upto, func() {})
	if a == nil {
		r.t.Fatal("nothing arrives")
	}
	begun := time.Since(began)
	if err := a.Move().Wait(r.t.Context()); err != nil {
		r.t.Error(err)
	}
	took := time.Since(began)
	<-a.Done()
	r.t.Logf("%d tokens: under way after %.2f ms, there after %.2f", a.Upto(), ms(begun), ms(took))
	return took
}

// stepped is a reply, and of the steps with its prompt how many there were, and how
// long they took on the device, ms.
type stepped struct {
	reply
	steps  int
	device float64
}

// overlap measures how much of a load is hidden: a prompt with its first half in host memory against the
// same prompt with that half in the pool. They run in pairs, in alternating order, each after a computed
// prompt and a pause, so that the device is equally warm and has the same clock for both: at its power
// limit the same prompt takes 8 % more or less, and the load is 9 % of it. The result is the median of
// the pairs' differences.
func overlap(t *testing.T, b *cuda.Backend) {
	const n, pairs, pause = 8192, 32, 300 * time.Millisecond
	r := newGPURigOn(t, b, 10<<30, "", func(c *engine.Config) { c.MaxStepTime = 0 }) // steps of 2,048 tokens, however long
	defer r.end()
	half, seed := randomPrompt(1, n/2, b.Arch().Vocab), uint64(100)
	ask := func(prompt []int32) (a stepped) {
		began := time.Now()
		a.reply = r.ask(prompt, 2)
		for _, s := range r.engine.Steps() {
			if s.Began.After(began) && s.Tokens > 1 {
				a.steps, a.device = a.steps+1, a.device+s.Device/1000
			}
		}
		return a
	}
	turn := func(clear bool) []int32 {
		r.ask(randomPrompt(seed+1, n/4, b.Arch().Vocab), 2)
		r.saved()
		if clear {
			r.cache.Clear()
		}
		seed += 2
		time.Sleep(pause)
		return append(slices.Clone(half), randomPrompt(seed, n/2, b.Arch().Vocab)...)
	}
	r.ask(turn(false), 2)
	r.ask(turn(false), 2)
	var host, warm, load, begun, there, shows, longer []float64
	for i := range pairs {
		var h, w stepped
		if i%2 == 0 {
			h = ask(turn(true))
			w = ask(turn(false))
		} else {
			w = ask(turn(false))
			h = ask(turn(true))
		}
		l := r.load(turn(true), n/2)
		r.ask(turn(false), 2) // the half is in the pool for who is first next
		if h.loaded != n/2 || w.loaded != 0 {
			t.Errorf("%d and %d tokens came from host memory", h.loaded, w.loaded)
		}
		if h.steps != w.steps {
			t.Errorf("%d and %d steps", h.steps, w.steps)
		}
		longer = append(longer, h.device-w.device)
		begun, there = append(begun, ms(h.begun)), append(there, ms(h.there))
		host, warm, load = append(host, ms(h.first)), append(warm, ms(w.first)), append(load, ms(l))
		shows = append(shows, ms(h.first-w.first))
	}
	t.Logf("overlap: half in host memory %.2f ms (under way after %.2f, there after %.2f), in the pool %.2f ms, loaded alone %.2f ms, shows %.2f ms of %.2f", median(host), median(begun),
		median(there), median(warm), median(load), median(shows), shows)
	t.Logf("overlap: its steps take %.2f ms longer on the device", median(longer))
	hidden := make([]float64, pairs)
	for i := range hidden {
		hidden[i] = 100 * (1 - shows[i]/median(load))
	}
	result("hicache.overlap_pct", "%", hidden, "the same half in the pool, first token after ms", median(warm))
}

// writeThrough compares the gaps between tokens of 64 streams.
func writeThrough(t *testing.T, b *cuda.Backend) {
	p99 := map[bool][]float64{}
	for round := range 10 {
		through := round%2 == 1
		host := int64(0)
		if through {
			host = 12 << 30
		}
		r := newGPURig(t, b, host)
		answers := make(chan reply)
		for i := range 64 {
			go func() { answers <- r.ask(randomPrompt(uint64(1000*round+i), 512, b.Arch().Vocab), 176) }()
		}
		var gaps []float64
		for range 64 {
			a := <-answers
			for _, g := range a.gaps[min(80, len(a.gaps)):] { // all decode by then
				gaps = append(gaps, ms(g))
			}
		}
		r.end()
		slices.Sort(gaps)
		p99[through] = append(p99[through], gaps[len(gaps)*99/100])
	}
	ratio := make([]float64, len(p99[true]))
	for i := range ratio {
		ratio[i] = p99[true][i] / p99[false][i]
	}
	t.Logf("p99 of the gap: %.2f ms without tiers, %.2f ms writing through", p99[false], p99[true])
	result("hicache.itl_ratio", "", ratio, fmt.Sprintf("decoding without tiers (p99 %.2f ms)", median(p99[false])), 1)
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

// median is of an even number the mean of the two in the middle.
func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// interval has the median of what v is a sample of in 95 of 100 samples, by their ranks.
func interval(v []float64) (float64, float64) {
	s := slices.Sorted(slices.Values(v))
	k := max(0, int(float64(len(s))/2-0.98*math.Sqrt(float64(len(s)))))
	return s[k], s[len(s)-1-k]
}

func result(name, unit string, v []float64, peer string, beside float64) {
	least, most := interval(v)
	line, _ := json.Marshal(map[string]any{"name": name, "value": median(v), "unit": unit, "peer": peer, "peer_value": beside, "runs": len(v),
		"spread": fmt.Sprintf("%.3f..%.3f, 95 %% of medians %.3f..%.3f", slices.Min(v), slices.Max(v), least, most)})
	fmt.Fprintf(os.Stdout, "RESULT %s\n", line)
}
