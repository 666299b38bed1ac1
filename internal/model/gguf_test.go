package model_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

// TestDequantise compares every block format with an independent
// implementation, to the bit: see testdata/golden.py.
func TestDequantise(t *testing.T) {
	b, err := os.ReadFile("testdata/quant.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden map[string]struct {
		Type        uint32
		Stored, F32 []byte
	}
	if err := json.Unmarshal(b, &golden); err != nil {
		t.Fatal(err)
	}
	if len(golden) != 8 {
		t.Errorf("%d formats, want 8", len(golden))
	}
	for name, g := range golden {
		if got := model.Dequantise(g.Type, g.Stored); !bytes.Equal(got, g.F32) {
			t.Errorf("%s differs", name)
		}
	}
}

func TestOpenGGUFGolden(t *testing.T) {
	m := open(t, "testdata/tiny-llama.gguf")
	want := arch.Config{
		ModelType: "llama", Layers: 1, Hidden: 256, Intermediate: 32, Heads: 2, KVHeads: 1, HeadDim: 8, Vocab: 16,
		MaxPositions: 64, NormEps: 1e-5, RopeTheta: 500000, TiedHead: true, BOS: []int32{1}, EOS: []int32{2},
	}
	if !reflect.DeepEqual(m.Config, want) {
		t.Errorf("config\n%+v, want\n%+v", m.Config, want)
	}
	if m.Name != "tiny-llama" {
		t.Errorf("name %q", m.Name)
	}
	b, err := os.ReadFile("testdata/tiny-llama.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden map[string]struct {
		Shape  []int
		SHA256 string
	}
	if err := json.Unmarshal(b, &golden); err != nil {
		t.Fatal(err)
	}
	if len(golden) != len(m.Names()) {
		t.Errorf("%d tensors, want %d", len(m.Names()), len(golden))
	}
	for name, g := range golden {
		tn, ok := m.Tensor(name)
		if sum := sha256.Sum256(tn.Data); !ok || tn.DType != kernels.F32 || !slices.Equal(tn.Shape, g.Shape) || hex.EncodeToString(sum[:]) != g.SHA256 {
			t.Errorf("%s differs (%v, shape %v, want %v)", name, tn.DType, tn.Shape, g.Shape)
		}
	}
	meta := m.GGUFMeta()
	if v, ok := meta["tokenizer.ggml.tokens"].([]string); !ok || len(v) != 16 || v[3] != "t3" {
		t.Errorf("tokens %v", meta["tokenizer.ggml.tokens"])
	}
	if v, ok := meta["tokenizer.ggml.scores"].([]float32); !ok || v[2] != -2 {
		t.Errorf("scores %v", meta["tokenizer.ggml.scores"])
	}
	if v, ok := meta["tokenizer.ggml.add_bos_token"].(bool); !ok || !v {
		t.Errorf("add_bos_token %v", meta["tokenizer.ggml.add_bos_token"])
	}
	if v := meta["tokenizer.test.nested"]; !reflect.DeepEqual(v, []any{[]int32{1, 2}, []int32{3}}) {
		t.Errorf("nested %#v", v)
	}
	if _, ok := meta["llama.block_count"]; ok {
		t.Error("metadata that is not the tokenizer's")
	}
}

// TestGGUFEqualsHF: the same model in both formats gives the same tensors.
func TestGGUFEqualsHF(t *testing.T) {
	f := func(c arch.Config, kind string, tolerance float64) {
		t.Run(c.ModelType+" "+kind, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "m.gguf")
			if err := modeltest.WriteGGUF(path, c, modeltest.GGUFOptions{Seed: 3, Type: kind}); err != nil {
				t.Fatal(err)
			}
			m := open(t, path)
			c.NormsFromOne = false // whoever writes a file has added the 1
			if !reflect.DeepEqual(m.Config, c) {
				t.Errorf("config\n%+v, want\n%+v", m.Config, c)
			}
			for _, s := range c.Tensors() {
				tn, ok := m.Tensor(s.Name)
				if !ok || !slices.Equal(tn.Shape, s.Shape) {
					t.Fatalf("%s: %v %v", s.Name, ok, tn.Shape)
				}
				got, want := floats(t, tn), modeltest.Values(3, s)
				for i := range want {
					if math.Abs(float64(got[i]-want[i])) > tolerance {
						t.Fatalf("%s[%d] is %v, want %v", s.Name, i, got[i], want[i])
					}
				}
			}
		})
	}
	for _, family := range arch.Families() {
		if family.GGUF != "" {
			f(modeltest.Tiny(family.Name), "F32", 0)
		}
	}
	f(modeltest.Tiny("llama"), "F16", 1e-3)
	f(modeltest.Tiny("llama"), "BF16", 4e-3)
	f(modeltest.Tiny("qwen2"), "Q8_0", 5e-3)
	f(modeltest.Tiny("qwen3"), "Q4_0", 0.1)
	f(modeltest.Tiny("qwen3_moe"), "Q8_0", 1e-2)
	f(modeltest.Tiny("mixtral"), "F32", 0) // its files say llama
	biased := modeltest.Tiny("llama")
	biased.QKVBias = true
	f(biased, "F32", 0)
	factors := modeltest.Tiny("llama")
	factors.RopeFreqFactors = []float32{1, 1, 1, 2, 4, 8, 8, 8}
	f(factors, "F32", 0)
}

