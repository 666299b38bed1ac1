package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// pulse is GET /admin/v1/history: a router's last quarter of an hour, a point a second.
type pulse struct {
	Columns []string
	Next    int
	TTFT    float64     `json:"ttft_promise_s"` // what requests are to see; 0: anything
	TPOT    float64     `json:"tpot_promise_s"`
	Points  [][]float64 // of Columns, the oldest first
}

// column returns the latest most values of a column; nil if the router has none.
func (p *pulse) column(name string, most int) []float64 {
	at := slices.Index(p.Columns, name)
	if at < 0 {
		return nil
	}
	var out []float64
	for _, point := range p.Points[max(0, len(p.Points)-most):] {
		if at < len(point) {
			out = append(out, point[at])
		}
	}
	return out
}

// happening is one of GET /admin/v1/events.
type happening struct {
	At   time.Time
	Who  string
	Text string
}

func newTop() *cobra.Command {
	var once bool
	cmd := adminCommand(&cobra.Command{
		Use: "top", Short: "Watch the fleet and its load in the terminal",
		Long: `Show each second what the router serves, with the last minute as a line of bars, which
worker does how much of it, and what happened last. Ctrl-C ends it.`,
		Example: "  xpyd top\n  xpyd top --once        as it is now; also where the output is no terminal",
	}, func(cmd *cobra.Command, admin *adminFlags, args []string) error {
		out := cmd.OutOrStdout()
		if once || !isTerminal(out) {
			return new(top).show(cmd.Context(), admin, out, 0, 0)
		}
		t := &top{}
		// The alternate screen, so that what stood in the terminal comes back.
		fmt.Fprint(out, "\033[?1049h\033[?25l")
		defer fmt.Fprint(out, "\033[?25h\033[?1049l")
		return every(cmd.Context(), time.Second, func() error {
			width, height, err := term.GetSize(int(out.(*os.File).Fd()))
			if err != nil {
				return err
			}
			var page bytes.Buffer
			if err := t.show(cmd.Context(), admin, &page, width, height); err != nil && cmd.Context().Err() == nil {
				page.Reset()
				fmt.Fprintln(&page, "xpyd:", plain(err.Error()))
			}
			_, err = fmt.Fprintf(out, "\033[H%s\033[J", strings.ReplaceAll(page.String(), "\n", "\033[K\n"))
			return err
		})
	})
	cmd.Flags().BoolVar(&once, "once", false, "once, and end")
	return cmd
}

// How many seconds of bars and how many events there is room for, if nobody says how large the terminal is.
const barsShown, eventsShown = 60, 8

// top is up to where the router's lists were read: the next page asks for the end of them alone.
type top struct{ points, events int }

