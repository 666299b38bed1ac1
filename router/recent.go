package router

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
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
			i.Worker, i.State = p.leg.id, p.leg.state
		}
		out = append(out, i)
	}
	return out
}

// asText says whether curl or a browser asks, and not a program that wants
// JSON.
func asText(ctx *fasthttp.RequestCtx) bool {
	if f := ctx.QueryArgs().Peek("format"); len(f) > 0 {
		return string(f) == "text"
	}
	return strings.HasPrefix(string(ctx.Request.Header.Peek("Accept")), "text/")
}

// serveRequests lists the requests that run and the recent ones, the newest
// first: ?n=N of them, as text with ?format=text.
func (r *Router) serveRequests(ctx *fasthttp.RequestCtx) {
	most := 100
	if n, err := ctx.QueryArgs().GetUint("n"); err == nil {
		most = n
	}
	var running []*request
	r.mu.Lock()
	recent := r.history.list()
	for q := range r.requests {
		if !q.probe {
			running = append(running, q)
		}
	}
	r.mu.Unlock()
	list := make([]*requestInfo, 0, len(recent)+len(running))
	for i := range recent {
		list = append(list, recent[i].info())
	}
	for _, q := range running {
		list = append(list, q.info())
	}
	slices.SortFunc(list, func(a, b *requestInfo) int { return cmp.Or(b.Start.Compare(a.Start), cmp.Compare(a.ID, b.ID)) })
	list = list[:min(most, len(list))]
	if !asText(ctx) {
		reply(ctx, 200, struct {
			Requests []*requestInfo `json:"requests"`
		}{list})
		return
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%-12s %-8s %6s %10s %10s  %-28s %-20s %s\n", "start", "state", "status", "ttft ms", "took ms", "request", "pair", "path")
	for _, i := range list {
		pair := ""
		if n := len(i.Attempts); n > 0 {
			pair = i.Attempts[n-1].Prefill.ID + "/" + i.Attempts[n-1].Decode.ID
		}
		fmt.Fprintf(&b, "%-12s %-8s %6d %10.1f %10.1f  %-28s %-20s %s\n", i.Start.Format("15:04:05.000"), i.State, i.Status, i.TTFTMS, i.TookMS, i.ID, pair, i.Path)
	}
	plain(ctx, b.Bytes())
}

// serveRequest shows one request, running or recent.
func (r *Router) serveRequest(ctx *fasthttp.RequestCtx, id string) {
	r.mu.Lock()
	recent := r.history.list()
	var running *request
	for q := range r.requests {
		if q.id == id {
			running = q
		}
	}
	r.mu.Unlock()
	var info *requestInfo
	if i := slices.IndexFunc(recent, func(rec record) bool { return rec.id == id }); running != nil {
		info = running.info()
	} else if i >= 0 {
		info = recent[i].info()
	}
	switch {
	case info == nil:
		writeError(ctx, openai.NotFound("there is no request %q, or it is too old", clip(id)))
	case asText(ctx):
		plain(ctx, info.text())
	default:
		reply(ctx, 200, info)
	}
}

func plain(ctx *fasthttp.RequestCtx, text []byte) {
	ctx.SetContentType("text/plain; charset=utf-8")
	ctx.SetBody(text)
}

// text draws the waterfall.
func (i *requestInfo) text() []byte {
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
