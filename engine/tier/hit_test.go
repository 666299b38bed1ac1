package tier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/internal/nap"
	"github.com/xpyd/xpyd/kernels"
)

// quickDevice moves and computes nothing, so all the time that a hit takes is the host's.
type quickDevice struct {
	*enginetest.Backend
	way      time.Duration // an arrival's
	last     time.Duration // what a step computes behind the last layer
	launched time.Time     // the latest step that waits
	landed   time.Time     // what it waited for
	step     *kernels.Step
}

type quickMemory struct{ mem []byte }

func (m quickMemory) Bytes() []byte { return m.mem }
func (m quickMemory) Close() error  { return nil }

type quickMove struct{}

func (quickMove) Wait(context.Context) error { return nil }

// quickArrival is over at a time, of which one has to ask, as one asks a GPU.
type quickArrival struct {
	layers int
	n      int
	over   atomic.Bool
	good   []bool
}

func (a *quickArrival) Layers() int {
	if a.over.Load() {
		return a.layers
	}
	return 0
}

func (a *quickArrival) Good() ([]bool, error) {
	if !a.over.Load() {
		return nil, kernels.ErrLate
	}
	return a.good, nil
}

func (a *quickArrival) Wait(ctx context.Context) error {
	return nap.Until(ctx, a.over.Load)
}

func (d *quickDevice) RegisterHost(mem []byte) (kernels.HostMemory, error) {
	return quickMemory{mem}, nil
}
func (d *quickDevice) GatherBlocks(*kernels.HostMove) (kernels.Pending, error) {
	return quickMove{}, nil
}
func (d *quickDevice) ScatterBlocks(*kernels.HostMove) (kernels.Pending, error) {
	return quickMove{}, nil
}
func (d *quickDevice) Verify(_ context.Context, list []kernels.Landed) ([]bool, error) {
	good := make([]bool, len(list))
	for i := range good {
		good[i] = true
	}
	return good, nil
}

func (d *quickDevice) ArriveBlocks(m *kernels.HostMove) (kernels.HostArrival, error) {
	a := &quickArrival{layers: d.Layout().Layers(), n: len(m.Blocks), good: make([]bool, len(m.Blocks))}
	for i := range a.good {
		a.good[i] = true
	}
	return a, nil
}

func (d *quickDevice) Launch(s *kernels.Step) error {
	d.step = s
	if len(s.Arrivals) > 0 {
		d.launched = time.Now()
	}
	return nil
}

func (d *quickDevice) Await() ([]kernels.Result, error) {
	for _, a := range d.step.Arrivals {
		ctx, cancel := context.WithTimeout(context.Background(), d.way)
		_ = nap.Until(ctx, func() bool { return false }) // the way
		cancel()
		a.(*quickArrival).over.Store(true)
		for began := time.Now(); time.Since(began) < d.last; { // the step spins
		}
		d.landed = time.Now()
	}
	results := make([]kernels.Result, len(d.step.Seqs))
	for i, q := range d.step.Seqs {
		for range q.Samples {
			results[i].Samples = append(results[i].Samples, kernels.Sampled{Token: 1})
		}
	}
	return results, nil
}

// BenchmarkHit is what the host adds to a hit in host memory: before the step is
// launched, and from the moment that all is there to the first token.
func BenchmarkHit(b *testing.B) {
	for _, n := range []int{8192, 32768} {
		b.Run(fmt.Sprint(n), func(b *testing.B) { benchmarkHit(b, n) })
	}
}

func benchmarkHit(b *testing.B, n int) {
	const blocks = 8192
	dev := &quickDevice{Backend: enginetest.New(enginetest.Config{Layers: 32, Blocks: blocks, BlockTokens: 16, MaxPositions: 40960}), way: 25 * time.Millisecond}
	log, reg := slog.New(slog.DiscardHandler), prometheus.NewRegistry()
	tiers, err := New(b.Context(), Config{Host: host.Config{Bytes: 1 << 30}, Identity: identity, LoadTimeout: time.Minute, LoadBlocks: blocks}, dev, 1, log, reg)
	if err != nil {
		b.Fatal(err)
	}
	cache, err := kvcache.New(kvcache.Config{Blocks: blocks, BlockTokens: 16, Fingerprint: identity, Listener: tiers})
	if err != nil {
		b.Fatal(err)
	}
	tiers.Attach(cache)
	cfg := stepConfig()
	cfg.PrefillTokens = 1 << 16
	eng, err := engine.New(cfg, dev, cache, log, reg)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := errors.Join(eng.Close(b.Context()), tiers.Close(b.Context())); err != nil {
			b.Error(err)
		}
	}()
	prompt, came := talk(1, n), spy{tiers, make(chan *Arrival, 1)}
	ask := func() (began, first time.Time) {
		began = time.Now()
		tiers.Stage(b.Context(), prompt, "", n-1)
		h, err := eng.Submit(b.Context(), &engine.Request{ID: "r", Prompt: prompt, MaxTokens: 2, IgnoreEOS: true, Logprobs: -1, PromptLogprobs: -1, Source: came})
		if err != nil {
			b.Fatal(err)
		}
		for {
			_, err := h.Next(b.Context())
			if errors.Is(err, io.EOF) {
				<-h.Done()
				return began, first
			}
			if err != nil {
				b.Fatal(err)
			}
			if first.IsZero() {
				first = time.Now()
			}
		}
	}
	ask()
	var before, after []time.Duration
	for b.Loop() {
		if err := nap.Until(b.Context(), func() bool { return tiers.unsaved.Load() == 0 }); err != nil {
			b.Fatal(err)
		}
		cache.Clear()
		dev.last = time.Duration(rand.IntN(3000)) * time.Microsecond
		dev.launched = time.Time{}
		began, first := ask()
		if dev.launched.IsZero() {
			b.Fatal("nothing arrived")
		}
		<-(<-came.got).Done()
		before, after = append(before, dev.launched.Sub(began)), append(after, first.Sub(dev.landed))
	}
	b.ReportMetric(float64(middle(before).Microseconds()), "us-before")
	b.ReportMetric(float64(middle(after).Microseconds()), "us-after")
	b.ReportMetric(float64(slices.Max(after).Microseconds()), "us-after-max")
}

func middle(d []time.Duration) time.Duration {
	return slices.Sorted(slices.Values(d))[len(d)/2]
}
