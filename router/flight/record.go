package flight

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/pick"
)

// record is what is kept of a request: no pointer into the fleet, which would
// keep all of an old snapshot, and nothing that has to be made, so that it costs
// those that nobody asks about no more than a copy.
type record struct {
	id, path, model string
	streams, probe  bool
	over            bool
	state           string
	since, start    time.Time
	end             time.Time // deadline
	admitted        time.Time
	dispatched      time.Time
	first           time.Time
	status          int
	failed          string
	n               int // attempts
	attempt         attemptRecord
	more            []attemptRecord // from the second on
}

type attemptRecord struct {
	Link    linkText       `json:"link"`
	Start   time.Time      `json:"start"`
	Prefill legRecord      `json:"prefill"`
	Decode  legRecord      `json:"decode"`
	Outcome ticket.Outcome `json:"outcome,omitempty"` // of prefill's part
	Error   string         `json:"error,omitempty"`
	Explain *pick.Explain  `json:"explain,omitempty"`
}

// linkText is a link in JSON.
type linkText ticket.Link

// MarshalText implements encoding.TextMarshaler.
func (l linkText) MarshalText() ([]byte, error) { return []byte(ticket.Link(l).String()), nil }

type legRecord struct {
	ID    string    `json:"id"`
	Epoch uint64    `json:"epoch"`
	State string    `json:"state"`
	Since time.Time `json:"since"`

	begun, ended time.Time // see leg.times
}

// note fills rec with what is known of the request now.
func (q *request) note(rec *record) {
	q.mu.Lock()
	*rec = record{id: q.id, path: q.path, model: q.model, streams: q.streams, probe: q.probe, over: q.over, state: q.state, since: q.since,
		start: q.start, end: q.end, admitted: q.admitted, dispatched: q.dispatched, first: q.first, status: q.status, failed: q.failed,
		n: len(q.attempts)}
	attempts := q.attempts
	if rec.n > 1 { // which are changed in place, with a hedge
		rec.more, attempts = make([]attemptRecord, rec.n-1), slices.Clone(attempts)
	}
	q.mu.Unlock()
	for i, a := range attempts {
		if i == 0 {
			a.note(&rec.attempt)
		} else {
			a.note(&rec.more[i-1])
		}
	}
}

func (a *attempt) note(rec *attemptRecord) {
	rec.Link, rec.Start, rec.Explain = linkText(a.link), a.start, a.choice.Explain
	a.mu.Lock()
	if rec.Outcome = a.outcome; a.failed != nil {
		rec.Error = a.failed.Error()
	}
	a.mu.Unlock()
	a.p.note(&rec.Prefill)
	a.d.note(&rec.Decode)
}

func (l *leg) note(rec *legRecord) {
	l.smu.Lock()
	defer l.smu.Unlock()
	*rec = legRecord{l.inst.ID, l.inst.Epoch, l.state, l.since, l.begun, l.ended}
}

// at is an attempt, from 0.
func (rec *record) at(i int) *attemptRecord {
	if i == 0 {
		return &rec.attempt
	}
	return &rec.more[i-1]
}

// history is the last finished requests; Service.mu guards it.
type history struct {
	ring []record
	next int
}

func newHistory(n int) history { return history{ring: make([]record, n)} }

func (h *history) add(rec *record) {
	h.ring[h.next] = *rec
	h.next = (h.next + 1) % len(h.ring)
}

// list is all of them, the newest first.
func (h *history) list() []record {
	out := make([]record, 0, len(h.ring))
	for i := range h.ring {
		rec := &h.ring[(h.next-1-i+2*len(h.ring))%len(h.ring)]
		if rec.start.IsZero() {
			break
		}
		out = append(out, *rec)
	}
	return out
}

// Recent is the requests that run and the latest ones, most of them at most, the
// newest first.
func (s *Service) Recent(most int) []*Info {
	running, over := s.both()
	list := make([]*Info, 0, len(over)+len(running))
	for i := range over {
		list = append(list, over[i].info())
	}
	for _, q := range running {
		if !q.probe {
			list = append(list, q.info())
		}
	}
	slices.SortFunc(list, func(a, b *Info) int { return cmp.Or(b.Start.Compare(a.Start), cmp.Compare(a.ID, b.ID)) })
	return list[:min(most, len(list))]
}

// Find returns a request by its id, running or recent; nil if there is none.
func (s *Service) Find(id string) *Info {
	running, over := s.both()
	if i := slices.IndexFunc(running, func(q *request) bool { return q.id == id }); i >= 0 {
		return running[i].info()
	}
	if i := slices.IndexFunc(over, func(rec record) bool { return rec.id == id }); i >= 0 {
		return over[i].info()
	}
	return nil
}

// both is the requests that run and the latest ones, at one moment.
func (s *Service) both() (running []*request, over []record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.requests)), s.history.list()
}
