package pick

import (
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/xpyd/xpyd/internal/fleet"
)

// Chain is the rolling hash of a prompt's text: one hash per block, over all up to its end. Blocks
// are 256 bytes at first and grow with the position: 100,000 tokens have about 250.
type Chain struct {
	hashes []uint64
	length int
}

// Blocks are the sizes of blocks, each from an offset on.
var Blocks = [...]struct{ From, Bytes int }{{0, 256}, {16 << 10, 1 << 10}, {128 << 10, 4 << 10}}

// blockBytes is the size of the block at an offset.
func blockBytes(at int) int {
	i := len(Blocks) - 1
	for at < Blocks[i].From {
		i--
	}
	return Blocks[i].Bytes
}

// NewChain hashes text but for a trailing part of a block. Chains with other separate (models,
// salts, tools) do not match. Routers share hints, so the hash has no secret: a forged collision
// could only send a request where its prefix is not warm.
func NewChain(text []byte, separate ...string) Chain {
	var h xxhash.Digest
	h.Reset()
	for _, s := range separate {
		_, _ = h.WriteString(s) // it never fails
		_, _ = h.Write([]byte{0})
	}
	c := Chain{length: len(text)}
	for at := 0; at+blockBytes(at) <= len(text); {
		next := at + blockBytes(at)
		_, _ = h.Write(text[at:next])
		c.hashes = append(c.hashes, h.Sum64())
		at = next
	}
	return c
}

// Hashes are the chain's, which nobody may change.
func (c Chain) Hashes() []uint64 { return c.hashes }

// Length is that of the text, in bytes.
func (c Chain) Length() int { return c.length }

// match is how much of the prompt's text a node is known to have had in a role; one of p and d is
// set.
type match struct {
	p, d  *node
	bytes int
}

func (m match) node(role fleet.Role) *node {
	if role == fleet.Prefill {
		return m.p
	}
	return m.d
}

// index remembers which pair last served each prefix; the least recently used is forgotten first.
// The list is threaded through a slice; slot 0 is its head.
type index struct {
	slots map[uint64]int32
	list  []entry
	max   int
}

type entry struct {
	hash       uint64
	p, d       *node
	prev, next int32
}

// entryBytes is one entry with its share of the map.
const entryBytes = 40 + 40

func newIndex(budget int) *index {
	return &index{slots: map[uint64]int32{}, list: make([]entry, 1), max: budget / entryBytes}
}

func (x *index) bytes() int { return len(x.slots) * entryBytes }

// match appends to out how deep each node on the known part of the chain goes: having served a
// longer prefix implies the shorter ones.
func (x *index) match(out []match, c Chain) ([]match, int) {
	deepen := func(m match) {
		i := slices.IndexFunc(out, func(o match) bool { return o.p == m.p && o.d == m.d })
		if i >= 0 {
			out[i].bytes = m.bytes
		} else if len(out) < 16 {
			out = append(out, m)
		}
	}
	at := 0
	for _, h := range c.hashes {
		i, ok := x.slots[h]
		if !ok {
			break
		}
		at += blockBytes(at)
		deepen(match{p: x.list[i].p, bytes: at})
		deepen(match{d: x.list[i].d, bytes: at})
	}
	return out, c.length
}

// put notes that the pair serves the chain, and returns how many blocks at its end are news. The
// start of the chain ends up most recent: a prefix must outlive its continuations.
func (x *index) put(c Chain, p, d *node) (fresh int) {
	n := min(len(c.hashes), x.max)
	for k := n - 1; k >= 0; k-- {
		h := c.hashes[k]
		i, ok := x.slots[h]
		if ok {
			x.unlink(i)
		} else {
			i = x.slot()
			x.slots[h] = i
		}
		e := &x.list[i]
		if !ok || e.p != p || e.d != d {
			fresh = n - k
		}
		e.hash, e.p, e.d = h, p, d
		x.toFront(i)
	}
	return fresh
}

// slot returns an unused slot, if need be that of the oldest entry.
func (x *index) slot() int32 {
	if len(x.slots) >= x.max {
		oldest := x.list[0].prev
		x.unlink(oldest)
		delete(x.slots, x.list[oldest].hash)
		return oldest
	}
	x.list = append(x.list, entry{})
	return int32(len(x.list) - 1)
}

func (x *index) unlink(i int32) {
	e := &x.list[i]
	x.list[e.prev].next = e.next
	x.list[e.next].prev = e.prev
}

func (x *index) toFront(i int32) {
	first := x.list[0].next
	x.list[i].prev, x.list[i].next = 0, first
	x.list[first].prev = i
	x.list[0].next = i
}
