package grammar

import (
	"encoding/binary"
	"math/bits"
	"slices"
)

// A repetition with numbers can be at several of its rounds at once: a*a{400} behind n bytes is
// at any of n. That is one cont, not n of them. Its lo and hi are of the fewest rounds done, and
// rounds says which further numbers there are.
type rounds struct {
	id   uint32
	bits []uint64 // bit i: i rounds more are done than the fewest; bit 0 is set
	top  int32    // the highest bit
}

// size is about the bytes that r holds.
func (r *rounds) size() int64 { return int64(len(r.bits))*16 + 100 }

func hasBit(set []uint64, i int32) bool {
	return int(i>>6) < len(set) && set[i>>6]>>(i&63)&1 != 0
}

// least is the fewest rounds that c, a repetition, has to do still.
func (c *cont) least() int32 {
	if c.more != nil {
		return max(c.lo-c.more.top, 0)
	}
	return c.lo
}

// round is c, a repetition, behind one more round.
func (m *machine) round(c *cont) *cont {
	if c.hi == 1 { // what else c has is done already
		return c.next
	}
	lo, hi := max(c.lo-1, 0), max(c.hi-1, -1)
	if c.more == nil {
		return m.consAt(c.e, 0, lo, hi, c.next)
	}
	return m.repAt(c.e, lo, hi, slices.Clone(c.more.bits), c.next)
}

// repAt is the repetition e with lo to hi rounds left, and in set, which it may change, the
// further numbers. Of those that have done all that must be only the one with the most rounds left
// counts, and none can do more than all.
func (m *machine) repAt(e *expr, lo, hi int32, set []uint64, next *cont) *cont {
	most := min(lo, hi)
	for i := lo; int(i>>6) < len(set); i++ { // the first that need not go on
		if hasBit(set, i) {
			most = min(i, hi)
			break
		}
	}
	if words := int(most>>6) + 1; words < len(set) {
		set = set[:words]
	}
	if last := len(set) - 1; last == int(most>>6) {
		set[last] &= 1<<(most&63)<<1 - 1
	}
	for len(set) > 0 && set[len(set)-1] == 0 {
		set = set[:len(set)-1]
	}
	if len(set) == 0 || len(set) == 1 && set[0] == 1 {
		return m.consAt(e, 0, lo, hi, next)
	}
	return m.consOf(contKey{e: e.id, next: next.id, lo: lo, hi: hi, more: m.roundsOf(set).id}, e, m.roundsOf(set), next)
}

func (m *machine) roundsOf(set []uint64) *rounds {
	k := m.key[:0]
	for _, w := range set {
		k = binary.LittleEndian.AppendUint64(k, w)
	}
	m.key = k
	if r := m.rounds[string(k)]; r != nil {
		return r
	}
	m.lastCont++
	last := len(set) - 1
	r := &rounds{id: m.lastCont, bits: set, top: int32(last*64 + 63 - bits.LeadingZeros64(set[last]))}
	m.rounds[string(k)] = r
	m.size += r.size()
	return r
}

// counted says whether it matters how many rounds of e are done.
func (e *expr) counted() bool { return e.kind == exprRep && (e.max >= 0 || e.min > 1) }

// joined is one repetition for list, which are of one node and go on alike.
func (m *machine) joined(list []*cont) *cont {
	base := list[0]
	for _, c := range list[1:] {
		if c.hi > base.hi || c.hi < 0 && c.lo < base.lo {
			base = c
		}
	}
	if base.hi < 0 {
		return base
	}
	var set []uint64
	for _, c := range list {
		from := base.hi - c.hi
		last := from
		if c.more != nil {
			last += c.more.top
		}
		if words := int(last>>6) + 1; words > len(set) {
			set = append(set, make([]uint64, words-len(set))...)
		}
		if c.more == nil {
			set[from>>6] |= 1 << (from & 63)
			continue
		}
		at, by := int(from>>6), from&63
		for i, w := range c.more.bits {
			set[at+i] |= w << by
			if high := w >> (64 - by); by > 0 && high != 0 {
				set[at+i+1] |= high
			}
		}
	}
	return m.repAt(base.e, base.lo, base.hi, set, base.next)
}

// frees says whether a, a repetition of the same node as b, may do whatever b may.
func frees(a, b *cont) bool {
	if a.e.max < 0 {
		return a.lo <= b.lo
	}
	if a.more == nil && b.more == nil {
		return a.lo <= b.lo && a.hi >= b.hi
	}
	from := a.hi - b.hi // where b begins among a's
	if from < 0 {
		return false
	}
	one := func(i int32) bool { // of b's
		if a.more == nil {
			return from+i == 0 || a.lo == 0
		}
		return hasBit(a.more.bits, from+i) || a.least() == 0 && from+i >= a.more.top
	}
	if b.more == nil {
		return one(0)
	}
	for i := int32(0); i <= b.more.top; i++ {
		if hasBit(b.more.bits, i) && !one(i) {
			return false
		}
	}
	return true
}
