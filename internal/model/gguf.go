package model

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/xpyd/xpyd/kernels"
)

// Bounds on GGUF headers, beside maxHeaderBytes and maxTensors.
const (
	maxMetaKeys  = 1 << 16
	maxArrayLen  = 1 << 22
	maxBoxed     = 1 << 22 // elements of all arrays that become []any
	maxArrayNest = 4
	maxGGUFDims  = 4
)

// gguf is a parsed file: metadata, and windows on its tensors.
type gguf struct {
	meta    map[string]any
	tensors map[string]ggufTensor
}

type ggufTensor struct {
	kind uint32   // ggml type
	dims []uint64 // fastest first, as in the file
	raw  []byte   // nil when the type is not supported
}

// ggmlType is a tensor type: quantised blocks, or elements of dtype.
type ggmlType struct {
	name  string
	quant quant // without a decoder: elements of dtype
	dtype kernels.DType
}

// ggmlTypes are ggml's types by id. Those without a size are not supported.
var ggmlTypes = map[uint32]ggmlType{
	0: {"F32", quant{1, 4, nil}, kernels.F32}, 1: {"F16", quant{1, 2, nil}, kernels.F16}, 30: {"BF16", quant{1, 2, nil}, kernels.BF16},
	2: {name: "Q4_0", quant: quant{32, 18, q40}}, 3: {name: "Q4_1", quant: quant{32, 20, q41}},
	6: {name: "Q5_0", quant: quant{32, 22, q50}}, 7: {name: "Q5_1", quant: quant{32, 24, q51}},
	8: {name: "Q8_0", quant: quant{32, 34, q80}}, 12: {name: "Q4_K", quant: quant{256, 144, q4K}},
	13: {name: "Q5_K", quant: quant{256, 176, q5K}}, 14: {name: "Q6_K", quant: quant{256, 210, q6K}},
	9: {name: "Q8_1"}, 10: {name: "Q2_K"}, 11: {name: "Q3_K"}, 15: {name: "Q8_K"}, 16: {name: "IQ2_XXS"}, 17: {name: "IQ2_XS"},
	18: {name: "IQ3_XXS"}, 19: {name: "IQ1_S"}, 20: {name: "IQ4_NL"}, 21: {name: "IQ3_S"}, 22: {name: "IQ2_S"}, 23: {name: "IQ4_XS"},
	24: {name: "I8"}, 25: {name: "I16"}, 26: {name: "I32"}, 27: {name: "I64"}, 28: {name: "F64"}, 29: {name: "IQ1_M"},
	34: {name: "TQ1_0"}, 35: {name: "TQ2_0"}, 39: {name: "MXFP4"},
}

// ggmlTypeOf returns what is known of a type id, and whether it is supported.
func ggmlTypeOf(id uint32) (t ggmlType, ok bool) {
	t, ok = ggmlTypes[id]
	if !ok {
		t.name = fmt.Sprintf("number %d", id)
	}
	return t, t.quant.size > 0
}

// parseGGUF reads versions 2 and 3. Layout: "GGUF", uint32 version, uint64
// tensors, uint64 keys, the keys with their values, the tensor infos, padding
// to general.alignment, tensor data. Everything is little-endian.
func parseGGUF(data []byte) (*gguf, error) {
	r := &cursor{b: data[:min(len(data), maxHeaderBytes)]}
	if magic := r.bytes(4); r.err == nil && string(magic) != "GGUF" {
		return nil, errors.New("not a GGUF file: the magic is missing")
	}
	version := r.u32()
	tensors, keys := r.u64(), r.u64()
	switch {
	case r.err != nil:
		return nil, r.err
	case version == 1:
		return nil, errors.New("GGUF version 1 is not supported (2 and 3 are): convert the file again")
	case version != 2 && version != 3:
		return nil, fmt.Errorf("GGUF version %d is not supported (2 and 3, little-endian, are)", version)
	case tensors > maxTensors:
		return nil, fmt.Errorf("%d tensors are more than %d", tensors, maxTensors)
	case keys > maxMetaKeys:
		return nil, fmt.Errorf("%d metadata keys are more than %d", keys, maxMetaKeys)
	}
	g := &gguf{meta: make(map[string]any), tensors: make(map[string]ggufTensor)}
	for range keys {
		key := r.str()
		v := r.value(r.u32(), 0)
		if r.err != nil {
			return nil, fmt.Errorf("metadata key %.120q: %w", key, r.err)
		}
		if _, twice := g.meta[key]; twice {
			return nil, fmt.Errorf("metadata key %.120q appears twice", key)
		}
		g.meta[key] = v
	}
	return g, g.readTensors(r, data, int(tensors))
}

