package kvlayout

import "fmt"

// MaxRanks bounds the tensor-parallel ranks of a worker.
const MaxRanks = 64

// Ranks returns what each of n tensor-parallel ranks keeps of a layout: as many heads of each
// group as every other one. Where a group has fewer heads than there are ranks, each head is
// kept by several.
func (l Layout) Ranks(n int) ([]Layout, error) {
	if n < 1 || n > MaxRanks {
		return nil, fmt.Errorf("%d ranks: want 1..%d", n, MaxRanks)
	}
	for i := range l.Groups {
		if h := l.Groups[i].Heads.Count; h%n != 0 && n%h != 0 {
			return nil, fmt.Errorf("%d ranks and %d KV heads: one must divide the other", n, h)
		}
	}
	ranks := make([]Layout, n)
	for r := range ranks {
		ranks[r] = l
		ranks[r].Groups = append([]Group(nil), l.Groups...)
		for i := range ranks[r].Groups {
			h := &ranks[r].Groups[i].Heads
			h.First, h.Count = h.First+r*h.Count/n, max(h.Count/n, 1)
		}
	}
	return ranks, nil
}
