package prefill

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/convert"
	"github.com/xpyd/xpyd/kvlayout"
)

// TestInForm: the receiver keeps bf16, in blocks of another size. Its rows are ours, rounded, with digests that hold
// for them; a row of ours that is wrong gets none.
func TestInForm(t *testing.T) {
	const n, bt = 30, 8
	p, ready := prompt(4, n)
	src := newSource(p, p.layout.Resolve(), n, bt)
	for layer := range p.layout.Layers() {
		src.ready(layer, ready)
	}
	to := kvlayout.Plain(2, 2, 2, bt, "bf16")
	rows, err := convert.New(src, p.layout, to, kernels.DigestPart)
	if err != nil {
		t.Fatal(err)
	}
	for layer := range p.layout.Layers() {
		for first := 0; first < n; first += bt {
			count := min(bt, n-first)
			got, sums, ours := make([]byte, to.Resolve()[0].PackedBytes(count)), make([]uint64, 2), make([]byte, p.layout.Resolve()[0].PackedBytes(count))
			if err := rows.Load(layer, first/bt, first, count, got, sums); err != nil {
				t.Fatal(err)
			}
			p.fill(ours, layer, first, count)
			want := make([]uint64, 2)
			for part := range 4 {
				kv, head := part/2, part%2
				mine, its := ours[part*count*8:][:count*8], got[part*count*4:][:count*4]
				want[head] += kernels.DigestPart(&to.Resolve()[layer], kv, head, first, count, its, nil)
				for e := range 2 * count {
					f := math.Float32frombits(binary.LittleEndian.Uint32(mine[4*e:]))
					b := math.Float32frombits(uint32(binary.LittleEndian.Uint16(its[2*e:])) << 16)
					if d := math.Abs(float64(f) - float64(b)); d > math.Abs(float64(f))/256 && d > 0x1p-133 {
						t.Fatalf("layer %d positions %d+%d: %v became %v", layer, first, count, f, b)
					}
				}
			}
			if !slices.Equal(sums, want) {
				t.Errorf("layer %d positions %d+%d: digests %x, want %x", layer, first, count, sums, want)
			}
		}
	}
	p.broken[ready[4].Block] = true
	if err := rows.Load(0, 2, 16, bt, make([]byte, to.Resolve()[0].PackedBytes(bt)), make([]uint64, 2)); !errors.Is(err, kvconn.ErrDigest) {
		t.Errorf("a broken row was converted: %v", err)
	}
	to = kvlayout.Plain(2, 2, 2, 4, kvlayout.F32)
	if same, err := convert.New(src, p.layout, to, kernels.DigestPart); err != nil || same != kvconn.Source(src) {
		t.Errorf("rows of our own form are converted: %v", err)
	}
}
