package grammar

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"
)

// few is how many leaves are left as they are: comparing them costs more than it saves.
const few = 16

// maxWays bounds the leaves of a state that read the same node, each with other numbers of
// rounds to come, of several repetitions: a step has to take each of them on.
const maxWays = 256

// leafKey is what a leaf reads.
type leafKey struct {
	e *expr
	n int32
}

// best is leaves without those that read nothing that another of them does not: of (a{1,9}){1,9}
// behind four bytes that are all of one round, or of two, and so on. Those that differ in the
// rounds of one repetition become one. Only repetitions with numbers make such leaves, but nested
// ones make thousands. What is more than maxWays even so, or than maxLeaves in all, is left out: then
// not every member of the language can follow, but what ends is one, and it can always go on. While
// compiling leaves stay as they are: the budget bounds what there is.
func (m *machine) best(leaves []*cont) []*cont {
	if len(leaves) <= few || m.spent != nil {
		return leaves
	}
	inside := 0
	for _, l := range leaves {
		if l.inside {
			inside++
		}
	}
	if inside > few && m.alike(leaves) {
		for depth := 0; depth < maxNested && len(leaves) > few; depth++ {
			leaves = m.join(leaves, depth)
		}
		leaves = uncovered(leaves)
		slices.SortFunc(leaves, byID)
	}
	if len(leaves) > maxLeaves {
		leaves = nearest(leaves, maxLeaves)
		slices.SortFunc(leaves, byID)
	}
	return leaves
}

// alike says whether two of leaves read the same.
func (m *machine) alike(leaves []*cont) bool {
	clear(m.reads)
	for _, l := range leaves {
		k := leafKey{l.e, l.n}
		if m.reads[k] {
			return true
		}
		m.reads[k] = true
	}
	return false
}

// maxNested is how many repetitions around each other join looks at.
const maxNested = 3

// join makes one of leaves that differ in the rounds of one repetition only: of the one at depth
// among those with numbers that are around them.
func (m *machine) join(leaves []*cont, depth int) []*cont {
	groups := make(map[string][]*cont, len(leaves))
	var order []string
	out := make([]*cont, 0, len(leaves))
	for _, l := range leaves {
		r := around(l, depth)
		if r == nil {
			out = append(out, l)
			continue
		}
		k := m.key[:0]
		for c := l; c != r; c = c.next {
			k = appendCont(k, c)
		}
		k = binary.LittleEndian.AppendUint32(k, r.e.id)
		k = binary.LittleEndian.AppendUint32(k, r.next.id)
		m.key = k
		list, ok := groups[string(k)]
		if !ok {
			order = append(order, string(k))
		}
		groups[string(k)] = append(list, l)
	}
	var reps []*cont
	for _, k := range order {
		list := groups[k]
		if len(list) == 1 {
			out = append(out, list[0])
			continue
		}
		reps = reps[:0]
		for _, l := range list {
			reps = append(reps, around(l, depth))
		}
		out = append(out, m.behind(list[0], reps[0], m.joined(reps)))
	}
	return out
}

// behind is l with r in place of old, which is somewhere behind it.
func (m *machine) behind(l, old, r *cont) *cont {
	if l == old {
		return r
	}
	next := m.behind(l.next, old, r)
	key := contKey{e: l.e.id, next: next.id, n: l.n, lo: l.lo, hi: l.hi}
	if l.more != nil {
		key.more = l.more.id
	}
	return m.consOf(key, l.e, l.more, next)
}

// maxAround bounds how far around a leaf its repetitions are looked for.
const maxAround = 24

// around is the repetition with numbers at depth around l; nil: there is none.
func around(l *cont, depth int) *cont {
	c := l
	for range maxAround {
		if !c.inside {
			return nil
		}
		c = c.next
		if c.e.counted() {
			if depth == 0 {
				return c
			}
			depth--
		}
	}
	return nil
}

func appendCont(k []byte, c *cont) []byte {
	k = binary.LittleEndian.AppendUint32(k, c.e.id)
	k = binary.LittleEndian.AppendUint32(k, uint32(c.n))
	k = binary.LittleEndian.AppendUint32(k, uint32(c.lo))
	k = binary.LittleEndian.AppendUint32(k, uint32(c.hi))
	var more uint32
	if c.more != nil {
		more = c.more.id
	}
	return binary.LittleEndian.AppendUint32(k, more)
}

// uncovered is leaves without those that another covers.
func uncovered(leaves []*cont) []*cont {
	groups := map[leafKey][]*cont{}
	for _, l := range leaves {
		k := leafKey{l.e, l.n}
		groups[k] = append(groups[k], l)
	}
	kept := make([]*cont, 0, len(leaves))
	for _, group := range groups {
		if len(group) == 1 {
			kept = append(kept, group[0])
			continue
		}
		var plain, ways []*cont // without and with numbers around them
		for _, l := range group {
			if l.inside {
				ways = append(ways, l)
			} else {
				plain = append(plain, l)
			}
		}
		kept = append(kept, plain...)
		ways = nearest(ways, 2*maxWays)
		from := len(kept)
		for _, l := range ways {
			if !slices.ContainsFunc(group, func(o *cont) bool { return covers(o, l) }) {
				kept = append(kept, l)
			}
		}
		kept = append(kept[:from], nearest(kept[from:], maxWays)...)
	}
	return kept
}

// nearest is the n of leaves from which the end of the rule is nearest, counted in rounds. What is
// kept depends on the grammar and the text alone: other texts number conts in another order.
func nearest(leaves []*cont, n int) []*cont {
	if len(leaves) <= n {
		return leaves
	}
	leaves = slices.Clone(leaves)
	left := make(map[*cont]int64, len(leaves))
	for _, l := range leaves {
		sum := int64(0)
		for c := l; c.e != nil; c = c.next {
			if c.e.kind == exprRep {
				sum = min(sum+int64(c.least()), math.MaxInt32)
			}
		}
		left[l] = sum
	}
	slices.SortFunc(leaves, func(a, b *cont) int { return cmp.Or(cmp.Compare(left[a], left[b]), inOrder(a, b)) })
	return leaves[:n]
}

// inOrder compares conts by what they are.
func inOrder(a, b *cont) int {
	for a != b {
		switch {
		case a.e == nil && b.e == nil:
			return 0
		case a.e == nil:
			return -1
		case b.e == nil:
			return 1
		}
		if c := cmp.Or(cmp.Compare(a.e.id, b.e.id), cmp.Compare(a.n, b.n), cmp.Compare(a.lo, b.lo), cmp.Compare(a.hi, b.hi)); c != 0 {
			return c
		}
		if a.more != b.more {
			var x, y []uint64
			if a.more != nil {
				x = a.more.bits
			}
			if b.more != nil {
				y = b.more.bits
			}
			if c := slices.Compare(x, y); c != 0 {
				return c
			}
		}
		a, b = a.next, b.next
	}
	return 0
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
			if a.e.kind == exprRep {
				if !frees(a, b) {
					return false
				}
			} else if a.lo > b.lo || uint32(a.hi) < uint32(b.hi) {
				return false
			}
			a, b = a.next, b.next
		case a.e.kind == exprRep && a.least() == 0:
			a = a.next
		default:
			return false
		}
	}
	return true
}
