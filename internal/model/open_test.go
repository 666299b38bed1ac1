package model_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

func open(t *testing.T, ref string) *model.Model {
	t.Helper()
	m, err := model.Open(t.Context(), ref, model.Options{CacheDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func writeHF(t *testing.T, c arch.Config, o modeltest.HFOptions) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "my-model")
	if err := modeltest.WriteHF(dir, c, o); err != nil {
		t.Fatal(err)
	}
	return dir
}

// floats widens any tensor to float32.
func floats(t *testing.T, tn kernels.Tensor) []float32 {
	t.Helper()
	var out []float32
	for b := tn.Data; len(b) > 0; b = b[tn.DType.Bytes():] {
		switch tn.DType {
		case kernels.F32:
			out = append(out, math.Float32frombits(binary.LittleEndian.Uint32(b)))
		case kernels.BF16:
			out = append(out, math.Float32frombits(uint32(binary.LittleEndian.Uint16(b))<<16))
		case kernels.F16:
			h := binary.LittleEndian.Uint16(b)
			v := math.Ldexp(float64(h&0x3ff|0x400), int(h>>10&31)-25)
			if h>>10&31 == 0 {
				v = math.Ldexp(float64(h&0x3ff), -24)
			}
			if h>>15 == 1 {
				v = -v
			}
			out = append(out, float32(v))
		}
	}
	return out
}

func TestOpenEmbedded(t *testing.T) {
	m := open(t, "")
	want := arch.Config{
		ModelType: "llama", Layers: 5, Hidden: 64, Intermediate: 172, Heads: 8, KVHeads: 4, HeadDim: 8, Vocab: 512,
		MaxPositions: 512, NormEps: 1e-5, RopeTheta: 10000, TiedHead: true, BOS: []int32{1}, EOS: []int32{2},
	}
	if !reflect.DeepEqual(m.Config, want) {
		t.Errorf("config\n%+v, want\n%+v", m.Config, want)
	}
	if m.Name != "stories260k" || len(m.Fingerprint) != 64 || len(m.Names()) != 47 {
		t.Errorf("name %q, fingerprint %q, %d tensors", m.Name, m.Fingerprint, len(m.Names()))
	}
	tok, cfg, tmpl := m.TokenizerFiles()
	if len(tok) == 0 || len(cfg) == 0 || tmpl != nil {
		t.Errorf("tokenizer files of %d, %d, %d bytes", len(tok), len(cfg), len(tmpl))
	}
	if m.GGUFMeta() != nil {
		t.Error("GGUF metadata without a GGUF file")
	}
	if again := open(t, "stories260k"); again.Fingerprint != m.Fingerprint {
		t.Error("two openings, two fingerprints")
	}
}

func TestOpenHF(t *testing.T) {
	f := func(name string, c arch.Config, o modeltest.HFOptions) {
		t.Run(name, func(t *testing.T) {
			m := open(t, writeHF(t, c, o))
			if !reflect.DeepEqual(m.Config, c) {
				t.Errorf("config\n%+v, want\n%+v", m.Config, c)
			}
			if want := map[kernels.DType]string{kernels.F32: "float32", kernels.F16: "float16", kernels.BF16: "bfloat16"}[o.DType]; m.TorchDType != want {
				t.Errorf("torch_dtype %q, want %q", m.TorchDType, want)
			}
			if m.Name != "my-model" {
				t.Errorf("name %q", m.Name)
			}
			specs := c.Tensors()
			if len(specs) != len(m.Names()) {
				t.Errorf("%d tensors, want %d", len(m.Names()), len(specs))
			}
			for _, s := range specs {
				tn, ok := m.Tensor(s.Name)
				if !ok || tn.DType != o.DType || !slices.Equal(tn.Shape, s.Shape) {
					t.Fatalf("%s: %v %v %v", s.Name, ok, tn.DType, tn.Shape)
				}
				got, want := floats(t, tn), modeltest.Values(o.Seed, s)
				for i := range want {
					tolerance := map[kernels.DType]float64{kernels.F16: 1. / 2048, kernels.BF16: 1. / 256}[o.DType]
					if math.Abs(float64(got[i]-want[i])) > tolerance*math.Abs(float64(want[i]))+tolerance*1e-4 {
						t.Fatalf("%s[%d] is %v, want %v", s.Name, i, got[i], want[i])
					}
				}
			}
		})
	}
	for i, family := range arch.Families() {
		f(family.Name+" f32", modeltest.Tiny(family.Name), modeltest.HFOptions{Seed: uint64(i)})
		f(family.Name+" bf16 in shards", modeltest.Tiny(family.Name), modeltest.HFOptions{Seed: uint64(i), DType: kernels.BF16, Shards: 3})
	}
	f("qwen2 f16", modeltest.Tiny("qwen2"), modeltest.HFOptions{Seed: 3, DType: kernels.F16})
	biased := modeltest.Tiny("llama")
	biased.QKVBias = true
	f("llama with attention bias", biased, modeltest.HFOptions{Seed: 5})
	scaled := modeltest.Tiny("llama")
	scaled.Rope = arch.RopeScaling{Kind: "llama3", Factor: 32, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMaxPos: 64}
	f("llama 3 scaling", scaled, modeltest.HFOptions{Seed: 6})
}

// The type to compute in, from old and new config.json files; anything but a string is
// ignored.
func TestTorchDType(t *testing.T) {
	f := func(want string, change map[string]any) {
		t.Helper()
		j := modeltest.ConfigJSON(modeltest.Tiny("llama"), kernels.F32)
		maps.Copy(j, change)
		maps.DeleteFunc(j, func(_ string, v any) bool { return v == nil })
		b, err := json.Marshal(j)
		if err != nil {
			t.Fatal(err)
		}
		if got := model.TorchDType(b); got != want {
			t.Errorf("%v: %q, want %q", change, got, want)
		}
		if _, err := arch.ReadHF(b); err != nil {
			t.Error(err)
		}
	}
	f("float32", nil)
	f("float16", map[string]any{"torch_dtype": "float16"})
	f("bfloat16", map[string]any{"torch_dtype": nil, "dtype": "bfloat16"})
	f("float16", map[string]any{"torch_dtype": "bfloat16", "dtype": "float16"})
	f("", map[string]any{"torch_dtype": nil})
	f("", map[string]any{"torch_dtype": 16})
	f("float16", map[string]any{"torch_dtype": "float16", "dtype": map[string]any{"text": "float32"}})
}

func TestOpenHFFiles(t *testing.T) {
	m := open(t, writeHF(t, modeltest.Tiny("llama"), modeltest.HFOptions{Files: map[string][]byte{
		"tokenizer.json": []byte("{}"), "chat_template.jinja": []byte("{{ x }}"),
		"generation_config.json": []byte(`{"eos_token_id": [2, 9], "temperature": 0.6, "top_k": 20, "top_p": null}`),
	}}))
	tok, cfg, tmpl := m.TokenizerFiles()
	if string(tok) != "{}" || cfg != nil || string(tmpl) != "{{ x }}" {
		t.Errorf("files %q %q %q", tok, cfg, tmpl)
	}
	if !slices.Equal(m.Config.EOS, []int32{2, 9}) {
		t.Errorf("end ids %v", m.Config.EOS)
	}
	g := m.Generation
	if g.Temperature == nil || *g.Temperature != 0.6 || g.TopK == nil || *g.TopK != 20 || g.TopP != nil {
		t.Errorf("generation %+v", g)
	}
}

// TestGenerationValues: values that no request could have are left out, and reported.
func TestGenerationValues(t *testing.T) {
	var said bytes.Buffer
	f := func(value string, ignored bool) {
		t.Helper()
		said.Reset()
		dir := writeHF(t, modeltest.Tiny("llama"), modeltest.HFOptions{Files: map[string][]byte{"generation_config.json": []byte("{" + value + "}")}})
		m, err := model.Open(t.Context(), dir, model.Options{CacheDir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&said, nil))})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		g := m.Generation
		have := g.Temperature != nil || g.TopP != nil || g.TopK != nil || g.MinP != nil || g.RepetitionPenalty != nil
		key, _, _ := strings.Cut(strings.Trim(value, `"`), `"`)
		if have == ignored || ignored != (strings.Contains(said.String(), "generation_config.json") && strings.Contains(said.String(), key)) {
			t.Errorf("%s: %+v, %s", value, g, &said)
		}
	}
	for _, ok := range []string{`"temperature":0`, `"temperature":3`, `"top_p":1`, `"top_k":-1`, `"top_k":0`, `"min_p":0`, `"repetition_penalty":2.5`} {
		f(ok, false)
	}
	for _, bad := range []string{`"temperature":-0.5`, `"top_p":1.5`, `"top_p":0`, `"top_k":-2`, `"top_k":4294967296`, `"min_p":2`, `"min_p":-1`, `"repetition_penalty":0`} {
		f(bad, true)
	}
}

