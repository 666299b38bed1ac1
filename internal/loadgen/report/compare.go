package report

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/xpyd/xpyd/internal/chart"
	"github.com/xpyd/xpyd/internal/figures"
)

// Run is what is compared: one benchmark, or rounds of the same.
type Run struct {
	Name   string
	Rounds []*Report // at least one
}

// Difference is a figure of a phase in two runs.
type Difference struct {
	Phase, Figure string
	Base, Other   float64 // medians over the rounds
	Change        float64 // of Other from Base, as a part of it; NaN if Base is 0
	// Low and High are the spread of Change: over the rounds, the least and the most; of one round each, the 95 %
	// interval of a percentile as far as its requests tell. NaN: nothing is known.
	Low, High float64
	Verdict   string // "better", "worse", "within the spread"; "" if nothing is known
}

// figure is what is compared of a phase.
type figure struct {
	name   string
	of     func(*Phase) (float64, bool)
	more   bool    // more of it is better
	column string  // of the sample; "": none
	q      float64 // of the sample's column
}

var compared = func() []figure {
	out := []figure{
		{"requests/s", func(p *Phase) (float64, bool) { return p.Throughput.Requests, true }, true, "", 0},
		{"output tokens/s", func(p *Phase) (float64, bool) { return p.Throughput.OutputTokens, true }, true, "", 0},
	}
	columns := map[string]string{"TTFT": "ttft_ms", "TPOT": "tpot_ms", "E2E": "e2e_ms"}
	for _, l := range latencies {
		for i, q := range percentiles {
			out = append(out, figure{l.name + " " + q.name + ", ms", func(p *Phase) (float64, bool) {
				v := l.of(&p.Latency)
				return q.of(v), v.Count > 0
			}, false, columns[l.name], []float64{0.5, 0.9, 0.99}[i]})
		}
	}
	return append(out, figure{"goodput, %", func(p *Phase) (float64, bool) {
		if p.Goodput == nil {
			return 0, false
		}
		return 100 * p.Goodput.Fraction, true
	}, true, "", 0}, figure{"failed, %", func(p *Phase) (float64, bool) {
		all := p.Requests.Completed + p.Requests.Failed
		return 100 * float64(p.Requests.Failed) / float64(max(all, 1)), p.Requests.Failed > 0
	}, false, "", 0})
}()

// Compare compares runs with the first one, phase by phase, by the phases' names.
type Compare struct {
	Runs  []Run
	Notes []string // what makes them hard to compare
}

// NewCompare looks at what the runs have in common. It fails if that is no phase.
func NewCompare(runs []Run) (*Compare, error) {
	c := &Compare{Runs: runs}
	base := runs[0].Rounds[0]
	for _, run := range runs {
		for _, r := range run.Rounds {
			if r == base {
				continue
			}
			c.differ(run.Name, r, base)
		}
	}
	slices.Sort(c.Notes)
	c.Notes = slices.Compact(c.Notes)
	if len(c.phases()) == 0 {
		return nil, fmt.Errorf("no phase is in all of them: %s", strings.Join(c.names(), "; "))
	}
	return c, nil
}

// differ notes what else is different between two reports.
func (c *Compare) differ(name string, r, base *Report) {
	note := func(what, have, want string) {
		c.Notes = append(c.Notes, fmt.Sprintf("%s: %s is %s, and %s in %s", name, what, have, want, c.Runs[0].Name))
	}
	said := func(v any) string {
		b, _ := json.Marshal(v) // it came from JSON
		return string(b)
	}
	if r.Load != base.Load {
		note("the load", said(r.Load), said(base.Load))
	}
	if r.Target.Model != base.Target.Model {
		note("the model", r.Target.Model, base.Target.Model)
	}
	if r.Target.Stream != base.Target.Stream || r.Target.Endpoint != base.Target.Endpoint {
		note("the request", fmt.Sprintf("%s, streamed: %v", r.Target.Endpoint, r.Target.Stream), fmt.Sprintf("%s, streamed: %v", base.Target.Endpoint, base.Target.Stream))
	}
	if a, b := r.SLO, base.SLO; (a == nil) != (b == nil) || a != nil && *a != *b {
		note("the SLO", said(a), said(b))
	}
}

func (c *Compare) names() (out []string) {
	for _, run := range c.Runs {
		for _, r := range run.Rounds {
			var names []string
			for _, p := range r.measured() {
				names = append(names, p.Name)
			}
			out = append(out, run.Name+" has "+strings.Join(names, ", "))
		}
	}
	return out
}

func (r *Report) phase(name string) *Phase {
	for _, p := range r.measured() {
		if p.Name == name {
			return p
		}
	}
	return nil
}

