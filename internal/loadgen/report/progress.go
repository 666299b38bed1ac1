package report

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/record"
)

// Progress writes how far a phase is: on a terminal one line that is written
// over, elsewhere a line now and then.
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
	line := p.line(now)
	p.last = now
	if !p.Terminal {
		fmt.Fprintln(p.W, line)
		return
	}
	fmt.Fprintf(p.W, "\r%s%s", line, strings.Repeat(" ", max(0, p.length-len(line))))
	p.length = len(line)
}

// End writes the last line, and on a terminal goes on to the next.
func (p *Progress) End(now record.Now) {
	p.Show(now)
	if p.Terminal {
		fmt.Fprintln(p.W)
	}
}

func (p *Progress) line(now record.Now) string {
	b := &strings.Builder{}
	fmt.Fprintf(b, "%s  %.1fs", p.Name, now.Elapsed.Seconds())
	if p.Duration > 0 {
		fmt.Fprintf(b, " of %v", p.Duration)
	}
	done := now.Done + now.Failed
	fmt.Fprintf(b, "  %d", done)
	if p.Requests > 0 {
		fmt.Fprintf(b, " of %d", p.Requests)
	}
	fmt.Fprintf(b, " requests, %d in flight, %d failed", now.InFlight, now.Failed)
	if t := (now.Elapsed - p.last.Elapsed).Seconds(); t > 0 {
		fmt.Fprintf(b, "  %.1f requests/s, %.0f tokens/s", float64(done-p.last.Done-p.last.Failed)/t, (now.Tokens-p.last.Tokens)/t)
	}
	if now.TTFT > 0 {
		fmt.Fprintf(b, "  p50: TTFT %s ms, E2E %s ms", short(now.TTFT/ms), short(now.E2E/ms))
	}
	return b.String()
}
