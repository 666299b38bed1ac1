package modeltest

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// GGUFOptions say how WriteGGUF writes.
type GGUFOptions struct {
	Seed uint64
	// Type of the matrices: "F32" (also ""), "F16", "BF16", "Q8_0", "Q4_0".
	// Norms and biases are F32.
	Type string
	// Meta holds more keys, such as tokenizer.ggml.tokens: see GGUF.Meta.
	Meta map[string]any
}

// WriteGGUF writes a model with c's shape, in memory first: for small shapes.
func WriteGGUF(path string, c arch.Config, o GGUFOptions) error {
	b, err := ModelGGUF(c, o).Encode()
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o644)
}

// GGUF is a file to be written. Supported Meta values: bool, uint8, int8,
// uint16, int16, uint32, int32, uint64, int64, float32, float64, string, and
// []string, []int32, []uint32, []float32, []any (of one type).
type GGUF struct {
	Version uint32 // 0 means 3
	Meta    map[string]any
	Tensors []GGUFTensor
}

// GGUFTensor is one tensor, its data as it is stored.
type GGUFTensor struct {
	Name   string
	Dims   []uint64 // fastest first
	Type   uint32   // ggml type
	Data   []byte
	Offset *uint64 // nil: placed one after the other
}

// ModelGGUF is the file of a model with c's shape.
func ModelGGUF(c arch.Config, o GGUFOptions) GGUF {
	a := strings.TrimSuffix(strings.ReplaceAll(c.ModelType, "_", ""), "text")
	if a == "mixtral" {
		a = "llama"
	}
	g := GGUF{Meta: map[string]any{
		"general.architecture": a, "general.alignment": uint32(32),
		a + ".block_count": uint32(c.Layers), a + ".context_length": uint32(c.MaxPositions),
		a + ".embedding_length": uint32(c.Hidden), a + ".feed_forward_length": uint32(c.Intermediate),
		a + ".attention.head_count": uint32(c.Heads), a + ".attention.head_count_kv": uint32(c.KVHeads),
		a + ".attention.key_length": uint32(c.HeadDim), a + ".attention.value_length": uint32(c.HeadDim),
		a + ".attention.layer_norm_rms_epsilon": c.NormEps, a + ".rope.freq_base": float32(c.RopeTheta),
	}}
	if len(c.BOS) > 0 {
		g.Meta["tokenizer.ggml.bos_token_id"] = uint32(c.BOS[0])
	}
	if len(c.EOS) > 0 {
		g.Meta["tokenizer.ggml.eos_token_id"] = uint32(c.EOS[0])
	}
	if c.Experts > 0 {
		g.Meta[a+".expert_count"], g.Meta[a+".expert_used_count"] = uint32(c.Experts), uint32(c.ExpertsPerToken)
		g.Meta[a+".expert_feed_forward_length"] = uint32(c.ExpertWidth)
	}
	if c.Window > 0 {
		g.Meta[a+".attention.sliding_window"] = uint32(c.Window)
	}
	maps.Copy(g.Meta, o.Meta)
	for _, s := range c.Tensors() {
		v := Values(o.Seed, s)
		t := GGUFTensor{Name: s.GGUF}
		if s.PairedHeads > 0 {
			v = pair(v, s.Shape[0], s.Shape[0]/s.PairedHeads)
		}
		for _, d := range slices.Backward(s.Shape) {
			t.Dims = append(t.Dims, uint64(d))
		}
		kind := o.Type
		if len(s.Shape) == 1 {
			kind = "F32"
		}
		switch kind {
		case "F16":
			t.Type, t.Data = 1, encode(nil, v, kernels.F16)
		case "BF16":
			t.Type, t.Data = 30, encode(nil, v, kernels.BF16)
		case "Q8_0":
			t.Type, t.Data = 8, quantise(v, kind)
		case "Q4_0":
			t.Type, t.Data = 2, quantise(v, kind)
		default:
			t.Data = encode(nil, v, kernels.F32)
		}
		if !g.stack(s, t) {
			g.Tensors = append(g.Tensors, t)
		}
	}
	if n := len(c.RopeFreqFactors); n > 0 {
		g.Tensors = append(g.Tensors, GGUFTensor{Name: arch.RopeFreqs, Dims: []uint64{uint64(n)}, Data: encode(nil, c.RopeFreqFactors, kernels.F32)})
	}
	return g
}

