package flight

import (
	"bytes"
	"fmt"
	"strings"
	"time"
)

// phaseInfo is a row of a request's waterfall, in milliseconds since its start.
type phaseInfo struct {
	Name    string  `json:"name"`
	StartMS float64 `json:"start_ms"`
	EndMS   float64 `json:"end_ms,omitempty"` // absent while it lasts
	Attempt int     `json:"attempt,omitempty"`
	Worker  string  `json:"worker,omitempty"`
	State   string  `json:"state,omitempty"` // of a leg
}

func (rec *record) waterfall() []phaseInfo {
	since := func(t time.Time) float64 { return float64(t.Sub(rec.start).Microseconds()) / 1000 }
	phases := rec.phases()
	out := make([]phaseInfo, 0, len(phases))
	for i := range phases {
		p := &phases[i]
		i := phaseInfo{Name: p.name, StartMS: since(p.start), Attempt: p.attempt}
		if !p.end.IsZero() {
			i.EndMS = max(since(p.end), 0.001)
		}
		if p.leg != nil {
			i.Worker, i.State = p.leg.ID, p.leg.State
		}
		out = append(out, i)
	}
	return out
}

// Text draws the waterfall.
func (i *Info) Text() []byte {
	const width = 50
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s model=%s stream=%v state=%s status=%d", i.ID, i.Path, i.Model, i.Stream, i.State, i.Status)
	if i.Error != "" {
		fmt.Fprintf(&b, " error=%q", i.Error)
	}
	total := i.TookMS
	for _, p := range i.Phases {
		total = max(total, p.StartMS)
		total = max(total, p.EndMS)
	}
	fmt.Fprintf(&b, "\nstart %s, %.3f ms\n\n", i.Start.Format(time.RFC3339Nano), total)
	for _, p := range i.Phases {
		end, dur := total, "..."
		if p.EndMS > 0 {
			end = p.EndMS
			dur = fmt.Sprintf("%.3f", end-p.StartMS)
		}
		from := int(width * p.StartMS / max(total, 0.001))
		to := max(int(width*end/max(total, 0.001)), from+1)
		bar := strings.Repeat(" ", min(from, width-1)) + strings.Repeat("=", min(to, width)-min(from, width-1))
		fmt.Fprintf(&b, "%-10s |%-*s| %10.3f +%10s ms", p.Name, width, bar, p.StartMS, dur)
		if p.Worker != "" {
			fmt.Fprintf(&b, "  %s %s, attempt %d", p.Worker, p.State, p.Attempt)
		}
		b.WriteByte('\n')
	}
	for n, a := range i.Attempts {
		if a.Error != "" {
			fmt.Fprintf(&b, "\nattempt %d failed: %s", n+1, a.Error)
		}
	}
	if b.Bytes()[b.Len()-1] != '\n' {
		b.WriteByte('\n')
	}
	return b.Bytes()
}
