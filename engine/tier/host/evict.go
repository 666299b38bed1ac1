package host

import (
	"container/heap"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// Eviction is the order in which units are evicted from host memory. In every order a unit that
// another one extends stays until that one is evicted, and of the others those with the lowest
// priority go first. A use is a load into the pool.
type Eviction string

const (
	// LRU evicts the least recently used unit.
	LRU Eviction = "lru"
	// LFU evicts the least often used unit, of several the least recently used.
	LFU Eviction = "lfu"
	// S3FIFO tries new units in a tenth of the memory. From there a unit that was used twice
	// moves to the rest, and others are evicted. The rest is a queue in which each use buys
	// another round, up to three. Units that come back soon after their eviction skip the
	// trial. So long prompts that nobody asks for again evict nothing else. (Yang et al., "FIFO
	// queues are all you need for cache eviction", SOSP 2023.)
	S3FIFO Eviction = "s3fifo"
)

// order decides which slot is evicted. It knows slots by number only. Slots that may be evicted
// now are idle, the others busy.
type order struct {
	policy Eviction
	ranks  []rank
	clock  uint64
	small  int // units on trial, busy ones too (S3FIFO)
	ghosts ghosts
	all    pile
}

// rank is what an order knows about a unit.
type rank struct {
	leaf bool
	main bool   // its trial is over (S3FIFO)
	prio int8   // its priority
	uses uint32 // ever (LFU), or since it was last spared, at most 3 (S3FIFO)
	seq  uint64 // the clock at its last use, or when it entered its queue (S3FIFO)
	own  *pile  // of its tenant; nil: none
	at   [2]int // its index in the heap of all, and of own; -1: in none
}

// queue is 1 for a unit whose trial is over, else 0.
func (r *rank) queue() int {
	if r.main {
		return 1
	}
	return 0
}

// pile is idle slots, by rank.queue. Policies without a trial use the first heap only.
type pile [2]rankHeap

func newOrder(policy Eviction, slots int) *order {
	o := &order{policy: policy, ranks: make([]rank, slots)}
	if policy == S3FIFO {
		o.ghosts = newGhosts(slots)
	}
	o.all = o.pile(0)
	return o
}

// pile makes a pile of all slots (0) or of a tenant's (1).
func (o *order) pile(which int) pile {
	return pile{{o: o, which: which}, {o: o, which: which}}
}

// enter adds a new unit, which is busy.
func (o *order) enter(i int32, key kvcache.Hash, prio int8, leaf bool, own *pile) {
	o.clock++
	o.ranks[i] = rank{leaf: leaf, prio: prio, seq: o.clock, own: own, at: [2]int{-1, -1}}
	if o.policy != S3FIFO {
		return
	}
	if o.ghosts.take(key) {
		o.ranks[i].main = true
	} else {
		o.small++
	}
}

// leave removes a busy unit. went says that it was evicted.
func (o *order) leave(i int32, key kvcache.Hash, went bool) {
	r := &o.ranks[i]
	if o.policy == S3FIFO && !r.main {
		o.small--
		if went {
			o.ghosts.add(key)
		}
	}
	r.own = nil
}

// use notes that a busy unit was asked for.
func (o *order) use(i int32) {
	r := &o.ranks[i]
	switch o.policy {
	case S3FIFO:
		r.uses = min(r.uses+1, 3)
		return
	case LFU:
		r.uses++
	}
	o.clock++
	r.seq = o.clock
}

// idle makes a unit evictable; busy takes that back.
func (o *order) idle(i int32) { o.each(i, func(h *rankHeap) { heap.Push(h, i) }) }
func (o *order) busy(i int32) {
	o.each(i, func(h *rankHeap) { heap.Remove(h, o.ranks[i].at[h.which]) })
}

// setLeaf notes whether other units extend a unit, which may be busy.
func (o *order) setLeaf(i int32, leaf bool) {
	if r := &o.ranks[i]; r.leaf != leaf {
		r.leaf = leaf
		o.fix(i)
	}
}

// raise raises the priority of a unit, which may be busy.
func (o *order) raise(i int32, priority int8) {
	if r := &o.ranks[i]; priority > r.prio {
		r.prio = priority
		o.fix(i)
	}
}

// fix moves a unit, if it is idle, to its place in its heaps.
func (o *order) fix(i int32) {
	if r := &o.ranks[i]; r.at[0] >= 0 {
		o.each(i, func(h *rankHeap) { heap.Fix(h, r.at[h.which]) })
	}
}

// each calls f for the heaps that the unit belongs to.
func (o *order) each(i int32, f func(*rankHeap)) {
	r := &o.ranks[i]
	f(&o.all[r.queue()])
	if r.own != nil {
		f(&r.own[r.queue()])
	}
}

// victim returns the idle unit of a pile that is evicted next; -1 if none is idle.
func (o *order) victim(p *pile) int32 {
	for {
		h := o.next(p)
		if h == nil {
			return -1
		}
		i := h.ids[0]
		r := &o.ranks[i]
		switch {
		case o.policy != S3FIFO || r.main && r.uses == 0 || !r.main && r.uses < 2:
			return i
		case r.main:
			o.requeue(i, r.uses-1)
		default:
			o.small--
			o.requeue(i, 0)
		}
	}
}

// requeue puts an idle unit at the end of the main queue.
func (o *order) requeue(i int32, uses uint32) {
	o.busy(i)
	o.clock++
	r := &o.ranks[i]
	r.main, r.uses, r.seq = true, uses, o.clock
	o.idle(i)
}

// next returns the heap whose first unit is evicted next; nil if the pile is empty.
func (o *order) next(p *pile) *rankHeap {
	trial, rest := &p[0], &p[1]
	switch {
	case len(trial.ids) == 0 && len(rest.ids) == 0:
		return nil
	case len(rest.ids) == 0:
		return trial
	case len(trial.ids) == 0:
		return rest
	}
	a, b := &o.ranks[trial.ids[0]], &o.ranks[rest.ids[0]]
	first := o.small*10 >= len(o.ranks) // trial
	switch {
	case a.leaf != b.leaf:
		first = a.leaf
	case a.prio != b.prio:
		first = a.prio < b.prio
	}
	if first {
		return trial
	}
	return rest
}

// rankHeap orders idle slots, the one that is evicted next first.
type rankHeap struct {
	o     *order
	which int // of rank.at
	ids   []int32
}

func (h *rankHeap) Len() int { return len(h.ids) }
func (h *rankHeap) Less(i, j int) bool {
	a, b := &h.o.ranks[h.ids[i]], &h.o.ranks[h.ids[j]]
	switch {
	case a.leaf != b.leaf:
		return a.leaf
	case a.prio != b.prio:
		return a.prio < b.prio
	case h.o.policy == LFU && a.uses != b.uses:
		return a.uses < b.uses
	}
	return a.seq < b.seq
}
func (h *rankHeap) Swap(i, j int) {
	h.ids[i], h.ids[j] = h.ids[j], h.ids[i]
	h.o.ranks[h.ids[i]].at[h.which], h.o.ranks[h.ids[j]].at[h.which] = i, j
}
func (h *rankHeap) Push(x any) {
	i := x.(int32)
	h.o.ranks[i].at[h.which] = len(h.ids)
	h.ids = append(h.ids, i)
}
func (h *rankHeap) Pop() any {
	last := len(h.ids) - 1
	i := h.ids[last]
	h.ids = h.ids[:last]
	h.o.ranks[i].at[h.which] = -1
	return i
}

// ghosts are names of the latest units that were evicted while on trial: as many as the main
// queue has room for.
type ghosts struct {
	ring []kvcache.Hash
	n    int                  // names ever
	at   map[kvcache.Hash]int // of which number; the ring may have old ones
}

func newGhosts(slots int) ghosts {
	return ghosts{ring: make([]kvcache.Hash, max(1, slots-slots/10)), at: make(map[kvcache.Hash]int)}
}

func (g *ghosts) add(key kvcache.Hash) {
	i := g.n % len(g.ring)
	if n, ok := g.at[g.ring[i]]; ok && n == g.n-len(g.ring) {
		delete(g.at, g.ring[i])
	}
	g.ring[i], g.at[key] = key, g.n
	g.n++
}

func (g *ghosts) take(key kvcache.Hash) bool {
	_, ok := g.at[key]
	delete(g.at, key)
	return ok
}
