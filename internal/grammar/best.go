package grammar

import (
	"cmp"
	"slices"
)

// few is how many leaves are left as they are: comparing them costs more than it saves.
const few = 16

// maxWays bounds the leaves of a state that read the same node, each with other numbers of
// rounds to come: a step has to take each of them on.
const maxWays = 256

// leafKey is what a leaf reads; wayKey is also how it goes on, but for the rounds that the
// repetition around it has left.
type leafKey struct {
	e *expr
	n int32
}

type wayKey struct {
	leafKey
	lo, hi int32
	around leafKey
	next   *cont
}

func wayOf(l *cont) wayKey {
	return wayKey{leafKey{l.e, l.n}, l.lo, l.hi, leafKey{l.next.e, l.next.n}, l.next.next}
}

// best is leaves without those that read nothing that another of them does not: of (a{1,9}){1,9}
// behind four bytes that are all of one round, or of two, and so on. Only repetitions with
// numbers make such leaves, but nested ones make thousands. It is false if what is left is more
// than maxWays. While compiling nothing is left out: the budget bounds what there is.
func (m *machine) best(leaves []*cont) ([]*cont, bool) {
	if len(leaves) <= few || m.spent != nil {
		return leaves, true
	}
	clear(m.reads)
	for _, l := range leaves {
		m.reads[leafKey{l.e, l.n}]++
	}
	if len(m.reads) == len(leaves) {
		return leaves, true
	}
	ways := map[wayKey][]*cont{}
	for _, l := range leaves {
		ways[wayOf(l)] = append(ways[wayOf(l)], l)
	}
	groups := map[leafKey][][]*cont{}
	for k, list := range ways {
		groups[k.leafKey] = append(groups[k.leafKey], freest(list))
	}
	kept := make([]*cont, 0, len(leaves))
	for _, group := range groups {
		n := 0
		for _, list := range group {
			n += len(list)
		}
		if n > 2*maxWays {
			return nil, false
		}
		from := len(kept)
		for i, list := range group {
			for _, l := range list {
				covered := false
				for k, others := range group {
					if k != i && !covered {
						covered = slices.ContainsFunc(others, func(o *cont) bool { return covers(o, l) })
					}
				}
				if !covered {
					kept = append(kept, l)
				}
			}
		}
		if len(kept)-from > maxWays {
			return nil, false
		}
	}
	slices.SortFunc(kept, byID)
	return kept, true
}

// freest is those of list, which differ in the rounds that are left only, whose numbers are
// not within another's.
func freest(list []*cont) []*cont {
	if len(list) == 1 {
		return list
	}
	most := func(l *cont) uint32 { return uint32(l.next.hi) } // -1, without end, is the largest
	slices.SortFunc(list, func(a, b *cont) int {
		return cmp.Or(cmp.Compare(a.next.lo, b.next.lo), cmp.Compare(most(b), most(a)))
	})
	out := list[:1]
	for _, l := range list[1:] {
		if most(l) > most(out[len(out)-1]) {
			out = append(out, l)
		}
	}
	return out
}

// covers says whether a reads all that b reads, and is not b: it goes through the same nodes,
// and through repetitions that are at least as free, or that may be left out. It may say no of
// what does. Two leaves never cover each other.
func covers(a, b *cont) bool {
	if a == b {
		return false
	}
	for a != b {
		switch {
		case a.e == nil:
			return false
		case a.e == b.e && a.n == b.n:
			if a.lo > b.lo || uint32(a.hi) < uint32(b.hi) {
				return false
			}
			a, b = a.next, b.next
		case a.e.kind == exprRep && a.lo == 0:
			a = a.next
		default:
			return false
		}
	}
	return true
}
