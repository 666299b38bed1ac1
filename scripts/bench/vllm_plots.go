package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/xpyd/xpyd/internal/chart"
	"github.com/xpyd/xpyd/internal/figures"
)

var servers = [2]string{oursName, vllmName}

// plots draws what was measured of both servers into plots/ beside the results.
func (o *vllm) plots() error {
	if o.Out == "" {
		return nil
	}
	var errs []error
	write := func(name string, charts ...chart.Chart) {
		if len(charts) > 0 {
			to := filepath.Join(o.Out, "plots", name)
			errs = append(errs, os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, chart.Row(charts...), 0o644))
		}
	}
	write("vllm-clients.svg", o.overClients()...)
	for _, p := range promised {
		write("vllm-"+p.name+".svg", o.overRates(p)...)
	}
	return errors.Join(errs...)
}

// overClients is throughput, first tokens and gaps over the clients of the closed loops of 1,000
// tokens in and 128 out; nothing unless all are measured.
func (o *vllm) overClients() []chart.Chart {
	line := func(name, server string, of func(vllmRow) float64) (l chart.Line, whole bool) {
		l = chart.Line{Name: name, Color: slices.Index(servers[:], server)}
		for _, load := range closedLoops {
			if load.in != 1000 {
				continue
			}
			var list []float64
			for _, r := range o.rows {
				if r.Server == server && r.Load == load.name {
					list = append(list, of(r))
				}
			}
			if len(list) == 0 {
				return l, false
			}
			l.Points = append(l.Points, chart.Point{X: float64(load.clients), Y: figures.Median(list)})
		}
		return l, true
	}
	list := []chart.Chart{{Title: "Output, 1,000 tokens in, 128 out", Y: "tokens a second"}, {Title: "First token, p50 and p99", Y: "ms"}, {Title: "Between tokens, mean", Y: "ms"}}
	for i := range list {
		list[i].X, list[i].LogX = "clients", true
	}
	whole := true
	add := func(c int, name, server string, dashed bool, of func(vllmRow) float64) {
		l, all := line(name, server, of)
		l.Dashed, whole = dashed, whole && all
		list[c].Lines = append(list[c].Lines, l)
	}
	for _, server := range servers {
		add(0, server, server, false, func(r vllmRow) float64 { return r.Output })
		add(1, server, server, false, func(r vllmRow) float64 { return r.TTFT })
		add(1, server+" p99", server, true, func(r vllmRow) float64 { return r.TTFT99 })
		add(2, server, server, false, func(r vllmRow) float64 { return r.TPOT })
	}
	if !whole {
		return nil
	}
	return list
}

// overRates is what part of the requests got what is promised, and their first tokens and gaps, over
// the rates that were tried; nothing unless both servers were.
func (o *vllm) overRates(p promise) []chart.Chart {
	list := []chart.Chart{
		{Title: fmt.Sprintf("First token within %v and %v between tokens", p.ttft, p.tpot), Y: "% of the requests", Top: 100},
		{Title: "First token, p50", Y: "ms", Top: 2 * ms(p.ttft)}, {Title: "Between tokens, mean", Y: "ms"}}
	of := []func(vllmRow) float64{
		func(r vllmRow) float64 { return 100 * r.Good },
		func(r vllmRow) float64 { return min(r.TTFT, 2*ms(p.ttft)) }, // beyond, it is how long the window was
		func(r vllmRow) float64 { return r.TPOT },
	}
	for i := range list {
		list[i].X = "requests a second"
		for color, server := range servers {
			rows := p.of(o.rows, 0, server)
			if len(rows) == 0 {
				return nil
			}
			slices.SortFunc(rows, func(a, b vllmRow) int { return cmp.Compare(a.Rate, b.Rate) })
			l := chart.Line{Name: server, Color: color}
			for _, r := range rows {
				l.Points = append(l.Points, chart.Point{X: r.Rate, Y: of[i](r)})
			}
			list[i].Lines = append(list[i].Lines, l)
		}
	}
	return list
}
