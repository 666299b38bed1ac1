package workload

import (
	"context"
	"encoding/binary"
	"hash/maphash"
	"slices"

	"github.com/xpyd/xpyd/internal/loadgen/client"
)

// Chains is a trace as conversations, for a closed loop. A request whose prompt starts with all
// whole blocks of an earlier one is a later turn of it and waits for its answer; the longest such
// prefix counts, of equals the latest. Otherwise requests go in the trace's order, whatever its
// times. Prompts are the trace's own, including its answers.
type Chains struct {
	trace *Trace
	turn  []int   // by entry, from 1
	next  [][]int // by entry: those that follow it

	queue
	ready []int // entries that may go, in order
}

// NewChains orders a trace's requests. Entries without block ids are conversations of one
// turn.
func NewChains(trace *Trace) *Chains {
	c := &Chains{trace: trace, turn: make([]int, len(trace.entries)), next: make([][]int, len(trace.entries))}
	c.wake.L = &c.mu
	seed := maphash.MakeSeed()
	last := map[uint64]int{} // by the whole blocks of a prompt
	var sum maphash.Hash
	sum.SetSeed(seed)
	for i := range trace.entries {
		e := &trace.entries[i]
		sum.Reset()
		before, own := -1, uint64(0)
		for n, id := range e.Blocks {
			var b [8]byte
			binary.LittleEndian.PutUint64(b[:], id)
			_, _ = sum.Write(b[:]) // it never fails
			if j, ok := last[sum.Sum64()]; ok {
				before = j
			}
			if n < e.In/trace.block {
				own = sum.Sum64()
			}
		}
		if c.turn[i] = 1; before >= 0 {
			c.turn[i] = c.turn[before] + 1
			c.next[before] = append(c.next[before], i)
		} else {
			c.ready = append(c.ready, i)
		}
		if own != 0 {
			last[own] = i
		}
	}
	return c
}

// Next waits for a request that may go; false if all have gone or ctx ends.
func (c *Chains) Next(ctx context.Context) (*Item, bool) {
	ok := c.lock(ctx, func() bool { return len(c.ready) == 0 })
	defer c.mu.Unlock()
	if !ok {
		return nil, false
	}
	i := c.ready[0]
	c.ready = c.ready[1:]
	it := c.trace.item(i)
	it.At, it.Turn, it.entry = 0, c.turn[i], i
	return it, true
}

// Done lets the turns after this one go, whatever the answer: they are the trace's.
func (c *Chains) Done(it *Item, _ *client.Result) {
	c.over(func() {
		for _, i := range c.next[it.entry] {
			at, _ := slices.BinarySearch(c.ready, i)
			c.ready = slices.Insert(c.ready, at, i)
		}
		c.next[it.entry] = nil
	})
}

// Scale cuts a trace's blocks to blockTokens, and its prompts and answers in proportion, for
// small models and machines. Shared prefixes stay shared.
func Scale(entries []Entry, blockTokens int) []Entry {
	part := func(n int) int { return (n*blockTokens + BlockTokens - 1) / BlockTokens }
	for i := range entries {
		e := &entries[i]
		e.In, e.Out = max(1, part(e.In)), max(1, part(e.Out))
	}
	return entries
}
