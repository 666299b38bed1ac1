package kvbench

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/xpyd/xpyd/internal/chart"
)

// Links is the result of `bench kvio`: how fast KV went over the links between the
// tiers.
type Links struct {
	Pool   string `json:"pool,omitempty"` // the device
	Layout string `json:"layout,omitempty"`
	Host   []Host `json:"host,omitempty"` // by size of a block
	SSD    []SSD  `json:"ssd,omitempty"`  // by size of a unit
}

// Host is between a pool and host memory, GB/s.
type Host struct {
	BlockTokens int    `json:"block_tokens"`
	UnitBytes   int    `json:"unit_bytes"`
	Units       int    `json:"units"`
	Out         Spread `json:"out_gb_s"`
	In          Spread `json:"in_gb_s"`
	Both        Spread `json:"both_gb_s"`
}

// SSD is between host memory and an SSD.
type SSD struct {
	UnitBytes int     `json:"unit_bytes"`
	Units     int     `json:"units"`
	Depth     int     `json:"depth"`
	IO        string  `json:"io"` // how, in the end
	Write     float64 `json:"write_gb_s"`
	Read      float64 `json:"read_gb_s"`
	WriteCPU  float64 `json:"write_cpu_s_gb"` // seconds of processors
	ReadCPU   float64 `json:"read_cpu_s_gb"`
}

// GBs is a spread of rates in bytes a second.
func GBs(rates []float64) Spread {
	s := spreadOf(rates)
	return Spread{s.Median / 1e9, s.Min / 1e9, s.Max / 1e9}
}

// Table writes them for people.
func (r *Links) Table(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	if len(r.Host) > 0 {
		fmt.Fprintf(t, "%s, %s: GB/s, median (least to most)\n", r.Pool, r.Layout)
		fmt.Fprintf(t, "block\tunits of\tto host memory\tand back, verified\tboth at once\n")
		for _, h := range r.Host {
			fmt.Fprintf(t, "%d tokens\t%s\t%s\t%s\t%s\n", h.BlockTokens, Size(h.UnitBytes), h.Out, h.In, h.Both)
		}
	}
	if len(r.Host) > 0 && len(r.SSD) > 0 {
		fmt.Fprintln(t)
	}
	if len(r.SSD) > 0 {
		fmt.Fprintf(t, "SSD, units of\tat a time\tby\twrite GB/s\tread in random order GB/s\tprocessor s a GB\n")
		for _, s := range r.SSD {
			fmt.Fprintf(t, "%s\t%d\t%s\t%.2f\t%.2f\t%.2f, %.2f\n", Size(s.UnitBytes), s.Depth, s.IO, s.Write, s.Read, s.WriteCPU, s.ReadCPU)
		}
	}
	return t.Flush()
}

// String is for a table.
func (s Spread) String() string { return fmt.Sprintf("%.2f (%.2f to %.2f)", s.Median, s.Min, s.Max) }

// charts are host memory, by the size of a block, and the SSD, by that of a unit.
func (r *Links) charts() (charts []chart.Chart) {
	if len(r.Host) > 0 {
		c := chart.Chart{Title: "Pool and host memory", X: "tokens of a block", Y: "GB/s", LogX: true, WholeX: true,
			Lines: []chart.Line{{Name: "to host memory"}, {Name: "and back", Color: 1}, {Name: "both at once", Color: 2}}}
		for _, h := range r.Host {
			c.Add(float64(h.BlockTokens), h.Out.Median, h.In.Median, h.Both.Median)
			for i, s := range []Spread{h.Out, h.In, h.Both} {
				c.Lines[i].Spread = append(c.Lines[i].Spread, [2]float64{s.Min, s.Max})
			}
		}
		charts = append(charts, c)
	}
	if len(r.SSD) > 0 {
		c := chart.Chart{Title: "SSD", X: "bytes of a unit", Y: "GB/s", LogX: true, Mark: sized, Lines: []chart.Line{{Name: "write"}, {Name: "read in random order", Color: 1}}}
		for _, s := range r.SSD {
			c.Add(float64(s.UnitBytes), s.Write, s.Read)
		}
		charts = append(charts, c)
	}
	return charts
}

func (r *Links) about() string {
	if r.Pool == "" {
		return "an SSD"
	}
	return r.Pool + ", " + r.Layout
}

// Plot draws them as one SVG.
func (r *Links) Plot(w io.Writer) error {
	_, err := w.Write(chart.Column("xpyd bench kvio: "+r.about(), r.charts()...))
	return err
}

// PlotHTML is Plot in a page with the table.
func (r *Links) PlotHTML(w io.Writer) error {
	return page(w, "xpyd bench kvio", r.about(), r, r.charts())
}
