package flight

import (
	"time"
)

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
		QueueMS: ms(rec.dispatched), TTFTMS: ms(rec.first), Phases: rec.waterfall()}
	if !rec.end.IsZero() {
		i.Deadline = &rec.end
	}
	if rec.over {
		i.TookMS = ms(rec.since)
	}
	for n := range rec.n {
		i.Attempts = append(i.Attempts, *rec.at(n))
	}
	return i
}
