package share

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/router/pick"
)

// Bounds of what other routers can make this one remember.
const (
	maxPeers   = 64
	maxWorkers = 16 << 10 // of one router
)

// name is how routers call a worker.
type name struct {
	id    string
	epoch uint64
}

// told is the load that one router has on a worker.
type told struct {
	pick.Loads
	mark int // of the last snapshot that had it
}

type peer struct {
	heard   time.Time
	seq     uint64
	workers map[name]told
	mark    int
	next    int // part of the snapshot that must come next; -1: none
}

// peers is what other routers have said: a state machine without I/O or clock.
type peers struct {
	expire time.Duration
	byID   map[uint64]*peer
	totals map[name]pick.Loads
	counts counts
}

// counts are for metrics.
type counts struct {
	gaps    uint64 // messages that did not arrive
	expired uint64 // routers that fell silent
	refused uint64 // messages that could not be used
}

func newPeers(expire time.Duration) *peers {
	return &peers{expire: expire, byID: map[uint64]*peer{}, totals: map[name]pick.Loads{}}
}

// apply takes in a message. It returns the workers whose totals change, and whether its
// sender was unknown.
func (s *peers) apply(m *message, now time.Time) (touched []pick.WorkerLoad, isNew bool) {
	p := s.byID[m.from]
	if m.kind == kindBye {
		return s.forget(m.from), false
	}
	if p == nil {
		if len(s.byID) >= maxPeers {
			s.counts.refused++
			return nil, false
		}
		p, isNew = &peer{workers: map[name]told{}, next: -1, seq: m.seq - 1}, true
		s.byID[m.from] = p
	}
	if m.seq <= p.seq && !isNew { // the bus repeated it
		s.counts.refused++
		return nil, false
	}
	s.counts.gaps += m.seq - p.seq - 1
	p.seq, p.heard = m.seq, now
	switch m.kind {
	case kindChanges:
		touched = s.set(p, m.workers, touched)
	case kindSnapshot:
		switch m.part {
		case 0:
			p.mark++
			p.next = 1
		case p.next:
			p.next++
		default: // a part was lost; the next snapshot repairs it
			p.next = -1
		}
		touched = s.set(p, m.workers, touched)
		if p.next == m.parts {
			p.next = -1
			for n, t := range p.workers {
				if t.mark != p.mark {
					touched = s.put(p, n, pick.Loads{}, touched)
				}
			}
		}
	}
	return touched, isNew
}

// first reports whether self is the one that answers the asker: one is enough.
func (s *peers) first(self, asker uint64) bool {
	for id := range s.byID {
		if id != asker && id < self {
			return false
		}
	}
	return true
}

func (s *peers) set(p *peer, list []pick.WorkerLoad, touched []pick.WorkerLoad) []pick.WorkerLoad {
	for _, w := range list {
		touched = s.put(p, name{w.ID, w.Epoch}, w.Loads, touched)
	}
	return touched
}

// put makes l the load that p has on a worker.
func (s *peers) put(p *peer, n name, l pick.Loads, touched []pick.WorkerLoad) []pick.WorkerLoad {
	old, known := p.workers[n]
	switch {
	case l == pick.Loads{}:
		delete(p.workers, n)
	case !known && len(p.workers) >= maxWorkers:
		return touched
	default:
		p.workers[n] = told{l, p.mark}
	}
	t := s.totals[n]
	t.Legs += l.Legs - old.Legs
	t.Tokens += l.Tokens - old.Tokens
	t.Seqs += l.Seqs - old.Seqs
	t.KV += l.KV - old.KV
	if t == (pick.Loads{}) {
		delete(s.totals, n)
	} else {
		s.totals[n] = t
	}
	return append(touched, pick.WorkerLoad{ID: n.id, Epoch: n.epoch, Loads: t})
}

// forget drops a router with all that it has told.
func (s *peers) forget(id uint64) (touched []pick.WorkerLoad) {
	p := s.byID[id]
	if p == nil {
		return nil
	}
	for n := range p.workers {
		touched = s.put(p, n, pick.Loads{}, touched)
	}
	delete(s.byID, id)
	return touched
}

// tick forgets routers that have been silent for too long.
func (s *peers) tick(now time.Time) (touched []pick.WorkerLoad) {
	for id, p := range s.byID {
		if now.Sub(p.heard) >= s.expire {
			s.counts.expired++
			touched = append(touched, s.forget(id)...)
		}
	}
	return touched
}

// Peer is another router, as people see it.
type Peer struct {
	ID       string  `json:"id"`
	SilentMS float64 `json:"silent_ms"` // since its last word
	Legs     int     `json:"legs"`      // that it has open to workers
	Workers  int     `json:"workers"`   // that it has legs to
}

func idText(id uint64) string { return fmt.Sprintf("%016x", id) }

func (s *peers) list(now time.Time) []Peer {
	out := make([]Peer, 0, len(s.byID))
	for id, p := range s.byID {
		i := Peer{ID: idText(id), SilentMS: float64(now.Sub(p.heard).Microseconds()) / 1000}
		for _, t := range p.workers {
			if i.Legs += t.Legs; t.Legs > 0 {
				i.Workers++
			}
		}
		out = append(out, i)
	}
	slices.SortFunc(out, func(a, b Peer) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// silence is how long the most silent router has been silent.
func (s *peers) silence(now time.Time) (most time.Duration) {
	for _, p := range s.byID {
		most = max(most, now.Sub(p.heard))
	}
	return most
}
