package report

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/record"
)

// Progress writes how far a phase is: on a terminal in one updated line, elsewhere in a line now
// and then.
type Progress struct {
	W        io.Writer
	Terminal bool
	Name     string
	Requests int           // in all; 0: not known
	Duration time.Duration // in all; 0: not known

	last   record.Now
	length int
}

// Every is how often Show is meant to be called.
func (p *Progress) Every() time.Duration {
	if p.Terminal {
		return 500 * time.Millisecond
	}
	return 5 * time.Second
}

// Show writes a line.
func (p *Progress) Show(now record.Now) {
	var requests, tokens float64 // per second since the last line
	if t := (now.Elapsed - p.last.Elapsed).Seconds(); t > 0 {
		requests, tokens = float64(now.Done+now.Failed-p.last.Done-p.last.Failed)/t, (now.Tokens-p.last.Tokens)/t
	}
	p.last = now
	if !p.Terminal {
		fmt.Fprintln(p.W, p.line(now, requests, tokens))
		return
	}
	line := p.short(now, requests, tokens)
	line = line[:min(len(line), columns)]
	fmt.Fprintf(p.W, "\r%s%s", line, strings.Repeat(" ", max(0, p.length-len(line))))
	p.length = len(line)
}

// columns of any terminal, less one against wrapping.
const columns = 79

// End writes the last line and, on a terminal, a line feed.
func (p *Progress) End(now record.Now) {
	p.Show(now)
	if p.Terminal {
		fmt.Fprintln(p.W)
	}
}

func (p *Progress) line(now record.Now, requests, tokens float64) string {
	b := &strings.Builder{}
	fmt.Fprintf(b, "%s  %.1fs", p.Name, now.Elapsed.Seconds())
	if p.Duration > 0 {
		fmt.Fprintf(b, " of %v", p.Duration)
	}
	fmt.Fprintf(b, "  %d", now.Done+now.Failed)
	if p.Requests > 0 {
		fmt.Fprintf(b, " of %d", p.Requests)
	}
	fmt.Fprintf(b, " requests, %d in flight, %d failed  %.1f requests/s, %.0f tokens/s", now.InFlight, now.Failed, requests, tokens)
	if now.TTFT > 0 {
		fmt.Fprintf(b, "  p50: TTFT %s ms, E2E %s ms", short(now.TTFT/ms), short(now.E2E/ms))
	}
	return b.String()
}

// short is a line for a terminal.
func (p *Progress) short(now record.Now, requests, tokens float64) string {
	share := ""
	switch {
	case p.Requests > 0:
		share = fmt.Sprintf(" %d%%", 100*(now.Done+now.Failed)/p.Requests)
	case p.Duration > 0:
		share = fmt.Sprintf(" %d%%", min(100, 100*now.Elapsed/p.Duration))
	}
	failed := ""
	if now.Failed > 0 {
		failed = fmt.Sprintf(" %d failed", now.Failed)
	}
	return fmt.Sprintf("%s %.0fs%s: %d done%s, %d busy, %.1f req/s, %.0f tok/s, TTFT %s ms", p.Name, now.Elapsed.Seconds(), share, now.Done, failed, now.InFlight, requests, tokens, short(now.TTFT/ms))
}
