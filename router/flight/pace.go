package flight

import (
	"math/rand/v2"
	"time"

	"github.com/xpyd/xpyd/router/pick"
)

// pacer measures how long a decode worker lets a stream wait for each run of
// events, for the ejection of slow workers. The client's own slowness does not
// count: what has arrived meanwhile costs no wait. A nil pacer measures nothing.
type pacer struct {
	choice *pick.Choice
	waited time.Duration
	runs   int
}

const (
	pacedOne  = 8 // stream of so many is measured: two looks at the clock a run cost something
	pacedRuns = 4 // that tell something
)

// pacer returns one for some streams if workers are compared by time.
func (q *request) pacer(ans *answer) *pacer {
	if ans.forwarded || !q.s.Paced || rand.IntN(pacedOne) != 0 {
		return nil
	}
	return &pacer{choice: q.attempts[len(q.attempts)-1].choice}
}

// next is e's.
func (p *pacer) next(e *events) ([]byte, error) {
	if p == nil {
		return e.next()
	}
	start := time.Now()
	run, err := e.next()
	if err == nil {
		p.waited += time.Since(start)
		p.runs++
	}
	return run, err
}

// tell hands on what was measured, at the stream's end.
func (p *pacer) tell() {
	if p != nil && p.runs >= pacedRuns {
		p.choice.Paced(p.waited / time.Duration(p.runs))
	}
}
