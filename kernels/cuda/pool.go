//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"fmt"
	"unsafe"
)

// The pool methods panic on ranges outside the pool, as those of kernels/cpu do. They also
// panic when the device fails, as kernels.Pool has no errors: a lost device ends the
// process.
func (b *Backend) must(name string, f func() C.int32_t) {
	if err := b.lib.call(name, f); err != nil {
		panic(fmt.Sprintf("kernels/cuda: %v", err))
	}
}

func (b *Backend) packed(n, size int) {
	if n < 0 || size != b.rows.PackedBytes(n) {
		panic(fmt.Sprintf("kernels/cuda: %d packed bytes for %d rows, want %d", size, n, b.rows.PackedBytes(max(n, 0))))
	}
}

// Gather implements kernels.Pool.
func (b *Backend) Gather(layer int, block int32, row, n int, dst []byte) {
	b.packed(n, len(dst))
	b.must("xk_gather", func() C.int32_t {
		return C.api_gather(b.lib.api, b.ctx, C.int32_t(layer), C.int32_t(block), C.int32_t(row), C.int32_t(n), unsafe.Pointer(unsafe.SliceData(dst)))
	})
}

// Scatter implements kernels.Pool.
func (b *Backend) Scatter(layer int, block int32, row, n int, src []byte) {
	b.packed(n, len(src))
	b.must("xk_scatter", func() C.int32_t {
		return C.api_scatter(b.lib.api, b.ctx, C.int32_t(layer), C.int32_t(block), C.int32_t(row), C.int32_t(n), unsafe.Pointer(unsafe.SliceData(src)))
	})
}

// Digest implements kernels.Pool.
func (b *Backend) Digest(layer int, block int32, dst []uint64) {
	dst = dst[:b.rows.Heads]
	b.must("xk_digest", func() C.int32_t {
		return C.api_digest(b.lib.api, b.ctx, C.int32_t(layer), C.int32_t(block), (*C.uint64_t)(unsafe.Pointer(&dst[0])))
	})
}

// SetDigest implements kernels.Pool.
func (b *Backend) SetDigest(layer int, block int32, filled int, digest []uint64) {
	digest = digest[:b.rows.Heads]
	b.must("xk_set_digest", func() C.int32_t {
		return C.api_set_digest(b.lib.api, b.ctx, C.int32_t(layer), C.int32_t(block), C.int32_t(filled), (*C.uint64_t)(unsafe.Pointer(&digest[0])))
	})
}

// CopyBlock implements kernels.Pool.
func (b *Backend) CopyBlock(dst, src int32, firstPos, n int) {
	b.must("xk_copy_block", func() C.int32_t {
		return C.api_copy_block(b.lib.api, b.ctx, C.int32_t(dst), C.int32_t(src), C.int32_t(firstPos), C.int32_t(n))
	})
}
