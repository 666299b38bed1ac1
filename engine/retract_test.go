package engine_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

// TestRetraction: prompts of many blocks under a pool that is always full, with
// host memory and an SSD below it that are too small as well, while every 50
// steps a sequence is retracted: each request gets the tokens that it gets
// alone, and nothing is left behind. XPYD_RETRACT_REQUESTS sets how many
// requests each block size gets (120; `make soak`: 5,000).
func TestRetraction(t *testing.T) {
	if pipelined {
		return // the CPU backend is no Launcher: the first pass was the same
	}
	n := 120
	if s := os.Getenv("XPYD_RETRACT_REQUESTS"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	shape := arch.Config{ModelType: "llama", Layers: 2, Hidden: 32, Intermediate: 48, Heads: 4, KVHeads: 2, HeadDim: 8, Vocab: 48, MaxPositions: 1024, NormEps: 1e-5, RopeTheta: 10000}
	weights := randomWeights(shape)
	open := func(blocks, blockTokens int) kernels.Backend {
		b, err := cpu.New(shape, weights, cpu.Options{Blocks: blocks, BlockTokens: blockTokens, Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Close() })
		return b
	}
	gen := rand.New(rand.NewPCG(3, 9))
	stem := prompt(gen, 300)
	var requests []*engine.Request
	var want [][]output
	for i := range 24 {
		p := append(stem[:gen.IntN(len(stem)):len(stem)-1], prompt(gen, 20+gen.IntN(400))...)
		p = append([]int32(nil), p...)
		req := request(p, 4+gen.IntN(40))
		req.IgnoreEOS, req.Seed, req.Temperature = true, uint64(i), float32(i%2)
		requests = append(requests, req)
		want = append(want, aloneOn(t, open(64, 16), 1024, req))
	}
	for _, blockTokens := range []int{1, 16, 64, 256} {
		t.Run(fmt.Sprint(blockTokens), func(t *testing.T) {
			retraction(t, open(1536/blockTokens, blockTokens), n, requests, want) // about three of eight that run
		})
	}
}

func retraction(t *testing.T, b kernels.Backend, n int, requests []*engine.Request, want [][]output) {
	blockTokens, reg, log := b.Layout().BlockTokens, prometheus.NewRegistry(), slog.New(slog.NewTextHandler(io.Discard, nil))
	unit := int64(max(blockTokens, kvcache.Grain)*b.Layout().Layers()*2*b.Layout().Resolve()[0].Heads*b.Layout().Resolve()[0].RowBytes(0) + 64<<10)
	tiers, err := tier.New(t.Context(), tier.Config{Host: host.Config{Bytes: 24 * unit}, Levels: []level.Config{ssd.Config{Dir: t.TempDir(), Bytes: 64 * unit}}, Identity: "soak", LoadTimeout: 10 * time.Second, LoadBlocks: b.Blocks() * 3 / 4},
		b, kvcache.UnitBlocks(blockTokens), log, reg)
	if err != nil {
		t.Fatal(err)
	}
	pool := kvcache.Config{Blocks: b.Blocks(), BlockTokens: blockTokens, Fingerprint: "soak", Numerics: b.Info().Numerics, Listener: tiers}
	tiers.Tune(&pool)
	cache, err := kvcache.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	tiers.Attach(cache)
	cfg := config()
	cfg.MaxRunning, cfg.StepTokens, cfg.MaxStepTime, cfg.RetractEvery = 8, 128, 0, 50
	e, err := engine.New(cfg, b, cache, log, reg)
	if err != nil {
		t.Fatal(err)
	}
	var next, loaded atomic.Int64
	var clients sync.WaitGroup
	for range 12 {
		clients.Go(func() {
			for i := next.Add(1) - 1; i < int64(n) && !t.Failed(); i = next.Add(1) - 1 {
				k := int(i) * 7 % len(requests)
				r := *requests[k]
				r.ID = fmt.Sprint("soak-", i)
				loaded.Add(int64(tiers.Load(t.Context(), r.Prompt, "", len(r.Prompt)-1)))
				h, err := e.Submit(t.Context(), &r)
				if err != nil {
					t.Error(err)
					return
				}
				got, _, err := collect(h, 1)
				if err != nil {
					t.Error(err)
					return
				}
				same(t, r.ID, got, want[k], false)
			}
		})
	}
	clients.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, end := range []func(context.Context) error{e.Close, tiers.Close} {
		if err := end(ctx); err != nil {
			t.Error(err)
		}
	}
	if err := cache.Check(); err != nil {
		t.Error(err)
	}
	if held := cache.Holders(); len(held) > 0 {
		t.Errorf("still held: %+v", held)
	}
	cache.Clear()
	if s := cache.Stats(); s.Free != s.Blocks {
		t.Errorf("not all free at the end: %+v", s)
	}
	if s := e.Stats(); s != (engine.Stats{}) {
		t.Errorf("left in the metrics: %+v", s)
	}
	preempted := (&rig{t: t, reg: reg}).metric("xpyd_engine_preemptions_total")
	if preempted < float64(n/20) {
		t.Errorf("%v preemptions: the test shows little", preempted)
	}
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	t.Logf("block size %d: %d requests, %v preemptions, %d tokens loaded from the tiers, %d goroutines, heap %d MiB",
		blockTokens, n, preempted, loaded.Load(), runtime.NumGoroutine(), mem.HeapAlloc>>20)
}