// show writes one page; width and height are the terminal's, 0 for no limit.
func (t *top) show(ctx context.Context, admin *adminFlags, w io.Writer, width, height int) error {
	var (
		fleet  fleetStatus
		past   pulse
		events struct {
			Next   int
			Events []happening
		}
	)
	after := func(read, shown int) string { return "?after=" + strconv.Itoa(max(read-shown, 0)) }
	for path, to := range map[string]any{"/admin/v1/instances": &fleet,
		"/admin/v1/history" + after(t.points, barsShown): &past, "/admin/v1/events" + after(t.events, eventsShown): &events} {
		var raw json.RawMessage
		if err := admin.call(ctx, "GET", path, nil, &raw); err != nil {
			return err
		}
		if err := json.Unmarshal(raw, to); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	t.points, t.events = past.Next, events.Next
	var page bytes.Buffer
	bars := barsShown
	if width > 0 {
		bars = min(max(width-46, 10), barsShown)
	}
	if fleet.At.IsZero() { // from an older router
		fleet.At = time.Now()
	}
	if err := writeTop(&page, &fleet, &past, events.Events, bars); err != nil {
		return err
	}
	_, err := io.WriteString(w, cropped(page.String(), width, height))
	return err
}

func writeTop(w io.Writer, s *fleetStatus, p *pulse, events []happening, bars int) error {
	state := "ready"
	if !s.Ready {
		state = "not ready: no live, probed, compatible pair"
	}
	fmt.Fprintf(w, "xpyd %s, %s\n\n", s.At.Local().Format("15:04:05"), state)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(title, value string, values []float64) {
		fmt.Fprintf(t, "%s\t%s\t%s\n", title, value, sparkline(values))
	}
	number := func(name, title, format string, scale float64) {
		values := p.column(name, bars)
		if len(values) == 0 {
			return
		}
		row(title, fmt.Sprintf(format, values[len(values)-1]*scale), values)
	}
	number("running", "running", "%.0f", 1)
	number("waiting", "waiting", "%.0f", 1)
	number("requests", "requests", "%.1f/s", 1)
	number("prompt_tokens", "prompt", "%.0f tok/s", 1)
	number("output_tokens", "output", "%.0f tok/s", 1)
	promise := func(seconds float64, format string, scale float64) string {
		if seconds == 0 {
			return ""
		}
		return " of " + fmt.Sprintf(format, seconds*scale)
	}
	number("ttft_p95", "TTFT p95", "%.0f ms"+promise(p.TTFT, "%.0f", 1e3), 1e3)
	number("tpot_p95", "TPOT p95", "%.1f ms"+promise(p.TPOT, "%.1f", 1e3), 1e3)
	number("failed", "failed", "%.0f", 1)
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	t = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tROLE\tSTATE\tRUN\tWAIT\tKV\t\tGPU\tNOTE")
	for i := range s.Instances {
		m := &s.Instances[i]
		state := string(m.State)
		if m.Draining {
			state += ",draining"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\n", m.ID, m.Role, state, m.Load.Running, m.Load.Waiting,
			gauge(m.Load.KVUsed), pool(m.Load.KVUsed, m.KVBytes), gpu(&m.Member), plain(cmp.Or(m.Breaker.Why, m.ProbeError, m.Reason)))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if s.Planner != "" {
		fmt.Fprintf(w, "\n%s\n", plain(s.Planner))
	}
	if len(events) > 0 {
		fmt.Fprintln(w)
	}
	for _, e := range slices.Backward(events[max(0, len(events)-eventsShown):]) {
		who := ""
		if e.Who != "" {
			who = plain(e.Who) + ": "
		}
		fmt.Fprintf(w, "%s  %s%s\n", e.At.Local().Format("15:04:05"), who, plain(e.Text))
	}
	return nil
}

// The heights of a bar, in eighths.
var blocks = []rune(" ▁▂▃▄▅▆▇█")

// sparkline draws values from 0 to their largest.
func sparkline(values []float64) string {
	most := 0.0
	for _, v := range values {
		most = max(most, v)
	}
	var b strings.Builder
	for _, v := range values {
		height := 0
		if most > 0 && v > 0 {
			height = 1 + int(v/most*float64(len(blocks)-2))
		}
		b.WriteRune(blocks[min(height, len(blocks)-1)])
	}
	return b.String()
}

// gauge draws a share of 1 as ten steps.
func gauge(share float64) string {
	const steps = 10
	full := min(max(int(share*steps+0.5), 0), steps)
	return strings.Repeat("█", full) + strings.Repeat("░", steps-full)
}

// cropped keeps a page within a terminal; a width or height of 0 is no limit.
func cropped(page string, width, height int) string {
	lines := strings.SplitAfter(page, "\n")
	if height > 0 && len(lines) > height {
		lines = lines[:height-1]
	}
	var b strings.Builder
	for _, line := range lines {
		text, end := strings.CutSuffix(line, "\n")
		if width > 0 && utf8.RuneCountInString(text) > width {
			text = string([]rune(text)[:width])
		}
		b.WriteString(text)
		if end {
			b.WriteByte('\n')
		}
	}
	return b.String()
}
