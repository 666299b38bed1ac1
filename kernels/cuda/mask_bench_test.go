//go:build cuda && cgo && linux

package cuda_test

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/grammar"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// maskedSpeed compares decode steps of 64 sequences whose draws a grammar binds, made side by side while the
// step runs as the engine does, with steps that nothing binds: by turns, the median of their ratios.
func maskedSpeed(t *testing.T, b *cuda.Backend) {
	const batch, length, steps, rounds, makers = 64, 1024, 120, 9, 8
	vocab := b.Arch().Vocab
	ends := []int32{0}
	r := rand.New(rand.NewPCG(1, 1))
	tokens := make([][]byte, vocab) // of a usual vocabulary's lengths: bytes, then words with and without a space
	for id := 1; id < vocab; id++ {
		if id <= 256 {
			tokens[id] = []byte{byte(id - 1)}
			continue
		}
		if r.IntN(2) == 0 {
			tokens[id] = []byte{' '}
		}
		for range 2 + r.IntN(8) {
			tokens[id] = append(tokens[id], byte('a'+r.IntN(26)))
		}
	}
	g, err := grammar.Compile(grammar.Spec{Kind: grammar.JSONObject}, grammar.NewVocabulary(tokens, ends), grammar.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	blocks := (length + 256) / 16
	seqs, next := []kernels.Seq{}, int32(0)
	for i := range batch {
		q := kernels.Seq{Tokens: []int32{int32(i)}, Samples: []kernels.Sample{{Seed: uint64(i), Temperature: 1, TopP: 1, Repetition: 1, Logprobs: -1}}}
		for range blocks {
			q.Blocks = append(q.Blocks, (next*7919)%int32(b.Blocks()))
			next++
		}
		seqs = append(seqs, q)
	}
	matchers, drawn := make([]*grammar.Matcher, batch), make([]int32, batch)
	words := kernels.MaskWords(vocab)
	run := func(masked bool) (took float64, masks []float64) {
		var halves [2][]kernels.Seq
		for h := range halves {
			halves[h] = slices.Clone(seqs)
			for i := range halves[h] {
				halves[h][i].Samples = slices.Clone(seqs[i].Samples)
				if masked {
					halves[h][i].Samples[0].Mask = make([]uint32, words)
				}
			}
		}
		for i := range matchers {
			matchers[i], drawn[i] = g.Matcher(), -1
		}
		fill := func(half []kernels.Seq) {
			at := time.Now()
			var wg sync.WaitGroup
			for maker := range makers {
				wg.Go(func() {
					for i := maker; i < batch; i += makers {
						if m := matchers[i]; drawn[i] >= 0 && !m.Accept(drawn[i]) {
							t.Errorf("sequence %d drew %d, which may not come", i, drawn[i])
						}
						if matchers[i].Ended() {
							matchers[i] = g.Matcher()
						}
						matchers[i].Mask(half[i].Samples[0].Mask)
					}
				})
			}
			wg.Wait()
			masks = append(masks, float64(time.Since(at).Microseconds()))
		}
		var last time.Time
		for step := range steps {
			half := halves[step%2]
			for i := range half {
				if half[i].Pos = length - 100 + step; step > 0 {
					half[i].After = i + 1
				}
			}
			if err := b.Launch(&kernels.Step{Seqs: half, Hold: masked}); err != nil {
				t.Fatal(err)
			}
			if step > 0 {
				for i, res := range mustAwait(t, b) {
					drawn[i] = res.Samples[0].Token
				}
			}
			if masked {
				fill(half)
				b.Draw()
			}
			if step == 20 {
				last = time.Now()
			}
		}
		mustAwait(t, b)
		return float64(time.Since(last).Microseconds()) / 1000 / (steps - 20), masks
	}
	var free, bound, ratios, masks []float64
	run(true)
	for range rounds {
		f, _ := run(false)
		m, each := run(true)
		free, bound, ratios, masks = append(free, f), append(bound, m), append(ratios, m/f), append(masks, each...)
	}
	for _, list := range [][]float64{free, bound, ratios, masks} {
		slices.Sort(list)
	}
	result("grammar.step_ratio", "x", ratios[rounds/2], ratios, nil)
	result("grammar.step_ms.free", "ms", free[rounds/2], free, nil)
	result("grammar.step_ms.bound", "ms", bound[rounds/2], bound, nil)
	result("grammar.step_masks_us.p50", "us", masks[len(masks)/2], masks, nil)
}
