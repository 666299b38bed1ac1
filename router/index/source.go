package index

import (
	"sync"
	"sync/atomic"

	"github.com/xpyd/xpyd/internal/kvevents"
)

// Source is the blocks of one rank of one worker. It is a kvevents.Handler.
type Source struct {
	x     *Index
	id    uint32
	key   Key
	model string
	role  atomic.Uint32
	size  atomic.Int64 // blocks

	mu     sync.Mutex
	blocks table // engine's hash → name with tiers
	grain  int   // 0 until the first block
	group  int   // the KV group that is indexed; -1 until one is known
	hand   int   // where evict goes on
	gone   bool
}

// SetRole changes which legs the blocks are good for.
func (s *Source) SetRole(r Role) { s.role.Store(uint32(r)) }

// Blocks is how many there are.
func (s *Source) Blocks() int64 { return s.size.Load() }

// Apply takes a batch of events in.
func (s *Source) Apply(b *kvevents.Batch) {
	for i := range b.Events {
		ev := &b.Events[i]
		switch ev.Kind {
		case kvevents.Stored:
			s.store(ev)
			s.x.makeRoom()
		case kvevents.Removed:
			s.remove(ev)
		case kvevents.Cleared:
			s.Reset("")
		}
	}
}

// ours reports whether an event's KV group is the one that names prefixes: the first that keeps all
// of them. s.mu is held.
func (s *Source) ours(ev *kvevents.Event) bool {
	if s.group < 0 && !ev.Window && ev.Kind == kvevents.Stored {
		s.group = ev.Group
	}
	return ev.Group == s.group && !ev.Window
}

func (s *Source) store(ev *kvevents.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return
	}
	if int64(len(ev.Hashes)) > s.x.limit/maxShare || !s.ours(ev) ||
		len(ev.Tokens) > 0 && s.grain != 0 && s.grain != grainOf(ev.BlockSize) {
		s.x.foreign.Add(uint64(len(ev.Hashes)))
		return
	}
	if len(ev.Tokens) == 0 {
		s.copied(ev)
		return
	}
	if s.grain == 0 {
		s.grain = grainOf(ev.BlockSize)
		s.x.useGrain(s.grain, 1)
	}
	name := s.x.root(s.model, ev.LoRA)
	if ev.HasParent {
		v, ok := s.blocks.get(ev.Parent)
		if !ok {
			s.x.orphans.Add(uint64(len(ev.Hashes)))
			return
		}
		name = v &^ tierMask
	}
	for i, hash := range ev.Hashes {
		if ev.Extra != nil {
			name = s.x.salted(name, ev.Extra[i])
		}
		for _, t := range ev.Tokens[i*ev.BlockSize : (i+1)*ev.BlockSize] {
			name = s.x.next(name, t)
		}
		s.put(hash, name, tierOf(ev.Tier))
	}
	s.size.Store(int64(s.blocks.n))
}

// copied adds a tier to blocks that are known.
func (s *Source) copied(ev *kvevents.Event) {
	for _, hash := range ev.Hashes {
		if v, ok := s.blocks.get(hash); ok {
			s.put(hash, v&^tierMask, tierOf(ev.Tier))
		} else {
			s.x.orphans.Add(1)
		}
	}
}

// put adds a block, or a tier to it.
func (s *Source) put(hash, name, tier uint64) {
	old, ok := s.blocks.get(hash)
	tiers := tier
	if ok && old&^tierMask == name {
		tiers |= old & tierMask >> tierShift
	} else if ok { // the engine has used the hash anew
		s.hold(old, 0)
	}
	if s.blocks.put(hash, name|tiers<<tierShift) {
		s.x.blocks.Add(1)
	}
	s.hold(name, tiers)
}

// hold tells the prefixes' table, if the block ends at a step of it.
func (s *Source) hold(name, tiers uint64) {
	name &^= tierMask
	if s.grain != 16 || name&15 == 0 {
		s.x.held(name, s.id, tiers)
	}
}

func (s *Source) remove(ev *kvevents.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ours(ev) {
		return
	}
	for _, hash := range ev.Hashes {
		v, ok := s.blocks.get(hash)
		if !ok {
			continue
		}
		left := v & tierMask >> tierShift &^ tierOf(ev.Tier)
		s.hold(v, left)
		if left == 0 {
			s.drop(hash)
		} else {
			s.blocks.put(hash, v&^tierMask|left<<tierShift)
		}
	}
	s.size.Store(int64(s.blocks.n))
}

// drop forgets a block.
func (s *Source) drop(hash uint64) {
	if s.blocks.del(hash) {
		s.x.blocks.Add(-1)
	}
}

// Reset forgets all blocks; the events that follow build them anew.
func (s *Source) Reset(string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget()
}

func (s *Source) forget() {
	for i := range s.blocks.slots {
		if v := s.blocks.slots[i].val; v != 0 {
			s.hold(v, 0)
		}
	}
	s.x.blocks.Add(-int64(s.blocks.n))
	s.blocks.clear()
	s.size.Store(0)
	if s.grain != 0 {
		s.x.useGrain(s.grain, -1)
	}
	s.grain, s.group, s.hand = 0, -1, 0
}

// evict drops up to n blocks that no prompt has asked for since the hand last came by.
func (s *Source) evict(n int) (dropped int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for looked := 0; dropped < n && s.blocks.n > 0; looked++ {
		if s.hand >= len(s.blocks.slots) {
			s.hand = 0
		}
		e := s.blocks.slots[s.hand]
		if e.val == 0 || looked < 2*len(s.blocks.slots) && s.x.spare(e.val&^tierMask) {
			s.hand++
			continue
		}
		s.hold(e.val, 0)
		s.drop(e.key) // another may have moved here: the hand stays
		dropped++
	}
	s.x.evicted.Add(uint64(dropped))
	s.size.Store(int64(s.blocks.n))
	return dropped
}

// Remove ends the source: its blocks are forgotten, and later events ignored.
func (s *Source) Remove() {
	s.mu.Lock()
	again := s.gone
	s.gone = true
	s.forget()
	s.mu.Unlock()
	if again {
		return
	}
	x := s.x
	x.mu.Lock()
	defer x.mu.Unlock()
	x.sources[s.id] = nil
	x.free = append(x.free, s.id)
	x.publish()
}

// useGrain counts the sources of a grain.
func (x *Index) useGrain(grain, n int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.grains[grain] += n; x.grains[grain] == 0 {
		delete(x.grains, grain)
	}
	x.publish()
}
