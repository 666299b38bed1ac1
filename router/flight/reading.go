package flight

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/xpyd/xpyd/router/limit"
)

// Reading is the router's counters at one moment, as the console's history takes them once a second. All but
// Running and Waiting only rise.
type Reading struct {
	Running, Waiting int // requests that are admitted, and that wait for admission
	Requests         int // completions and chats that were admitted
	Ended            int // that are over
	PromptTokens     int // as estimated at admission
	OutputTokens     int
	Good, Judged     int // see Tally
	Failed           int // 5xx
	Shed             int // that got no place in the queue
	Retries          int
	TakenOver        int // streams that another pair went on with, for whatever reason
	TTFT, TPOT       Spread
}

// Spread is a histogram: how many values there were up to each edge, in seconds, those below it included. The last
// edge is infinite.
type Spread struct {
	Edges  []float64
	Counts []uint64
}

// Since is the histogram of what has come since an older reading of the same one.
func (s Spread) Since(old Spread) Spread {
	if len(old.Counts) != len(s.Counts) {
		return s
	}
	out := Spread{Edges: s.Edges, Counts: make([]uint64, len(s.Counts))}
	for i := range out.Counts {
		out.Counts[i] = s.Counts[i] - min(old.Counts[i], s.Counts[i])
	}
	return out
}

// Quantile is interpolated in its bucket, as Prometheus does; of an infinite one it is the lower edge. 0 without values.
func (s Spread) Quantile(q float64) float64 {
	if len(s.Counts) == 0 || s.Counts[len(s.Counts)-1] == 0 {
		return 0
	}
	want := q * float64(s.Counts[len(s.Counts)-1])
	low, below := 0.0, 0.0
	for i, n := range s.Counts {
		if n := float64(n); n > 0 && n >= want {
			if math.IsInf(s.Edges[i], 1) || n == below {
				return low
			}
			return low + (s.Edges[i]-low)*(want-below)/(n-below)
		}
		low, below = s.Edges[i], float64(n)
	}
	return low
}

// Read takes a reading. It costs some microseconds and takes no lock that a request holds for longer.
func (s *Service) Read() Reading {
	var r Reading
	r.Running, r.Waiting = s.gate.Counts()
	for _, t := range s.Tallies() {
		r.Requests += t.Requests
		r.Ended += t.Ended
		r.PromptTokens += t.PromptTokens
		r.OutputTokens += t.OutputTokens
		r.Good += t.Good
		r.Judged += t.Judged
	}
	each(s.metrics.requests, func(m *dto.Metric) {
		if label(m, "code") >= "500" {
			r.Failed += int(m.GetCounter().GetValue())
		}
	})
	each(s.metrics.retries, func(m *dto.Metric) { r.Retries += int(m.GetCounter().GetValue()) })
	each(s.metrics.takeovers, func(m *dto.Metric) {
		if label(m, "outcome") == "continued" {
			r.TakenOver += int(m.GetCounter().GetValue())
		}
	})
	for class := range limit.Class(limit.Classes) {
		for _, why := range limit.Whys {
			r.Shed += int(s.gate.Shed(class, why))
		}
	}
	r.TTFT, r.TPOT = spread(s.metrics.ttft), spread(s.metrics.tpot)
	return r
}

// each calls f with what c collects.
func each(c prometheus.Collector, f func(*dto.Metric)) {
	ch := make(chan prometheus.Metric)
	go func() { // ends with the loop below, which reads all
		c.Collect(ch)
		close(ch)
	}()
	for m := range ch {
		var out dto.Metric
		if m.Write(&out) == nil {
			f(&out)
		}
	}
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// spread sums up a histogram over its labels.
func spread(c prometheus.Collector) Spread {
	by := map[float64]uint64{}
	var all uint64
	each(c, func(m *dto.Metric) {
		h := m.GetHistogram()
		for _, b := range h.GetBucket() {
			by[b.GetUpperBound()] += b.GetCumulativeCount()
		}
		all += h.GetSampleCount()
	})
	out := Spread{Edges: slices.Sorted(maps.Keys(by))}
	for _, edge := range out.Edges {
		out.Counts = append(out.Counts, by[edge])
	}
	if n := len(out.Edges); n == 0 || !math.IsInf(out.Edges[n-1], 1) {
		out.Edges, out.Counts = append(out.Edges, math.Inf(1)), append(out.Counts, all)
	}
	return out
}

// Brief is a request in a line of a list.
type Brief struct {
	ID       string    `json:"id"`
	Path     string    `json:"path"`
	Model    string    `json:"model,omitempty"`
	State    string    `json:"state"`
	Start    time.Time `json:"start"`
	Over     time.Time `json:"over,omitzero"`
	QueueMS  float64   `json:"queue_ms,omitempty"`
	TTFTMS   float64   `json:"ttft_ms,omitempty"`
	TookMS   float64   `json:"took_ms,omitempty"` // once it is over
	Status   int       `json:"status,omitempty"`
	Error    string    `json:"error,omitempty"`
	Prefill  string    `json:"prefill,omitempty"` // of the last attempt
	Decode   string    `json:"decode,omitempty"`
	Attempts int       `json:"attempts,omitempty"`
}

// Briefs returns the requests that run and the latest ones that ended after a moment, at most so many of each, in no
// order.
func (s *Service) Briefs(after time.Time, most int) []Brief {
	s.mu.Lock()
	running := slices.Collect(maps.Keys(s.requests))
	out := s.history.briefs(after, most)
	s.mu.Unlock()
	for _, q := range running {
		if most == 0 {
			break
		}
		if !q.probe {
			var rec record
			q.note(&rec)
			out = append(out, rec.brief())
			most--
		}
	}
	return out
}

func (h *history) briefs(after time.Time, most int) []Brief {
	out := []Brief{}
	for i := range min(most, len(h.ring)) {
		rec := &h.ring[(h.next-1-i+2*len(h.ring))%len(h.ring)]
		if rec.start.IsZero() || !rec.since.After(after) {
			break
		}
		out = append(out, rec.brief())
	}
	return out
}

func (rec *record) brief() Brief {
	ms := func(t time.Time) float64 {
		if t.IsZero() {
			return 0
		}
		return float64(t.Sub(rec.start).Microseconds()) / 1000
	}
	b := Brief{ID: rec.id, Path: rec.path, Model: rec.model, State: rec.state, Start: rec.start, QueueMS: ms(rec.dispatched), TTFTMS: ms(rec.first),
		Status: rec.status, Error: rec.failed, Attempts: rec.n}
	if rec.over {
		b.Over, b.TookMS = rec.since, ms(rec.since)
	}
	if rec.n > 0 {
		last := rec.at(rec.n - 1)
		b.Prefill, b.Decode = last.Prefill.ID, last.Decode.ID
	}
	return b
}
