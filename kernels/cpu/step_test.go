package cpu_test

import (
	"errors"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

func TestStepRefuses(t *testing.T) {
	a := shape(1, 16, 16, 1, 1, 8, 8)
	b := open(t, a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 2, BlockTokens: 4, Threads: 1})
	f := func(part string, s kernels.Seq) {
		t.Helper()
		_, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{s}})
		var e *kernels.Error
		if !errors.As(err, &e) || e.Call != "step" || !strings.Contains(err.Error(), part) {
			t.Errorf("%q: got %v", part, err)
		}
	}
	f("0 tokens", kernels.Seq{Blocks: []int32{0}})
	f("position -1", kernels.Seq{Tokens: []int32{1}, Pos: -1, Blocks: []int32{0}})
	f("context is 640", kernels.Seq{Tokens: []int32{1}, Pos: 640, Blocks: make([]int32, 200)})
	f("context is 640", kernels.Seq{Tokens: []int32{1}, Pos: math.MaxInt, Blocks: make([]int32, 200)})
	f("token 8", kernels.Seq{Tokens: []int32{8}, Blocks: []int32{0}})
	f("token -1", kernels.Seq{Tokens: []int32{-1}, Blocks: []int32{0}})
	f("1 blocks for 5", kernels.Seq{Tokens: []int32{1}, Pos: 4, Blocks: []int32{0}})
	f("block 2", kernels.Seq{Tokens: []int32{1}, Blocks: []int32{2}})
	f("block -1", kernels.Seq{Tokens: []int32{1}, Pos: 4, Blocks: []int32{-1, 0}})
	f("1 targets for 2", kernels.Seq{Tokens: []int32{1, 2}, Blocks: []int32{0}, Targets: []int32{1}})
	f("target 9", kernels.Seq{Tokens: []int32{1}, Blocks: []int32{0}, Targets: []int32{9}})
	if r, err := b.Step(&kernels.Step{}); err != nil || len(r) != 0 {
		t.Errorf("empty step: %v, %v", r, err)
	}
	b.Close()
	f("closed", kernels.Seq{Tokens: []int32{1}, Blocks: []int32{0}})
}

func TestNewRefuses(t *testing.T) {
	ok := shape(1, 16, 16, 2, 1, 8, 8)
	w := randomWeights(ok, kernels.F32, 1)
	f := func(part string, change func(a *arch.Config, w kernels.Weights, o *cpu.Options)) {
		t.Helper()
		a, w, o := ok, w, cpu.Options{Blocks: 1}
		w = maps.Clone(w)
		change(&a, w, &o)
		b, err := cpu.New(a, w, o)
		if err == nil {
			b.Close()
		}
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%q: got %v", part, err)
		}
	}
	f("0 blocks", func(_ *arch.Config, _ kernels.Weights, o *cpu.Options) { o.Blocks = 0 })
	f("of 257 tokens", func(_ *arch.Config, _ kernels.Weights, o *cpu.Options) { o.BlockTokens = 257 })
	f("-1 threads", func(_ *arch.Config, _ kernels.Weights, o *cpu.Options) { o.Threads = -1 })
	f(`simd "neon"`, func(_ *arch.Config, _ kernels.Weights, o *cpu.Options) { o.SIMD = "neon" })
	f("bad architecture", func(a *arch.Config, _ kernels.Weights, _ *cpu.Options) { a.KVHeads = 3 })
	f("bad architecture", func(a *arch.Config, _ kernels.Weights, _ *cpu.Options) { a.HeadDim = 7 })
	f("bad architecture", func(a *arch.Config, _ kernels.Weights, _ *cpu.Options) { a.Hidden = math.MaxInt32 })
	f(`bad architecture: architecture "other"`, func(a *arch.Config, _ kernels.Weights, _ *cpu.Options) { a.ModelType = "other" })
	f("weight model.layers.0.input_layernorm.weight", func(_ *arch.Config, w kernels.Weights, _ *cpu.Options) { clear(w) })
	f("layers.0.mlp.down_proj", func(_ *arch.Config, w kernels.Weights, _ *cpu.Options) { delete(w, arch.Down.At(0)) })
	f("q_proj.bias", func(a *arch.Config, _ kernels.Weights, _ *cpu.Options) { a.QKVBias = true })
	f("weight lm_head", func(a *arch.Config, _ kernels.Weights, _ *cpu.Options) { a.TiedHead = false })
	f("unknown type", func(_ *arch.Config, w kernels.Weights, _ *cpu.Options) {
		norm := w[arch.Norm.At(0)]
		norm.DType = 9
		w[arch.Norm.At(0)] = norm
	})
	f("rope", func(a *arch.Config, _ kernels.Weights, _ *cpu.Options) { a.Rope.Kind = "dynamic" })
}

