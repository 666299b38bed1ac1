package model_test

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

// raw is a tensor as a file has it.
type raw struct {
	dtype string
	shape []int
	data  []byte
}

func saveTensors(t *testing.T, path string, ts map[string]raw) {
	t.Helper()
	header, data := map[string]any{}, []byte(nil)
	for name, r := range ts {
		header[name] = map[string]any{"dtype": r.dtype, "shape": r.shape, "data_offsets": []int{len(data), len(data) + len(r.data)}}
		data = append(data, r.data...)
	}
	h, err := json.Marshal(header)
	if err == nil {
		err = os.WriteFile(path, slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h, data), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func scalesOf(v ...float32) (b []byte) {
	for _, s := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(s))
	}
	return b
}

// fp8Dir makes an FP8 checkpoint of Tiny("llama"): scales a channel, one for the
// tensor in layer 1's mlp. It returns the tensors, to be changed and saved again.
func fp8Dir(t *testing.T, quantization map[string]any) (dir string, ts map[string]raw) {
	t.Helper()
	c := modeltest.Tiny("llama")
	dir = writeHF(t, c, modeltest.HFOptions{Seed: 1, DType: kernels.BF16})
	m := open(t, dir)
	ts = map[string]raw{}
	for _, spec := range c.Tensors() {
		tn, _ := m.Tensor(spec.Name)
		ts[spec.Name] = raw{"BF16", spec.Shape, slices.Clone(tn.Data)}
		if !strings.HasSuffix(spec.Name, "_proj.weight") {
			continue
		}
		q, _ := kerneltest.F8Tensor(kernels.Tensor{DType: kernels.BF16, Shape: tn.Shape, Data: tn.Data})
		ts[spec.Name] = raw{"F8_E4M3", spec.Shape, q.Data}
		scale := raw{"F32", []int{spec.Shape[0], 1}, scalesOf(q.Scale...)}
		switch {
		case strings.Contains(spec.Name, "layers.1.mlp"):
			scale = raw{"BF16", []int{}, []byte{0x00, 0x3c}} // 2^-7
		case strings.Contains(spec.Name, "o_proj"):
			scale.shape = scale.shape[:1]
		}
		ts[spec.Name+"_scale"] = scale
	}
	ts["model.layers.0.self_attn.q_proj.input_scale"] = raw{"F32", []int{}, scalesOf(3)}
	ts["model.layers.0.self_attn.k_proj.k_scale"] = raw{"F32", []int{1}, scalesOf(3)}
	saveTensors(t, filepath.Join(dir, "model.safetensors"), ts)
	j := modeltest.ConfigJSON(c, kernels.BF16)
	j["quantization_config"] = quantization
	b, err := json.Marshal(j)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir, ts
}

func TestOpenFP8(t *testing.T) {
	dir, ts := fp8Dir(t, map[string]any{"quant_method": "fp8", "activation_scheme": "dynamic"})
	m := open(t, dir)
	for name, r := range ts {
		if r.dtype != "F8_E4M3" {
			if _, ok := m.F8(name); ok {
				t.Errorf("%s is FP8", name)
			}
			continue
		}
		q, ok := m.F8(name)
		scale := q.Scale
		if !ok || q.DType != kernels.F8 || !slices.Equal(q.Data, r.data) || !slices.Equal(q.Shape, r.shape) {
			t.Fatalf("%s is not what was saved", name)
		}
		if one := strings.Contains(name, "layers.1.mlp"); one && (len(scale) != 1 || scale[0] != 0x1p-7) || !one && len(scale) != r.shape[0] {
			t.Errorf("%s: %d scales", name, len(scale))
		}
		wide, _ := m.Tensor(name)
		values := floats(t, wide)
		if wide.DType != kernels.F32 || len(values) != len(r.data) {
			t.Fatalf("%s: widened to %d of %v", name, len(values), wide.DType)
		}
		for i, v := range values {
			s := scale[0]
			if len(scale) > 1 {
				s = scale[i/r.shape[1]]
			}
			if want := kerneltest.FromE4M3(r.data[i]) * s; v != want {
				t.Fatalf("%s: element %d is %v, want %v", name, i, v, want)
			}
		}
	}
	// A scale is part of what the model is.
	ts["model.layers.1.mlp.up_proj.weight_scale"] = raw{"BF16", []int{}, []byte{0x80, 0x3c}}
	other := m.Fingerprint
	saveTensors(t, filepath.Join(dir, "model.safetensors"), ts)
	if again := open(t, dir); again.Fingerprint == other {
		t.Error("another scale, and the fingerprint is the same")
	}
}