// phases are the names of those that each round of each run has.
func (c *Compare) phases() (out []string) {
	for _, p := range c.Runs[0].Rounds[0].measured() {
		everywhere := !slices.Contains(out, p.Name)
		for _, run := range c.Runs {
			for _, r := range run.Rounds {
				everywhere = everywhere && r.phase(p.Name) != nil
			}
		}
		if everywhere {
			out = append(out, p.Name)
		}
	}
	return out
}

// values are a figure's of each round; nil if one lacks it.
func (run *Run) values(phase string, f *figure) (out []float64) {
	for _, r := range run.Rounds {
		v, ok := f.of(r.phase(phase))
		if !ok && f.name != "failed, %" {
			return nil
		}
		out = append(out, v)
	}
	return out
}

// Differences are the figures of the run of that index, beside the first one's.
func (c *Compare) Differences(i int) (out []Difference) {
	base, other := &c.Runs[0], &c.Runs[i]
	for _, phase := range c.phases() {
		for _, f := range compared {
			a, b := base.values(phase, &f), other.values(phase, &f)
			if a == nil || b == nil || f.name == "failed, %" && slices.Max(a) == 0 && slices.Max(b) == 0 {
				continue
			}
			d := Difference{Phase: phase, Figure: f.name, Base: figures.Median(a), Other: figures.Median(b)}
			d.Change, d.Low, d.High = change(a, b)
			if len(a) == 1 && len(b) == 1 && f.column != "" {
				d.Low, d.High = within(base.Rounds[0].phase(phase), other.Rounds[0].phase(phase), &f, d.Change)
			}
			d.judge(f.more)
			out = append(out, d)
		}
	}
	return out
}

func (d *Difference) judge(more bool) {
	switch {
	case math.IsNaN(d.Low) || math.IsNaN(d.High):
	case d.Low <= 0 && d.High >= 0:
		d.Verdict = "within the spread"
	case d.Low > 0 == more:
		d.Verdict = "better"
	default:
		d.Verdict = "worse"
	}
}

// change is by what part b is more than a, and its spread: round by round if there are as many, or else of each with each.
// With one round of each there is none.
func change(a, b []float64) (median, low, high float64) {
	nan := math.NaN()
	if slices.Min(a) <= 0 {
		return nan, nan, nan
	}
	var parts []float64
	for i := range b {
		if len(a) == len(b) {
			parts = append(parts, b[i]/a[i]-1)
			continue
		}
		for j := range a {
			parts = append(parts, b[i]/a[j]-1)
		}
	}
	if len(parts) == 1 {
		return parts[0], nan, nan
	}
	return figures.Median(parts), slices.Min(parts), slices.Max(parts)
}

// within is the 95 % interval of a change, from those of the two percentiles, each by the ranks around its own in the
// sample, as if requests were independent of each other (MOVER, on logarithms).
func within(a, b *Phase, f *figure, change float64) (low, high float64) {
	am, al, ah := a.ranks(f)
	bm, bl, bh := b.ranks(f)
	if !(al > 0 && bl > 0) || math.IsNaN(change) {
		return math.NaN(), math.NaN()
	}
	down := math.Hypot(math.Log(bm/bl), math.Log(ah/am))
	up := math.Hypot(math.Log(bh/bm), math.Log(am/al))
	return (1+change)*math.Exp(-down) - 1, (1+change)*math.Exp(up) - 1
}

// fewest is how many requests a sample needs for an interval.
const fewest = 20

// ranks are a percentile in the sample, and its 95 % interval; NaN of too few requests, or if the interval would
// reach past them.
func (p *Phase) ranks(f *figure) (at, low, high float64) {
	nan := math.NaN()
	column, failed := slices.Index(p.Columns, f.column), slices.Index(p.Columns, "failed")
	if column < 0 || column >= len([8]float64{}) || failed < 0 || failed >= len([8]float64{}) {
		return nan, nan, nan
	}
	var list []float64
	for i := range p.Sample {
		if row := &p.Sample[i]; row[failed] == 0 && row[column] > 0 {
			list = append(list, row[column])
		}
	}
	slices.Sort(list)
	n := float64(len(list))
	around := 1.96 * math.Sqrt(n*f.q*(1-f.q))
	first, last := int(math.Floor(n*f.q-around)), int(math.Ceil(n*f.q+around))
	if n < fewest || first < 0 || last >= len(list) {
		return nan, nan, nan
	}
	return list[int(n*f.q)], list[first], list[last]
}

