package flight

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/pick"
)

// record is what is kept of a request: a copy, so that requests that nobody asks about cost
// no more, without pointers into the fleet, which would keep an old snapshot alive.
type record struct {
	summary
	n       int // attempts
	attempt attemptRecord
	more    []attemptRecord // from the second on
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
	Why   string    `json:"why,omitempty"` // it has moved
	Since time.Time `json:"since"`

	begun, ended time.Time // zero before
	ahead        period
}

// note fills rec with what is known of the request now.
func (q *request) note(rec *record) {
	q.mu.Lock()
	*rec = record{summary: q.summary, n: len(q.attempts)}
	attempts := q.attempts
	if rec.n > 1 {
		rec.more, attempts = make([]attemptRecord, rec.n-1), q.begun()
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

// begun is the attempts in order of their start: hedges and moves change it in place. q.mu is held.
func (q *request) begun() []*attempt {
	return slices.SortedStableFunc(slices.Values(q.attempts), func(a, b *attempt) int { return a.start.Compare(b.start) })
}

func (a *attempt) note(rec *attemptRecord) {
	rec.Link, rec.Start, rec.Explain = linkText(a.link), a.start, a.choice.Explain
	a.mu.Lock()
	if rec.Outcome = a.outcome; a.failed != nil {
		rec.Error = a.failed.Error()
	}
	a.mu.Unlock()
	rec.Prefill, rec.Decode = a.leg(fleet.Prefill).record(), a.leg(fleet.Decode).record()
}

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

func (h *history) add(rec *record) {
	if len(h.ring) == 0 {
		return
	}
	h.ring[h.next] = *rec
	h.next = (h.next + 1) % len(h.ring)
}

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

// Recent returns up to most requests, running and recent ones, the newest first.
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

// Find returns a running or recent request by its ID; nil if there is none.
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

// both returns the running requests and the recent ones, at one moment.
func (s *Service) both() (running []*request, over []record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.requests)), s.history.list()
}

// Info is a request as /debug/ledger and /debug/requests show it.
type Info struct {
	ID       string          `json:"request_id"`
	Path     string          `json:"path"`
	Model    string          `json:"model,omitempty"`
	Stream   bool            `json:"stream"`
	Internal bool            `json:"internal,omitempty"` // a probe or the like
	State    string          `json:"state"`
	Since    time.Time       `json:"since"`
	Start    time.Time       `json:"start"`
	Deadline *time.Time      `json:"deadline,omitempty"`
	QueueMS  float64         `json:"queue_ms,omitempty"`
	TTFTMS   float64         `json:"ttft_ms,omitempty"`
	TookMS   float64         `json:"took_ms,omitempty"` // once it is over
	Status   int             `json:"status,omitempty"`
	Error    string          `json:"error,omitempty"`
	Attempts []attemptRecord `json:"attempts,omitempty"`
	Phases   []phaseInfo     `json:"phases,omitempty"`
	Pauses   []pauseInfo     `json:"pauses,omitempty"` // the longest waits between tokens, of a stream that is over
}

// pauseInfo is when one began and ended, in milliseconds since the request's start.
type pauseInfo struct {
	StartMS float64 `json:"start_ms"`
	EndMS   float64 `json:"end_ms"`
}

func (q *request) info() *Info {
	var rec record
	q.note(&rec)
	return rec.info()
}

func (rec *record) info() *Info {
	ms := func(t time.Time) float64 {
		if t.IsZero() {
			return 0
		}
		return float64(t.Sub(rec.start).Microseconds()) / 1000
	}
	i := &Info{ID: rec.id, Path: rec.path, Model: rec.model, Stream: rec.streams, Internal: rec.probe,
		State: rec.state, Since: rec.since, Start: rec.start, Status: rec.status, Error: rec.failed,
		QueueMS: ms(rec.dispatched), TTFTMS: ms(rec.first)}
	if !rec.end.IsZero() {
		i.Deadline = &rec.end
	}
	if rec.over {
		i.TookMS = ms(rec.since)
	}
	for n := range rec.n {
		i.Attempts = append(i.Attempts, *rec.at(n))
	}
	for _, p := range rec.phases() {
		row := phaseInfo{Name: p.name, StartMS: ms(p.start), Attempt: p.attempt}
		if !p.end.IsZero() {
			row.EndMS = max(ms(p.end), 0.001)
		}
		if p.leg != nil {
			row.Worker, row.State, row.Why = p.leg.ID, p.leg.State, p.leg.Why
		}
		i.Phases = append(i.Phases, row)
	}
	for _, p := range rec.pauses {
		if p.to > 0 {
			i.Pauses = append(i.Pauses, pauseInfo{float64(p.from.Microseconds()) / 1000, float64(p.to.Microseconds()) / 1000})
		}
	}
	return i
}

