package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/sim"
	"github.com/xpyd/xpyd/internal/stepbench"
	"github.com/xpyd/xpyd/internal/steptable"
)

// TestPlanHowMany: the fewest workers that a load needs, or what a budget pays, and what they cost.
func TestPlanHowMany(t *testing.T) {
	ask := func(args ...string) (p plan) {
		t.Helper()
		args = append([]string{"plan", "--table", writeTable(t), "--slo", "ttft=500ms,tpot=10ms", "--window", "3s", "--input", "100", "--output", "20", "--json", "-"}, args...)
		out, errs, code := xpyd(t, args...)
		if err := json.Unmarshal([]byte(out), &p); err != nil || code != 0 {
			t.Fatalf("%v, exit %d\n%s%s", err, code, out, errs)
		}
		return p
	}
	one := ask("--workers", "1", "--seeds", "1")
	rate := one.Fleets[0].Rate
	if one.Need != nil || one.Sure != nil || one.Price != 0 || one.Fleets[0].Cost != nil || rate <= 0 || one.Fleets[0].OfBound != rate/one.Bound || one.Fleets[0].OfBound > 1.2 {
		t.Errorf("%+v", one)
	}
	two := ask("--workers", "1-4", "--rate", digits(1.2*rate), "--cost", "3.6", "--seeds", "3")
	best := two.best()
	if n := two.Need; n == nil || n.Workers != 2 || n.From != 1 || two.Workers != 2 || best.Rate < 1.1*rate {
		t.Errorf("a load of %v: %+v, %+v", 1.2*rate, n, two.Fleets)
	}
	// Two workers cost 2/1000 a second.
	if c := best.Cost; c == nil || c.Requests < 2/best.Rate || c.Requests > 2.3/best.Rate || c.Tokens/c.Requests < 49 || c.Tokens/c.Requests > 51 {
		t.Errorf("%+v at %v requests/s", c, best.Rate)
	}
	if s := two.Sure; s == nil || len(s.Fleets) != 2 || len(s.Fleets[0].Rates) != 3 || s.Lead == nil || s.Lead.Low > s.Lead.Median || s.Lead.Median > s.Lead.High {
		t.Errorf("%+v", s)
	}
	if p := ask("--workers", "1", "--rate", digits(2*rate), "--seeds", "1"); p.Need.Workers != 0 || p.Workers != 1 || !strings.Contains(strings.Join(p.says(), "\n"), "is too much for 1 worker.") {
		t.Errorf("%+v\n%q", p.Need, p.says())
	}
	if p := ask("--budget", "7", "--cost", "3", "--seeds", "1"); p.Workers != 2 {
		t.Errorf("a budget of 7 pays %d workers at 3", p.Workers)
	}
}

// TestPlanFew: of a load that has next to no requests in a window nothing is said without that.
func TestPlanFew(t *testing.T) {
	for n, few := range map[int]bool{1: true, fewRequests: false} {
		p := plan{Need: &planNeed{Rate: 2, From: 1, To: 2, Workers: 1, Requests: n}, Fleets: []planned{{}}}
		if got := strings.HasPrefix(p.says()[0], "Only 1 of the load's requests come in a window"); got != few {
			t.Errorf("%d requests: %s", n, p.says()[0])
		}
	}
}

// TestPlanPage: a page that needs nothing else has the text's sentences, and a plot of each kind in which
// each fleet has a line.
func TestPlanPage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plan.html")
	out, errs, code := xpyd(t, "plan", "--table", writeTable(t), "--slo", "ttft=500ms,tpot=10ms", "--window", "2s", "--input", "100", "--output", "20", "--seeds", "2", "--html", file)
	b, err := os.ReadFile(file)
	if err != nil || code != 0 {
		t.Fatalf("%v, exit %d\n%s", err, code, errs)
	}
	page := string(b)
	_, text, _ := strings.Cut(out, "At most ")
	text, _, _ = strings.Cut(text, "\n")
	for want, n := range map[string]int{text: 1, "<svg": 5, ">2 whole<": 6, ">1P1D<": 6, ">requests/s<": 6, ">bound: no fleet keeps it up<": 1, ">to be good<": 1, ">SLO 500 ms": 2, ">SLO 10 ms": 1, "default-src 'none'": 1, "<script": 0, "https:": 0, "NaN": 0} {
		if got := strings.Count(page, want); got != n {
			t.Errorf("%d times %q, want %d", got, want, n)
		}
	}
	d := xml.NewDecoder(strings.NewReader(page[strings.Index(page, "<main>"):strings.Index(page, "</body>")]))
	for err == nil {
		_, err = d.Token()
	}
	if !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

