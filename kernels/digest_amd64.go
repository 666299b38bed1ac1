package kernels

import "golang.org/x/sys/cpu"

// hashRowsAVX512 returns the sum of RowHash over 8*eights contiguous rows of
// rowBytes, a multiple of 64 that the key table covers. coord is the seed plus
// the coordinates of the first row; the others follow it by position.
//
//go:noescape
func hashRowsAVX512(rows *byte, eights, rowBytes int, keys *uint64, coord uint64) uint64

// sumRowsAVX2 sets sums[i] to rowSum of the i-th of n contiguous rows of
// rowBytes, a multiple of 32 that the key table covers.
//
//go:noescape
func sumRowsAVX2(rows *byte, n, rowBytes int, keys, sums *uint64)

var (
	useAVX512 = cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ
	useAVX2   = cpu.X86.HasAVX2
)

// hashRowsSIMD hashes the first done of n rows; the caller does the rest. coord holds the
// rows' coordinates except their positions.
func hashRowsSIMD(coord uint64, firstPos, n, rowBytes int, rows []byte) (sum uint64, done int) {
	if rowBytes > 8*len(digestKeys) || uint64(firstPos)+uint64(n) > 1<<32 {
		return 0, 0
	}
	switch {
	case useAVX512 && rowBytes%64 == 0 && n >= 8:
		done = n &^ 7
		_ = rows[:done*rowBytes]
		return hashRowsAVX512(&rows[0], done/8, rowBytes, &digestKeys[0], digestCoordSeed+coord+uint64(firstPos)), done
	case useAVX2 && rowBytes%32 == 0:
		var sums [16]uint64
		for done < n {
			k := min(n-done, len(sums))
			at := rows[done*rowBytes : (done+k)*rowBytes]
			sumRowsAVX2(&at[0], k, rowBytes, &digestKeys[0], &sums[0])
			for i, s := range sums[:k] {
				sum += mix64(s ^ coordHash(coord+uint64(firstPos+done+i)))
			}
			done += k
		}
	}
	return sum, done
}