// rows are a table of the differences.
func (c *Compare) rows(i int) (head []string, rows [][]string) {
	head = []string{"phase", "figure", c.Runs[0].Name, c.Runs[i].Name, "difference", "spread", "verdict"}
	part := func(v float64) string {
		if math.IsNaN(v) {
			return "-"
		}
		return fmt.Sprintf("%+.1f %%", 100*v)
	}
	for _, d := range c.Differences(i) {
		spread := "-"
		if !math.IsNaN(d.Low) && !math.IsNaN(d.High) {
			spread = part(d.Low) + " to " + part(d.High)
		}
		rows = append(rows, []string{d.Phase, d.Figure, short(d.Base), short(d.Other), part(d.Change), spread, d.Verdict})
	}
	return head, rows
}

// says is how to read the table.
func (c *Compare) says() []string {
	out := slices.Clone(c.Notes)
	for _, run := range c.Runs {
		if len(run.Rounds) > 1 {
			return append(out, "The spread is the least and the most over the rounds.")
		}
	}
	return append(out, "The spread is what the requests of one run tell of a percentile (95 %), as if they did not depend on each other: runs differ by more. Rounds tell that: NAME=FILE, several files of one name.")
}

// WriteText writes the tables.
func (c *Compare) WriteText(w io.Writer) error {
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i := 1; i < len(c.Runs); i++ {
		head, rows := c.rows(i)
		for _, row := range append([][]string{head}, rows...) {
			fmt.Fprintln(tab, strings.TrimRight(strings.Join(row, "\t"), "\t"))
		}
		fmt.Fprintln(tab)
	}
	for _, s := range c.says() {
		fmt.Fprintln(tab, "note: "+s)
	}
	return tab.Flush()
}

// WriteHTML writes a page of the runs beside each other.
func (c *Compare) WriteHTML(w io.Writer) error {
	page := chart.Page{Title: "xpyd bench compare", About: c.Runs[0].Rounds[0].about()}
	if charts := c.charts(); len(charts) > 0 {
		page.Sections = append(page.Sections, chart.Section{Title: "Beside each other", Charts: charts})
	}
	for i := 1; i < len(c.Runs); i++ {
		head, rows := c.rows(i)
		page.Sections = append(page.Sections, chart.Section{Title: c.Runs[i].Name + " beside " + c.Runs[0].Name, Tables: []chart.Table{{Head: head, Rows: rows, Words: []int{1}}}})
	}
	how := chart.Section{Title: "How", Text: c.says()}
	for _, run := range c.Runs {
		for _, r := range run.Rounds {
			how.Code += fmt.Sprintf("%s  %s  xpyd %s  %s\n", run.Name, r.Started.Format("2006-01-02 15:04 MST"), r.Version, strings.Join(r.Command, " "))
		}
	}
	page.Sections = append(page.Sections, how)
	return page.WriteHTML(w)
}

// charts are the shared phases' figures, a line for each run.
func (c *Compare) charts() (out []chart.Chart) {
	var all []*Phase
	for _, name := range c.phases() {
		for _, run := range c.Runs {
			for _, r := range run.Rounds {
				all = append(all, r.phase(name))
			}
		}
	}
	over, whole, at := level(all)
	draw := func(to chart.Chart, name string, dashed bool, of func(*Phase) (float64, bool)) chart.Chart {
		for i, run := range c.Runs {
			l := chart.Line{Name: strings.TrimSpace(run.Name + " " + name), Color: i, Dashed: dashed}
			for _, phase := range c.phases() {
				var values, places []float64
				for _, r := range run.Rounds {
					if v, ok := of(r.phase(phase)); ok {
						values, places = append(values, v), append(places, at(r.phase(phase)))
					}
				}
				if len(values) > 0 {
					l.Points = append(l.Points, chart.Point{X: figures.Median(places), Y: figures.Median(values)})
					l.Spread = append(l.Spread, [2]float64{slices.Min(values), slices.Max(values)})
				}
			}
			if len(l.Points) > 0 {
				to.Lines = append(to.Lines, l)
			}
		}
		return to
	}
	for _, l := range latencies {
		ch := chart.Chart{Title: l.long + ", " + l.name, X: over, Y: "ms", WholeX: whole, Limits: l.limits(c.Runs[0].Rounds[0].SLO, false)}
		for i, q := range []int{0, 2} { // p50, p99
			ch = draw(ch, percentiles[q].name, i > 0, func(p *Phase) (float64, bool) {
				v := l.of(&p.Latency)
				return percentiles[q].of(v), v.Count > 0
			})
		}
		if len(ch.Lines) > 0 {
			out = append(out, ch)
		}
	}
	out = append(out, draw(chart.Chart{Title: "Output", X: over, Y: "tokens/s", WholeX: whole}, "", false, compared[1].of))
	good := draw(chart.Chart{Title: "Goodput", X: over, Y: "% of the requests", WholeX: whole, Top: 100}, "", false, compared[len(compared)-2].of)
	if len(good.Lines) > 0 {
		out = append(out, good)
	}
	return out
}
