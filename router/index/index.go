// Package index knows exactly, from the workers' own KV events, which worker holds which blocks of
// which token prefixes.
//
// Engines name blocks by opaque hashes. The index names every prefix by a rolling hash over its
// token ids, and each source (one rank of one worker) keeps a table from its engine's names to ours:
// a stored block's prefix is its parent's, extended by the block's tokens. Our names do not depend
// on block sizes, so engines with different ones meet where their blocks end together.
//
// Two tables of 16-byte slots hold everything: by our name a block's holders, two in place and more
// in a set beside; by the engine's name our name and the tiers. Together they take less than 64
// bytes a block, the unit of the budget. When that is used up, blocks that no prompt asked for
// lately are evicted, from the sources that have most.
//
// Looking a prompt up costs two table accesses per block, whatever the number of workers: only the
// deepest holders are collected, a few of each role.
//
// Locks: Source.mu, then Index.mu or a shard's; nobody holds two sources'.
package index

import (
	"hash/maphash"
	"maps"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/xpyd/xpyd/internal/kvevents"
)

// BlockBytes is the most that one block of one source takes, and the unit of the budget.
const BlockBytes = 64

// Key names a source.
type Key struct {
	ID    string // of the worker
	Epoch uint64
	Rank  int // data-parallel rank
}

// Role says which leg a source's blocks are good for; a set of bits.
type Role uint32

// Roles.
const (
	Prefill Role = 1 << iota
	Decode
)

// Index is safe for concurrent use.
type Index struct {
	seed   maphash.Seed
	k0, k1 uint64
	limit  int64 // blocks

	shards [shards]shard
	blocks atomic.Int64 // of all sources
	bytes  atomic.Int64 // of all tables

	orphans, foreign, evicted atomic.Uint64 // see Stats

	mu      sync.Mutex // guards what follows
	sources []*Source  // by id; nil where free
	free    []uint32
	byID    atomic.Pointer[[]*Source] // a copy of sources
	grains  map[int]int               // sources by their grain
	sizes   atomic.Pointer[[]int]     // the grains, ascending
}

// Stats is what the index holds, and what it could not.
type Stats struct {
	Sources int
	Blocks  int64  // of all sources
	Bytes   int64  // that the tables take
	Orphans uint64 // blocks that came without their parent being known
	Foreign uint64 // of KV groups that do not name prefixes, of another block size, or too many at once
	Evicted uint64 // to stay within the budget
}

const shards = 1024

// New makes an index that takes at most budget bytes.
func New(budget int64) *Index {
	x := &Index{seed: maphash.MakeSeed(), k0: rand.Uint64(), k1: rand.Uint64() | 1, limit: max(budget/BlockBytes, 64), grains: map[int]int{}}
	x.byID.Store(&[]*Source{})
	x.sizes.Store(&[]int{})
	for i := range x.shards {
		x.shards[i].nodes.bytes = &x.bytes
	}
	return x
}

// Stats may be read at any time.
func (x *Index) Stats() Stats {
	x.mu.Lock()
	n := len(x.sources) - len(x.free)
	x.mu.Unlock()
	return Stats{Sources: n, Blocks: x.blocks.Load(), Bytes: x.bytes.Load(), Orphans: x.orphans.Load(),
		Foreign: x.foreign.Load(), Evicted: x.evicted.Load()}
}

// Add makes a source of blocks of a model; Remove ends it.
func (x *Index) Add(key Key, model string, role Role) *Source {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := &Source{x: x, key: key, model: model, group: -1}
	s.role.Store(uint32(role))
	s.blocks.bytes = &x.bytes
	if n := len(x.free); n > 0 {
		s.id = x.free[n-1]
		x.free = x.free[:n-1]
		x.sources[s.id] = s
	} else {
		s.id = uint32(len(x.sources))
		x.sources = append(x.sources, s)
	}
	x.publish()
	return s
}

// publish shows readers the sources and grains; x.mu is held.
func (x *Index) publish() {
	list := slices.Clone(x.sources)
	x.byID.Store(&list)
	sizes := slices.Sorted(maps.Keys(x.grains))
	x.sizes.Store(&sizes)
}

// A name is a prefix's rolling hash: 57 bits of hash, three bits for a table's tiers, else zero, and
// the length modulo 16.
const (
	tierShift = 4
	tierMask  = 7 << tierShift
	hashMask  = ^uint64(127)
)

// root names the empty prefix of a model and adapter.
func (x *Index) root(model, lora string) uint64 {
	var h maphash.Hash
	h.SetSeed(x.seed)
	h.WriteString(model)
	h.WriteByte(0)
	h.WriteString(lora)
	return h.Sum64() & hashMask
}

// salted is a prefix whose next block depends on something else too.
func (x *Index) salted(name, extra uint64) uint64 {
	if extra == 0 {
		return name
	}
	hi, lo := bits.Mul64(name^x.k1, extra^x.k0)
	return (hi^lo)&hashMask | name&15
}

// next extends a prefix by one token.
func (x *Index) next(name uint64, token uint32) uint64 {
	hi, lo := bits.Mul64(name^x.k0, uint64(token)^x.k1)
	return (hi^lo)&hashMask | (name+1)&15
}

// grainOf is the step in tokens at which a source's prefixes are indexed: its block size, but for
// small pages 16 tokens.
func grainOf(blockSize int) int {
	if blockSize < 16 && 16%blockSize == 0 {
		return 16
	}
	return blockSize
}

// shard is a part of the prefixes.
type shard struct {
	mu    sync.Mutex
	nodes table // name → holders
	sets  []set
	free  []uint32
}

func (x *Index) shard(name uint64) *shard { return &x.shards[name>>7&(shards-1)] }

// held notes in which tiers a source has a prefix; none takes it out.
func (x *Index) held(name uint64, id uint32, tiers uint64) {
	sh := x.shard(name)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	old, ok := sh.nodes.get(name)
	if !ok && tiers == 0 {
		return
	}
	now := sh.update(old, id, tiers, &x.bytes, len(*x.byID.Load()))
	if now&^refBit == 0 {
		sh.nodes.del(name)
	} else if now != old {
		sh.nodes.put(name, now)
	}
}

// spare reports whether a prompt asked for the prefix since the last call.
func (x *Index) spare(name uint64) bool {
	sh := x.shard(name)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	v, ok := sh.nodes.get(name)
	if ok && v&refBit != 0 {
		sh.nodes.put(name, v&^refBit)
		return true
	}
	return false
}

// maxShare bounds the part of the budget that one event may store, and by which the index may
// exceed it for a moment.
const maxShare = 4

// makeRoom evicts until what was stored is within the budget.
func (x *Index) makeRoom() {
	for {
		n := int(x.blocks.Load() - x.limit)
		if n <= 0 {
			return
		}
		list := *x.byID.Load()
		var victim *Source
		for range 8 {
			s := list[rand.IntN(len(list))]
			if s != nil && (victim == nil || s.size.Load() > victim.size.Load()) {
				victim = s
			}
		}
		if victim == nil || victim.evict(max(n, 64)) == 0 {
			for _, s := range list { // the sample had none
				if s != nil && s.evict(max(n, 64)) > 0 {
					break
				}
			}
		}
	}
}

// tierOf is one tier as a bit.
func tierOf(t kvevents.Tier) uint64 { return 1 << t }
