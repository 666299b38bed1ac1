package kvconn

// ElementBytes is the size of one element of a row, and 0 for a dtype that
// cannot be converted: one that is not "f32", "f16", "bf16" or "f8e4m3".
func ElementBytes(dtype string) int {
	switch dtype {
	case "f32":
		return 4
	case "f16", "bf16":
		return 2
	case F8:
		return 1
	}
	return 0
}

// F8 is FP8 in the E4M3 form without infinities: one byte an element, and one
// f32 scale a row. Packed rows of it are followed by their scales.
const F8 = "f8e4m3"

const scaleBytes = 4

// PackedBytes is the size of n packed positions of one layer of the group:
// [2 (K,V)][kv_heads][n][row_bytes], and with F8 [2][kv_heads][n] scales.
func (g Group) PackedBytes(n int) int {
	row := g.RowBytes
	if g.DType == F8 {
		row += scaleBytes
	}
	return 2 * g.KVHeads * n * row
}

// convertible tells whether the group's rows are of a form that can be made
// into, and from, another dtype.
func (g Group) convertible() bool {
	n := ElementBytes(g.DType)
	return n > 0 && g.RowBytes == n*g.HeadDim
}
