package kerneltest

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/convert"
	"github.com/xpyd/xpyd/kvlayout"
)

// oneRow is a source of one K and V row of one head.
type oneRow struct{ k, v [][]byte }

func (o oneRow) Load(_, _, firstPos, _ int, dst []byte, digests []uint64) error {
	at := 0
	for part := range o.k {
		for _, row := range [][][]byte{o.k, o.v} {
			at += copy(dst[at:], row[part])
		}
	}
	digests[0] = kernels.RowHash(0, 0, 0, firstPos, bytes.Join(o.k, nil)) + kernels.RowHash(0, 1, 0, firstPos, bytes.Join(o.v, nil))
	return nil
}

// Every element of every form, among its neighbours, alone, and in noise, becomes what
// kvconn/convert makes of it.
func TestConvertRow(t *testing.T) {
	const dim = 32
	size := map[kvlayout.DType]int{kvlayout.BF16: 2, kvlayout.F16: 2, kvlayout.F8E4M3: 1}
	layout := func(dtype kvlayout.DType) kvlayout.Layout {
		return kvlayout.Plain(1, 1, dim, 1, dtype)
	}
	r := rand.New(rand.NewPCG(1, 2))
	noise := func(dtype kvlayout.DType) []byte {
		row := make([]byte, dim*size[dtype])
		for i := range row {
			row[i] = byte(r.Uint32())
		}
		return row
	}
	rowOf := func(dtype kvlayout.DType, code int) [][]byte {
		row := noise(dtype)
		if dtype == kvlayout.F8E4M3 {
			for i := range row {
				row[i] = byte(code + i)
			}
			return [][]byte{row, binary.LittleEndian.AppendUint32(nil, uint32(r.IntN(math.MaxInt32)%0x7f800000))} // any that is finite
		}
		for i := range dim {
			binary.LittleEndian.PutUint16(row[2*i:], uint16(code+i))
		}
		return [][]byte{row}
	}
	other := func(dtype kvlayout.DType, code int) [][]byte {
		if dtype == kvlayout.F8E4M3 {
			return rowOf(dtype, code)
		}
		row := noise(dtype)
		if code%3 == 0 { // alone
			clear(row)
			copy(row[2*(code/3%dim):], []byte{byte(r.Uint32()), byte(r.Uint32())})
		}
		return [][]byte{row}
	}
	for from := range size {
		for to := range size {
			if from == to {
				continue
			}
			for code := 0; code < 1<<16; code += dim / 2 {
				o := oneRow{rowOf(from, code), other(from, code)}
				src, err := convert.New(o, layout(from), layout(to), kernels.DigestPart)
				if err != nil {
					t.Fatal(err)
				}
				want, sums := make([]byte, layout(to).Resolve()[0].PackedBytes(1)), make([]uint64, 1)
				if err := src.Load(0, 0, 0, 1, want, sums); err != nil {
					t.Fatal(err)
				}
				o = oneRow{convertRow(from, to, o.k), convertRow(from, to, o.v)}
				got := make([]byte, len(want))
				if err := o.Load(0, 0, 0, 1, got, make([]uint64, 1)); err != nil || !bytes.Equal(got, want) {
					t.Fatalf("%s to %s, %x: %x, want %x (%v)", from, to, code, got, want, err)
				}
			}
		}
	}
}
