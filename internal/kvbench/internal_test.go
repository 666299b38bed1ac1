package kvbench

import (
	"errors"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kvconn"
)

func tiny() Config {
	c := DefaultConfig()
	c.Layers, c.BlockBytes, c.Bytes, c.LatencyBytes = 2, 1<<10, 8<<10, 2<<10
	return c
}

// What a pool checks and believes is what a corrupted byte shows in.
func TestPool(t *testing.T) {
	c := tiny()
	from, err := newPool(c, 4, false)
	if err != nil {
		t.Fatal(err)
	}
	defer from.memory.Close()
	to, err := newPool(c, 8, false)
	if err != nil {
		t.Fatal(err)
	}
	defer to.memory.Close()
	src := source{from, order("shuffled", 4, 1)}
	src.fill(src.order)
	if err := src.check(src.order); err != nil {
		t.Fatal(err)
	}
	dst := order("shuffled", 8, 2)[:4]
	sk := &sink{pool: to}
	sums, rows := make([]uint64, c.KVHeads), make([]byte, c.BlockBytes)
	for layer := range c.Layers {
		for i := range src.order {
			if err := src.Load(layer, i, i*16, 16, rows, sums); err != nil {
				t.Fatal(err)
			}
			rows[17] ^= 4
			if err := sk.Store(layer, dst[i], 0, 16, i*16, rows, sums); !errors.Is(err, kvconn.ErrDigest) {
				t.Errorf("a flipped bit was stored: %v", err)
			}
			rows[17] ^= 4
			if i%2 == 0 {
				err = sk.Store(layer, dst[i], 0, 16, i*16, rows, sums)
			} else if run, ok := sk.View(layer, dst[i], 0, 16); ok {
				copy(run, rows)
				err = sk.Verify(layer, dst[i], 0, 16, i*16, sums)
			}
			if err != nil || !slices.Equal(to.sums(layer, dst[i]), sums) {
				t.Error(err)
			}
		}
	}
	if err := to.check(dst); err != nil {
		t.Error(err)
	}
	to.run(1, dst[3])[1023]++
	if to.check(dst) == nil {
		t.Error("a changed byte was not seen")
	}
	if sk.Verify(1, dst[3], 0, 16, 3*16, sums) == nil {
		t.Error("a changed byte was believed")
	}
	sk.unchecked.Store(true)
	if err := sk.Verify(1, dst[3], 0, 16, 3*16, sums); err != nil {
		t.Error(err)
	}
	if _, ok := sk.View(0, 0, 1, 15); ok {
		t.Error("a view of a part of a block")
	}
	if src.Load(0, 4, 64, 16, rows, sums) == nil || src.Load(0, 0, 0, 15, rows, sums) == nil {
		t.Error("loaded what is not there")
	}
}

func TestOrder(t *testing.T) {
	if o := order("contiguous", 4, 9); !slices.Equal(o, []int32{0, 1, 2, 3}) {
		t.Error(o)
	}
	a, b := order("shuffled", 64, 1), order("shuffled", 64, 2)
	if slices.Equal(a, b) || slices.IsSorted(a) {
		t.Error("not shuffled, or alike")
	}
	slices.Sort(a)
	if !slices.Equal(a, order("contiguous", 64, 0)) {
		t.Error("not a permutation")
	}
}
