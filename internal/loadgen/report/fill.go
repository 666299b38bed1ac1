package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/xpyd/xpyd/internal/loadgen/record"
)

// Fill sets p's figures from a record; slo adds the goodput.
func (p *Phase) Fill(s *record.Stats, slo bool) {
	p.Window = s.Last.Sub(s.First).Seconds()
	p.Requests = s.Requests
	p.Errors = slices.SortedStableFunc(slices.Values(s.Errors), func(a, b record.Error) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Kind, b.Kind))
	})
	if p.Errors == nil {
		p.Errors = []record.Error{} // a list in JSON, too
	}
	p.Tokens = Tokens{Input: values(&s.In, 1), Output: values(&s.Out, 1), Asked: values(&s.Asked, 1), Cached: s.Cached, FromUsage: s.Usage, FromChunks: s.Counted}
	p.Latency = Latency{TTFT: values(&s.TTFT, ms), ITL: values(&s.ITL, ms), TPOT: values(&s.TPOT, ms), E2E: values(&s.E2E, ms),
		SchedTTFT: some(&s.SchedTTFT), SchedE2E: some(&s.SchedE2E), Late: some(&s.Late), Connect: some(&s.Connect)}
	if p.Window > 0 {
		in, out := s.In.Sum/p.Window, s.Out.Sum/p.Window
		p.Throughput = Throughput{Requests: float64(s.Completed) / p.Window, InputTokens: in, OutputTokens: out, TotalTokens: in + out}
	}
	if slo {
		p.Goodput = &Goodput{Requests: s.Good}
		if all := s.Completed + s.Failed; all > 0 && p.Window > 0 {
			p.Goodput.Fraction, p.Goodput.Rate = float64(s.Good)/float64(all), float64(s.Good)/p.Window
		}
	}
	for i := range s.Turns {
		t := &s.Turns[i]
		row := Turn{Turn: i + 1, TTFT: values(&t.TTFT, ms), E2E: values(&t.E2E, ms)}
		if n := t.E2E.Count; n > 0 {
			row.MeanInput = float64(t.In) / float64(n)
		}
		if t.In > 0 {
			row.CachedFraction = float64(t.Cached) / float64(t.In)
		}
		p.Turns = append(p.Turns, row)
	}
	n := len(s.Bins)
	p.Timeline = Timeline{Bin: s.BinWidth.Seconds(), Started: make([]int, n), Completed: make([]int, n), Failed: make([]int, n), InFlight: make([]int, n), OutputTokens: make([]float64, n)}
	started, over := 0, 0
	for i, b := range s.Bins {
		started += b.Started
		over += b.Done + b.Failed
		p.Timeline.Started[i], p.Timeline.Completed[i], p.Timeline.Failed[i] = b.Started, b.Done, b.Failed
		p.Timeline.InFlight[i] = started - over
		p.Timeline.OutputTokens[i] = round(b.Tokens)
	}
	p.Columns = []string{"start_s", "ttft_ms", "e2e_ms", "tpot_ms", "input_tokens", "output_tokens", "turn", "failed"}
	p.Sample = make([][8]float64, 0, len(s.Points))
	for _, t := range s.Points {
		failed := 0.0
		if t.Kind != "" {
			failed = 1
		}
		p.Sample = append(p.Sample, [8]float64{round(t.Start.Seconds()), round(float64(t.TTFT) / ms), round(float64(t.E2E) / ms), round(float64(t.TPOT) / ms),
			float64(t.In), float64(t.Out), float64(t.Turn), failed})
	}
	slices.SortFunc(p.Sample, func(a, b [8]float64) int { return slices.Compare(a[:], b[:]) })
}

// bins is the number of bins of a distribution.
const bins = 60

func values(h *record.Hist, unit float64) Values {
	v := Values{Count: h.Count, Mean: h.Mean / unit, StdDev: h.StdDev() / unit, Min: float64(h.Min) / unit, Max: float64(h.Max) / unit}
	for q, to := range map[float64]*float64{0.5: &v.P50, 0.9: &v.P90, 0.95: &v.P95, 0.99: &v.P99} {
		*to = h.Quantile(q) / unit
	}
	edges, counts := h.Bins(bins, 0.995)
	if counts == nil {
		return v
	}
	v.From, v.To = edges[0]/unit, edges[bins]/unit
	for i := range counts {
		counts[i] = round(counts[i])
	}
	v.Bins = counts
	return v
}

// some is nil for an empty Hist.
func some(h *record.Hist) *Values {
	if h.Count == 0 {
		return nil
	}
	v := values(h, ms)
	return &v
}

// round keeps three decimals, so that a page with thousands of numbers stays small.
func round(x float64) float64 { return math.Round(x*1000) / 1000 }

// Remark adds the Notes.
func (r *Report) Remark() {
	note := func(format string, args ...any) { r.Notes = append(r.Notes, fmt.Sprintf(format, args...)) }
	for i := range r.Phases {
		p := &r.Phases[i]
		if !p.Measured {
			continue
		}
		if p.Requests.Completed == 0 {
			note("%s: no request completed", p.Name)
			continue
		}
		if n := p.Tokens.FromChunks; n > 0 {
			note("%s: %d of %d answers came without usage: their tokens are the number of their events, their prompts' tokens what was asked for", p.Name, n, p.Requests.Completed)
		}
		if in, asked := p.Tokens.Input.Mean, p.Tokens.Asked.Mean; p.Tokens.FromUsage > 0 && asked > 0 && math.Abs(in/asked-1) > 0.05 {
			note("%s: prompts had %.0f tokens in the mean where %.0f were asked for (--calibrate measures the server's tokens a word)", p.Name, in, asked)
		}
		if n := p.Requests.Cancelled; n > 0 {
			note("%s: %d requests were broken off at the end and are in no figure", p.Name, n)
		}
		if n := p.Requests.Unsent; n > 0 {
			note("%s: %d requests were due and not sent when the drain ended, as %d were in flight, the most allowed: they are in no figure, and would be the slowest (--max-in-flight, --drain)", p.Name, n, p.Concurrency)
		}
		if late := p.Latency.Late; late != nil && late.P99 > 10 {
			why := "this client was too busy"
			if slices.Contains(p.Timeline.InFlight, p.Concurrency) {
				why = fmt.Sprintf("%d were in flight, the most allowed", p.Concurrency)
			}
			note("%s: requests began up to %.0f ms late (p99 %.0f ms), as %s; the latencies from the schedule have that wait", p.Name, late.Max, late.P99, why)
		}
	}
}
