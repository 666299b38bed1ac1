package kernels

import (
	"encoding/binary"

	"github.com/xpyd/xpyd/kvlayout"
)

// The digest is defined to the bit in DESIGN.md, with vectors in
// testdata/digest_vectors.json. Each row is hashed alone with its coordinates;
// every larger digest is the wrapping sum of its rows' hashes, so slices are
// merged by adding and blocks grow by adding.

const (
	digestKeySeed   = 0x9e3779b97f4a7c15
	digestCoordSeed = 0xd1b54a32d192ed03
)

// mix64 is the splitmix64 finaliser (Stafford's variant 13), a bijection.
func mix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// digestKey returns the key pair of 8-byte lane i: k1 in the low 32 bits, k2 in
// the high ones.
func digestKey(i int) uint64 { return mix64(digestKeySeed * (uint64(i) + 1)) }

// digestKeys holds the first keys: those of rows up to 2 KiB. Longer rows compute the rest.
var digestKeys = func() (keys [256]uint64) {
	for i := range keys {
		keys[i] = digestKey(i)
	}
	return keys
}()

// coordHash mixes a row's coordinates (kvlayout.Coordinates).
func coordHash(coord uint64) uint64 { return mix64(digestCoordSeed + coord) }

// lane is one lane's term: a keyed product plus, in the high word, the sum of the halves,
// where a change of a single half shows whatever the keys are.
func lane(d, key uint64) uint64 {
	lo, hi := uint32(d), uint32(d>>32)
	return uint64(lo+hi)<<32 + uint64(lo^uint32(key))*uint64(hi^uint32(key>>32))
}

// RowHash is the 64-bit hash of one KV row: the bytes that a plane of a head stores for one
// position (see kvlayout.Coordinates). It detects corruption, not forgery.
func RowHash(layer, plane, head, pos int, row []byte) uint64 {
	return mix64(rowSum(row) ^ coordHash(kvlayout.Coordinates(layer, plane, head, pos)))
}

// rowSum is the order-free part: the sum of the lanes of row, zero-padded to a
// multiple of 16 bytes.
func rowSum(row []byte) uint64 {
	var a, b uint64
	i, keys := 0, digestKeys[:]
	for len(row) >= 16 && len(keys) >= 2 {
		a += lane(binary.LittleEndian.Uint64(row), keys[0])
		b += lane(binary.LittleEndian.Uint64(row[8:16]), keys[1])
		row, keys = row[16:], keys[2:]
		i += 2
	}
	for ; len(row) > 0; i += 2 {
		var pad [16]byte
		n := copy(pad[:], row)
		row = row[n:]
		a += lane(binary.LittleEndian.Uint64(pad[:]), digestKey(i))
		b += lane(binary.LittleEndian.Uint64(pad[8:]), digestKey(i+1))
	}
	return a + b
}

// DigestRows hashes n packed positions of one layer, firstPos .. firstPos+n-1.
// out[h] is set to the digest of head h: the sum of RowHash over its rows.
// len(packed) is l.PackedBytes(n), len(out) is l.Heads.
func DigestRows(l *kvlayout.Layer, firstPos, n int, packed []byte, out []uint64) {
	_ = packed[:l.PackedBytes(n)]
	clear(out[:l.Heads])
	for plane := range l.Planes {
		for h := range l.Heads {
			rows, scales := l.Part(packed, n, plane, h)
			out[h] += DigestPart(l, plane, h, firstPos, n, rows, scales)
		}
	}
}

// DigestPart is DigestRows for n rows of one plane of one head, in place in a pool. scales
// is empty where rows have none.
func DigestPart(l *kvlayout.Layer, plane, head, firstPos, n int, rows, scales []byte) (sum uint64) {
	coord, size, done := l.Coordinates(plane, head, 0), l.RowBytes(plane), 0
	if len(scales) > 0 { // a row is hashed with its scale behind it
		row, scale := make([]byte, size, size+l.ScaleBytes()), l.ScaleBytes()
		for i := range n {
			copy(row, rows[i*size:(i+1)*size])
			sum += mix64(rowSum(append(row, scales[i*scale:(i+1)*scale]...)) ^ coordHash(coord|uint64(uint32(firstPos+i))))
		}
		return sum
	}
	sum, done = hashRowsSIMD(coord, firstPos, n, size, rows)
	for i := done; i < n; i++ {
		sum += mix64(rowSum(rows[i*size:(i+1)*size]) ^ coordHash(coord|uint64(uint32(firstPos+i))))
	}
	return sum
}
