package shm

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// stream is implemented in copy_amd64.s.
//
//go:noescape
func stream(dst, src, nextDst, nextSrc *byte, n int)

// streamAhead is how far stream reads ahead; it wants more than that.
const streamAhead = 2048

// streamCopy is copy with stores that pass the caches by. What of src and the
// two next runs cannot be streamed is copied, or not touched in advance.
func streamCopy(dst, src, nextDst, nextSrc []byte) {
	n := len(dst) &^ 127
	if n <= streamAhead || len(src) != len(dst) || !cpu.X86.HasAVX2 || uintptr(unsafe.Pointer(&dst[0]))&31 != 0 {
		copy(dst, src)
		return
	}
	if len(nextDst) < n || len(nextSrc) < n {
		nextDst, nextSrc = dst, src
	}
	stream(&dst[0], &src[0], &nextDst[0], &nextSrc[0], n)
	copy(dst[n:], src[n:])
}
