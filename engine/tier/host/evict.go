package host

import (
	"container/heap"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// Eviction says which unit makes room in host memory. In all of them a unit that another one
// extends stays until that is gone, and of others those of less priority go first.
type Eviction string

// The orders. A use is a load into the pool.
const (
	// LRU: the one not used for longest.
	LRU Eviction = "lru"
	// LFU: the one used least often, of those the one not used for longest.
	// What was popular once stays.
	LFU Eviction = "lfu"
	// S3FIFO: new units are on trial in a tenth of the memory, from where one that was used
	// twice moves to the rest, and the others go; the rest is a queue in which a use buys
	// another round, up to three. Units that come back soon after they went skip the trial.
	// Long prompts that nobody asks for again push out no others. (Yang et al., "FIFO queues
	// are all you need for cache eviction", SOSP 2023.)
	S3FIFO Eviction = "s3fifo"
)

// order decides who goes. It knows slots by their number, and nothing of what
// is in them. Slots that may go at present are idle, the others busy.
type order struct {
	policy Eviction
	ranks  []rank
	clock  uint64
	small  int // units on trial, busy ones too (S3FIFO)
	ghosts ghosts
	all    pile
}

// rank is what an order knows of a unit.
type rank struct {
	leaf bool
	main bool   // its trial is over (S3FIFO)
	prio int8   // what has less goes before
	uses uint32 // ever (LFU), or since it was last asked to go, at most 3 (S3FIFO)
	seq  uint64 // the clock at its last use, or when it came into its queue (S3FIFO)
	own  *pile  // of its tenant; nil: none
	at   [2]int // where it is in its heap of all, and of own; -1: nowhere
}

// pile is idle slots: those on trial and the others; policies without a trial
// use the first only.
type pile [2]rankHeap

func newOrder(policy Eviction, slots int) *order {
	o := &order{policy: policy, ranks: make([]rank, slots)}
	if policy == S3FIFO {
		o.ghosts = newGhosts(slots)
	}
	o.all = o.pile(0)
	return o
}

// pile makes one: 0: of all, 1: a tenant's.
func (o *order) pile(which int) pile {
	return pile{{o: o, which: which}, {o: o, which: which}}
}

// enter takes in a new unit, busy.
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

// leave takes a busy unit out; went: it had to go.
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

// idle says that a unit may go from now on; busy, that it may not.
func (o *order) idle(i int32) { o.each(i, func(h *rankHeap) { heap.Push(h, i) }) }
func (o *order) busy(i int32) {
	o.each(i, func(h *rankHeap) { heap.Remove(h, o.ranks[i].at[h.which]) })
}

// setLeaf says whether others extend a unit, idle or not.
func (o *order) setLeaf(i int32, leaf bool) {
	r := &o.ranks[i]
	if r.leaf == leaf {
		return
	}
	r.leaf = leaf
	o.fix(i)
}

// raise gives a unit a priority if it is higher than its own.
func (o *order) raise(i int32, priority int8) {
	if r := &o.ranks[i]; priority > r.prio {
		r.prio = priority
		o.fix(i)
	}
}

// fix puts a unit, if it is idle, where it belongs.
func (o *order) fix(i int32) {
	if r := &o.ranks[i]; r.at[0] >= 0 {
		o.each(i, func(h *rankHeap) { heap.Fix(h, r.at[h.which]) })
	}
}

// each calls f for the heaps that the unit belongs to.
func (o *order) each(i int32, f func(*rankHeap)) {
	r := &o.ranks[i]
	q := 0
	if r.main {
		q = 1
	}
	f(&o.all[q])
	if r.own != nil {
		f(&r.own[q])
	}
}

// victim is the idle unit of a pile that goes next; -1: none is idle.
func (o *order) victim(p *pile) int32 {
	for {
		h := o.queue(p)
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

// queue is where the next one goes from; nil: nowhere.
func (o *order) queue(p *pile) *rankHeap {
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

// rankHeap orders idle slots, the next to go first.
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

// ghosts are names of units that went while on trial, the latest of them: as
// many as the main queue has room for.
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
