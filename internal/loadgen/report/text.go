package report

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// WriteText writes the figures for people.
func (r *Report) WriteText(w io.Writer) error {
	b := &strings.Builder{}
	for i := range r.Phases {
		if p := &r.Phases[i]; p.Measured {
			p.text(b)
		}
	}
	for _, n := range r.Notes {
		fmt.Fprintf(b, "note: %s\n", n)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *Phase) text(b *strings.Builder) {
	fmt.Fprintf(b, "%s: %s in %.2f s", p.Name, p.load(), p.Window)
	q := p.Requests
	fmt.Fprintf(b, "; %d completed, %d failed", q.Completed, q.Failed)
	if q.Cancelled > 0 {
		fmt.Fprintf(b, ", %d cancelled", q.Cancelled)
	}
	if q.Unsent > 0 {
		fmt.Fprintf(b, ", %d unsent", q.Unsent)
	}
	if q.Ramped > 0 {
		fmt.Fprintf(b, ", %d in the ramp", q.Ramped)
	}
	fmt.Fprintln(b)
	for _, e := range p.Errors {
		fmt.Fprintf(b, "  failed %-12s %6d  %s\n", e.Kind, e.Count, e.Example)
	}
	t := p.Throughput
	fmt.Fprintf(b, "  throughput  %.2f requests/s, %.1f output tokens/s, %.1f input tokens/s\n", t.Requests, t.OutputTokens, t.InputTokens)
	fmt.Fprintf(b, "  tokens      %.1f in, %.1f out a request", p.Tokens.Input.Mean, p.Tokens.Output.Mean)
	if in := p.Tokens.Input.Mean * float64(p.Tokens.Input.Count); in > 0 {
		fmt.Fprintf(b, ", %.1f %% of the input cached", 100*float64(p.Tokens.Cached)/in)
	}
	fmt.Fprintf(b, " (counted by %s)\n", p.Tokens.source())
	if g := p.Goodput; g != nil {
		fmt.Fprintf(b, "  goodput     %.2f requests/s, %.1f %% of the requests\n", g.Rate, 100*g.Fraction)
	}
	b.WriteByte('\n')
	tab := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(tab, "  ms\tmean\tp50\tp90\tp95\tp99\tmax\t\n")
	row := func(name string, v *Values) {
		if v != nil && v.Count > 0 {
			fmt.Fprintf(tab, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", name, short(v.Mean), short(v.P50), short(v.P90), short(v.P95), short(v.P99), short(v.Max))
		}
	}
	l := &p.Latency
	row("TTFT", &l.TTFT)
	row("ITL", &l.ITL)
	row("TPOT", &l.TPOT)
	row("E2E", &l.E2E)
	row("TTFT from schedule", l.SchedTTFT)
	row("E2E from schedule", l.SchedE2E)
	row("started late by", l.Late)
	_ = tab.Flush() // a strings.Builder never fails
	b.WriteByte('\n')
	if len(p.Turns) == 0 {
		return
	}
	tab = tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(tab, "  turn\trequests\tinput tokens\tcached\tTTFT p50\tp99\tE2E p50\tp99\t\n")
	for _, t := range p.Turns {
		fmt.Fprintf(tab, "  %d\t%d\t%.0f\t%.1f %%\t%s\t%s\t%s\t%s\t\n", t.Turn, t.E2E.Count, t.MeanInput, 100*t.CachedFraction, short(t.TTFT.P50), short(t.TTFT.P99), short(t.E2E.P50), short(t.E2E.P99))
	}
	_ = tab.Flush() // a strings.Builder never fails
	b.WriteByte('\n')
}

// load describes the phase's load.
func (p *Phase) load() string {
	switch {
	case p.Mode == "closed":
		return fmt.Sprintf("closed loop of %d", p.Concurrency)
	case p.RateAsked > 0:
		return fmt.Sprintf("open loop, %s, %g requests/s", p.Arrival, p.RateAsked)
	}
	return "open loop, at the trace's times"
}

func (t *Tokens) source() string {
	switch {
	case t.FromChunks == 0:
		return "usage"
	case t.FromUsage == 0:
		return "events: the server sends no usage"
	}
	return fmt.Sprintf("usage in %d answers, events in %d", t.FromUsage, t.FromChunks)
}

// short is x with about four digits.
func short(x float64) string {
	switch {
	case x >= 1000:
		return fmt.Sprintf("%.0f", x)
	case x >= 100:
		return fmt.Sprintf("%.1f", x)
	case x >= 1:
		return fmt.Sprintf("%.2f", x)
	}
	return fmt.Sprintf("%.3f", x)
}
