package prefill

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
)

// TestInForm: the receiver keeps the second KV head only, in bf16 and in
// blocks of another size. Its rows are ours, rounded, with digests that hold
// for them; a row of ours that is wrong gets none.
func TestInForm(t *testing.T) {
	const n, bt = 30, 8
	p, ready := prompt(4, n)
	src := newSource(p, p.layout, n, bt)
	for layer := range p.layout.Layers {
		src.ready(layer, ready)
	}
	to := kvconn.Layout{BlockTokens: bt, Groups: []kvconn.Group{{Kind: "full", Layers: 2, KVHeads: 1, HeadFirst: 1, HeadsTotal: 2, HeadDim: 2, RowBytes: 4, DType: "bf16"}}}
	rows, err := inForm(src, to)
	if err != nil {
		t.Fatal(err)
	}
	for layer := range p.layout.Layers {
		for first := 0; first < n; first += bt {
			count := min(bt, n-first)
			got, sums, ours := make([]byte, to.RowsBytes(layer, count)), make([]uint64, 1), make([]byte, p.layout.RowsBytes(count))
			if err := rows.Load(layer, first/bt, first, count, got, sums); err != nil {
				t.Fatal(err)
			}
			p.fill(ours, layer, first, count)
			want := uint64(0)
			for kv := range 2 {
				mine, its := ours[(kv*2+1)*count*8:][:count*8], got[kv*count*4:][:count*4]
				want += kernels.DigestHeadRows(layer, kv, 1, first, count, 4, its)
				for e := range 2 * count {
					f := math.Float32frombits(binary.LittleEndian.Uint32(mine[4*e:]))
					b := math.Float32frombits(uint32(binary.LittleEndian.Uint16(its[2*e:])) << 16)
					if d := math.Abs(float64(f) - float64(b)); d > math.Abs(float64(f))/256 && d > 0x1p-133 {
						t.Fatalf("layer %d positions %d+%d: %v became %v", layer, first, count, f, b)
					}
				}
			}
			if sums[0] != want {
				t.Errorf("layer %d positions %d+%d: digest %x, want %x", layer, first, count, sums[0], want)
			}
		}
	}
	p.broken[ready[4].Block] = true
	if err := rows.Load(0, 2, 16, bt, make([]byte, to.RowsBytes(0, bt)), make([]uint64, 1)); !errors.Is(err, kvconn.ErrDigest) {
		t.Errorf("a broken row was converted: %v", err)
	}
	to.Groups[0].DType, to.Groups[0].RowBytes, to.Groups[0].KVHeads, to.Groups[0].HeadFirst, to.BlockTokens = "f32", 8, 2, 0, 4
	if same, err := inForm(src, to); err != nil || same != kvconn.Source(src) {
		t.Errorf("rows of our own form are converted: %v", err)
	}
}
