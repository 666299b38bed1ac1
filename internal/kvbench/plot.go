package kvbench

import (
	"fmt"
	"io"
	"time"

	"github.com/xpyd/xpyd/internal/chart"
)

// Plot writes the sweep as one self-contained SVG: throughput above, latency
// below, against the transfer size.
func (r *Report) Plot(w io.Writer) error {
	c := r.Config
	title := fmt.Sprintf("xpyd bench kv: %s, blocks of %s %s, %d layers, %s, digests %s", r.Transport, Size(c.BlockBytes), c.Scatter, c.Layers,
		count(c.Connections, "connection"), c.Digests)
	rates := chart.Chart{Title: "GB/s", LogX: true, Mark: sized, Lines: []chart.Line{{Name: "throughput"}}}
	times := chart.Chart{Title: "latency, ticket to verified", LogX: true, LogY: true, Mark: sized, Tick: microseconds,
		Lines: []chart.Line{{Name: "p50"}, {Name: "p99", Color: 1}}}
	for _, p := range r.Sweep {
		rates.Add(float64(p.Bytes), p.GBs.Median)
		times.Add(float64(p.Bytes), p.P50, p.P99)
	}
	_, err := w.Write(chart.Column(title, rates, times))
	return err
}

// PlotHTML is Plot in a page with the table.
func (r *Report) PlotHTML(w io.Writer) error { return page(w, "xpyd bench kv", r) }

func sized(v float64) string { return Size(int(v)) }

// microseconds are written as people read them.
func microseconds(v float64) string { return time.Duration(v * 1e3).String() }
