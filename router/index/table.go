package index

import (
	"math/bits"
	"sync/atomic"
)

// table maps 64-bit keys to non-zero values: open addressing, linear probing, deletion by shifting
// back. It grows by a quarter at four fifths and shrinks below a half, so at least half is in use.
type table struct {
	slots []slot
	n     int
	bytes *atomic.Int64 // of all tables of an index
}

type slot struct{ key, val uint64 }

const (
	slotBytes = 16
	minSlots  = 8
)

// home is a key's preferred slot. Engines' hashes need not be well mixed.
func (t *table) home(key uint64) int {
	key ^= key >> 32
	key *= 0x9e3779b97f4a7c15
	key ^= key >> 29
	hi, _ := bits.Mul64(key*0xbf58476d1ce4e5b9, uint64(len(t.slots)))
	return int(hi)
}

// find returns where a key is, or the free slot where it would go.
func (t *table) find(key uint64) (at int, ok bool) {
	for at = t.home(key); ; {
		s := &t.slots[at]
		if s.val == 0 {
			return at, false
		}
		if s.key == key {
			return at, true
		}
		if at++; at == len(t.slots) {
			at = 0
		}
	}
}

func (t *table) get(key uint64) (uint64, bool) {
	if t.n == 0 {
		return 0, false
	}
	at, ok := t.find(key)
	return t.slots[at].val, ok
}

// put sets a key; added reports whether it is new.
func (t *table) put(key, val uint64) (added bool) {
	if t.n*5 >= len(t.slots)*4 {
		t.resize(max(minSlots, len(t.slots)*5/4+1))
	}
	at, ok := t.find(key)
	t.slots[at] = slot{key, val}
	if !ok {
		t.n++
	}
	return !ok
}

func (t *table) del(key uint64) bool {
	if t.n == 0 {
		return false
	}
	at, ok := t.find(key)
	if !ok {
		return false
	}
	// Close the gap with slots that would rather be there.
	n := len(t.slots)
	for next := at; ; {
		if next++; next == n {
			next = 0
		}
		s := t.slots[next]
		if s.val == 0 {
			break
		}
		home := t.home(s.key)
		// s may move to at unless its home is between at and next.
		if (next-home+n)%n >= (next-at+n)%n {
			t.slots[at] = s
			at = next
		}
	}
	t.slots[at] = slot{}
	if t.n--; t.n*2 < len(t.slots) && len(t.slots) > minSlots {
		t.resize(max(minSlots, t.n*10/7+1))
	}
	return true
}

func (t *table) resize(slots int) {
	old := t.slots
	t.bytes.Add(int64(slots-len(old)) * slotBytes)
	t.slots = make([]slot, slots)
	for _, s := range old {
		if s.val != 0 {
			at, _ := t.find(s.key)
			t.slots[at] = s
		}
	}
}

// clear forgets all.
func (t *table) clear() {
	t.bytes.Add(-int64(len(t.slots)) * slotBytes)
	t.slots, t.n = nil, 0
}
