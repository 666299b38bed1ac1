package kvbench

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/chart"
)

// charts are the sweep: throughput and latency against the transfer size.
func (r *Report) charts() []chart.Chart {
	if len(r.Sweep) == 0 {
		return nil
	}
	rates := chart.Chart{Title: "Throughput", X: "bytes of a transfer", Y: "GB/s", LogX: true, Mark: sized, Lines: []chart.Line{{Name: "median, least and most"}}}
	for _, s := range r.Runs { // the limits of this machine
		if s.Name != RunChecked && s.Name != RunUnchecked {
			rates.Limits = append(rates.Limits, chart.Limit{Name: s.Name, At: s.GBs.Median})
		}
	}
	times := chart.Chart{Title: "Latency, ticket to verified", X: "bytes of a transfer", LogX: true, LogY: true, Mark: sized, Tick: microseconds,
		Lines: []chart.Line{{Name: "p50"}, {Name: "p99", Color: 1}}}
	for _, p := range r.Sweep {
		rates.Add(float64(p.Bytes), p.GBs.Median)
		rates.Lines[0].Spread = append(rates.Lines[0].Spread, [2]float64{p.GBs.Min, p.GBs.Max})
		times.Add(float64(p.Bytes), p.P50, p.P99)
	}
	return []chart.Chart{rates, times}
}

func (r *Report) about() string {
	c := r.Config
	return fmt.Sprintf("%s, blocks of %s %s, %d layers, %s, digests %s", r.Transport, Size(c.BlockBytes), c.Scatter, c.Layers, count(c.Connections, "connection"), c.Digests)
}

// Plot writes the sweep as one self-contained SVG.
func (r *Report) Plot(w io.Writer) error {
	_, err := w.Write(chart.Column("xpyd bench kv: "+r.about(), r.charts()...))
	return err
}

// PlotHTML is Plot in a page with the table.
func (r *Report) PlotHTML(w io.Writer) error {
	return page(w, "xpyd bench kv", r.about(), r, r.charts())
}

// page is a page of a report's charts, and its table as it is printed.
func page(w io.Writer, title, about string, r interface{ Table(w io.Writer) error }, charts []chart.Chart) error {
	var table strings.Builder
	if err := r.Table(&table); err != nil {
		return err
	}
	p := chart.Page{Title: title, About: about, Sections: []chart.Section{{Charts: charts}, {Title: "Figures", Code: table.String()}}}
	return p.WriteHTML(w)
}

func sized(v float64) string { return Size(int(v)) }

// microseconds are written as people read them.
func microseconds(v float64) string { return time.Duration(v * 1e3).String() }
