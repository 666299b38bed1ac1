package model_test

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

func FuzzSafetensors(f *testing.F) {
	f.Add(safetensors(`{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 8))
	f.Add(safetensors(`{"a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"b":{"dtype":"I64","shape":[0],"data_offsets":[2,2]}}`, 2))
	f.Add([]byte{255, 255, 255, 255, 255, 255, 255, 255, '{'})
	f.Fuzz(func(t *testing.T, b []byte) {
		ts, err := model.ParseSafetensors(b)
		if err != nil && len(ts) > 0 {
			t.Error("tensors and an error")
		}
	})
}

func FuzzIndex(f *testing.F) {
	f.Add([]byte(`{"metadata":{"total_size":8},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}`))
	f.Add([]byte(`{"weight_map":{"a":"../m.safetensors"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		owner, err := model.ParseIndex(b)
		if err == nil && len(owner) == 0 {
			t.Error("an empty index is accepted")
		}
		for _, file := range owner {
			if file != "" && (file[0] == '.' || file[0] == '/') {
				t.Errorf("file name %q", file)
			}
		}
	})
}

func FuzzGGUF(f *testing.F) {
	c := modeltest.Tiny("llama")
	c.Layers, c.Vocab, c.Hidden, c.Intermediate, c.Heads, c.KVHeads, c.HeadDim = 1, 1, 32, 32, 1, 1, 32
	for _, kind := range []string{"F32", "Q8_0"} {
		b, err := modeltest.ModelGGUF(c, modeltest.GGUFOptions{Type: kind, Meta: map[string]any{
			"tokenizer.ggml.tokens": []string{"a", "b"}, "x": []any{[]int32{1}, []int32{}}}}).Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[:len(b)/2])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		_, tensors, c, err := model.ParseGGUF(b)
		if err != nil {
			return
		}
		for _, s := range c.Tensors() {
			n := 1
			for _, d := range s.Shape {
				n *= d
			}
			if tn := tensors[s.Name]; len(tn.Data) != n*tn.DType.Bytes() {
				t.Errorf("%s of shape %v has %d bytes", s.Name, s.Shape, len(tn.Data))
			}
		}
	})
}

func FuzzConfig(f *testing.F) {
	for _, kind := range []string{"llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3"} {
		c := modeltest.Tiny(kind)
		c.Rope = arch.RopeScaling{Kind: "yarn", Factor: 4, OriginalMaxPos: 64}
		b, err := json.Marshal(modeltest.ConfigJSON(c, kernels.F32))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	if b, err := os.ReadFile("stories260k/config.json"); err == nil {
		f.Add(b)
	}
	f.Add([]byte(`{"model_type":"llama","rope_parameters":{"rope_type":"llama3","rope_theta":5e5},"eos_token_id":[1,2]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if g, err := model.ParseGeneration(b); err == nil {
			for _, id := range g.EOS {
				if id < 0 {
					t.Errorf("end id %d", id)
				}
			}
		}
		c, err := arch.ReadHF(b)
		if err != nil {
			return
		}
		if c.Layers < 1 || c.Heads%c.KVHeads != 0 || c.HeadDim%2 != 0 || c.MaxPositions < 1 || !(c.NormEps > 0) {
			t.Errorf("accepted %+v", c)
		}
	})
}
