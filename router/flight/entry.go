package flight

import (
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/requestlog"
)

// enter has the request's line written to the request log. No word that a client or an engine has
// said is in it: a model is named once a worker serves it, and of an error only its status.
func (q *request) enter(took time.Duration) {
	line := requestlog.Request{Path: q.path, Stream: q.streams, Status: q.status, Broken: q.status == 200 && q.failed != "",
		Took: requestlog.Millis(took), Attempts: len(q.attempts), Bytes: q.logged.Length()}
	if !q.first.IsZero() {
		line.TTFT = requestlog.Millis(q.first.Sub(q.start))
	}
	if q.pulse != nil {
		line.Gap = requestlog.Millis(q.pulse.longest)
	}
	if n := q.top.N * q.top.Prompts; n > 1 {
		line.Choices = n
	}
	line.Prompt, line.Output = q.tokens()
	if !q.usage.told && q.usage.framed > 0 {
		line.Output = q.usage.framed
	}
	line.Estimated = !q.usage.told && line.Prompt > 0
	if n := len(q.attempts); n > 0 {
		a := q.attempts[n-1]
		line.Model = q.model
		if a.d.role == fleet.Prefill {
			line.Prefill = a.d.inst.ID
		} else {
			line.Decode = a.d.inst.ID
		}
		if !a.alone {
			line.Prefill = a.p.inst.ID
		}
		a.mu.Lock()
		if a.counted {
			line.Estimated = false
			if cached := a.usage.Cached; cached >= 0 {
				line.Cached = &cached
			}
		}
		a.mu.Unlock()
	}
	q.s.RequestLog.Add(q.start, &line, q.logged.Hashes())
}
