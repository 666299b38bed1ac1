package host

import (
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// naive is a plain implementation of an order: lists, searched from the front.
type naive struct {
	policy      Eviction
	slots       int
	small, main []int32 // the order of coming in, or of the last use (LRU, LFU: small only)
	ghosts      []kvcache.Hash
	of          map[int32]*naiveUnit
}

type naiveUnit struct {
	key           kvcache.Hash
	leaf, idle    bool
	uses, tenancy int
	prio          int8
}

// before says whether, whatever the policy, u goes before v.
func (u *naiveUnit) before(v *naiveUnit) bool {
	return u.leaf && !v.leaf || u.leaf == v.leaf && u.prio < v.prio
}

func without(list []int32, i int32) []int32 {
	return slices.DeleteFunc(list, func(j int32) bool { return i == j })
}

func (n *naive) enter(i int32, u *naiveUnit) {
	n.of[i] = u
	if g := slices.Index(n.ghosts, u.key); n.policy == S3FIFO && g >= 0 {
		n.ghosts[g] = kvcache.Hash{} // its place in the queue stays taken
		n.main = append(n.main, i)
		return
	}
	n.small = append(n.small, i)
}

func (n *naive) leave(i int32, went bool) {
	if n.policy == S3FIFO && went && slices.Contains(n.small, i) {
		n.ghosts = append(n.ghosts, n.of[i].key)
		n.ghosts = n.ghosts[max(0, len(n.ghosts)-max(1, n.slots-n.slots/10)):]
	}
	n.small, n.main = without(n.small, i), without(n.main, i)
	delete(n.of, i)
}

func (n *naive) use(i int32) {
	if n.of[i].uses++; n.policy == S3FIFO {
		n.of[i].uses = min(n.of[i].uses, 3)
		return
	}
	n.small = append(without(n.small, i), i)
}

// first is the unit of a list that goes first; -1: none may.
func (n *naive) first(list []int32, tenancy int) int32 {
	best := int32(-1)
	for _, i := range list {
		u := n.of[i]
		if !u.idle || tenancy > 0 && u.tenancy != tenancy {
			continue
		}
		if best < 0 || u.before(n.of[best]) || !n.of[best].before(u) && n.policy == LFU && u.uses < n.of[best].uses {
			best = i
		}
	}
	return best
}

func (n *naive) victim(tenancy int) int32 {
	for {
		s, m := n.first(n.small, tenancy), n.first(n.main, tenancy)
		switch {
		case s < 0 && m < 0:
			return -1
		case m < 0:
		case s < 0 || n.of[m].before(n.of[s]):
			s = -1
		case n.of[s].before(n.of[m]):
		case len(n.small)*10 < n.slots:
			s = -1
		}
		switch {
		case s >= 0 && (n.policy != S3FIFO || n.of[s].uses < 2):
			return s
		case s >= 0:
			n.of[s].uses = 0
			n.small, n.main = without(n.small, s), append(n.main, s)
		case n.of[m].uses == 0:
			return m
		default:
			n.of[m].uses--
			n.main = append(without(n.main, m), m)
		}
	}
}

// TestOrders: each order names the same victims as the naive one, whatever
// happens to its units.
func TestOrders(t *testing.T) {
	for _, policy := range []Eviction{LRU, LFU, S3FIFO} {
		t.Run(string(policy), func(t *testing.T) {
			for seed := range uint64(20) {
				gen := rand.New(rand.NewPCG(seed, 9))
				slots := 2 + gen.IntN(60)
				o := newOrder(policy, slots)
				n := &naive{policy: policy, slots: slots, of: make(map[int32]*naiveUnit)}
				piles := []*pile{&o.all, nil, nil}
				for i := range piles[1:] {
					p := o.pile(1)
					piles[i+1] = &p
				}
				leave := func(i int32, went bool) {
					if n.of[i].idle {
						o.busy(i)
					}
					o.leave(i, n.of[i].key, went)
					n.leave(i, went)
				}
				for step := range 2000 {
					i := int32(gen.IntN(slots))
					u := n.of[i]
					switch op := gen.IntN(16); {
					case u == nil:
						u = &naiveUnit{leaf: gen.IntN(4) > 0, tenancy: gen.IntN(3), prio: int8(gen.IntN(4)/3 + gen.IntN(8)/7)}
						binary.LittleEndian.PutUint64(u.key[:], uint64(1+gen.IntN(3*slots)))
						if slices.ContainsFunc(slices.Collect(maps.Values(n.of)), func(v *naiveUnit) bool { return v.key == u.key }) {
							continue
						}
						o.enter(i, u.key, u.prio, u.leaf, piles[u.tenancy:][0].own())
						n.enter(i, u)
					case op < 6:
						if u.idle = !u.idle; u.idle {
							o.idle(i)
						} else {
							o.busy(i)
						}
					case op < 9:
						if !u.idle {
							o.use(i)
							n.use(i)
						}
					case op == 9:
						prio := int8(gen.IntN(3))
						o.raise(i, prio)
						u.prio = max(u.prio, prio)
					case op == 10:
						u.leaf = !u.leaf
						o.setLeaf(i, u.leaf)
					case op == 11:
						leave(i, false)
					default:
						tenancy := gen.IntN(3)
						got, want := o.victim(piles[tenancy]), n.victim(tenancy)
						if got != want {
							t.Fatalf("seed %d, step %d: victim %d of tenancy %d, want %d", seed, step, got, tenancy, want)
						}
						if got >= 0 {
							leave(got, true)
						}
					}
					if policy == S3FIFO && o.small != len(n.small) {
						t.Fatalf("seed %d, step %d: %d on trial, want %d", seed, step, o.small, len(n.small))
					}
				}
			}
		})
	}
}

// own is the pile as a tenant's; the pile of all is nobody's.
func (p *pile) own() *pile {
	if p[0].which == 0 {
		return nil
	}
	return p
}

// hitRate plays a trace of units, each a prompt of its own, through a memory with the
// given slots.
func hitRate(policy Eviction, slots int, trace []int) float64 {
	o := newOrder(policy, slots)
	at := make(map[int]int32)
	held := make([]int, slots)
	hits := 0
	for _, unit := range trace {
		if i, ok := at[unit]; ok {
			hits++
			o.busy(i)
			o.use(i)
			o.idle(i)
			continue
		}
		i := int32(len(at))
		if len(at) == slots {
			i = o.victim(&o.all)
			o.busy(i)
			o.leave(i, keyOf(held[i]), true)
			delete(at, held[i])
		}
		at[unit], held[i] = i, unit
		o.enter(i, keyOf(unit), 0, true, nil)
		o.idle(i)
	}
	return float64(hits) / float64(len(trace))
}

func keyOf(unit int) (k kvcache.Hash) {
	binary.LittleEndian.PutUint64(k[:], uint64(unit)+1)
	return k
}

// TestScan: long prompts that nobody asks for again push what is popular out
// of LRU's memory, and not out of S3-FIFO's.
func TestScan(t *testing.T) {
	gen := rand.New(rand.NewPCG(1, 1))
	var trace []int
	for scan := range 40 {
		for range 200 { // 80 popular units
			trace = append(trace, int(80*gen.Float64()*gen.Float64()))
		}
		for i := range 150 { // and a document, once
			trace = append(trace, 1000+150*scan+i)
		}
	}
	lru, s3 := hitRate(LRU, 100, trace), hitRate(S3FIFO, 100, trace)
	t.Logf("hit rates: lru %.3f, s3fifo %.3f", lru, s3)
	if best := 200.0 / 350; s3 < 0.9*best || s3 < lru+0.05 {
		t.Errorf("s3fifo hits %.3f, lru %.3f, at best %.3f", s3, lru, best)
	}
}
