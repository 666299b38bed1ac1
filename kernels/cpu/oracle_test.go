package cpu_test

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

// stories260k reads the embedded model's weights; the safetensors format is 8
// bytes of length, a JSON header, then the tensors.
func stories260k(t testing.TB) (arch.Config, kernels.Weights) {
	t.Helper()
	raw, err := os.ReadFile("../../internal/model/stories260k/model.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	n := binary.LittleEndian.Uint64(raw)
	var header map[string]json.RawMessage
	if err := json.Unmarshal(raw[8:8+n], &header); err != nil {
		t.Fatal(err)
	}
	a := shape(5, 64, 172, 8, 4, 8, 512)
	a.MaxPositions = 512
	w := kernels.Weights{}
	for _, tensor := range a.Tensors() {
		var h struct {
			Shape   []int
			Offsets [2]int `json:"data_offsets"`
		}
		if err := json.Unmarshal(header[tensor.Name], &h); err != nil {
			t.Fatalf("%s: %v", tensor.Name, err)
		}
		w[tensor.Place] = kernels.Tensor{DType: kernels.F32, Shape: h.Shape, Data: raw[8+n:][h.Offsets[0]:h.Offsets[1]]}
	}
	return a, w
}

// testdata/stories260K.oracle.json was computed in float64 from the same
// weights (karpathy/tinyllamas stories260K, MIT) and checked against llama2.c.
func TestStories260KOracle(t *testing.T) {
	raw, err := os.ReadFile("testdata/stories260K.oracle.json")
	if err != nil {
		t.Fatal(err)
	}
	var oracle struct {
		Cases []struct {
			Prompt string
			IDs    []int32      `json:"prompt_ids"`
			Greedy []int32      `json:"greedy_64_ids"`
			Top    [][2]float64 `json:"last_prompt_logits_top10"`
			All    []float64    `json:"last_prompt_logits_all"`
		}
	}
	if err := json.Unmarshal(raw, &oracle); err != nil {
		t.Fatal(err)
	}
	a, w := stories260k(t)
	for _, simd := range simds {
		if !supported(simd) {
			continue
		}
		for _, ranks := range []int{1, 2, 4, 8} {
			b := open(t, a, w, cpu.Options{Blocks: 32, SIMD: simd, Ranks: ranks})
			for i, c := range oracle.Cases {
				if simd == "portable" && (i > 0 || ranks > 1) {
					break // slow, and the same bits by TestSameBits
				}
				blocks := make([]int32, 32)
				for i := range blocks {
					blocks[i] = int32(31 - i)
				}
				greedy := func(pos int) []kernels.Sample {
					return []kernels.Sample{{Position: pos, TopP: 1, Repetition: 1, Logprobs: -1}}
				}
				seq := kernels.Seq{Tokens: c.IDs, Blocks: blocks, Samples: greedy(len(c.IDs)), WantLogits: true}
				var got []int32
				for range c.Greedy {
					r := mustStep(t, b, seq)[0]
					for _, top := range c.Top {
						if seq.Pos == 0 && math.Abs(float64(r.Logits[int(top[0])])-top[1]) > 1e-4 {
							t.Errorf("%s %q: logit %v is %v, want %v", simd, c.Prompt, top[0], r.Logits[int(top[0])], top[1])
						}
					}
					for i, v := range c.All {
						if seq.Pos == 0 && math.Abs(float64(r.Logits[i])-v) > 1e-4 {
							t.Errorf("%s %q: logit %d is %v, want %v", simd, c.Prompt, i, r.Logits[i], v)
						}
					}
					got = append(got, r.Samples[0].Token)
					pos := seq.Pos + len(seq.Tokens)
					seq = kernels.Seq{Tokens: got[len(got)-1:], Pos: pos, Blocks: blocks, Samples: greedy(pos + 1)}
				}
				if !slices.Equal(got, c.Greedy) {
					t.Errorf("%s, %d ranks, %q: got %v, want %v", simd, ranks, c.Prompt, got, c.Greedy)
				}
			}
		}
	}
}
