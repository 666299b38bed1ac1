package router

import (
	"time"

	"github.com/xpyd/xpyd/router/pick"
)

// requestInfo is a request as /debug/ledger and /debug/requests show it.
type requestInfo struct {
	ID       string        `json:"request_id"`
	Path     string        `json:"path"`
	Model    string        `json:"model,omitempty"`
	Stream   bool          `json:"stream"`
	Internal bool          `json:"internal,omitempty"` // a probe or the like
	State    string        `json:"state"`
	Since    time.Time     `json:"since"`
	Start    time.Time     `json:"start"`
	Deadline *time.Time    `json:"deadline,omitempty"`
	QueueMS  float64       `json:"queue_ms,omitempty"`
	TTFTMS   float64       `json:"ttft_ms,omitempty"`
	TookMS   float64       `json:"took_ms,omitempty"` // once it is over
	Status   int           `json:"status,omitempty"`
	Error    string        `json:"error,omitempty"`
	Attempts []attemptInfo `json:"attempts,omitempty"`
	Phases   []phaseInfo   `json:"phases,omitempty"`
}

type attemptInfo struct {
	Link    string        `json:"link"`
	Start   time.Time     `json:"start"`
	Prefill legInfo       `json:"prefill"`
	Decode  legInfo       `json:"decode"`
	Outcome string        `json:"outcome,omitempty"` // of prefill's part
	Error   string        `json:"error,omitempty"`
	Explain *pick.Explain `json:"explain,omitempty"`
}

type legInfo struct {
	ID    string    `json:"id"`
	Epoch uint64    `json:"epoch"`
	State string    `json:"state"`
	Since time.Time `json:"since"`
}

func (q *request) info() *requestInfo {
	phases := q.waterfall()
	q.mu.Lock()
	defer q.mu.Unlock()
	ms := func(t time.Time) float64 {
		if t.IsZero() {
			return 0
		}
		return float64(t.Sub(q.start).Microseconds()) / 1000
	}
	i := &requestInfo{ID: q.id, Path: q.path, Model: q.model, Stream: q.streams, Internal: q.probe,
		State: q.state, Since: q.since, Start: q.start, Status: q.status, Error: q.failed,
		QueueMS: ms(q.dispatched), TTFTMS: ms(q.first), Phases: phases}
	if !q.end.IsZero() {
		end := q.end
		i.Deadline = &end
	}
	if q.over {
		i.TookMS = ms(q.since)
	}
	for _, a := range q.attempts {
		i.Attempts = append(i.Attempts, a.info())
	}
	return i
}

func (a *attempt) info() attemptInfo {
	a.mu.Lock()
	i := attemptInfo{Link: a.link.String(), Start: a.start, Outcome: string(a.outcome), Explain: a.choice.Explain}
	if a.failed != nil {
		i.Error = a.failed.Error()
	}
	a.mu.Unlock()
	i.Prefill, i.Decode = a.p.info(), a.d.info()
	return i
}

func (l *leg) info() legInfo {
	state, since := l.get()
	return legInfo{ID: l.inst.ID, Epoch: l.inst.Epoch, State: state, Since: since}
}

// history is the last finished requests; Router.mu guards it.
type history struct {
	ring []*requestInfo
	next int
	byID map[string]*requestInfo
}

func newHistory(n int) history {
	return history{ring: make([]*requestInfo, n), byID: map[string]*requestInfo{}}
}

func (h *history) add(i *requestInfo) {
	if len(h.ring) == 0 {
		return
	}
	if old := h.ring[h.next]; old != nil && h.byID[old.ID] == old {
		delete(h.byID, old.ID)
	}
	h.ring[h.next] = i
	h.byID[i.ID] = i
	h.next = (h.next + 1) % len(h.ring)
}
