//go:build cuda && cgo && linux

package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// Backends that share the GPU keep to their parts whoever is first, the one too
// many is refused with the numbers, and steps take nothing more.
func TestMemory(t *testing.T) {
	a := arch.Config{ModelType: "llama", Layers: 4, Hidden: 1024, Intermediate: 4096, Heads: 8, KVHeads: 2, HeadDim: 128,
		Vocab: 32000, MaxPositions: 8192, NormEps: 1e-5, RopeTheta: 10000}
	opt := Options{MemoryPart: 0.3, MaxTokens: 1024, MaxSeqs: 64}
	var open []*Backend
	defer func() {
		for _, b := range open {
			b.Close()
		}
	}()
	left := func(b *Backend) int64 {
		_, free, err := b.memory()
		if err != nil {
			t.Fatal(err)
		}
		return free
	}
	before := int64(0)
	for i := range 3 {
		b, err := NewRandom(a, 1, opt)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, b)
		m, free := b.Memory(), left(b)
		if i == 0 {
			before = m.Total
		}
		t.Logf("%+v, free %d; beside what is counted: %d MiB", m, free, (before-free-m.Weights-m.Scratch-m.Pool)>>20)
		if took, share := before-free, int64(opt.MemoryPart*float64(m.Total)); took > share || took < share-2*overhead {
			t.Errorf("backend %d took %d MiB, its part is %d", i, took>>20, share>>20)
		}
		before = free
		if i > 0 && b.Blocks() != open[0].Blocks() {
			t.Errorf("backend %d has %d blocks, the first %d", i, b.Blocks(), open[0].Blocks())
		}
	}
	_, err := NewRandom(a, 1, opt)
	if err == nil || !strings.Contains(err.Error(), "MiB are free") || errors.Is(err, ErrUnavailable) {
		t.Errorf("a fourth of three: %v", err)
	}
	b := open[2]
	free := left(b)
	table := make([]int32, 512)
	for i := range table {
		table[i] = int32(i * 31 % b.Blocks())
	}
	for pos := 0; pos < 8192; {
		n := min([]int{1024, 1, 777, 33, 300}[pos%5], 8192-pos)
		q := kernels.Seq{Tokens: make([]int32, n), Pos: pos, Blocks: table,
			Samples: []kernels.Sample{{Temperature: 1, TopP: 0.9, TopK: 50, Repetition: 1.1, Prompt: []int32{1, 2}, Logprobs: 3}}}
		if n < 40 {
			q.Targets, q.TargetLogprobs = make([]int32, n), 2
		}
		if _, err := b.Step(&kernels.Step{Seqs: []kernels.Seq{q}}); err != nil {
			t.Fatal(err)
		}
		pos += n
	}
	if now := left(b); now < free {
		t.Errorf("steps took %d KiB of the device", (free-now)>>10)
	}
}
