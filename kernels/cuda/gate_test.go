//go:build cuda && cgo && linux

package cuda_test

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// A step behind a gate computes no layer before it is open, and draws what it would
// have with all rows in place; a gate that is open holds nobody up.
func TestGates(t *testing.T) {
	a := families()["llama gqa2 8"]
	b := open(t, a, randomWeights(a, 1), cuda.Options{Blocks: 64, BlockTokens: 8, BatchInvariant: true})
	l := b.Layout()
	r := rand.New(rand.NewPCG(1, 2))
	const blocks = 5
	tokens := randomTokens(r, 8*blocks+1, a.Vocab)
	step := func(table []int32, gates ...kernels.Arrival) int32 {
		t.Helper()
		res, err := b.Step(&kernels.Step{Arrivals: gates, Seqs: []kernels.Seq{{Tokens: tokens[8*blocks:], Pos: 8 * blocks, Blocks: table,
			Samples: []kernels.Sample{{Position: 8*blocks + 1, TopP: 1, Repetition: 1, Logprobs: -1}}}}})
		if err != nil {
			t.Fatal(err)
		}
		return res[0].Samples[0].Token
	}
	from := []int32{0, 1, 2, 3, 4}
	mustStep(t, b, kernels.Seq{Tokens: tokens[:8*blocks], Blocks: from})
	want := step(append(from[:5:5], 5))
	gate := func() kernels.Gate {
		t.Helper()
		g, err := b.Gate()
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	for round := range 4 {
		table := make([]int32, 0, blocks+1)
		for i := range int32(blocks) {
			table = append(table, 10+10*int32(round)+i)
		}
		g, ended := gate(), gate()
		ended.Open(l.Layers)
		var all sync.WaitGroup
		all.Go(func() {
			for layer := range l.Layers {
				rows := make([]byte, l.BlockBytes())
				for i := range from {
					b.Gather(layer, from[i], 0, 8, rows)
					b.Scatter(layer, table[i], 0, 8, rows)
				}
				time.Sleep(time.Duration(round) * time.Millisecond) // a step that does not wait is done by now
				g.Open(layer + 1)
				g.Open(layer)
				if g.Layers() != layer+1 {
					t.Errorf("%d layers are open, want %d", g.Layers(), layer+1)
				}
			}
		})
		if got := step(append(table, 63), g, ended, g); got != want {
			t.Errorf("round %d: drew %d behind a gate, want %d", round, got, want)
		}
		all.Wait()
		if g.Layers() != l.Layers || g.Wait(soon(t)) != nil {
			t.Errorf("%d layers after the step", g.Layers())
		}
		g.Open(l.Layers)
	}
	other := open(t, a, randomWeights(a, 1), cuda.Options{Blocks: 8, BlockTokens: 8})
	g, err := other.Gate()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Step(&kernels.Step{Arrivals: []kernels.Arrival{g}, Seqs: []kernels.Seq{{Tokens: tokens[:1], Blocks: []int32{63}}}}); err == nil {
		t.Error("a step waits for another backend's gate")
	}
	g.Open(l.Layers)
}
