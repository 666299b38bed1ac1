package model

import (
	"context"
	"time"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// The decoders of foreign bytes, for tests and fuzzers.
var (
	ParseGeneration = parseGeneration
	ParseIndex      = parseIndex
	TorchDType      = torchDType
)

// ParseSafetensors returns name -> shape.
func ParseSafetensors(b []byte) (map[string][]int, error) {
	ts, err := parseSafetensors(b)
	out := map[string][]int{}
	for n, s := range ts {
		if s.why == "" {
			out[n] = s.tensor().Shape
		}
	}
	return out, err
}

// ParseGGUF parses a file, derives its configuration and reads all it can.
func ParseGGUF(b []byte) (meta map[string]any, tensors map[string]kernels.Tensor, c arch.Config, err error) {
	g, err := parseGGUF(b)
	if err != nil {
		return nil, nil, arch.Config{}, err
	}
	if c, err = g.config(); err != nil {
		return g.meta, nil, arch.Config{}, err
	}
	ts, err := choose(&c, "test.gguf", g.stored("test.gguf"), true)
	tensors = map[string]kernels.Tensor{}
	for n, e := range ts {
		tensors[n] = e.tensor()
	}
	return g.meta, tensors, c, err
}

// Dequantise decodes blocks of a ggml type to little-endian F32.
func Dequantise(kind uint32, src []byte) []byte {
	t, _ := ggmlTypeOf(kind)
	dst := make([]byte, 4*len(src)/t.quant.size*t.quant.block)
	t.quant.decode(dst, src)
	return dst
}

// FetchFast downloads without waiting between attempts; stall is how long a
// server may be silent.
func FetchFast(ctx context.Context, ref string, o Options, stall time.Duration) (string, error) {
	r, err := parseRepo(ref)
	if err != nil {
		return "", err
	}
	h, err := newHub(r, o.withDefaults())
	if err != nil {
		return "", err
	}
	h.pause, h.stall = func(int) time.Duration { return time.Millisecond }, stall
	return h.snapshot(ctx)
}
