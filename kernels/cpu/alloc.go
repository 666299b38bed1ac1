package cpu

import "unsafe"

const hugeBytes = 2 << 20

// alloc returns n zeroed bytes, aligned to 64. Large areas are aligned to 2 MiB and backed
// by huge pages where the system has them: every step reads the weights end to end, and
// page walks and prefetchers that stop at 4 KiB cost speed.
func alloc(n int) []byte {
	if n < hugeBytes {
		b := make([]byte, n+64)
		off := -int(uintptr(unsafe.Pointer(&b[0]))) & 63
		return b[off : off+n : off+n]
	}
	b := make([]byte, roundUp(n, hugeBytes)+hugeBytes)
	off := -int(uintptr(unsafe.Pointer(&b[0]))) & (hugeBytes - 1)
	b = b[off : off+roundUp(n, hugeBytes)]
	adviseHuge(b)
	return b[:n:n]
}

// allocFloats is alloc for n float32.
func allocFloats(n int) []float32 {
	if n == 0 {
		return nil
	}
	b := alloc(4 * n)
	return unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), n)
}

// floatsOf views memory that is aligned for it as float32.
func floatsOf(b []byte) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), len(b)/4)
}
