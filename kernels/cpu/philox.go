package cpu

import "math/bits"

// philox is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", 2011): a pure function of counter and key.
func philox(c [4]uint32, k [2]uint32) [4]uint32 {
	for range 10 {
		h0, l0 := bits.Mul32(0xd2511f53, c[0])
		h1, l1 := bits.Mul32(0xcd9e8d57, c[2])
		c = [4]uint32{h1 ^ c[1] ^ k[0], l1, h0 ^ c[3] ^ k[1], l0}
		k[0] += 0x9e3779b9
		k[1] += 0xbb67ae85
	}
	return c
}

// uniform is the one random number, in [0, 1), of a draw: a function of the
// seed, the choice and the absolute position of the token drawn.
func uniform(seed uint64, choice uint32, position int) float64 {
	r := philox(
		[4]uint32{uint32(position), uint32(uint64(position) >> 32), choice, 0},
		[2]uint32{uint32(seed), uint32(seed >> 32)})
	return float64((uint64(r[1])<<32|uint64(r[0]))>>11) * (1.0 / (1 << 53))
}
