package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/requestlog"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/steptable"
)

// replayed is the result, as JSON.
type replayed struct {
	Xpyd  string          `json:"xpyd"` // whose router and engine it is
	Log   loggedAs        `json:"log"`
	Table steptable.About `json:"table"`
	Speed float64         `json:"speed"`
	SLO   string          `json:"slo,omitempty"`
	// Runs are the log's own, if requests came at their speed, and then each fleet with each policy.
	Runs     []runResult       `json:"runs"`
	Requests []replayedRequest `json:"requests"` // by arrival
}

// loggedAs is what there is of the log.
type loggedAs struct {
	Xpyd     string    `json:"xpyd"`
	Start    time.Time `json:"start"`
	Models   []string  `json:"models"`
	Requests int       `json:"requests"`
	Empty    int       `json:"left_out_no_token,omitempty"`
	Several  int       `json:"left_out_several_choices,omitempty"`
	Long     int       `json:"left_out_too_long,omitempty"`
	Dropped  int       `json:"dropped,omitempty"`
	span     time.Duration
}

// runResult is what the clients of a run saw. Times are of those that had not failed; the first three are
// of streams.
type runResult struct {
	Fleet  string     `json:"fleet"` // "log": as it was
	Policy string     `json:"policy"`
	Failed int        `json:"failed"`
	Good   float64    `json:"good"` // share of the requests that kept the limits, of all if there are none
	Rate   float64    `json:"good_per_s"`
	TTFT   sim.Spread `json:"ttft_s"`
	Gap    sim.Spread `json:"gap_s"`     // means of requests
	Worst  sim.Spread `json:"longest_s"` // longest gaps of requests
	Took   sim.Spread `json:"took_s"`    // until the answer's end
}

// replayedRequest is a request with what its client saw in each run, in the order of the runs.
type replayedRequest struct {
	Line   int     `json:"line"` // of the log
	At     float64 `json:"at_ms"`
	Stream bool    `json:"stream"`
	Prompt int     `json:"prompt_tokens"`
	Output int     `json:"output_tokens"`
	Runs   []saw   `json:"runs"`
}