// stack adds the tensor of an expert to those before it, and reports whether it belongs there.
func (g *GGUF) stack(s arch.Tensor, t GGUFTensor) bool {
	if s.Stacked == 0 {
		return false
	}
	for i := range g.Tensors {
		if have := &g.Tensors[i]; have.Name == t.Name {
			have.Data = append(have.Data, t.Data...)
			return true
		}
	}
	t.Dims = append(t.Dims, uint64(s.Stacked))
	g.Tensors = append(g.Tensors, t)
	return true
}

// pair puts the two halves of each head's rows side by side, as llama.cpp's
// converter does: stored row 2i+s is row i+s*dim/2.
func pair(v []float32, rows, dim int) []float32 {
	out := make([]float32, 0, len(v))
	in := len(v) / rows
	for r := range rows {
		head, at := r/dim, r%dim
		src := head*dim + at/2 + at%2*(dim/2)
		out = append(out, v[src*in:][:in]...)
	}
	return out
}

// Encode renders the file. Keys are written in order of their names.
func (g GGUF) Encode() ([]byte, error) {
	le := binary.LittleEndian
	b := le.AppendUint32([]byte("GGUF"), cmp.Or(g.Version, 3))
	b = le.AppendUint64(b, uint64(len(g.Tensors)))
	b = le.AppendUint64(b, uint64(len(g.Meta)))
	for _, k := range slices.Sorted(maps.Keys(g.Meta)) {
		kind, v, err := ggufValue(g.Meta[k])
		if err != nil {
			return nil, fmt.Errorf("key %s: %w", k, err)
		}
		b = append(le.AppendUint32(append(le.AppendUint64(b, uint64(len(k))), k...), kind), v...)
	}
	align := uint64(32)
	if a, ok := g.Meta["general.alignment"].(uint32); ok {
		align = uint64(a)
	}
	var data []byte
	pad := func(b []byte) []byte { return append(b, make([]byte, (align-uint64(len(b))%align)%align)...) }
	for _, t := range g.Tensors {
		data = pad(data)
		at := uint64(len(data))
		if t.Offset != nil {
			at = *t.Offset
		}
		b = append(le.AppendUint64(b, uint64(len(t.Name))), t.Name...)
		b = le.AppendUint32(b, uint32(len(t.Dims)))
		for _, d := range t.Dims {
			b = le.AppendUint64(b, d)
		}
		b = le.AppendUint64(le.AppendUint32(b, t.Type), at)
		data = append(data, t.Data...)
	}
	return append(pad(b), data...), nil
}

// ggufKinds are the type ids of values. An empty []any is one of uint8.
var ggufKinds = map[reflect.Kind]uint32{reflect.Uint8: 0, reflect.Interface: 0, reflect.Int8: 1, reflect.Uint16: 2, reflect.Int16: 3,
	reflect.Uint32: 4, reflect.Int32: 5, reflect.Float32: 6, reflect.Bool: 7, reflect.String: 8, reflect.Slice: 9,
	reflect.Uint64: 10, reflect.Int64: 11, reflect.Float64: 12}

// ggufValue returns the type id and the bytes of one value.
func ggufValue(v any) (uint32, []byte, error) {
	le, rv := binary.LittleEndian, reflect.ValueOf(v)
	kind, ok := ggufKinds[rv.Kind()]
	switch {
	case !ok:
		return 0, nil, fmt.Errorf("type %T is not supported", v)
	case rv.Kind() == reflect.String:
		return kind, append(le.AppendUint64(nil, uint64(rv.Len())), rv.String()...), nil
	case rv.Kind() != reflect.Slice:
		b, err := binary.Append(nil, le, v)
		return kind, b, err
	}
	var body []byte
	of := ggufKinds[rv.Type().Elem().Kind()]
	for i := range rv.Len() {
		k, b, err := ggufValue(rv.Index(i).Interface())
		if err != nil {
			return 0, nil, err
		}
		if i > 0 && k != of {
			return 0, nil, fmt.Errorf("array of type %d holds type %d", of, k)
		}
		of, body = k, append(body, b...)
	}
	return kind, append(le.AppendUint64(le.AppendUint32(nil, of), uint64(rv.Len())), body...), nil
}