// metaGGUF is a small model's file with changed metadata; nil removes a key.
func metaGGUF(t *testing.T, arch string, change map[string]any) []byte {
	t.Helper()
	g := modeltest.ModelGGUF(modeltest.Tiny(arch), modeltest.GGUFOptions{})
	for k, v := range change {
		if g.Meta[k] = v; v == nil {
			delete(g.Meta, k)
		}
	}
	b, err := g.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGGUFConfig(t *testing.T) {
	f := func(change map[string]any, want func(*arch.Config)) {
		t.Helper()
		c := modeltest.Tiny("llama")
		want(&c)
		_, _, got, err := model.ParseGGUF(metaGGUF(t, "llama", change))
		if err != nil {
			t.Errorf("%v: %v", change, err)
		} else if !reflect.DeepEqual(got, c) {
			t.Errorf("%v: got\n%+v, want\n%+v", change, got, c)
		}
	}
	type m = map[string]any
	same := func(*arch.Config) {}
	f(m{"llama.attention.key_length": nil, "llama.attention.value_length": nil, "llama.rope.freq_base": nil}, same)
	f(m{"llama.attention.head_count_kv": []uint32{2, 2}, "llama.block_count": uint64(2)}, same)
	f(m{"x.all": []any{uint8(1), uint8(2)}, "x.i8": int8(-1), "x.u16": uint16(1), "x.i16": int16(-1), "x.u64": uint64(1), "x.f64": 0.5, "x.empty": []string{}}, same)
	f(m{"general.alignment": uint32(64)}, same)
	f(m{"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": float32(1)}, same)
	f(m{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": float32(4)}, func(c *arch.Config) { c.Rope = arch.RopeScaling{Kind: "linear", Factor: 4} })
	f(m{"llama.rope.scale_linear": float32(2)}, func(c *arch.Config) { c.Rope = arch.RopeScaling{Kind: "linear", Factor: 2} })
	f(m{"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": float32(4), "llama.rope.scaling.original_context_length": uint32(64)},
		func(c *arch.Config) { c.Rope = arch.RopeScaling{Kind: "yarn", Factor: 4, OriginalMaxPos: 64} })
	f(m{"tokenizer.ggml.bos_token_id": nil, "tokenizer.ggml.eos_token_id": uint32(5), "tokenizer.ggml.eot_token_id": uint32(6)},
		func(c *arch.Config) { c.BOS, c.EOS = nil, []int32{5, 6} })
}

func TestGGUFRefuses(t *testing.T) {
	f := func(want string, b []byte) {
		t.Helper()
		if _, _, _, err := model.ParseGGUF(b); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
	meta := func(want, key string, v any) {
		t.Helper()
		f(want, metaGGUF(t, "llama", map[string]any{key: v}))
	}
	meta("general.architecture is missing", "general.architecture", nil)
	meta(`"gemma" is not supported (llama`, "general.architecture", "gemma")
	meta("llama.block_count: key is missing", "llama.block_count", nil)
	meta("llama.block_count: 2.5 is not a count", "llama.block_count", float32(2.5))
	meta("llama.attention.layer_norm_rms_epsilon: key is missing", "llama.attention.layer_norm_rms_epsilon", nil)
	meta("llama.attention.head_count_kv: layers that differ", "llama.attention.head_count_kv", []int32{2, 4})
	meta("llama.expert_used_count: key is missing", "llama.expert_count", uint32(8))
	f("qwen3.expert_count: 8", metaGGUF(t, "qwen3", map[string]any{"qwen3.expert_count": uint32(8), "qwen3.expert_used_count": uint32(2)}))
	f("qwen3moe.expert_gating_func: 2", metaGGUF(t, "qwen3_moe", map[string]any{"qwen3moe.expert_gating_func": uint32(2)}))
	f("qwen3moe.expert_shared_count: 1", metaGGUF(t, "qwen3_moe", map[string]any{"qwen3moe.expert_shared_count": uint32(1)}))
	meta("llama.rope.dimension_count: 8", "llama.rope.dimension_count", uint32(8))
	meta("sliding_window: 16", "llama.attention.sliding_window", uint32(16))
	meta("split.count", "split.count", uint16(3))
	meta(`"longrope" is not supported`, "llama.rope.scaling.type", "longrope")
	meta("general.alignment", "general.alignment", uint32(3))
	meta("has shape", "llama.feed_forward_length", uint32(95))
	meta("has no place", "llama.block_count", uint32(1))
	meta("tensor blk.2.attn_norm.weight is missing", "llama.block_count", uint32(3))

	good := metaGGUF(t, "llama", nil)
	f("magic", append([]byte("GGML"), good[4:]...))
	f("version 1", slices.Replace(slices.Clone(good), 4, 8, 1, 0, 0, 0))
	f("little-endian", slices.Replace(slices.Clone(good), 4, 8, 0, 0, 0, 3))
	f("tensors are more", slices.Replace(slices.Clone(good), 8, 16, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff))
	f("metadata keys are more", slices.Replace(slices.Clone(good), 16, 24, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff))
	for n := 0; n < 4096; n += 7 { // every cut in the header
		if _, _, _, err := model.ParseGGUF(good[:n]); err == nil {
			t.Fatalf("file cut at %d is accepted", n)
		}
	}
	f("exceed", good[:len(good)-1])

	tensor := func(want string, change func(*modeltest.GGUF)) {
		t.Helper()
		g := modeltest.ModelGGUF(modeltest.Tiny("llama"), modeltest.GGUFOptions{})
		change(&g)
		b, err := g.Encode()
		if err != nil {
			t.Fatal(err)
		}
		f(want, b)
	}
	at := func(v uint64) *uint64 { return &v }
	tensor("overlap", func(g *modeltest.GGUF) { g.Tensors[1].Offset = at(0) })
	tensor("unaligned", func(g *modeltest.GGUF) { g.Tensors[1].Offset = at(8) })
	tensor("past", func(g *modeltest.GGUF) { g.Tensors[1].Offset = at(1 << 63) })
	tensor("appears twice", func(g *modeltest.GGUF) { g.Tensors[1].Name = g.Tensors[0].Name })
	tensor("too large", func(g *modeltest.GGUF) { g.Tensors[0].Dims = []uint64{1 << 62, 4, 4} })
	tensor("5 dimensions", func(g *modeltest.GGUF) { g.Tensors[0].Dims = []uint64{1, 1, 1, 1, 1} })
	tensor("type Q2_K is not supported", func(g *modeltest.GGUF) { g.Tensors[0].Type = 10 })
	tensor("type number 99 is not supported", func(g *modeltest.GGUF) { g.Tensors[0].Type = 99 })
	tensor("needs rows of a multiple of 32", func(g *modeltest.GGUF) { g.Tensors[0].Type, g.Tensors[0].Dims = 8, []uint64{63, 128} })
	tensor("tensor blk.0.attn_norm.weight is missing", func(g *modeltest.GGUF) { g.Tensors[1].Name = "blk.0.other.weight" })
	tensor("tensor model.layers.0.input_layernorm.weight has no place", func(g *modeltest.GGUF) {
		twin := g.Tensors[1]
		twin.Name = "model.layers.0.input_layernorm.weight"
		g.Tensors = append(g.Tensors, twin)
	})
	tensor("attn_output.bias has no place", func(g *modeltest.GGUF) {
		g.Tensors = append(g.Tensors, modeltest.GGUFTensor{Name: "blk.0.attn_output.bias", Dims: []uint64{1}, Data: []byte{0, 0, 1, 0}})
	})

	deep := any(uint8(1))
	for range 6 {
		deep = []any{deep}
	}
	meta("levels deep", "x.deep", deep)
}