// readTensors reads n tensor infos and cuts the tensors out of data.
func (g *gguf) readTensors(r *cursor, data []byte, n int) error {
	align := uint64(32)
	if v, ok := g.meta["general.alignment"]; ok {
		a, ok := v.(uint32)
		if !ok || a == 0 || a > 1<<16 || a&(a-1) != 0 {
			return fmt.Errorf("general.alignment %v is not a power of two up to 65536", v)
		}
		align = uint64(a)
	}
	type info struct {
		ggufTensor
		name   string
		offset uint64
	}
	var infos []info
	for range n {
		in := info{name: r.str()}
		dims := r.u32()
		if r.err == nil && dims > maxGGUFDims {
			return fmt.Errorf("tensor %.120q: %d dimensions", in.name, dims)
		}
		for range dims {
			in.dims = append(in.dims, r.u64())
		}
		in.kind, in.offset = r.u32(), r.u64()
		if r.err != nil {
			return fmt.Errorf("tensor info %.120q: %w", in.name, r.err)
		}
		infos = append(infos, in)
	}
	if n == 0 {
		return nil
	}
	start := (uint64(r.at) + align - 1) / align * align
	if start > uint64(len(data)) {
		return fmt.Errorf("tensor data would begin at %d, the file ends at %d", start, len(data))
	}
	body := data[start:]
	var spans []span
	for _, in := range infos {
		if _, twice := g.tensors[in.name]; twice {
			return fmt.Errorf("tensor %.120q appears twice", in.name)
		}
		if in.offset%align != 0 || in.offset > uint64(len(body)) {
			return fmt.Errorf("tensor %.120q: offset %d is unaligned or past %d data bytes", in.name, in.offset, len(body))
		}
		t, known := ggmlTypeOf(in.kind)
		if known {
			size, err := t.sizeOf(in.dims)
			if err != nil {
				return fmt.Errorf("tensor %.120q: %w", in.name, err)
			}
			if size > uint64(len(body))-in.offset {
				return fmt.Errorf("tensor %.120q: %d bytes at offset %d exceed %d data bytes", in.name, size, in.offset, len(body))
			}
			in.raw = body[in.offset : in.offset+size : in.offset+size]
		}
		spans = append(spans, span{in.name, in.offset, in.offset + uint64(len(in.raw))})
		g.tensors[in.name] = in.ggufTensor
	}
	slices.SortFunc(spans, span.compare)
	for i := 1; i < len(spans); i++ {
		if spans[i].begin < spans[i-1].end {
			return fmt.Errorf("tensors %.120q and %.120q overlap", spans[i-1].name, spans[i].name)
		}
	}
	return nil
}

// sizeOf is the stored size of a tensor of dims, fastest first.
func (t ggmlType) sizeOf(dims []uint64) (uint64, error) {
	n, ok := checkedProduct(append(slices.Clone(dims), uint64(t.quant.size)))
	for _, d := range dims {
		ok = ok && d <= math.MaxInt32
	}
	if !ok {
		return 0, fmt.Errorf("dimensions %v are too large", dims)
	}
	if block := uint64(t.quant.block); block > 1 {
		if len(dims) == 0 || dims[0]%block != 0 {
			return 0, fmt.Errorf("type %s needs rows of a multiple of %d values, not %v", t.name, block, dims)
		}
		n /= block
	}
	return n, nil
}