// saw is what a client saw, in milliseconds; TTFT and gaps only of a stream.
type saw struct {
	Failed bool    `json:"failed,omitempty"`
	TTFT   float64 `json:"ttft_ms,omitempty"`
	Gap    float64 `json:"gap_ms,omitempty"`
	Worst  float64 `json:"longest_ms,omitempty"`
	Took   float64 `json:"took_ms"`
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// result puts the runs together. It adds the log as one, if requests came at its speed.
func (r *replayFlags) result(log *requestlog.Log, t *steptable.Table, load *sim.Logged, runs []*replayRun, promise sim.Promise) *replayed {
	last := load.Requests[len(load.Requests)-1].At
	out := &replayed{Xpyd: build(), Table: t.About, Speed: r.speed, SLO: r.slo, Log: loggedAs{Xpyd: log.Xpyd, Start: log.Start, Models: log.Models, Requests: len(load.Requests),
		Empty: load.Empty, Several: load.Several, Long: load.Long, Dropped: log.Dropped, span: last}}
	add := func(fleet, policy string, outcomes []sim.Outcome) {
		out.Runs = append(out.Runs, summed(fleet, policy, outcomes, load.Lines, promise, last))
		for i := range outcomes {
			out.Requests[i].Runs = append(out.Requests[i].Runs, sawOf(&outcomes[i], load.Lines[i]))
		}
	}
	own := make([]sim.Outcome, len(load.Lines))
	for i, q := range load.Lines {
		own[i] = sim.Seen(q)
		out.Requests = append(out.Requests, replayedRequest{Line: q.Line, At: millis(time.Duration(q.Arrived)), Stream: q.Stream, Prompt: q.Prompt, Output: q.Output})
	}
	if r.speed == 1 {
		add("log", log.Policy, own)
	}
	for _, one := range runs {
		add(one.split.String(), one.policy, one.out)
	}
	return out
}

func sawOf(o *sim.Outcome, q *requestlog.Request) saw {
	if o.Failed {
		return saw{Failed: true}
	}
	s := saw{Took: millis(o.Last - o.At)}
	if q.Stream {
		s.TTFT, s.Gap, s.Worst = millis(o.TTFT()), millis(o.Gap()), millis(o.Longest)
	}
	return s
}

// summed is what the clients saw together, if the last request came at last.
func summed(fleet, policy string, all []sim.Outcome, lines []*requestlog.Request, promise sim.Promise, last time.Duration) runResult {
	res, good := runResult{Fleet: fleet, Policy: policy}, 0
	var streams []sim.Outcome
	for i := range all {
		o := &all[i]
		if promise.Kept(o) {
			good++
		}
		if o.Failed {
			res.Failed++
		} else if lines[i].Stream {
			streams = append(streams, *o)
		}
	}
	res.Good, res.Rate = float64(good)/float64(len(all)), float64(good)/max(last, time.Second).Seconds()
	res.TTFT, res.Gap = sim.SpreadOf(streams, (*sim.Outcome).TTFT), sim.SpreadOf(streams, (*sim.Outcome).Gap)
	res.Worst = sim.SpreadOf(streams, func(o *sim.Outcome) time.Duration { return o.Longest })
	res.Took = sim.SpreadOf(all, func(o *sim.Outcome) time.Duration { return o.Last - o.At })
	return res
}

// show prints what people want to know.
func (r *replayed) show(w io.Writer, took time.Duration) error {
	l := &r.Log
	fmt.Fprintf(w, "%d requests in %v from %s, by xpyd %s; %s on %s", l.Requests, l.span.Round(time.Second/10), l.Start.UTC().Format(time.DateTime), openai.Clip(l.Xpyd), r.Table.Model, r.Table.Device)
	if r.Speed != 1 {
		fmt.Fprintf(w, "; %g times as fast", r.Speed)
	}
	fmt.Fprintf(w, "; computed in %v\n\n", took.Round(time.Second/10))
	tab := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	head := "fleet\tpolicy\tfailed\tTTFT p50, p99, ms\tmean gap p50, p99, ms\tlongest gap p50, p99, ms\tanswer p50, p99, ms"
	if r.SLO != "" {
		head += "\tgood\tgood/s"
	}
	fmt.Fprintln(tab, head)
	for _, x := range r.Runs {
		ms := func(s sim.Spread) string {
			if s == (sim.Spread{}) {
				return "-"
			}
			return fmt.Sprintf("%.3g, %.3g", 1e3*s.P50, 1e3*s.P99)
		}
		fmt.Fprintf(tab, "%s\t%s\t%d\t%s\t%s\t%s\t%s", x.Fleet, openai.Clip(x.Policy), x.Failed, ms(x.TTFT), ms(x.Gap), ms(x.Worst), ms(x.Took))
		if r.SLO != "" {
			fmt.Fprintf(tab, "\t%.1f %%\t%.3g", 100*x.Good, x.Rate)
		}
		fmt.Fprintln(tab)
	}
	if err := tab.Flush(); err != nil {
		return err
	}
	return r.showDifferent(w)
}

// mostShown is how many of the requests that differ most are printed; JSON has all.
const mostShown = 10

// showDifferent prints the requests whose first token, or whole answer if it came in one piece, differs most
// from the first run's.
func (r *replayed) showDifferent(w io.Writer) error {
	if len(r.Runs) < 2 {
		return nil
	}
	value := func(q *replayedRequest, run int) float64 {
		s := q.Runs[run]
		switch {
		case s.Failed:
			return lastWait.Seconds() * 1e3
		case q.Stream:
			return s.TTFT
		}
		return s.Took
	}
	differs := func(q *replayedRequest) (most float64) {
		for run := range q.Runs {
			most = max(most, value(q, run)-value(q, 0), value(q, 0)-value(q, run))
		}
		return most
	}
	order := make([]*replayedRequest, len(r.Requests))
	for i := range r.Requests {
		order[i] = &r.Requests[i]
	}
	slices.SortStableFunc(order, func(a, b *replayedRequest) int { return cmp.Compare(differs(b), differs(a)) })
	fmt.Fprintf(w, "\nRequests that differ most from %q, by TTFT, or by the whole answer (*) where it did not stream, ms:\n\n", r.name(0))
	tab := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprint(tab, "line\tat, s\tprompt\tanswer")
	for run := range r.Runs {
		fmt.Fprintf(tab, "\t%s", r.name(run))
	}
	fmt.Fprintln(tab)
	for _, q := range order[:min(mostShown, len(order))] {
		fmt.Fprintf(tab, "%d\t%.3f\t%d\t%d", q.Line, q.At/1e3, q.Prompt, q.Output)
		for run := range q.Runs {
			switch {
			case q.Runs[run].Failed:
				fmt.Fprint(tab, "\tfailed")
			case q.Stream:
				fmt.Fprintf(tab, "\t%.1f", value(q, run))
			default:
				fmt.Fprintf(tab, "\t%.1f*", value(q, run))
			}
		}
		fmt.Fprintln(tab)
	}
	return tab.Flush()
}

// name is a run's, with its policy if there are several of the fleet.
func (r *replayed) name(run int) string {
	x := r.Runs[run]
	if n := slices.IndexFunc(r.Runs, func(y runResult) bool { return y.Fleet == x.Fleet && y.Policy != x.Policy }); n >= 0 {
		return x.Fleet + " " + x.Policy
	}
	return x.Fleet
}
