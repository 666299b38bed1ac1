//go:build !amd64

package shm

// streamCopy is copy: only amd64 has stores that are worth choosing.
func streamCopy(dst, src, nextDst, nextSrc []byte) { copy(dst, src) }
