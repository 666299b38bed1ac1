package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/internal/loadgen/report"
)

// promise is what requests of 1,000 tokens in and 128 out, which come at random, are to get. Ours
// is told so by its settings; vLLM has none for it.
type promise struct {
	name       string
	ttft, tpot time.Duration      // tpot is a request's mean
	from       map[string]float64 // requests a second at which the search begins, by server
}

var promised = []promise{
	{"goodput.a", 500 * time.Millisecond, 25 * time.Millisecond, map[string]float64{oursName: 29.6, vllmName: 24.2}},
	{"goodput.b", 200 * time.Millisecond, 25 * time.Millisecond, map[string]float64{oursName: 28.5, vllmName: 24.2}},
	{"goodput.c", time.Second, 12 * time.Millisecond, map[string]float64{oursName: 24.7, vllmName: 13.1}},
}

const (
	goodEnough    = 0.9
	goodputWindow = time.Minute
	rateStep      = 1.02 // between rates that are tried
	firstStride   = 4    // steps, then twice as many, until both a good and a bad rate are known
)

func (p *promise) settings() []string {
	return []string{fmt.Sprintf("ttft_promise: %v", p.ttft), fmt.Sprintf("tpot_promise: %v", p.tpot)}
}

// rateOf is the rate of a step of the search.
func rateOf(step int) float64 { return math.Pow(rateStep, float64(step)) }

func stepOf(rate float64) int { return int(math.Round(math.Log(rate) / math.Log(rateStep))) }

// search returns a server's step to try next, or the highest one that is good enough and whose next is
// not.
func (p *promise) search(server string, rows []vllmRow) (step int, over bool) {
	if len(rows) == 0 {
		return stepOf(p.from[server]), false
	}
	best, bad, lowest := math.MinInt, math.MaxInt, math.MaxInt
	for _, r := range rows {
		s := stepOf(r.Rate)
		if lowest = min(lowest, s); r.Good >= goodEnough {
			best = max(best, s)
		}
	}
	for _, r := range rows {
		if s := stepOf(r.Rate); s > best {
			bad = min(bad, s)
		}
	}
	stride := firstStride << (len(rows) - 1)
	switch {
	case best == math.MinInt:
		return lowest - stride, false
	case bad == math.MaxInt:
		return best + stride, false
	case bad == best+1:
		return best, true
	}
	return (best + bad) / 2, false
}

// of returns the rows of a server's search.
func (p *promise) of(rows []vllmRow, round int, server string) (list []vllmRow) {
	for _, r := range rows {
		if r.Round == round && r.Server == server && r.Load == p.name {
			list = append(list, r)
		}
	}
	return list
}

// goodput looks for the highest rates at which the promises are kept.
func (o *vllm) goodput(ctx context.Context, parts []part) error {
	for round := range o.Rounds {
		for _, server := range []string{oursName, vllmName} {
			var left []promise
			for _, p := range promised {
				_, over := p.search(server, p.of(o.rows, round, server))
				if !over && slices.ContainsFunc(parts, func(q part) bool { return q.name == p.name }) {
					left = append(left, p)
				}
			}
			for len(left) > 0 {
				n, settings := len(left), []string(nil)
				if server == oursName { // one server for each, as its settings differ
					n, settings = 1, left[0].settings()
				}
				if err := o.rates(ctx, round, server, left[:n], settings); err != nil {
					return fmt.Errorf("round %d, %s, %s: %w", round+1, server, left[0].name, err)
				}
				left = left[n:]
			}
		}
	}
	return nil
}

// rates starts a server and searches as far as the budget allows.
func (o *vllm) rates(ctx context.Context, round int, server string, list []promise, settings []string) error {
	need := goodputWindow + vllmRamp + 15*time.Second
	start := map[string]time.Duration{oursName: 30 * time.Second, vllmName: 90 * time.Second}[server]
	if !o.fits(start + need) {
		o.Sayf("round %d, %s, %s: no time left", round+1, server, list[0].name)
		return nil
	}
	url, version, stop, err := o.warm(ctx, server, settings...)
	if err != nil {
		return errors.Join(err, stop())
	}
	for _, p := range list {
		for {
			rows := p.of(o.rows, round, server)
			step, over := p.search(server, rows)
			if over {
				break
			}
			if !o.fits(need) {
				o.Sayf("round %d, %s, %s: no time left", round+1, server, p.name)
				return stop()
			}
			r, err := o.rate(ctx, url, p, rateOf(step), 1000*round+len(rows))
			if err != nil {
				return errors.Join(fmt.Errorf("%s: %w", p.name, err), stop())
			}
			r.Round, r.Server, r.Device, r.Version = round, server, o.on(ctx), version
			o.Sayf("round %d, %-4s %s %.2f requests/s: %.1f %% good; TTFT %.0f ms, p99 %.0f; TPOT %.1f ms; %d requests, %d failed", round+1, server, p.name, r.Rate, 100*r.Good, r.TTFT, r.TTFT99, r.TPOT, r.Completed, r.Failed)
			if err := o.keep(r); err != nil {
				return errors.Join(err, stop())
			}
		}
	}
	return stop()
}

// rate measures a window of requests that come at random. All of them count, also those that
// were not answered.
func (o *vllm) rate(ctx context.Context, url string, p promise, rate float64, seed int) (r vllmRow, err error) {
	window := goodputWindow
	if o.device == "cpu" {
		window /= 12
	}
	ph, err := o.load(ctx, url, 1000, 128, window, vllmRamp, seed, "--rate", strconv.FormatFloat(rate, 'f', 3, 64), "--slo", fmt.Sprintf("ttft=%v,tpot=%v", p.ttft, p.tpot))
	if err != nil {
		return r, err
	}
	if ph.Goodput == nil {
		return r, errors.New("the report has no goodput")
	}
	r = rowOf(ph)
	r.Load, r.Rate, r.Good = p.name, rate, goodPart(ph)
	return r, nil
}

func goodPart(p *report.Phase) float64 {
	q := p.Requests
	return float64(p.Goodput.Requests) / float64(q.Completed+q.Failed+q.Cancelled+q.Unsent)
}

// goodputFigure is a ratio of the rates that are good enough, if the searches of all rounds are over.
func (o *vllm) goodputFigure(p promise) (f figures.Figure, ok bool) {
	var ours, theirs []float64
	windows, on, version := 0, "", ""
	for round := range o.Rounds {
		for _, server := range []string{oursName, vllmName} {
			rows := p.of(o.rows, round, server)
			step, over := p.search(server, rows)
			if !over {
				o.Sayf("%s: round %d of %s is not over", p.name, round+1, server)
				return f, false
			}
			windows += len(rows)
			if on = rows[0].Device; server == oursName {
				ours = append(ours, rateOf(step))
			} else {
				theirs, version = append(theirs, rateOf(step)), rows[0].Version
			}
		}
	}
	o.Book.On(on)
	f = figures.Figure{Name: "vs_vllm.goodput_ratio" + p.name[len("goodput"):], Unit: "requests/s", Peer: "vLLM " + version + ", vllm serve's defaults",
		Model: fmt.Sprintf("Llama-3-8B shape, random bf16 weights; Poisson, 1,000 tokens in, 128 out; the highest rate in steps of 2 %% with 90 %% of a minute's requests within %v and a mean gap of %v, which our settings promise; one whole worker behind the router; %d windows", p.ttft, p.tpot, windows)}
	return f.Ratios(ours, theirs), true
}
