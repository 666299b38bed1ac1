package flight

import (
	"sync"
	"sync/atomic"
	"time"
)

// Tally is what has come of a model's completions and chats since the router began.
type Tally struct {
	Requests, PromptTokens int // that were admitted; tokens are estimates
	Ended                  int // that are over
	// OutputTokens have come, of streams as they come. The gaps before Gaps of them took Streaming together.
	OutputTokens, Gaps int
	Streaming          time.Duration
	// Of the Judged requests, Good saw what is expected; see Expect.
	Good, Judged int
}

// Expect is what requests are to see; 0: anything.
type Expect struct {
	TTFT, TPOT time.Duration // to the first token of a stream; mean time between tokens
}

// maxTallies bounds the models that are told apart.
const maxTallies = 64

type tallies struct {
	mu sync.Mutex
	by map[string]*tally
}

// tally is a Tally whose requests are counted under tallies.mu, and whose tokens are not.
type tally struct {
	Tally
	output, gaps, streaming atomic.Int64
}

// beat counts a run of n tokens of a stream: the first ones or, after a gap, more.
func (t *tally) beat(first bool, gap time.Duration, n, choices int) {
	if t == nil || n <= 0 {
		return
	}
	t.output.Add(int64(n))
	if !first {
		t.gaps.Add(int64(n))
		t.streaming.Add(int64(gap) * int64(choices))
	}
}

// Tallies returns those of all models. The model "" is what was asked for while none was served.
func (s *Service) Tallies() map[string]Tally {
	s.tallies.mu.Lock()
	defer s.tallies.mu.Unlock()
	out := make(map[string]Tally, len(s.tallies.by))
	for name, t := range s.tallies.by {
		now := t.Tally
		now.OutputTokens, now.Gaps, now.Streaming = int(t.output.Load()), int(t.gaps.Load()), time.Duration(t.streaming.Load())
		out[name] = now
	}
	return out
}

// Legs is how many legs are open to workers.
func (s *Service) Legs() int { return int(s.legs.count()) }

// came counts an admitted request.
func (q *request) came() {
	prompt := q.top.PromptTokens()
	t := &q.s.tallies
	t.mu.Lock()
	defer t.mu.Unlock()
	if q.tally = t.by[q.top.Model]; q.tally == nil {
		if len(t.by) >= maxTallies {
			return
		}
		q.tally = &tally{}
		t.by[q.top.Model] = q.tally
	}
	q.tally.Requests++
	q.tally.PromptTokens += prompt
}

// went counts a request that is over.
func (q *request) went() {
	if q.tally == nil {
		return
	}
	if q.pulse == nil && q.status == 200 { // no stream
		_, output := q.tokens()
		q.tally.output.Add(int64(output))
	}
	judged, good := q.judge()
	t := &q.s.tallies
	t.mu.Lock()
	defer t.mu.Unlock()
	q.tally.Ended++
	if judged {
		q.tally.Judged++
	}
	if good {
		q.tally.Good++
	}
}

// judge reports whether a request counts, and whether it saw what is expected: only streams show when tokens
// came, and what clients did wrong or left says nothing.
func (q *request) judge() (judged, good bool) {
	e, p := q.s.Expect, q.pulse
	switch {
	case e == Expect{} || q.status != 200 && q.status < 500 || q.status == 200 && (p == nil || p.first == 0):
		return false, false
	case q.status != 200 || q.failed != "":
		return true, false
	}
	_, output := q.tokens()
	n := max(q.top.N, 1)
	late := e.TTFT > 0 && p.first > e.TTFT || e.TPOT > 0 && output > n && (p.last-p.first)*time.Duration(n) > e.TPOT*time.Duration(output-n)
	return true, !late
}