// cursor reads a header; after the first error it yields zeros.
type cursor struct {
	b   []byte
	at  int
	err error

	boxed uint64 // elements of []any so far
}

func (r *cursor) bytes(n uint64) []byte {
	if r.err == nil && n > uint64(len(r.b)-r.at) {
		r.err = fmt.Errorf("header ends at byte %d where %d more are needed", len(r.b), n)
	}
	if r.err != nil {
		return nil
	}
	b := r.b[r.at:][:n]
	r.at += int(n)
	return b
}

// fixed returns n bytes, zeros after an error.
func (r *cursor) fixed(n uint64) []byte {
	if b := r.bytes(n); b != nil {
		return b
	}
	return make([]byte, n)
}

func (r *cursor) u32() uint32 { return binary.LittleEndian.Uint32(r.fixed(4)) }
func (r *cursor) u64() uint64 { return binary.LittleEndian.Uint64(r.fixed(8)) }
func (r *cursor) str() string { return string(r.bytes(r.u64())) }

// Value types of GGUF metadata.
const (
	ggufU8 = iota
	ggufI8
	ggufU16
	ggufI16
	ggufU32
	ggufI32
	ggufF32
	ggufBool
	ggufString
	ggufArray
	ggufU64
	ggufI64
	ggufF64
)

// ggufScalars read the values that are neither strings nor arrays.
var ggufScalars = map[uint32]func(*cursor) any{
	ggufU8:   func(r *cursor) any { return r.fixed(1)[0] },
	ggufI8:   func(r *cursor) any { return int8(r.fixed(1)[0]) },
	ggufBool: func(r *cursor) any { return r.fixed(1)[0] != 0 },
	ggufU16:  func(r *cursor) any { return binary.LittleEndian.Uint16(r.fixed(2)) },
	ggufI16:  func(r *cursor) any { return int16(binary.LittleEndian.Uint16(r.fixed(2))) },
	ggufU32:  func(r *cursor) any { return r.u32() },
	ggufI32:  func(r *cursor) any { return int32(r.u32()) },
	ggufF32:  func(r *cursor) any { return math.Float32frombits(r.u32()) },
	ggufU64:  func(r *cursor) any { return r.u64() },
	ggufI64:  func(r *cursor) any { return int64(r.u64()) },
	ggufF64:  func(r *cursor) any { return math.Float64frombits(r.u64()) },
}

// value reads one metadata value of the given type.
func (r *cursor) value(kind uint32, depth int) any {
	switch read, ok := ggufScalars[kind]; {
	case ok:
		return read(r)
	case kind == ggufString:
		return r.str()
	case kind == ggufArray:
		return r.array(depth + 1)
	case r.err == nil:
		r.err = fmt.Errorf("value type %d is unknown", kind)
	}
	return nil
}

// array reads an array. Each element takes at least one byte of the header, and boxed
// ones are counted, so memory stays in proportion to the header.
func (r *cursor) array(depth int) any {
	kind, n := r.u32(), r.u64()
	if r.err == nil && (depth > maxArrayNest || n > maxArrayLen || n > uint64(len(r.b)-r.at)) {
		r.err = fmt.Errorf("array of %d elements, %d levels deep, is too large", n, depth)
	}
	if r.err != nil {
		return nil
	}
	switch kind {
	case ggufString:
		return fill(r, n, r.str)
	case ggufI32:
		return fill(r, n, func() int32 { return int32(r.u32()) })
	case ggufU32:
		return fill(r, n, r.u32)
	case ggufF32:
		return fill(r, n, func() float32 { return math.Float32frombits(r.u32()) })
	}
	if r.boxed += n; r.boxed > maxBoxed {
		r.err = fmt.Errorf("arrays of more than %d elements in all", maxBoxed)
		return nil
	}
	return fill(r, n, func() any { return r.value(kind, depth) })
}

func fill[T any](r *cursor, n uint64, next func() T) []T {
	out := []T{}
	for range n {
		v := next()
		if r.err != nil {
			return nil
		}
		out = append(out, v)
	}
	return out
}