// TestPlanPageEscapes: what others wrote stays text.
func TestPlanPageEscapes(t *testing.T) {
	var page strings.Builder
	p := plan{Table: steptable.About{Model: "</title><b>x", Command: "{{PLOTS}}"}, Fleets: []planned{{Goodput: sim.Goodput{Fleet: "<i>"}}}, Run: []string{"<u>"}}
	if err := p.writePage(&page); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"<b>", "<i>", "<u>"} {
		if strings.Contains(page.String(), bad) {
			t.Errorf("the page has %s", bad)
		}
	}
}

// TestPlanSure: a fleet is ahead if it is with every seed; otherwise it is too close to call.
func TestPlanSure(t *testing.T) {
	for _, c := range []struct {
		a, b  []float64
		ahead string
		clear bool
	}{
		{[]float64{10, 20, 30}, []float64{9, 19, 28}, "a", true},
		{[]float64{10, 20, 30}, []float64{11, 22, 33}, "b", true},
		{[]float64{10, 20, 30}, []float64{9, 21, 28}, "a", false},
		{[]float64{10, 20, 30}, []float64{9.9, 15, 25}, "a", false}, // within what a search may be off
	} {
		l := newLead(newSeeds("a", c.a), newSeeds("b", c.b))
		if l.Fleet != c.ahead || l.Clear != c.clear {
			t.Errorf("%v, %v: %+v", c.a, c.b, l)
		}
	}
}

// TestPlanBadTable: a plan by a table that misses steps says so, and bench step does when it made one.
func TestPlanBadTable(t *testing.T) {
	for _, c := range []struct {
		h   steptable.HeldOut
		bad bool
	}{{steptable.HeldOut{}, false}, {steptable.HeldOut{Steps: 40, Median: 0.03, P90: 0.09, Worst: 0.8}, false}, {steptable.HeldOut{Steps: 40, Median: 0.24, P90: 0.2}, true},
		{steptable.HeldOut{Steps: 40, Median: 0.05, P90: 3}, true}} {
		table, err := steptable.Open(writeTable(t))
		if err != nil {
			t.Fatal(err)
		}
		table.HeldOut = c.h
		var step strings.Builder
		if err := showSteps(&step, &stepbench.Result{Table: table}); err != nil {
			t.Fatal(err)
		}
		p := plan{HeldOut: c.h, Fleets: []planned{{}}}
		for what, text := range map[string]string{"plan": strings.Join(p.says(), "\n"), "step": step.String()} {
			if got := strings.Contains(text, "bad table") && strings.Contains(text, remeasure); got != c.bad {
				t.Errorf("%s of %+v:\n%s", what, c.h, text)
			}
		}
	}
}

// TestTelling: who waits hears of it within seconds, and then less and less often.
func TestTelling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		to, p := &lines{to: &out}, &sim.Progress{}
		end := telling(to, p)
		p.Tries.Add(3)
		time.Sleep(100*time.Second + time.Millisecond)
		end()
		if got := out.String(); !strings.HasPrefix(got, "2s: 3 tries begun, 0 requests computed\n6s: ") || strings.Count(got, "\n") != 6 {
			t.Errorf("%s", got)
		}
	})
}

