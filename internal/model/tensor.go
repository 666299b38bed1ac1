package model

import (
	"math"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
)

// entry is a tensor as it lies in its file.
type entry struct {
	stored string        // dtype in the file: "F32", "Q4_K"; part of the fingerprint
	dtype  kernels.DType // dtype that Tensor yields
	shape  []int
	raw    []byte    // stored bytes
	quant  *quant    // set when stored in quantised blocks
	scale  []float32 // set when stored in E4M3: one a row, one for all, or as blocks says
	blocks int       // > 0: one for each block, this many side by side
	heads  int       // > 0: rows are interleaved head by head (llama.cpp's q and k)
}

// tensor yields e in canonical form.
func (e entry) tensor() kernels.Tensor {
	t := kernels.Tensor{DType: e.dtype, Shape: append([]int(nil), e.shape...)}
	if e.scale != nil {
		t.Data = e.widenF8()
		return t
	}
	if e.quant == nil && e.heads == 0 {
		t.Data = aligned(e.raw, e.dtype.Bytes())
		return t
	}
	rows := 1
	for _, n := range e.shape[:len(e.shape)-1] {
		rows *= n
	}
	if e.heads > 0 {
		rows = e.shape[0] // a bias has one element a row
	}
	t.Data = make([]byte, elements(e.shape)*e.dtype.Bytes())
	if rows == 0 {
		return t
	}
	in, out := len(e.raw)/rows, len(t.Data)/rows
	for r := range rows {
		src := e.raw[in*e.storedRow(r):][:in]
		dst := t.Data[out*r:][:out]
		if e.quant == nil {
			copy(dst, src)
		} else {
			e.quant.decode(dst, src)
		}
	}
	return t
}

// storedRow maps a row in rotate-half order to its place in the file. Within
// a head of d rows llama.cpp stores the pairs (i, i+d/2) side by side.
func (e entry) storedRow(r int) int {
	if e.heads == 0 {
		return r
	}
	d := e.shape[0] / e.heads
	head, in := r/d, r%d
	return head*d + 2*(in%(d/2)) + in/(d/2)
}

// aligned returns b, copied when it does not begin at a multiple of size.
func aligned(b []byte, size int) []byte {
	if uintptr(unsafe.Pointer(unsafe.SliceData(b)))%uintptr(size) == 0 {
		return b
	}
	return append(make([]byte, 0, len(b)), b...)
}

// elements is the product of a shape that was checked before.
func elements(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// checkedProduct multiplies dims, or reports false on overflow of int.
func checkedProduct(dims []uint64) (uint64, bool) {
	n := uint64(1)
	for _, d := range dims {
		if d != 0 && n > math.MaxInt/d {
			return 0, false
		}
		n *= d
	}
	return n, true
}
