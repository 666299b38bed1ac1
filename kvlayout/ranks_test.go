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

// TestPairs: every rank gets each of its heads once, from a rank that has it, in runs that are as
// long as they can be; and the senders that keep a head take turns.
func TestPairs(t *testing.T) {
	for _, heads := range []int{1, 2, 6, 8, 64} {
		for from := 1; from <= 16; from++ {
			for to := 1; to <= 16; to++ {
				pairs, err := kvlayout.Pairs(heads, from, to)
				l := kvlayout.Plain(1, heads, 8, 16, kvlayout.BF16)
				src, err1 := l.Ranks(from)
				dst, err2 := l.Ranks(to)
				if (err == nil) != (err1 == nil && err2 == nil) {
					t.Fatalf("%d heads, %d to %d: %v, %v, %v", heads, from, to, err, err1, err2)
				}
				if err != nil {
					continue
				}
				times, senders := map[[2]int]int{}, map[int]bool{}
				for i, p := range pairs {
					if p.Heads < 1 {
						t.Errorf("%d heads, %d to %d: %+v", heads, from, to, p)
					}
					senders[p.From] = true
					a, b := src[p.From].Groups[0].Heads, dst[p.To].Groups[0].Heads
					if p.FromHead+p.Heads > a.Count || p.ToHead+p.Heads > b.Count || a.First+p.FromHead != b.First+p.ToHead {
						t.Errorf("%d heads, %d to %d: %+v of %v to %v", heads, from, to, p, a, b)
					}
					for h := range p.Heads {
						times[[2]int{p.To, p.ToHead + h}]++
					}
					if i > 0 && pairs[i-1].From == p.From && pairs[i-1].To == p.To {
						t.Errorf("%d heads, %d to %d: %+v and %+v could be one", heads, from, to, pairs[i-1], p)
					}
				}
				for r := range dst {
					for h := range dst[r].Groups[0].Heads.Count {
						if times[[2]int{r, h}] != 1 {
							t.Errorf("%d heads, %d to %d: rank %d gets head %d %d times", heads, from, to, r, h, times[[2]int{r, h}])
						}
					}
				}
				if from == to && len(senders) != from {
					t.Errorf("%d heads, %d to %d: %d of the ranks send", heads, from, to, len(senders))
				}
				if most := kvlayout.MostPairs(heads, 16, to); len(pairs) > most || most > to+15 {
					t.Errorf("%d heads, %d to %d: %d pairs, at most %d", heads, from, to, len(pairs), most)
				}
			}
		}
	}
	for _, c := range [][3]int{{8, 0, 1}, {8, 1, 0}, {8, 3, 1}, {8, 1, 3}, {0, 1, 1}, {-1, 1, 1}, {8, 128, 1}} {
		if _, err := kvlayout.Pairs(c[0], c[1], c[2]); err == nil {
			t.Errorf("pairs of %v", c)
		}
	}
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
