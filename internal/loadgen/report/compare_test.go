package report_test

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/loadgen/report"
)

// slower is the sample with every latency times f, and throughput over it.
func slower(f float64) *report.Report {
	r := sample()
	for i := range r.Phases {
		p := &r.Phases[i]
		for _, v := range []*report.Values{&p.Latency.TTFT, &p.Latency.ITL, &p.Latency.TPOT, &p.Latency.E2E} {
			for _, x := range []*float64{&v.P50, &v.P90, &v.P99} {
				*x *= f
			}
		}
		for j := range p.Sample {
			for c := 1; c <= 3; c++ {
				p.Sample[j][c] *= f
			}
		}
		p.Throughput.Requests /= f
		p.Throughput.OutputTokens /= f
	}
	return r
}

func compare(t *testing.T, runs ...report.Run) *report.Compare {
	t.Helper()
	c, err := report.NewCompare(runs)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func find(t *testing.T, c *report.Compare, figure string) report.Difference {
	t.Helper()
	for _, d := range c.Differences(1) {
		if d.Phase == "rate 20" && d.Figure == figure {
			return d
		}
	}
	t.Fatalf("no %s", figure)
	return report.Difference{}
}

// TestCompareOne: of one round each, percentiles have the spread that their requests tell, the rest has none.
func TestCompareOne(t *testing.T) {
	c := compare(t, report.Run{Name: "a", Rounds: []*report.Report{sample()}}, report.Run{Name: "b", Rounds: []*report.Report{slower(3)}})
	d := find(t, c, "TTFT p50, ms")
	if math.Abs(d.Change-2) > 1e-9 || !(d.Low > 0 && d.Low < 2 && d.High > 2 && d.High < 5) || d.Verdict != "worse" {
		t.Errorf("%+v", d)
	}
	if d := find(t, c, "requests/s"); math.Abs(d.Change+2.0/3) > 1e-9 || !math.IsNaN(d.Low) || d.Verdict != "" {
		t.Errorf("%+v", d)
	}
	// p99 of 36 requests: its interval would reach past them.
	if d := find(t, c, "TTFT p99, ms"); !math.IsNaN(d.High) || d.Verdict != "" {
		t.Errorf("%+v", d)
	}
	same := compare(t, report.Run{Name: "a", Rounds: []*report.Report{sample()}}, report.Run{Name: "b", Rounds: []*report.Report{slower(1.01)}})
	if d := find(t, same, "E2E p50, ms"); d.Verdict != "within the spread" {
		t.Errorf("%+v", d)
	}
}

// TestCompareRounds: rounds are paired, and their spread is the least and the most.
func TestCompareRounds(t *testing.T) {
	f := func(figure, verdict string, change, low, high float64, a, b []float64) {
		t.Helper()
		var runs [2]report.Run
		for i, list := range [][]float64{a, b} {
			runs[i].Name = string(rune('a' + i))
			for _, by := range list {
				runs[i].Rounds = append(runs[i].Rounds, slower(by))
			}
		}
		d := find(t, compare(t, runs[:]...), figure)
		near := func(x, y float64) bool { return math.Abs(x-y) < 1e-6 }
		if !near(d.Change, change) || !near(d.Low, low) || !near(d.High, high) || d.Verdict != verdict {
			t.Errorf("%s: %+v", figure, d)
		}
	}
	f("ITL p50, ms", "worse", 0.5, 0.25, 1, []float64{1, 2, 4}, []float64{2, 3, 5}) // 2, 1.5, 1.25 times
	f("output tokens/s", "better", 1, 1, 1, []float64{2, 4}, []float64{1, 2})
	f("TTFT p90, ms", "within the spread", 0.25, -0.5, 1, []float64{1, 2}, []float64{2, 1})
	f("TTFT p90, ms", "better", -0.375, -0.5, -0.25, []float64{2}, []float64{1, 1.5}) // each with each
}

// TestCompareShows: the table and the page have every run; names and notes stay text.
func TestCompareShows(t *testing.T) {
	other := slower(2)
	other.Load.Input = "<script>x"
	c := compare(t, report.Run{Name: "base", Rounds: []*report.Report{sample()}}, report.Run{Name: "</title><b>", Rounds: []*report.Report{other}}, report.Run{Name: "c", Rounds: []*report.Report{slower(1)}})
	var text, page bytes.Buffer
	if err := c.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	if err := c.WriteHTML(&page); err != nil {
		t.Fatal(err)
	}
	golden(t, "compare.txt", text.Bytes())
	golden(t, "compare-page.txt", structure(page.String()))
	for _, bad := range []string{"<b>", "<script", "https:", "NaN", "Inf"} {
		if strings.Contains(page.String(), bad) {
			t.Errorf("the page has %q", bad)
		}
	}
}

// TestReadOthers: what is no report of this version is told apart.
func TestReadOthers(t *testing.T) {
	f := func(want, text string) {
		t.Helper()
		if r, err := report.Read(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v, %v; want %q", text, r, err, want)
		}
	}
	f("not a JSON object", "")
	f("not a JSON object", "[]")
	f("not a JSON object", "requests  12\n")
	f("it names no schema", "{}")
	f(`its schema is "theirs"`, `{"schema": "theirs"}`)
	f(`a report of version "2", which another xpyd wrote; want "xpyd.bench/1"`, `{"schema": "xpyd.bench/2"}`)
	f("a result of xpyd bench kv;", `{"config": {}, "transport": "shm", "runs": []}`)
	f("a result of xpyd bench kvio;", `{"pool": "CPU", "host": []}`)
	f("a result of xpyd plan;", `{"table": {}, "fleets": []}`)
	f("no measured phase", `{"schema": "xpyd.bench/1"}`)
	f("no report of xpyd.bench/1", `{"schema": "xpyd.bench/1", "phases": 3}`)
	f(`phase "x": a figure of -1`, `{"schema": "xpyd.bench/1", "phases": [{"name": "x", "measured": true, "window_s": -1}]}`)
	if _, err := report.NewCompare([]report.Run{{Name: "a", Rounds: []*report.Report{sample()}}, {Name: "b", Rounds: []*report.Report{renamed()}}}); err == nil ||
		err.Error() != "no phase is in all of them: a has 8 clients, rate 20; b has other, other" {
		t.Error(err)
	}
}

func renamed() *report.Report {
	r := sample()
	for i := range r.Phases {
		r.Phases[i].Name = "other"
	}
	return r
}

// FuzzRead: whatever is read can be compared with itself, without a difference, and drawn.
func FuzzRead(f *testing.F) {
	whole, err := json.Marshal(sample())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add([]byte(`{"schema":"xpyd.bench/1","phases":[{"name":"x","measured":true,"sample_columns":["failed","ttft_ms"],"sample":[[0,1]],"latency":{"ttft_ms":{"count":1,"p50":1}}}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := report.Read(bytes.NewReader(b))
		if err != nil {
			return
		}
		c, err := report.NewCompare([]report.Run{{Name: "a", Rounds: []*report.Report{r}}, {Name: "b", Rounds: []*report.Report{r}}})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range c.Differences(1) {
			if d.Change != 0 && !math.IsNaN(d.Change) || d.Verdict != "" && d.Verdict != "within the spread" {
				t.Errorf("with itself: %+v", d)
			}
		}
		var page bytes.Buffer
		if err := c.WriteHTML(&page); err != nil {
			t.Error(err)
		}
	})
}