func TestOpenSnapshotName(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "models--acme--Tiny-1", "snapshots", strings.Repeat("a", 40))
	if err := modeltest.WriteHF(dir, modeltest.Tiny("llama"), modeltest.HFOptions{}); err != nil {
		t.Fatal(err)
	}
	if m := open(t, dir); m.Name != "acme/Tiny-1" {
		t.Errorf("name %q", m.Name)
	}
}

func TestOpenErrors(t *testing.T) {
	type files map[string]string // file -> new content; "-" removes it
	f := func(name, want string, c func(*arch.Config), o modeltest.HFOptions, change files) {
		t.Run(name, func(t *testing.T) {
			stored := modeltest.Tiny("llama")
			dir := writeHF(t, stored, o)
			if c != nil {
				c(&stored)
				other := writeHF(t, stored, o)
				b, err := os.ReadFile(filepath.Join(other, "config.json"))
				if err != nil {
					t.Fatal(err)
				}
				change = files{"config.json": string(b)}
			}
			for name, text := range change {
				var err error
				if text == "-" {
					err = os.Remove(filepath.Join(dir, name))
				} else {
					err = os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			_, err := model.Open(t.Context(), dir, model.Options{CacheDir: t.TempDir()})
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want one with %q", err, want)
			}
			if err != nil && !strings.Contains(err.Error(), dir) {
				t.Errorf("error %v does not name the place", err)
			}
		})
	}
	f("no config.json", "no config.json", nil, modeltest.HFOptions{}, files{"config.json": "-"})
	sharded := modeltest.HFOptions{Shards: 2}
	f("no weights", "no .safetensors file", nil, modeltest.HFOptions{}, files{"model.safetensors": "-"})
	f("no shard", "model-00002-of-00002.safetensors", nil, sharded, files{"model-00002-of-00002.safetensors": "-"})
	f("empty weights", "model.safetensors: empty file", nil, modeltest.HFOptions{}, files{"model.safetensors": ""})
	f("cut weights", "model.safetensors: safetensors header", nil, modeltest.HFOptions{}, files{"model.safetensors": "12345678{}"})
	f("index leads outside", "is not a plain", nil, sharded, files{"model.safetensors.index.json": `{"weight_map":{"a":"../a.safetensors"}}`})
	f("tensor not in its shard", "model-00001-of-00002.safetensors: tensor a is missing", nil, sharded,
		files{"model.safetensors.index.json": `{"weight_map":{"a":"model-00001-of-00002.safetensors"}}`})
	f("missing tensor", "tensor model.layers.0.self_attn.q_norm.weight is missing", func(c *arch.Config) { c.ModelType, c.QKNorm = "qwen3", true }, modeltest.HFOptions{}, nil)
	f("missing bias", "tensor model.layers.0.self_attn.q_proj.bias is missing", func(c *arch.Config) { c.QKVBias = true }, modeltest.HFOptions{}, nil)
	f("wrong shape", "tensor model.embed_tokens.weight has shape [128 64], the configuration needs [127 64]", func(c *arch.Config) { c.Vocab-- }, modeltest.HFOptions{}, nil)
	f("layers beyond", "tensor model.layers.1.input_layernorm.weight has no place", func(c *arch.Config) { c.Layers-- }, modeltest.HFOptions{}, nil)
	f("config cut", "config.json: unexpected end of JSON input", nil, modeltest.HFOptions{}, files{"config.json": "{"})
	f("generation config", "generation_config.json: token id", nil, modeltest.HFOptions{}, files{"generation_config.json": `{"eos_token_id":"x"}`})
	for _, name := range []string{"config.json", "model.safetensors"} { // nobody writes into the pipe
		dir := writeHF(t, modeltest.Tiny("llama"), modeltest.HFOptions{})
		path := filepath.Join(dir, name)
		if err := errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)); err != nil {
			t.Fatal(err)
		}
		if _, err := model.Open(t.Context(), dir, model.Options{CacheDir: t.TempDir()}); err == nil || !strings.Contains(err.Error(), path+": not a regular file") {
			t.Errorf("a pipe: %v", err)
		}
	}

	if _, err := model.Open(t.Context(), "/no/such/dir", model.Options{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent directory: %v", err)
	}
	if _, err := model.Open(t.Context(), "acme/tiny", model.Options{}); err == nil || !strings.Contains(err.Error(), "hf:acme/tiny") {
		t.Errorf("repository without hf: %v", err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "m.gguf"), []byte("GGUF"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := model.Open(t.Context(), dir, model.Options{}); err == nil || !strings.Contains(err.Error(), "m.gguf") {
		t.Errorf("directory with a GGUF file: %v", err)
	}
}

func TestTiedHeadSavedTwice(t *testing.T) {
	c := modeltest.Tiny("llama") // has lm_head
	dir := writeHF(t, c, modeltest.HFOptions{})
	c.TiedHead = true
	other := writeHF(t, c, modeltest.HFOptions{})
	if err := os.Rename(filepath.Join(other, "config.json"), filepath.Join(dir, "config.json")); err != nil {
		t.Fatal(err)
	}
	if m := open(t, dir); slices.Contains(m.Names(), "lm_head.weight") {
		t.Error("a tied model has a head")
	}
}

// TestTensorAlignment: data at odd offsets of the file comes out aligned.
func TestTensorAlignment(t *testing.T) {
	dir := writeHF(t, modeltest.Tiny("llama"), modeltest.HFOptions{})
	path := filepath.Join(dir, "model.safetensors")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	n := binary.LittleEndian.Uint64(b)
	b = slices.Insert(b, int(8+n), ' ')
	binary.LittleEndian.PutUint64(b, n+1)
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	m := open(t, dir)
	for _, name := range m.Names() {
		tn, _ := m.Tensor(name)
		if uintptr(unsafe.Pointer(&tn.Data[0]))%uintptr(tn.DType.Bytes()) != 0 {
			t.Errorf("%s is not aligned", name)
		}
	}
}

func TestOpenCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := model.Open(ctx, "", model.Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
