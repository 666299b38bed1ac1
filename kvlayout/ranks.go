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

// Pair is a rank of one worker that sends heads to a rank of another: Heads of them, from its own
// number FromHead on to the receiver's ToHead on.
type Pair struct {
	From, To         int // ranks
	FromHead, ToHead int // of the ranks' own
	Heads            int
}

// Pairs returns who sends what where `from` ranks send the same heads to `to` others: each receiver
// gets each of its heads once, in the order of receivers and heads. Receivers of a head that several
// senders keep take turns.
func Pairs(heads, from, to int) ([]Pair, error) {
	for _, n := range []int{from, to} {
		if n < 1 || n > MaxRanks || heads < 1 || heads%n != 0 && n%heads != 0 {
			return nil, fmt.Errorf("%d ranks and %d KV heads: one must divide the other", n, heads)
		}
	}
	each, copies := max(heads/from, 1), max(from/heads, 1) // heads of a sender, senders of a head
	want := max(heads/to, 1)
	var pairs []Pair
	for r := range to {
		first := r * heads / to
		for at, end := first, first+want; at < end; {
			owner := at / each
			n := min(end, (owner+1)*each) - at
			pairs = append(pairs, Pair{From: owner*copies + r%copies, To: r, FromHead: at - owner*each, ToHead: at - first, Heads: n})
			at += n
		}
	}
	return pairs, nil
}

// MostPairs is the longest list that Pairs returns for so many receivers and at most `from` senders.
func MostPairs(heads, from, to int) int {
	most := 1
	for n := 1; n <= from; n++ {
		if pairs, err := Pairs(heads, n, to); err == nil {
			most = max(most, len(pairs))
		}
	}
	return most
}
