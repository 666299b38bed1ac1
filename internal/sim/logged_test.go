package sim

import (
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/requestlog"
)

func logOf(requests ...requestlog.Request) *requestlog.Log {
	return &requestlog.Log{Header: requestlog.Header{Grain: []requestlog.Grain{{From: 0, Bytes: 256}}}, Requests: requests}
}

// logLine is of a stream whose prompt has so many tokens and bytes, and beginnings.
func logLine(at time.Duration, tokens, bytes, output int, prefix ...requestlog.Hash) requestlog.Request {
	return requestlog.Request{Arrived: requestlog.Millis(at), Stream: true, Status: 200, Prompt: tokens, Bytes: bytes, Output: output, Prefix: prefix}
}

// TestFromLog: prompts share in tokens what their texts share in bytes, even if these are not equally dense; times are
// from the first request, and what cannot be replayed is counted.
func TestFromLog(t *testing.T) {
	several, empty := logLine(0, 10, 10, 1), logLine(0, 10, 10, 0)
	several.Choices = 2
	log := logOf(
		several,
		logLine(time.Second, 100, 600, 5, 1, 2),   // a token has 6 bytes
		logLine(3*time.Second, 200, 800, 6, 1, 3), // 4 bytes, but for the first block
		logLine(5*time.Second, 300, 1024, 7, 1, 3, 4, 5),
		logLine(5*time.Second, 20, 256, 7, 1), // less than the block has by the others
		logLine(5*time.Second, 50, 100, 8),
		logLine(5*time.Second, 50, 100, 8),
		empty,
		logLine(6*time.Second, 990, 100, 11),
	)
	l := FromLog(log, 2, 1000)
	if l.Empty != 1 || l.Several != 1 || l.Long != 1 || len(l.Requests) != 6 || len(l.Lines) != 6 {
		t.Fatalf("%+v", l)
	}
	var ids [][]int32
	for i, want := range []Request{{At: 0, Output: 5}, {At: time.Second, Output: 6}, {At: 2 * time.Second, Output: 7}, {At: 2 * time.Second, Output: 7}, {At: 2 * time.Second, Output: 8}, {At: 2 * time.Second, Output: 8}} {
		q := &l.Requests[i]
		if q.At != want.At || q.Output != want.Output || q.Prompt.Tokens() != l.Lines[i].Prompt || len(q.Prompt.IDs()) != l.Lines[i].Prompt {
			t.Errorf("%d: %+v of %d tokens", i, q, len(q.Prompt.IDs()))
		}
		ids = append(ids, q.Prompt.IDs())
	}
	common := func(a, b int) int {
		n := 0
		for n < min(len(ids[a]), len(ids[b])) && ids[a][n] == ids[b][n] {
			n++
		}
		return n
	}
	const first = 100 * 256 / 600                    // tokens of the first block
	const second = first + (200-first)*256/(800-256) // and of both
	for _, x := range []struct{ a, b, want int }{{0, 1, first}, {1, 2, second}, {0, 3, 20}, {2, 3, 20}, {4, 5, 0}, {0, 4, 0}} {
		if n := common(x.a, x.b); n != x.want {
			t.Errorf("%d and %d share %d tokens, want %d", x.a, x.b, n, x.want)
		}
	}
}

// TestReplayed: a logged prompt that another begins with is not computed again.
func TestReplayed(t *testing.T) {
	var prefix []requestlog.Hash
	for i := range 12 {
		prefix = append(prefix, requestlog.Hash(i+1))
	}
	once := logLine(0, 768, 12*256, 5, prefix...)
	again, other := once, once
	again.Arrived, other.Arrived = requestlog.Millis(time.Second), requestlog.Millis(2*time.Second)
	other.Prefix = slices.Clone(prefix)
	for i := range prefix {
		other.Prefix[i] += 100
	}
	l := FromLog(logOf(once, again, other), 1, 1000)
	out := play(t, like(Split{Whole: 1}), Load{Requests: l.Requests})
	if warm, cold := out[1].TTFT(), out[2].TTFT(); warm > out[0].TTFT()/2 || cold != out[0].TTFT() {
		t.Errorf("first %v, again %v, another %v", out[0].TTFT(), warm, cold)
	}
}

// TestSeen: what a logged client saw; an answer in one piece has no first token.
func TestSeen(t *testing.T) {
	q := logLine(time.Second, 10, 40, 5)
	ms := requestlog.Millis(time.Millisecond)
	q.TTFT, q.Took, q.Gap = 20*ms, 60*ms, 30*ms
	if o := Seen(&q); o.TTFT() != 20*time.Millisecond || o.Gap() != 10*time.Millisecond || o.Longest != 30*time.Millisecond || o.Failed || o.Last-o.At != 60*time.Millisecond {
		t.Errorf("%+v", o)
	}
	q.Stream = false
	if o := Seen(&q); o.TTFT() != 0 || o.Gap() != 0 || o.Longest != 0 || o.Last-o.At != 60*time.Millisecond {
		t.Errorf("%+v", o)
	}
	for status, failed := range map[int]bool{200: false, 499: false, 503: true} {
		if q.Status = status; Seen(&q).Failed != failed {
			t.Errorf("status %d", status)
		}
	}
	if q.Status, q.Broken = 200, true; !Seen(&q).Failed {
		t.Error("a broken stream")
	}
}