// phaseInfo is a row of a request's waterfall, in milliseconds since its start.
type phaseInfo struct {
	Name    string  `json:"name"`
	StartMS float64 `json:"start_ms"`
	EndMS   float64 `json:"end_ms,omitempty"` // absent while it lasts
	Attempt int     `json:"attempt,omitempty"`
	Worker  string  `json:"worker,omitempty"`
	State   string  `json:"state,omitempty"` // of a leg
	Why     string  `json:"why,omitempty"`   // it has moved
}

// Text draws the waterfall.
func (i *Info) Text() []byte {
	const width = 50
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s model=%q stream=%v state=%s status=%d", i.ID, i.Path, i.Model, i.Stream, i.State, i.Status)
	if i.Error != "" {
		fmt.Fprintf(&b, " error=%q", i.Error)
	}
	total := i.TookMS
	for _, p := range i.Phases {
		total = max(total, p.StartMS, p.EndMS)
	}
	fmt.Fprintf(&b, "\nstart %s, %.3f ms\n\n", i.Start.Format(time.RFC3339Nano), total)
	for _, p := range i.Phases {
		end, dur := total, "..."
		if p.EndMS > 0 {
			end = p.EndMS
			dur = fmt.Sprintf("%.3f", end-p.StartMS)
		}
		from := int(width * p.StartMS / max(total, 0.001))
		to := max(int(width*end/max(total, 0.001)), from+1)
		bar := strings.Repeat(" ", min(from, width-1)) + strings.Repeat("=", min(to, width)-min(from, width-1))
		fmt.Fprintf(&b, "%-10s |%-*s| %10.3f +%10s ms", p.Name, width, bar, p.StartMS, dur)
		if p.Worker != "" {
			fmt.Fprintf(&b, "  %s %s, attempt %d", p.Worker, p.State, p.Attempt)
			if p.Why != "" {
				fmt.Fprintf(&b, ": %s", p.Why)
			}
		}
		b.WriteByte('\n')
	}
	for n, a := range i.Attempts {
		if a.Error != "" {
			fmt.Fprintf(&b, "\nattempt %d failed: %s", n+1, a.Error)
		}
	}
	if b.Bytes()[b.Len()-1] != '\n' {
		b.WriteByte('\n')
	}
	return b.Bytes()
}

// ledger is what this process holds, for whom and since when. At rest requests is empty and
// the counts are zero.
type ledger struct {
	Process   string                     `json:"process"`
	At        time.Time                  `json:"at"`
	Requests  []*Info                    `json:"requests"`
	Legs      int                        `json:"legs"`
	Running   int                        `json:"running"` // admitted
	Waiting   int                        `json:"waiting"` // for admission
	ConnsBusy int                        `json:"upstream_conns_busy"`
	ConnsIdle int                        `json:"upstream_conns_idle"`
	Fleet     map[string]json.RawMessage `json:"fleet,omitempty"` // the workers' ledgers, or their errors
}

// Ledger returns what is held now.
func (s *Service) Ledger() *ledger {
	l := &ledger{Process: "router", At: time.Now(), Requests: []*Info{}, Legs: s.legs.count()}
	l.Running, l.Waiting = s.gate.Counts()
	l.ConnsBusy, l.ConnsIdle = s.Client.Counts()
	for _, q := range s.running() {
		l.Requests = append(l.Requests, q.info())
	}
	slices.SortFunc(l.Requests, func(a, b *Info) int { return cmp.Or(a.Start.Compare(b.Start), cmp.Compare(a.ID, b.ID)) })
	return l
}

func (s *Service) running() []*request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.requests))
}
