package shm

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// stream is implemented in copy_amd64.s.
//
//go:noescape
func stream(dst, src, nextDst, nextSrc *byte, n int)

// streamAhead is how far stream reads ahead; it needs longer runs.
const streamAhead = 2048

// streamCopy is copy with stores that bypass the caches. Parts of src that cannot be
// streamed are copied; parts of the next runs that cannot are not touched in advance.
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
