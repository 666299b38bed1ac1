package kernels

import "encoding/binary"

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

// coordHash packs a row's coordinates into 64 bits and mixes them.
// layer < 2^16, kv < 2, head < 2^15, pos < 2^32.
func coordHash(layer, kv, head, pos int) uint64 {
	return mix64(digestCoordSeed + coordinates(layer, kv, head, pos))
}

func coordinates(layer, kv, head, pos int) uint64 {
	return uint64(uint32(pos)) | uint64(head)<<32 | uint64(kv)<<47 | uint64(layer)<<48
}

// lane is one lane's term: the sum of its halves in the high word, where any
// change of a single half shows whatever the keys are, plus a keyed product.
func lane(d, key uint64) uint64 {
	lo, hi := uint32(d), uint32(d>>32)
	return uint64(lo+hi)<<32 + uint64(lo^uint32(key))*uint64(hi^uint32(key>>32))
}

// RowHash is the 64-bit hash of one KV row: the bytes of (layer, kv, head,
// pos), where kv is 0 for K and 1 for V and pos is the absolute position of
// the token in its sequence. It detects corruption, not forgery.
func RowHash(layer, kv, head, pos int, row []byte) uint64 {
	return mix64(rowSum(row) ^ coordHash(layer, kv, head, pos))
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

// DigestRows hashes n positions of one layer, firstPos .. firstPos+n-1, that
// lie packed as [2 (K,V)][kv_heads][n][row_bytes], with their scales behind
// them where they have any (Layout.RowsBytes). out[h] is set to the
// digest of KV head h: the sum of RowHash over its K and V rows.
// len(packed) is l.RowsBytes(n), len(out) is l.KVHeads.
func DigestRows(l Layout, layer, firstPos, n int, packed []byte, out []uint64) {
	_ = packed[:l.RowsBytes(n)]
	clear(out[:l.KVHeads])
	for kv := range 2 {
		for h := range l.KVHeads {
			rows, scales := l.Part(packed, n, kv, h)
			if scales == nil {
				out[h] += DigestHeadRows(layer, kv, h, firstPos, n, l.RowBytes, rows)
				continue
			}
			out[h] += digestScaled(layer, kv, h, firstPos, l.RowBytes, rows, scales)
		}
	}
}

// digestScaled is DigestHeadRows of rows that are hashed with their scales
// behind them: 4 bytes each.
func digestScaled(layer, kv, head, firstPos, rowBytes int, rows, scales []byte) (sum uint64) {
	row := make([]byte, rowBytes+4)
	for i := 0; len(scales) > 0; i++ {
		copy(row, rows[:rowBytes])
		copy(row[rowBytes:], scales[:4])
		rows, scales = rows[rowBytes:], scales[4:]
		sum += RowHash(layer, kv, head, firstPos+i, row)
	}
	return sum
}

// DigestHeadRows is DigestRows for one half of one head: n contiguous rows of
// (layer, kv, head) beginning at firstPos. A pool uses it on rows in place.
func DigestHeadRows(layer, kv, head, firstPos, n, rowBytes int, rows []byte) uint64 {
	sum, done := hashRowsSIMD(layer, kv, head, firstPos, n, rowBytes, rows)
	for i := done; i < n; i++ {
		sum += RowHash(layer, kv, head, firstPos+i, rows[i*rowBytes:(i+1)*rowBytes])
	}
	return sum
}
