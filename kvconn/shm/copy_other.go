//go:build !amd64

package shm

// streamCopy is copy: only amd64 has non-temporal stores that pay.
func streamCopy(dst, src, nextDst, nextSrc []byte) { copy(dst, src) }