// OnLayer sees each layer once, in order, with its rows and digests in place
// and on the caller's goroutine.
func TestOnLayer(t *testing.T) {
	a := shape(4, 64, 96, 4, 2, 16, 64)
	for _, threads := range []int{1, 3} {
		b := open(t, a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 40, Threads: threads})
		var seen []int
		l := b.Layout()
		tokens := make([]int32, 600)
		table := make([]int32, 38)
		for i := range table {
			table[i] = int32(i)
		}
		rows, d, want := make([]byte, l.Resolve()[0].BlockBytes()), make([]uint64, 2), make([]uint64, 2)
		_, err := b.Step(&kernels.Step{
			Seqs: []kernels.Seq{{Tokens: tokens, Blocks: table}},
			OnLayer: func(layer int) {
				seen = append(seen, layer)
				b.Gather(layer, 36, 0, 16, rows)
				b.Digest(layer, 36, d)
				kernels.DigestRows(&l.Resolve()[layer], 36*16, 16, rows, want)
				if !slices.Equal(d, want) {
					t.Errorf("layer %d: digest not in place", layer)
				}
			},
		})
		if err != nil || !slices.Equal(seen, []int{0, 1, 2, 3}) {
			t.Errorf("layers %v, error %v", seen, err)
		}
	}
}

// A steady state allocates nothing, whatever is asked of a step.
func TestStepAllocations(t *testing.T) {
	a := shape(2, 256, 512, 4, 2, 64, 3000)
	for _, threads := range []int{1, 2} {
		b := open(t, a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 32, Threads: threads})
		step := kernels.Step{OnLayer: func(int) {}}
		for i := range 4 {
			n := []int{1, 1, 5, 40}[i]
			s := kernels.Seq{
				Tokens: make([]int32, n), Blocks: []int32{int32(4 * i), int32(4*i + 1), int32(4*i + 2)}, WantLogits: i == 1,
				Samples: []kernels.Sample{{TopP: 0.9, TopK: 50, MinP: 0.01, Temperature: 0.8, Repetition: 1.1, Frequency: 0.1,
					Prompt: []int32{1, 2}, Output: []int32{3}, Ban: []int32{4}, Bias: []kernels.Bias{{ID: 1, Value: 1}}, Logprobs: 5}},
			}
			if i == 2 {
				s.Targets, s.TargetLogprobs = make([]int32, n), 3
			}
			step.Seqs = append(step.Seqs, s)
		}
		pos := 0
		once := func() {
			for i := range step.Seqs {
				step.Seqs[i].Samples[0].Position = pos
			}
			pos++
			if _, err := b.Step(&step); err != nil {
				t.Fatal(err)
			}
		}
		for range 5 {
			once()
		}
		if n := testing.AllocsPerRun(20, once); n != 0 {
			t.Errorf("%d threads: %v allocations a step", threads, n)
		}
	}
}

