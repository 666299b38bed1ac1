package model

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/xpyd/xpyd/kernels"
)

// Checkpoints with FP8 weights: the layers' projections are F8_E4M3 and have a
// tensor NAME_scale beside them, one number or one for each output row, by which
// elements are multiplied. That is what vLLM reads as quantization "fp8" and
// "compressed-tensors". Scales of activations that such files may have are not
// used: activations get one a row when they are computed.
//
// DeepSeek's and Qwen's checkpoints have NAME_scale_inv instead, of the same meaning: a number
// for each block of 128 by 128.

// storedF8 is E4M3's name in safetensors; the suffixes are what a scale's name adds.
const (
	storedF8    = "F8_E4M3"
	scaleSuffix = "_scale"
	blockSuffix = "_scale_inv"
	blockSide   = 128
)

// findScale sets the scales of the FP8 tensor of that name. It returns their own name and entry.
func (s *stored) findScale(name string, have map[string]stored) (string, entry, error) {
	key := name + scaleSuffix
	t, ok := have[key]
	if !ok {
		key = name + blockSuffix
		if t, ok = have[key]; !ok {
			return "", entry{}, fmt.Errorf("%s without its scale, %s or %s", storedF8, name+scaleSuffix, key)
		}
		s.blocks = (s.shape[1] + blockSide - 1) / blockSide
	}
	e, err := s.setScale(t)
	return key, e, err
}

// setScale takes the scales from t, their tensor.
func (s *stored) setScale(t stored) (entry, error) {
	rows, known := s.shape[0], t.why == "" && t.stored != storedF8
	if want := []int{(rows + blockSide - 1) / blockSide, s.blocks}; s.blocks > 0 {
		if !known || !slices.Equal(t.shape, want) {
			return entry{}, fmt.Errorf("its scale is %s %v, want %v", t.stored, t.shape, want)
		}
	} else if n := elements(t.shape); !known || n != 1 && (n != rows || !slices.Equal(t.shape, []int{rows}) && !slices.Equal(t.shape, []int{rows, 1})) {
		return entry{}, fmt.Errorf("its scale is %s %v, want one number or %d", t.stored, t.shape, rows)
	}
	s.scale = make([]float32, elements(t.shape))
	for i := range s.scale {
		v := kernels.Widen(t.dtype, t.raw, i)
		if !(v >= 0) || math.IsInf(float64(v), 0) {
			return entry{}, fmt.Errorf("scale %d is %v", i, v)
		}
		s.scale[i] = v
	}
	if bytes.IndexByte(s.raw, 0x7f) >= 0 || bytes.IndexByte(s.raw, 0xff) >= 0 {
		return entry{}, errors.New("an element is not a number")
	}
	return t.entry, nil
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

// widenF8 multiplies the elements by their scales, as little-endian F32.
func (e entry) widenF8() []byte {
	out, width := make([]byte, 4*len(e.raw)), len(e.raw)/e.shape[0]
	for i, q := range e.raw {
		at := 0
		switch {
		case e.blocks > 0:
			at = i/width/blockSide*e.blocks + i%width/blockSide
		case len(e.scale) > 1:
			at = i / width
		}
		binary.LittleEndian.PutUint32(out[4*i:], math.Float32bits(e4m3[q]*e.scale[at]))
	}
	return out
}

// F8 returns a tensor stored in E4M3 as it is, with its scales; false if it is stored
// otherwise, or has scales for blocks, which no backend computes with. Tensor widens it to F32.
func (m *Model) F8(name string) (kernels.Tensor, bool) {
	e := m.tensors[name]
	if e.scale == nil || e.blocks > 0 {
		return kernels.Tensor{}, false
	}
	return kernels.Tensor{DType: kernels.F8, Shape: slices.Clone(e.shape), Data: e.raw, Scale: e.scale}, true
}

// StoredF8 reports whether the layers' projections are stored in E4M3 as F8 returns it: all of
// them are, or none.
func (m *Model) StoredF8() bool {
	for _, e := range m.tensors {
		if e.scale != nil && e.blocks == 0 {
			return true
		}
	}
	return false
}

// Weights returns all tensors, valid until Close. Those stored in E4M3 stay E4M3 if f8 is
// set, else they are widened.
func (m *Model) Weights(f8 bool) kernels.Weights {
	w := kernels.Weights{}
	for _, t := range m.Config.Tensors() {
		as, ok := m.F8(t.Name)
		if !f8 || !ok {
			as, _ = m.Tensor(t.Name)
		}
		w[t.Place] = as
	}
	return w
}