// TestRunLines: what starts a fleet as it was planned.
func TestRunLines(t *testing.T) {
	promise := sim.Promise{SLO: record.SLO{TTFT: time.Second, ITL: 20 * time.Millisecond}}
	const told = "--ttft-promise 1s --itl-promise 20ms"
	cpu := steptable.About{Backend: "cpu", Model: "stories260k", Threads: 2, Command: "xpyd bench step --time 5s"}
	gpu := steptable.About{Backend: "cuda", Model: "m", Command: "xpyd bench step --model /m --device=cuda --batch-invariant --max-batch 8 --out t.json"}
	two := steptable.About{Backend: "cuda", Model: "m", Ranks: 2, Command: "xpyd bench step --model /m --device cuda:0,cuda:1 --tensor-parallel 2"}
	for _, c := range []struct {
		about steptable.About
		s     sim.Split
		want  []string
	}{
		{cpu, sim.Split{Prefill: 1, Decode: 3}, []string{"xpyd up --prefill 1 --decode 3 --threads 2 " + told, "docker compose up --build --scale prefill=1 --scale decode=3"}},
		{cpu, sim.Split{Prefill: 1, Decode: maxWorkers + 1}, []string{"xpyd router --data fleet &", "test -e fleet/join-url",
			"for i in $(seq 1 65); do xpyd decode --join-file fleet/join-url --id decode-$i --threads 2 " + told + " & done"}},
		{cpu, sim.Split{Whole: 2}, []string{`- {id: whole-1, role: decode, url: "http://127.0.0.1:8102", dialect: openai, model: "stories260k"}`,
			"for i in $(seq 0 1); do xpyd decode --trust-everyone --listen 127.0.0.1:$((8101+i)) --served-name stories260k --threads 2 " + told + " & done", "xpyd router --config whole.yaml"}},
		{cpu, sim.Split{Mixed: 3}, []string{"disaggregate: mixed}", "xpyd up --config mixed.yaml --prefill 1 --decode 2 --threads 2 " + told + " --shed-late"}},
		{gpu, sim.Split{Mixed: 2}, []string{"disaggregate: mixed}", "xpyd up --config mixed.yaml --gpus 2 --prefill 1 --decode 1 --batch-invariant --device cuda --model /m " + told}},
		{gpu, sim.Split{Prefill: 2, Decode: 1}, []string{"xpyd up --gpus 3 --prefill 2 --decode 1 --batch-invariant --device cuda --model /m " + told, "--max-batch 8: say so"}},
		{two, sim.Split{Prefill: 2, Decode: 1}, []string{"xpyd up --gpus 6 --prefill 2 --decode 1 --device cuda --model /m --ttft-promise 1s --itl-promise 20ms --tensor-parallel 2"}},
		{two, sim.Split{Whole: 2}, []string{"--tensor-parallel 2 --device cuda:$((2*i+0)),cuda:$((2*i+1)) & done"}},
		{gpu, sim.Split{Whole: 2}, []string{"for i in $(seq 0 1); do xpyd decode --trust-everyone", " --device cuda --model /m " + told + " --device cuda:$i & done"}},
		{gpu, sim.Split{Prefill: maxWorkers + 1, Decode: 1}, []string{"xpyd router --data fleet &", "for i in $(seq 65 65); do xpyd decode --join-file fleet/join-url", " --device cuda:$i & done"}},
		{steptable.About{Backend: "cuda", Model: "m", Command: "xpyd bench step --model /m --device cuda:3"}, sim.Split{Prefill: 1, Decode: 1},
			[]string{"xpyd up --gpus 2 --prefill 1 --decode 1 --device cuda --model /m"}},
		{steptable.About{Backend: "cpu", Model: "it's", Command: "no command of ours --x"}, sim.Split{Prefill: 1, Decode: 1}, []string{`--model 'it'\''s' ` + told}},
	} {
		got := strings.Join(runLines(&c.about, c.s, promise, c.s.Mixed > 0), "\n")
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("%v: no %s in\n%s", c.s, want, got)
			}
		}
	}
}
