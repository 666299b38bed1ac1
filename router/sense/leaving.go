package sense

import (
	"sync/atomic"

	"github.com/xpyd/xpyd/internal/fleet"
)

// mark is a drain that was asked for here.
type mark struct {
	epoch uint64
	stays bool // its streams end there
}

// Leaving is a worker whose streams move to others, because it is drained or gets another role.
type Leaving struct {
	epoch uint64
	moves atomic.Int32 // under way
}

// maxMoves is how many streams of a worker move at once, so that they flood neither prefill nor
// the next decode.
const maxMoves = 8

// Begin takes a place for a move, if there is one; End gives it back.
func (l *Leaving) Begin() bool {
	if l.moves.Add(1) <= maxMoves {
		return true
	}
	l.End()
	return false
}

// End gives back a place for a move.
func (l *Leaving) End() { l.moves.Add(-1) }

// Leaving returns what the streams of a worker need to move away; nil if they stay.
func (ms *Members) Leaving(inst *fleet.Instance) *Leaving {
	all := ms.leaving.Load()
	if all == nil { // mostly
		return nil
	}
	if l := (*all)[inst.ID]; l != nil && l.epoch == inst.Epoch {
		return l
	}
	return nil
}

// findLeaving finds out whose streams move. An order given here counts before the worker announces
// it. ms.mu is held, so that no older snapshot comes last.
func (ms *Members) findLeaving() {
	var all map[string]*Leaving
	s := ms.Fleet.Snapshot()
	for i := range s.Members {
		m := &s.Members[i]
		leaves := m.Draining && !m.WaitOnly
		if k, ok := ms.marked[m.ID]; ok && k.epoch == m.Epoch {
			leaves = !k.stays
		}
		if !leaves {
			continue
		}
		l := ms.Leaving(&m.Instance)
		if l == nil {
			l = &Leaving{epoch: m.Epoch}
		}
		if all == nil {
			all = map[string]*Leaving{}
		}
		all[m.ID] = l
	}
	if all == nil {
		ms.leaving.Store(nil)
		return
	}
	ms.leaving.Store(&all)
}
