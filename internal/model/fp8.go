package model

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Checkpoints with FP8 weights: the layers' projections are F8_E4M3 and have a
// tensor NAME_scale beside them, one number or one for each output row, by which
// elements are multiplied. That is what vLLM reads as quantization "fp8" and
// "compressed-tensors". Scales of activations that such files may have are not
// used: activations get one a row when they are computed.

// storedF8 is E4M3's name in safetensors, scaleSuffix what a scale's name adds.
const (
	storedF8    = "F8_E4M3"
	scaleSuffix = "_scale"
)

// checkQuantization accepts what FP8 checkpoints say of themselves. What the
// tensors must be like is checked with them.
func checkQuantization(raw json.RawMessage) error {
	var q struct {
		Method string          `json:"quant_method"`
		Format string          `json:"format"`            // compressed-tensors
		Block  json.RawMessage `json:"weight_block_size"` // fp8
		Groups map[string]struct {
			Weights *struct {
				Bits      int    `json:"num_bits"`
				Type      string `json:"type"`
				Strategy  string `json:"strategy"`
				Symmetric *bool  `json:"symmetric"`
			} `json:"weights"`
		} `json:"config_groups"`
	}
	if err := json.Unmarshal(raw, &q); err != nil {
		return fmt.Errorf("quantization_config: %w", err)
	}
	switch q.Method {
	case "fp8":
		if set(q.Block) {
			return fmt.Errorf("quantization_config: weight_block_size is not supported (scales a tensor or a channel are)")
		}
		return nil
	case "compressed-tensors":
		for name, g := range q.Groups {
			w := g.Weights
			if w == nil || w.Bits != 8 || w.Type != "float" || w.Strategy != "tensor" && w.Strategy != "channel" || w.Symmetric != nil && !*w.Symmetric {
				return fmt.Errorf("quantization_config: weights of %.40q are not supported (8 bits of type float, symmetric, a scale a tensor or a channel, are)", name)
			}
		}
		if len(q.Groups) > 0 && (q.Format == "" || q.Format == "float-quantized" || q.Format == "naive-quantized") {
			return nil
		}
	}
	return fmt.Errorf("quantization_config: quantised safetensors of method %.40q are not supported (F32, F16, BF16, and FP8 by \"fp8\" or \"compressed-tensors\" are; or a GGUF file)", q.Method)
}

// projection tells whether a tensor is one of those that may be FP8.
func projection(name string) bool {
	return strings.HasPrefix(name, "model.layers.") && strings.HasSuffix(name, "_proj.weight")
}

// findScale gives the FP8 tensor its scales, and returns their own entry.
func (s *stored) findScale(name string, have map[string]stored) (entry, error) {
	fail := func(format string, args ...any) (entry, error) {
		return entry{}, fmt.Errorf("%s: tensor %s: %s", s.file, name, fmt.Sprintf(format, args...))
	}
	if !projection(name) {
		return fail("dtype %s is not supported here (for the projections of the layers it is)", storedF8)
	}
	t, ok := have[name+scaleSuffix]
	if !ok {
		return fail("%s without its scale, %s", storedF8, name+scaleSuffix)
	}
	rows := s.shape[0]
	if n := elements(t.shape); t.why != "" || t.stored == storedF8 || n != 1 && (n != rows || !slices.Equal(t.shape, []int{rows}) && !slices.Equal(t.shape, []int{rows, 1})) {
		return fail("its scale is %s %v, want one number or %d", t.stored, t.shape, rows)
	}
	s.scale = widenScales(t.entry)
	for i, v := range s.scale {
		if !(v >= 0) || math.IsInf(float64(v), 0) {
			return fail("scale %d is %v", i, v)
		}
	}
	if bytes.IndexByte(s.raw, 0x7f) >= 0 || bytes.IndexByte(s.raw, 0xff) >= 0 {
		return fail("an element is not a number")
	}
	return t.entry, nil
}

// checkF8 refuses checkpoints in which only some projections are FP8.
func (c *Config) checkF8(source string, ts map[string]entry) error {
	var is, isNot string
	for _, w := range c.Tensors() {
		switch {
		case !projection(w.Name):
		case ts[w.Name].scale != nil:
			is = w.Name
		default:
			isNot = w.Name
		}
	}
	if is != "" && isNot != "" {
		return fmt.Errorf("%s: tensor %s is %s and %s is %s: all projections of the layers or none can be", source, is, storedF8, isNot, ts[isNot].stored)
	}
	return nil
}

func widenScales(e entry) []float32 {
	out := make([]float32, elements(e.shape))
	for i := range out {
		switch e.dtype {
		case F32:
			out[i] = math.Float32frombits(binary.LittleEndian.Uint32(e.raw[4*i:]))
		case F16:
			out[i] = half(e.raw[2*i:])
		default:
			out[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(e.raw[2*i:])) << 16)
		}
	}
	return out
}

// e4m3 are the values of the 256 codes; those of the two NaNs do not occur.
var e4m3 = func() (t [256]float32) {
	for i := range t {
		exp, man := i>>3&15, float64(i&7)
		v := math.Ldexp(man/8, -6)
		if exp > 0 {
			v = math.Ldexp(1+man/8, exp-7)
		}
		if i >= 128 {
			v = -v
		}
		t[i] = float32(v)
	}
	return t
}()

// widenF8 multiplies the elements of rows by their scales, as little-endian F32.
func widenF8(raw []byte, rows int, scale []float32) []byte {
	out := make([]byte, 4*len(raw))
	for i, q := range raw {
		s := scale[0]
		if len(scale) > 1 {
			s = scale[i/(len(raw)/rows)]
		}
		binary.LittleEndian.PutUint32(out[4*i:], math.Float32bits(e4m3[q]*s))
	}
	return out
}

// F8 returns a tensor that the file has in E4M3 as it lies there, and what its
// rows are multiplied by: one number each, or one for all. Tensor widens the same
// to F32. False: it is stored otherwise.
func (m *Model) F8(name string) (t Tensor, scale []float32, ok bool) {
	e := m.tensors[name]
	if e.scale == nil {
		return Tensor{}, nil, false
	}
	return Tensor{DType: F8, Shape: slices.Clone(e.shape), Data: e.raw}, e.scale, true
}
