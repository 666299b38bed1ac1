package kvlayout

// DType is the type of a row's elements.
type DType string

// Element types.
const (
	F32    DType = "f32"
	F16    DType = "f16"
	BF16   DType = "bf16"
	F8E4M3 DType = "f8e4m3" // no infinities
	U8     DType = "u8"     // opaque bytes
	U4     DType = "u4"     // two to a byte, opaque
)

// Bits is the size of one element; 0 for an unknown type.
func (d DType) Bits() int {
	switch d {
	case F32:
		return 32
	case F16, BF16:
		return 16
	case F8E4M3, U8:
		return 8
	case U4:
		return 4
	}
	return 0
}

// Bytes is the size of n elements.
func (d DType) Bytes(n int) int { return n * d.Bits() / 8 }

// number reports whether elements have a value that another type can take.
func (d DType) number() bool { return d == F32 || d == F16 || d == BF16 || d == F8E4M3 }
