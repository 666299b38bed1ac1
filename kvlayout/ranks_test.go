package kvlayout_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/xpyd/xpyd/kvlayout"
)

// TestRanks: ranks share the heads of each group evenly, in order; a head is kept by several where
// there are fewer.
func TestRanks(t *testing.T) {
	f := func(heads kvlayout.Heads, n int, want ...kvlayout.Heads) {
		t.Helper()
		l := kvlayout.Plain(2, 1, 8, 16, kvlayout.BF16)
		l.Groups[0].Heads = heads
		ranks, err := l.Ranks(n)
		if (err == nil) != (len(want) > 0) || len(ranks) != len(want) {
			t.Fatalf("%v among %d: %d ranks, %v", heads, n, len(ranks), err)
		}
		for i, r := range ranks {
			if err := r.Validate(); err != nil || r.Groups[0].Heads != want[i] {
				t.Errorf("%v among %d: rank %d has %v, want %v (%v)", heads, n, i, r.Groups[0].Heads, want[i], err)
			}
		}
		if l.Groups[0].Heads != heads {
			t.Errorf("%v became %v", heads, l.Groups[0].Heads)
		}
	}
	h := func(first, count, total int) kvlayout.Heads {
		return kvlayout.Heads{First: first, Count: count, Total: total}
	}
	f(h(0, 8, 8), 1, h(0, 8, 8))
	f(h(0, 8, 8), 2, h(0, 4, 8), h(4, 4, 8))
	f(h(0, 2, 2), 4, h(0, 1, 2), h(0, 1, 2), h(1, 1, 2), h(1, 1, 2))
	f(h(0, 1, 1), 3, h(0, 1, 1), h(0, 1, 1), h(0, 1, 1))
	f(h(4, 2, 8), 2, h(4, 1, 8), h(5, 1, 8)) // a part of a model's heads, divided once more
	f(h(0, 8, 8), 3)
	f(h(0, 2, 2), 3)
	f(h(0, 8, 8), 0)
	f(h(0, 8, 8), -1)
	f(h(0, 1, 1), 65)
}

// TestCopyHeads: what is divided among ranks and put together again is what it was, wherever it is
// cut; no byte of another head or position is touched.
func TestCopyHeads(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	each(t, func(t *testing.T, l kvlayout.Layout) {
		for _, n := range []int{1, 2, 3, 6, 8} {
			ranks, err := l.Ranks(n)
			if err != nil {
				continue
			}
			for i, whole := range l.Resolve()[:2] {
				bt := whole.BlockTokens
				packed, again := make([]byte, whole.BlockBytes()), make([]byte, whole.BlockBytes())
				for j := range packed {
					packed[j] = byte(r.Uint32())
				}
				for _, rank := range ranks {
					own := rank.Resolve()[i]
					block := make([]byte, own.BlockBytes())
					for at := 0; at < bt; {
						rows := 1 + r.IntN(bt-at)
						kvlayout.CopyHeads(&own, block, bt, at, &whole, packed, bt, at, rows)
						at += rows
					}
					for plane := range own.Planes {
						for head := range own.Heads {
							a, aScales := own.Part(block, bt, plane, head)
							b, bScales := whole.Part(packed, bt, plane, own.FirstHead-whole.FirstHead+head)
							if !bytes.Equal(a, b) || !bytes.Equal(aScales, bScales) {
								t.Fatalf("%d ranks, plane %d, head %d: the rank has other rows", n, plane, own.FirstHead+head)
							}
						}
					}
					kvlayout.CopyHeads(&whole, again, bt, 0, &own, block, bt, 0, bt)
				}
				if !bytes.Equal(again, packed) {
					t.Fatalf("%d ranks: what was put together differs", n)
				}
			}
		}
	})
	l := kvlayout.Plain(1, 4, 8, 4, kvlayout.BF16)
	ranks, err := l.Ranks(2)
	if err != nil {
		t.Fatal(err)
	}
	a, b := ranks[0].Resolve()[0], ranks[1].Resolve()[0]
	dst := make([]byte, a.BlockBytes())
	if kvlayout.CopyHeads(&a, dst, 4, 0, &b, bytes.Repeat([]byte{1}, b.BlockBytes()), 4, 0, 4); bytes.Count(dst, []byte{0}) != len(dst) {
		t.Error("heads that only one of two has were copied")
	}
}
