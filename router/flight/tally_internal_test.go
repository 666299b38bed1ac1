package flight

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
)

// TestTallies: requests count when they come and when they are over, tokens of streams as they come, each with the gap before it.
func TestTallies(t *testing.T) {
	s := &Service{tallies: tallies{by: map[string]*tally{}}}
	stream := &request{s: s, top: openai.Top{Model: "m", N: 1, Prompt: []byte(`[1,2,3]`)}}
	stream.came()
	stream.tally.beat(true, time.Second, 2, 1)
	stream.tally.beat(false, 30*time.Millisecond, 3, 1)
	if got, want := s.Tallies()["m"], (Tally{Requests: 1, PromptTokens: 3, OutputTokens: 5, Gaps: 3, Streaming: 30 * time.Millisecond}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	stream.status, stream.pulse = 200, &pulse{first: 1, last: 2}
	stream.went()
	whole := &request{s: s, top: openai.Top{Model: "m", N: 1, Prompt: []byte(`"abcdefgh"`)}, usage: usage{told: true, prompt: 4, generated: 7}}
	whole.came()
	whole.status = 200
	whole.went()
	(&request{s: s}).went() // it was never admitted
	if got := s.Tallies()["m"]; got.Requests != 2 || got.Ended != 2 || got.OutputTokens != 12 || got.Judged != 0 {
		t.Errorf("%+v", got)
	}
	for i := range 2 * maxTallies {
		q := &request{s: s, top: openai.Top{Model: string(rune('A' + i)), N: 1}}
		q.came()
		q.tally.beat(true, 0, 1, 1)
		q.went()
	}
	if n := len(s.Tallies()); n != maxTallies {
		t.Errorf("%d models", n)
	}
}

// TestJudge: what clients see of streams is compared with what is expected; faults of clients say nothing.
func TestJudge(t *testing.T) {
	s := &Service{Deps: Deps{Expect: Expect{TTFT: time.Second, TPOT: 20 * time.Millisecond}}}
	for _, c := range []struct {
		name         string
		status       int
		failed       string
		first, last  time.Duration
		tokens, n    int
		judged, good bool
	}{
		{"in time", 200, "", time.Second, 1200 * time.Millisecond, 11, 1, true, true},
		{"a late first token", 200, "", time.Second + 1, 1200 * time.Millisecond, 11, 1, true, false},
		{"long gaps", 200, "", time.Second, 1201 * time.Millisecond, 11, 1, true, false},
		{"two choices at a time", 200, "", time.Second, 1100 * time.Millisecond, 12, 2, true, true},
		{"one token", 200, "", time.Second, time.Second, 1, 1, true, true},
		{"broken", 200, "decode is gone", time.Second, 1200 * time.Millisecond, 11, 1, true, false},
		{"no worker", 503, "", 0, 0, 0, 1, true, false},
		{"a wrong request", 400, "", 0, 0, 0, 1, false, false},
		{"a client that left", 499, "", time.Second, time.Second, 1, 1, false, false},
		{"an answer in one piece", 200, "", 0, 0, 11, 1, false, false},
	} {
		q := &request{s: s, top: openai.Top{N: c.n}, usage: usage{told: true, generated: c.tokens}}
		if q.status, q.failed = c.status, c.failed; c.first > 0 {
			q.pulse = &pulse{first: c.first, last: c.last}
		}
		if judged, good := q.judge(); judged != c.judged || good != c.good {
			t.Errorf("%s: judged %v, good %v", c.name, judged, good)
		}
	}
	if judged, _ := (&request{s: &Service{}, summary: summary{status: 503}}).judge(); judged {
		t.Error("nothing is expected, and a request is judged")
	}
}
