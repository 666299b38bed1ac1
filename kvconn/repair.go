package kvconn

import (
	"errors"
	"fmt"
	"math/bits"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// again asks for units once more, in a new round, or gives up.
func (i *Incoming) again(runs []run, why error) {
	i.mu.Lock()
	if i.ended {
		i.mu.Unlock()
		return
	}
	if i.tries == nil {
		i.tries = map[uint32]int{}
	}
	n, tired := 0, false
	for _, r := range runs {
		for u := r.First; u < r.First+r.Count; u++ {
			i.tries[u]++
			tired = tired || i.tries[u] > i.s.cfg.Resends
			n++
		}
	}
	if tired { // the peer has sent again and again
		i.s.m.corrupt.Add(float64(len(i.torn)))
		clear(i.torn)
	}
	i.round++
	i.marks = 0
	i.progress = time.Now()
	m := &resend{ID: i.id, Round: i.round, Runs: runs}
	i.mu.Unlock()
	if staged, ok := i.s.staged(); ok && errors.Is(why, errLost) { // or the peer has no room to send them
		staged.Forget()
	}
	if tired {
		i.end(ticket.Corrupt, fmt.Errorf("asked %d times again: %w", i.s.cfg.Resends, why))
		return
	}
	i.s.side.resends.Add(float64(n))
	i.s.post(m)
}

// lost returns the missing units as runs; needs mu.
func (i *Incoming) lost() []run {
	var runs []run
	for u, st := range i.units {
		if st != unitMissing {
			continue
		}
		if n := len(runs); n > 0 && runs[n-1].First+runs[n-1].Count == uint32(u) {
			runs[n-1].Count++
		} else {
			runs = append(runs, run{uint32(u), 1})
		}
	}
	return runs
}

var errLost = errors.New("blocks did not arrive")

// onSent notes a bulk connection's mark. Once all have theirs, and the commit
// is there, nothing of this round is under way: what is missing was lost.
func (i *Incoming) onSent(round uint32, conn int) {
	i.mu.Lock()
	var runs []run
	complete := false
	if round == i.round && !i.ended {
		i.marks |= 1 << conn
		runs = i.settledRound()
		complete = i.complete()
	}
	i.mu.Unlock()
	if complete {
		i.end(ticket.Done, nil)
	} else if len(runs) > 0 {
		i.again(runs, errLost)
	}
}

// idle tells whether the sender has had nothing to send, on any bulk connection,
// since then and until just now: it beats only when idle. A ticket that makes
// no progress while it does not beat is waiting behind others, and asking again
// would only lengthen that queue.
func (s *Session) idle(since, now time.Time) bool {
	for n := range s.beats {
		if at := time.Unix(0, s.beats[n].Load()); !at.After(since) || now.Sub(at) > 2*s.cfg.KeepAlive {
			return false
		}
	}
	return true
}

// settledRound returns what this round has lost, once it is over; needs mu.
func (i *Incoming) settledRound() []run {
	if !i.committed || !i.marked() {
		return nil
	}
	return i.lost()
}

// marked needs mu: every bulk connection has delivered all of this round.
func (i *Incoming) marked() bool { return bits.OnesCount64(i.marks) == len(i.s.bulk) }
