package report_test

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/client"
	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/loadgen/report"
)

var update = flag.Bool("update", false, "write the goldens again")

// sample is a report made from fixed observations.
func sample() *report.Report {
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	slo := record.SLO{TTFT: 60 * time.Millisecond}
	phase := func(name string, open bool) report.Phase {
		rec := record.NewPhase(slo, begin)
		for i := range 40 {
			start := begin.Add(time.Duration(i) * 50 * time.Millisecond)
			res := client.Result{Start: start, Chunks: 4, FirstToken: time.Duration(40+i) * time.Millisecond, HasUsage: i%4 > 0, Usage: client.Usage{Prompt: 100 + i, Completion: 4, Cached: 30}}
			res.Gaps = []time.Duration{9 * time.Millisecond, 10 * time.Millisecond, time.Duration(10+i%3) * time.Millisecond}
			res.LastToken = res.FirstToken + res.Gaps[0] + res.Gaps[1] + res.Gaps[2]
			res.End = res.LastToken + time.Millisecond
			if i%20 == 19 {
				res = client.Result{Start: start, End: 5 * time.Millisecond, Status: 503, Kind: "http_503", Message: "</script><b>no pair</b>"}
			}
			o := record.Observation{Result: &res, In: 90, Out: 4, Ramp: i < 4, Turn: 1 + i%2}
			if open {
				o.Turn = 0
				o.Scheduled = start.Add(-15 * time.Millisecond)
			}
			rec.Start(start)
			rec.End(&o)
		}
		p := report.Phase{Name: name, Measured: true, Mode: "closed", Concurrency: 8, Ramp: 0.2}
		if open {
			p.Mode, p.RateAsked, p.Arrival, p.Concurrency = "open", 20, "poisson", 16384
		}
		p.Fill(rec.Stats(), slo.Any())
		return p
	}
	r := &report.Report{Schema: report.Schema, Version: "v0", Started: begin, Command: []string{"xpyd", "bench"}, Notes: []string{},
		Target: report.Target{URLs: []string{"http://127.0.0.1:8000"}, Endpoint: "chat/completions", Model: "m", Stream: true},
		Load:   report.Workload{Kind: "synthetic", Seed: 1, Input: "90", Output: "4"}, SLO: report.NewSLO(slo),
		Phases: []report.Phase{phase("8 clients", false), phase("rate 20", true)}}
	r.Remark()
	return r
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (go test -update writes it again):\n%s", path, got)
	}
}

func TestGoldens(t *testing.T) {
	r := sample()
	var text, js bytes.Buffer
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	if err := r.WriteJSON(&js); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.txt", text.Bytes())
	var lines bytes.Buffer
	if err := json.Indent(&lines, js.Bytes(), "", " "); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.json", lines.Bytes())
}

// structure is a page's elements, charts' names and headings, without figures.
func structure(page string) []byte {
	var out strings.Builder
	for _, found := range regexp.MustCompile(`<(h1|h2|th|caption|summary|dt)[^>]*>[^<]*|aria-label="[^"]*"|class="limited"[^>]*>[^<]*|class="ink"[^>]*>[^<]*`).FindAllString(page, -1) {
		fmt.Fprintln(&out, regexp.MustCompile(` (x|y|text-anchor|font-weight)="[^"]*"`).ReplaceAllString(found, ""))
	}
	return []byte(out.String())
}

// TestHTML: the page has all that is to be seen, loads nothing, and a server's text stays text.
func TestHTML(t *testing.T) {
	r := sample()
	r.Target.Model, r.Command = `</title><script>alert("m")</script>`, []string{"xpyd", "bench", "</pre><img src=x>"}
	var page bytes.Buffer
	if err := r.WriteHTML(&page); err != nil {
		t.Fatal(err)
	}
	html := page.String()
	golden(t, "page.txt", structure(html))
	for _, bad := range []string{"<b>no pair", "<script", "<img", `src="`, "https://", "http-equiv=\"refresh", "@import", "url(", "NaN", "Inf"} {
		if strings.Contains(html, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	for _, want := range []string{"default-src 'none'", "&lt;/script&gt;&lt;b&gt;no pair", "&lt;/pre&gt;&lt;img src=x&gt;"} {
		if !strings.Contains(html, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	d := xml.NewDecoder(strings.NewReader(html[strings.Index(html, "<main>"):strings.Index(html, "</body>")]))
	var err error
	for err == nil {
		_, err = d.Token()
	}
	if !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

// TestHTMLLevels: phases stand over what was asked for: whole numbers of requests in flight, or a rate; or else over the
// rate that was reached.
func TestHTMLLevels(t *testing.T) {
	f := func(want string, change func(*report.Report)) string {
		t.Helper()
		r := sample()
		change(r)
		var page bytes.Buffer
		if err := r.WriteHTML(&page); err != nil || !strings.Contains(page.String(), "<h2>Over "+want+"</h2>") {
			t.Errorf("%v: not over %q:\n%s", err, want, structure(page.String()))
		}
		return page.String()
	}
	f("requests/s reached", func(*report.Report) {})
	f("requests/s asked for", func(r *report.Report) {
		r.Phases[0].Mode, r.Phases[0].RateAsked = "open", 0.5
	})
	page := f("requests in flight", func(r *report.Report) {
		r.Phases[0].Concurrency = 1
		r.Phases[1].Mode, r.Phases[1].Concurrency = "closed", 2
	})
	sweep, _, _ := strings.Cut(page, "<details>")
	if strings.Contains(sweep, ">0.5</text>") || !strings.Contains(sweep, ">2</text>") || !strings.Contains(sweep, ">SLO 60 ms") {
		t.Error("the axis of a count has halves, or there is no limit")
	}
}

func TestProgress(t *testing.T) {
	now := record.Now{Elapsed: 2 * time.Second, Done: 30, Failed: 2, InFlight: 4, Tokens: 900, TTFT: 21e6, E2E: 130e6}
	later := now
	later.Elapsed, later.Done, later.Tokens, later.InFlight = 3*time.Second, 40, 1000, 0
	var plain, terminal bytes.Buffer
	p := report.Progress{W: &plain, Name: "rate 20", Requests: 100}
	p.Show(now)
	p.End(later)
	want := "rate 20  2.0s  32 of 100 requests, 4 in flight, 2 failed  16.0 requests/s, 450 tokens/s  p50: TTFT 21.00 ms, E2E 130.0 ms\n" +
		"rate 20  3.0s  42 of 100 requests, 0 in flight, 2 failed  10.0 requests/s, 100 tokens/s  p50: TTFT 21.00 ms, E2E 130.0 ms\n"
	if plain.String() != want {
		t.Errorf("plain:\n%s\nwant\n%s", plain.String(), want)
	}
	p = report.Progress{W: &terminal, Terminal: true, Name: "x", Duration: time.Minute}
	p.Show(now)
	p.End(record.Now{Elapsed: time.Minute})
	lines := strings.Split(strings.TrimPrefix(terminal.String(), "\r"), "\r")
	if len(lines) != 2 || !strings.HasSuffix(lines[1], "\n") || len(lines[1]) < len(lines[0]) || lines[0] != "x 2s 3%: 30 done 2 failed, 4 busy, 16.0 req/s, 450 tok/s, TTFT 21.00 ms" {
		t.Errorf("terminal: %q", lines)
	}
}
