package pick

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

type nodeKey struct {
	id    string
	epoch uint64
}

// node is what the picker remembers of one instance in one epoch; under Picker.mu unless marked
// otherwise.
type node struct {
	key   nodeKey
	at    atomic.Int32 // about where it is in the snapshot's members
	stamp uint64       // under Picker.build: the last Refresh that saw it usable,
	seen  uint64       // and that saw it at all

	class      *class     // nil while it gets no work
	role       fleet.Role // of its class, and when it has none, of its last one
	slot       int        // in class.nodes
	prev, next *node      // in class's order of use
	point      uint64     // on class's ring
	born       time.Time

	own    Loads // what this router has here
	others Loads // what other routers have here

	last   uint64  // tick of the last dispatch, or of its coming
	used   bool    // there was a dispatch
	memory float64 // dispatched work, decayed by later dispatches

	lines [3]line
	guard guard
	busy  float64    // part of the time that steps took lately, 0 to 1
	many  float64    // sequences that decoded in a step lately
	long  float64    // tokens of each
	heard time.Time  // when
	said  fleet.Load // the last report
	then  Loads      // own, when it came
	noted bool       // it is in Picker.notes
	named bool       // its epoch is this router's own; others know it by its id
}

// halfLife is how many dispatches halve a node's memory of its work.
const halfLife = 32

// recent is the decayed work at tick.
func (n *node) recent(tick uint64) float64 {
	return n.memory * math.Exp2(-float64(tick-n.last)/halfLife)
}

func (n *node) use(tick uint64, work float64) {
	n.memory = n.recent(tick) + work
	n.last, n.used = tick, true
	if n.class != nil {
		n.class.unlink(n)
		n.class.append(n)
	}
}

// count adds a leg's load, or with sign -1 takes it away.
func (n *node) count(l *Loads, sign int) {
	n.own.Legs += sign * l.Legs
	n.own.Tokens += sign * l.Tokens
	n.own.Seqs += sign * l.Seqs
	n.own.KV += sign * l.KV
	if n.class != nil {
		n.class.legs += sign * l.Legs
	}
}

// class is usable members of a model and role, alike in all that compatibility compares. It lives
// as long as it has members.
type class struct {
	id    classID
	rep   fleet.Instance
	stamp uint64 // under Picker.build

	born  time.Time // when its first member came
	nodes []*node   // in no order
	root  node      // head of the list in order of use, least recent first
	ring  []*node   // by point
	legs  int       // of all nodes and routers

	lines [3]line // of all nodes
	costs *costs  // of all alike, whatever their role
}

// classID is what members of a class have in common.
type classID struct {
	fleet.Traits
	zone string // the labels that pairs must share
}

func (c *class) unlink(n *node) { n.prev.next, n.next.prev = n.next, n.prev }

func (c *class) append(n *node) {
	last := c.root.prev
	n.prev, n.next = last, &c.root
	last.next, c.root.prev = n, n
}

// join adds a node as the most recently used.
func (c *class) join(n *node) {
	if len(c.nodes) == 0 {
		c.born = n.born
	}
	n.class, n.slot, n.role = c, len(c.nodes), c.id.Role
	c.nodes = append(c.nodes, n)
	c.append(n)
	c.legs += n.legsAll()
	c.addPoint(n)
}

func (c *class) leave(n *node) {
	last := len(c.nodes) - 1
	c.nodes[n.slot] = c.nodes[last]
	c.nodes[n.slot].slot = n.slot
	c.nodes[last] = nil
	c.nodes = c.nodes[:last]
	c.unlink(n)
	n.prev, n.next, n.class = nil, nil, nil
	c.legs -= n.legsAll()
	c.removePoint(n)
}