// TestOpenFP8Blocks: a scale is for 128 rows and 128 columns, the last of both for fewer.
func TestOpenFP8Blocks(t *testing.T) {
	for _, family := range []string{"qwen3_moe", "deepseek_v3"} {
		t.Run(family, func(t *testing.T) { openFP8Blocks(t, family) })
	}
}

func openFP8Blocks(t *testing.T, family string) {
	c := modeltest.Tiny(family)
	c.Hidden, c.ExpertWidth = 192, 130
	dir := writeHF(t, c, modeltest.HFOptions{Seed: 1, DType: kernels.BF16})
	m := open(t, dir)
	ts, scales, n := map[string]raw{}, map[string][]float32{}, 0
	for _, spec := range c.Tensors() {
		tn, _ := m.Tensor(spec.Name)
		ts[spec.Name] = raw{"BF16", spec.Shape, slices.Clone(tn.Data)}
		if !spec.Role.Projection() {
			continue
		}
		rows, cols := (spec.Shape[0]+127)/128, (spec.Shape[1]+127)/128
		codes := make([]byte, spec.Shape[0]*spec.Shape[1])
		for i := range codes {
			n++
			codes[i] = byte(n*7) % 0x7f
		}
		for range rows * cols {
			scales[spec.Name] = append(scales[spec.Name], 1/float32(len(scales[spec.Name])+2))
		}
		ts[spec.Name] = raw{"F8_E4M3", spec.Shape, codes}
		ts[spec.Name+"_scale_inv"] = raw{"F32", []int{rows, cols}, scalesOf(scales[spec.Name]...)}
	}
	save := func() { saveTensors(t, filepath.Join(dir, "model.safetensors"), ts) }
	save()
	m = open(t, dir)
	if m.StoredF8() {
		t.Error("a backend is to compute with blocks' scales")
	}
	for name, scale := range scales {
		if _, ok := m.F8(name); ok {
			t.Fatalf("%s is given as if it had a scale a row", name)
		}
		wide, _ := m.Tensor(name)
		width := wide.Shape[1]
		for i, v := range floats(t, wide) {
			if want := kerneltest.FromE4M3(ts[name].data[i]) * scale[i/width/128*((width+127)/128)+i%width/128]; v != want {
				t.Fatalf("%s: element %d is %v, want %v", name, i, v, want)
			}
		}
	}
	const gate = "model.layers.1.mlp.experts.2.gate_proj.weight"
	ts[gate+"_scale_inv"] = raw{"F32", []int{1, 2}, scalesOf(1, 1)}
	save()
	if _, err := model.Open(t.Context(), dir, model.Options{CacheDir: t.TempDir()}); err == nil || !strings.Contains(err.Error(), "[1 2], want [2 2]") {
		t.Errorf("%v", err)
	}
}

func TestOpenFP8Refuses(t *testing.T) {
	f := func(want string, change func(ts map[string]raw)) {
		t.Helper()
		dir, ts := fp8Dir(t, map[string]any{"quant_method": "compressed-tensors", "format": "float-quantized",
			"config_groups": map[string]any{"group_0": map[string]any{"weights": map[string]any{"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true}}}})
		change(ts)
		saveTensors(t, filepath.Join(dir, "model.safetensors"), ts)
		m, err := model.Open(t.Context(), dir, model.Options{CacheDir: t.TempDir()})
		if err == nil {
			m.Close()
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	const q, down = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
	f("", func(map[string]raw) {})
	f("without its scale, "+q+"_scale", func(ts map[string]raw) { delete(ts, q+"_scale") })
	f("want one number or", func(ts map[string]raw) { ts[q+"_scale"] = raw{"F32", []int{2}, scalesOf(1, 2)} })
	f("want one number or", func(ts map[string]raw) { ts[down+"_scale"] = raw{"I32", []int{1}, scalesOf(1)} })
	f("scale 0 is -1", func(ts map[string]raw) { ts[down+"_scale"] = raw{"F32", []int{1}, scalesOf(-1)} })
	f("scale 0 is NaN", func(ts map[string]raw) { ts[down+"_scale"] = raw{"F32", []int{1}, scalesOf(float32(math.NaN()))} })
	f("is not a number", func(ts map[string]raw) { ts[down].data[5] = 0xff })
	f("all projections of the layers or none", func(ts map[string]raw) {
		ts[down] = raw{"BF16", ts[down].shape, make([]byte, 2*len(ts[down].data))}
		delete(ts, down+"_scale")
	})
	f("is not supported here", func(ts map[string]raw) {
		e := ts["model.embed_tokens.weight"]
		ts["model.embed_tokens.weight"] = raw{"F8_E4M3", e.shape, e.data[:len(e.data)/2]}
	})
	f("has no place", func(ts map[string]raw) { ts[down+"_zero_point"] = raw{"F32", []int{1}, scalesOf(0)} })
}
