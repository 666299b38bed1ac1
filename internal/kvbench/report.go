package kvbench

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
)

// Report is the result of a run. GB is 10^9 bytes.
type Report struct {
	Config    Config     `json:"config"`
	Transport string     `json:"transport"` // the one that was used
	Why       string     `json:"why"`
	Mapped    bool       `json:"mapped"`  // the sender writes into the receiver's pool itself
	Runs      []*Series  `json:"runs"`    // in the order in which they took turns
	Latency   Latency    `json:"latency"` // of Config.LatencyBytes
	Handshake *Handshake `json:"handshake,omitempty"`
	Sweep     []Point    `json:"sweep,omitempty"`
	Resent    int        `json:"resent"`   // blocks that were asked for again
	Verified  bool       `json:"verified"` // every byte, at the end
	Notes     []string   `json:"notes,omitempty"`
}

// Series is one kind of run: RunChecked, RunUnchecked, or a limit.
type Series struct {
	Name  string    `json:"name"`
	GBs   Spread    `json:"gb_s"`
	CPU   CPU       `json:"cpu_s_per_gb"`
	All   []float64 `json:"all_gb_s"`
	cpu   CPU       // summed, seconds
	moved float64   // GB
}

// CPU is the CPU time of each process, seconds a GB.
type CPU struct {
	Receiver float64 `json:"receiver"`
	Sender   float64 `json:"sender"`
}

// Spread is a median with its extremes.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// Latency is of transfers of Bytes, in microseconds, from sending the ticket
// until every byte is there and verified.
type Latency struct {
	Bytes int     `json:"bytes"`
	Runs  int     `json:"runs"`
	P50   float64 `json:"p50_us"`
	P90   float64 `json:"p90_us"`
	P99   float64 `json:"p99_us"`
	Max   float64 `json:"max_us"`
}

// Handshake is what a new peer costs, in milliseconds from dialling.
type Handshake struct {
	Open      Spread `json:"open_ms"`       // a session that takes tickets
	FirstByte Spread `json:"first_byte_ms"` // the first block of the first ticket
}

// Point is one transfer size of the plot.
type Point struct {
	Latency
	GBs Spread `json:"gb_s"`
}

// add takes one run.
func (r *Report) add(name string, bytes int, took, ours, theirs time.Duration) {
	s, gb := r.Find(name), float64(bytes)/1e9
	if s == nil {
		s = &Series{Name: name}
		r.Runs = append(r.Runs, s)
	}
	s.All = append(s.All, gb/took.Seconds())
	s.GBs = spreadOf(s.All)
	s.moved += gb
	s.cpu.Receiver += ours.Seconds()
	s.cpu.Sender += theirs.Seconds()
	s.CPU = CPU{s.cpu.Receiver / s.moved, s.cpu.Sender / s.moved}
}

// last is the newest run of each kind, for progress.
func (r *Report) last() string {
	var out []string
	for _, s := range r.Runs {
		out = append(out, fmt.Sprintf("%s %.2f", s.Name, s.All[len(s.All)-1]))
	}
	return strings.Join(out, ", ") + " GB/s"
}

// Find returns a kind of run, or nil.
func (r *Report) Find(name string) *Series {
	for _, s := range r.Runs {
		if s.Name == name {
			return s
		}
	}
	return nil
}

func spreadOf(v []float64) Spread {
	return Spread{Median: figures.Median(v), Min: slices.Min(v), Max: slices.Max(v)}
}

func quantiles(bytes int, times []time.Duration) Latency {
	us := make([]float64, len(times))
	for i, t := range times {
		us[i] = float64(t.Nanoseconds()) / 1e3
	}
	return Latency{Bytes: bytes, Runs: len(us), P50: figures.Quantile(us, 0.5), P90: figures.Quantile(us, 0.9),
		P99: figures.Quantile(us, 0.99), Max: slices.Max(us)}
}

// over is the median of ours over theirs, run by run.
func over(ours, theirs *Series) float64 {
	ratios := make([]float64, min(len(ours.All), len(theirs.All)))
	for i := range ratios {
		ratios[i] = ours.All[i] / theirs.All[i]
	}
	return figures.Median(ratios)
}

// Table writes the report for people.
func (r *Report) Table(w io.Writer) error {
	c := r.Config
	blocks := c.blocks(c.Bytes)
	fmt.Fprintf(w, "%s (%s): %s as %d blocks of %s, %s; %d layers, %d KV heads, %d tokens a block; %s, %s\n\n",
		r.Transport, r.Why, Size(c.Bytes), blocks*c.Layers, Size(c.BlockBytes), c.Scatter, c.Layers, c.KVHeads, c.BlockTokens,
		count(c.Concurrency, "transfer")+" at a time", count(c.Connections, "bulk connection"))
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintf(t, "GB/s\tmedian\tmin\tmax\tCPU s/GB, receiver + sender\tours over it\n")
	ours := r.Runs[0]
	for _, s := range r.Runs {
		ratio, cpu := "", fmt.Sprintf("%.2f + %.2f", s.CPU.Receiver, s.CPU.Sender)
		if s != ours {
			ratio = fmt.Sprintf("%.2f", over(ours, s))
		}
		if strings.HasPrefix(s.Name, "memcpy") {
			cpu = fmt.Sprintf("%.2f", s.CPU.Receiver)
		}
		fmt.Fprintf(t, "%s\t%.2f\t%.2f\t%.2f\t%s\t%s\n", s.Name, s.GBs.Median, s.GBs.Min, s.GBs.Max, cpu, ratio)
	}
	if l := r.Latency; l.Runs > 0 {
		fmt.Fprintf(t, "\nµs\tp50\tp90\tp99\tmax\n")
		fmt.Fprintf(t, "%s, ticket to verified\t%.0f\t%.0f\t%.0f\t%.0f\n", Size(l.Bytes), l.P50, l.P90, l.P99, l.Max)
	}
	if h := r.Handshake; h != nil {
		fmt.Fprintf(t, "\nms\tmedian\tmin\tmax\n")
		fmt.Fprintf(t, "new peer, session\t%.2f\t%.2f\t%.2f\n", h.Open.Median, h.Open.Min, h.Open.Max)
		fmt.Fprintf(t, "new peer, first block\t%.2f\t%.2f\t%.2f\n", h.FirstByte.Median, h.FirstByte.Min, h.FirstByte.Max)
	}
	if len(r.Sweep) > 0 {
		fmt.Fprintf(t, "\ntransfer\tGB/s\tp50 µs\tp99 µs\n")
		for _, p := range r.Sweep {
			fmt.Fprintf(t, "%s\t%.2f\t%.0f\t%.0f\n", Size(p.Bytes), p.GBs.Median, p.P50, p.P99)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, n := range r.Notes {
		fmt.Fprintln(w, n)
	}
	if r.Verified {
		fmt.Fprintln(w, "every byte compared with what was sent: equal")
	}
	return nil
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
