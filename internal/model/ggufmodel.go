package model

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/model/arch"
)

func openGGUF(path string) (_ *Model, err error) {
	mp, err := mapFile(path)
	if err != nil {
		return nil, err
	}
	base := filepath.Base(path)
	m := &Model{Name: strings.TrimSuffix(base, filepath.Ext(base)), source: path, maps: []*mapping{mp}, gguf: make(map[string]any)}
	defer func() {
		if err != nil {
			_ = m.Close()
		}
	}()
	g, err := parseGGUF(mp.data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if m.Config, err = g.config(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if m.tensors, err = choose(&m.Config, path, g.stored(path), true); err != nil {
		return nil, err
	}
	for k, v := range g.meta {
		if strings.HasPrefix(k, "tokenizer.") {
			m.gguf[k] = v
		}
	}
	return m, nil
}

// config reads the architecture from the file's metadata and tensors.
func (g *gguf) config() (arch.Config, error) {
	var factors []float32
	if t, ok := g.tensors[arch.RopeFreqs]; ok {
		if typ, _ := ggmlTypeOf(t.kind); typ.name != "F32" {
			return arch.Config{}, fmt.Errorf("tensor %s of type %s is not F32", arch.RopeFreqs, typ.name)
		}
		r := cursor{b: t.raw}
		for range len(t.raw) / 4 {
			factors = append(factors, math.Float32frombits(r.u32()))
		}
	}
	shape := func(name string) []int {
		if t, ok := g.tensors[name]; ok {
			return t.shape()
		}
		return nil
	}
	return arch.ReadGGUF(g.meta, shape, factors)
}

// shape is row-major.
func (t ggufTensor) shape() []int {
	s := make([]int, 0, len(t.dims))
	for _, d := range slices.Backward(t.dims) {
		s = append(s, int(min(d, math.MaxInt32)))
	}
	return s
}

// stored lists the file's tensors.
func (g *gguf) stored(path string) map[string]stored {
	have := make(map[string]stored, len(g.tensors))
	for name, t := range g.tensors {
		typ, known := ggmlTypeOf(t.kind)
		s := stored{file: path, entry: entry{stored: typ.name, dtype: typ.dtype, raw: t.raw, shape: t.shape()}}
		if !known {
			s.why = fmt.Sprintf("type %s is not supported (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K are)", typ.name)
		} else if typ.quant.one != nil {
			s.quant = &typ.quant
		}
		have[name] = s
	}
	return have
}
