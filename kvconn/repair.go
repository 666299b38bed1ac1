package kvconn

import (
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// asking is a new round that was decided on but not yet requested.
type asking struct {
	m     *resend // nil: there is nothing to ask for
	units int
	tired bool // the peer has sent them again and again
	why   error
}

// again decides on a new round for missing units. It needs mu, held since they were
// found missing: else the end of the round would find them again, and they would be
// asked for twice. The caller calls ask after it has released mu.
func (i *Incoming) again(runs []run, why error) asking {
	if i.ended {
		return asking{}
	}
	if i.tries == nil {
		i.tries = map[uint32]int{}
	}
	a := asking{why: why}
	for _, r := range runs {
		for u := r.First; u < r.First+r.Count; u++ {
			i.tries[u]++
			a.tired = a.tired || i.tries[u] > i.s.cfg.Resends
			a.units++
		}
	}
	if a.tired {
		i.s.m.corrupt.Add(float64(len(i.torn)))
		clear(i.torn)
	}
	i.round++
	i.marks = 0
	i.progress = time.Now()
	a.m = &resend{ID: i.id, Round: i.round, Runs: runs}
	return a
}

// ask requests a round from the peer, or gives up.
func (i *Incoming) ask(a asking) {
	if a.m == nil {
		return
	}
	if staged, ok := holdAs[StagedHold](i.s.lent); ok && errors.Is(a.why, errLost) { // or the peer has no room to send them
		staged.Forget()
	}
	if a.tired {
		i.end(ticket.Corrupt, fmt.Errorf("asked %d times again: %w", i.s.cfg.Resends, a.why))
		return
	}
	i.s.side.resends.Add(float64(a.units))
	i.s.post(a.m)
}

// lost returns the missing units as runs; needs mu.
func (i *Incoming) lost() []run {
	var runs []run
	for u, st := range i.units {
		if st == unitMissing {
			runs = appendUnit(runs, uint32(u))
		}
	}
	return runs
}

// appendUnit adds a unit behind those in runs.
func appendUnit(runs []run, u uint32) []run {
	if n := len(runs); n > 0 && runs[n-1].First+runs[n-1].Count == u {
		runs[n-1].Count++
		return runs
	}
	return append(runs, run{u, 1})
}

var errLost = errors.New("blocks did not arrive")

func (s *Session) onSent(m *sent, conn int) {
	if i, _ := s.holder(m.ID, m.Tag); i != nil {
		i.onSent(m.Round, conn)
	}
}

// onSent records a bulk connection's mark. With all marks and the commit there, nothing
// of this round is on its way: units still missing were lost.
func (i *Incoming) onSent(round uint32, conn int) {
	i.mu.Lock()
	var lost asking
	complete := false
	if round == i.round && !i.ended {
		i.marks |= 1 << conn
		if complete = i.complete(); !complete {
			lost = i.settledRound()
		}
	}
	i.mu.Unlock()
	if complete {
		i.end(ticket.Done, nil)
	}
	i.ask(lost)
}

// idle reports whether the sender has had nothing to send on any bulk connection from
// since until just now. It beats only when idle: a ticket that makes no progress
// without beats waits behind others, and asking again would only lengthen that queue.
func (s *Session) idle(since, now time.Time) bool {
	for n := range s.beats {
		if at := time.Unix(0, s.beats[n].Load()); !at.After(since) || now.Sub(at) > 2*s.cfg.KeepAlive {
			return false
		}
	}
	return true
}

// settledRound begins a round with the units that the current one has lost, if that is
// over; needs mu.
func (i *Incoming) settledRound() asking {
	if !i.committed || !i.marked() {
		return asking{}
	}
	if runs := i.lost(); len(runs) > 0 {
		return i.again(runs, errLost)
	}
	return asking{}
}

// marked reports whether every bulk connection has delivered all of this round; needs
// mu.
func (i *Incoming) marked() bool { return bits.OnesCount64(i.marks) == len(i.s.bulk) }
