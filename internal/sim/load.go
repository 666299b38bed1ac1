package sim

import (
	"encoding/binary"
	"sort"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/workload"
)

// Prompt is a prompt's token ids, made when they are needed.
type Prompt struct {
	tokens int
	blocks []uint64 // ids of its pieces, as of workload.Entry; none: it shares nothing
	ends   []int    // where the pieces end; none: after workload.BlockTokens each
	nth    uint64   // tells it from others
}

// Tokens is its length.
func (p *Prompt) Tokens() int { return p.tokens }

// IDs returns its tokens. Prompts that begin with the same blocks begin with the same tokens.
func (p *Prompt) IDs() []int32 {
	ids := make([]int32, 0, p.tokens)
	piece := func(of uint64, end int) {
		for i := uint64(0); len(ids) < end; i++ {
			ids = append(ids, int32(mix(of, i)%vocab))
		}
	}
	for i, of := range p.blocks {
		end := (i + 1) * workload.BlockTokens
		if p.ends != nil {
			end = p.ends[i]
		}
		piece(of, min(end, p.tokens))
	}
	piece(p.nth|1<<63, p.tokens)
	return ids
}

// text is a prompt's text as a router sees it: four bytes a token, about as many as English has.
func text(ids []int32) []byte {
	b := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return b
}

// mix is splitmix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", 2014), of two numbers.
func mix(a, b uint64) uint64 {
	x := a*0x9e3779b97f4a7c15 + b*0xbf58476d1ce4e5b9
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Trace makes a load of a trace's entries, so many times as fast, for a time of the load; 0: all.
func Trace(entries []workload.Entry, speed float64, window time.Duration) []Request {
	at := func(i int) time.Duration { return time.Duration(float64(entries[i].At) / speed) }
	n := len(entries)
	if window > 0 {
		n = sort.Search(n, func(i int) bool { return at(i) >= window })
	}
	load := make([]Request, 0, n) // of millions, room for more would tell
	for i := range n {
		e := &entries[i]
		load = append(load, Request{At: at(i), Prompt: Prompt{tokens: e.In, blocks: e.Blocks, nth: uint64(i)}, Output: e.Out})
	}
	return load
}