// Close ends the goroutines; a second Close does nothing.
func TestClose(t *testing.T) {
	a := shape(1, 16, 16, 1, 1, 8, 8)
	before := runtime.NumGoroutine()
	b, err := cpu.New(a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 1, Threads: 8})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
	// A goroutine that Close has waited for may still be counted for a moment.
	for range 1000 {
		if runtime.NumGoroutine() <= before {
			break
		}
		runtime.Gosched()
	}
	if n := runtime.NumGoroutine(); n > before {
		t.Errorf("%d goroutines left", n-before)
	}
	if i := b.Info(); i.Name != "cpu" || i.Numerics != "cpu-f32-1" || i.SIMD == "" || i.Threads != 8 {
		t.Errorf("info %+v", i)
	}
}

// A step behind gates computes no layer before all of them have opened it, and gives the
// results that it would have given with all rows in place.
func TestGates(t *testing.T) {
	a := shape(3, 64, 96, 4, 2, 16, 64)
	for _, threads := range []int{1, 3} {
		b := open(t, a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 8, Threads: threads})
		l := b.Layout()
		prefix := make([]int32, 32)
		for i := range prefix {
			prefix[i] = int32(i)
		}
		if _, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{{Tokens: prefix, Blocks: []int32{0, 1}}}}); err != nil {
			t.Fatal(err)
		}
		logits := func(table []int32, gates ...kernels.Arrival) []float32 {
			t.Helper()
			out, err := b.Step(&kernels.Step{Arrivals: gates, Seqs: []kernels.Seq{{Tokens: []int32{7, 8, 9}, Pos: 32, Blocks: table, WantLogits: true}}})
			if err != nil {
				t.Fatal(err)
			}
			return slices.Clone(out[0].Logits)
		}
		want := logits([]int32{0, 1, 2})
		g, err := b.Gate()
		if err != nil {
			t.Fatal(err)
		}
		ended := kernels.NewHostGate(a.Layers)
		ended.Open(a.Layers)
		var all sync.WaitGroup
		all.Go(func() {
			rows := make([]byte, l.Resolve()[0].BlockBytes())
			for layer := range a.Layers {
				for block := range int32(2) {
					b.Gather(layer, block, 0, 16, rows)
					b.Scatter(layer, 4+block, 0, 16, rows)
				}
				g.Open(layer + 1)
			}
		})
		if got := logits([]int32{4, 5, 6}, ended, g); !slices.Equal(got, want) {
			t.Errorf("%d threads: other logits behind a gate", threads)
		}
		all.Wait()
		if g.Layers() != a.Layers || g.Wait(t.Context()) != nil {
			t.Errorf("%d layers are open", g.Layers())
		}
		if _, err := b.Step(&kernels.Step{Arrivals: []kernels.Arrival{otherGate{}}, Seqs: []kernels.Seq{{Tokens: []int32{7}, Blocks: []int32{0}}}}); err == nil {
			t.Error("a step waits for another backend's arrival")
		}
	}
}

type otherGate struct{ kernels.Gate }

// TestStepPanic: a panic inside a step of many threads ends that step for all of them,
// and the next step works.
func TestStepPanic(t *testing.T) {
	a := shape(2, 256, 512, 4, 2, 64, 300)
	b := open(t, a, randomWeights(a, kernels.F32, 1), cpu.Options{Blocks: 4, BlockTokens: 16, Threads: 4})
	seq := kernels.Seq{Tokens: make([]int32, 32), Blocks: []int32{0, 1}, WantLogits: true}
	want := slices.Clone(mustStep(t, b, seq)[0].Logits)
	for layer := range a.Layers {
		func() {
			defer func() {
				if p := recover(); p != "pusher" {
					t.Errorf("layer %d: %v", layer, p)
				}
			}()
			_, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{seq}, OnLayer: func(l int) {
				if l == layer {
					panic("pusher")
				}
			}})
			t.Errorf("layer %d: no panic, %v", layer, err)
		}()
		if got := mustStep(t, b, seq)[0].Logits; !sameBits(got, want) {
			t.Errorf("layer %d: the next step has other logits", layer)
		}
	}
}
