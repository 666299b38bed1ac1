package flight

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/responses"
	"github.com/xpyd/xpyd/router/kept"
)

// numbered is event n of a run, of 100 bytes.
func numbered(n int) string {
	e := fmt.Sprintf("data: %d ", n)
	return e + strings.Repeat("x", 98-len(e)) + "\n\n"
}

// TestRunPages: events are told from any number on, several in a page or one; where they take too much those of runs that are
// over go first, then the oldest, and a teller that is behind them is told.
func TestRunPages(t *testing.T) {
	s := &Service{}
	s.Deps.Responses = kept.Config{Background: 8, BackgroundBytes: 10_000}
	b := newBackground(s)
	start := func(id string) *run {
		r := &run{b: b, id: id, streams: true, changed: make(chan struct{})}
		if err := b.room(r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	told := func(r *run, from int) (text string, over bool) {
		teller := &teller{r: r, next: from}
		for {
			events, done, _ := teller.read()
			if text += string(events); done || len(events) == 0 {
				return text, done
			}
		}
	}
	old, r := start("old"), start("new")
	old.add([]byte(numbered(0)))
	old.closed, old.until, b.over = true, time.Now().Add(time.Hour), append(b.over, old)
	var want []string
	for n := 0; n < 30; {
		page := ""
		for range n%3 + 1 {
			page += numbered(n)
			want = append(want, numbered(n))
			n++
		}
		r.add([]byte(page))
	}
	for from := range len(want) + 1 {
		if text, over := told(r, from); text != strings.Join(want[from:], "") || over {
			t.Errorf("from %d: %q %v", from, text, over)
		}
	}
	r.closed = true
	if _, over := told(r, len(want)); !over || b.find("", "old") != old {
		t.Error(over)
	}
	for n := len(want); n < 500; n++ {
		r.add([]byte(numbered(n)))
		if b.bytes > 10_000 || r.next != n+1 {
			t.Fatalf("%d bytes, %d next", b.bytes, r.next)
		}
	}
	if b.find("", "old") != nil || b.bytes != r.bytes {
		t.Errorf("what is over is still there: %d bytes, %d of them the run's", b.bytes, r.bytes)
	}
	if text, over := told(r, r.begins); !strings.HasPrefix(text, numbered(r.begins)) || !strings.HasSuffix(text, numbered(499)) || !over || r.begins < 400 {
		t.Errorf("from %d: %q %v", r.begins, text, over)
	}
	if text, over := told(r, r.begins-1); !strings.HasPrefix(text, "event: error\n") || !strings.Contains(text, "not there any more") || !over {
		t.Errorf("%q %v", text, over)
	}
	b.forget(r)
	b.leave(r)
	b.leave(old)
	if b.bytes != 0 || len(b.runs) != 0 || len(b.live) != 0 || b.count != 0 {
		t.Errorf("left: %+v", b)
	}
}

// TestStanding: what another router announced is lost once its time is up.
func TestStanding(t *testing.T) {
	for until, want := range map[int64]string{0: "queued", time.Now().Add(time.Hour).Unix(): "queued", time.Now().Add(-time.Hour).Unix(): "failed"} {
		e := &kept.Entry{Input: []byte(`"a"`), Response: []byte(`{"id":"resp_1","status":"queued","error":null}`), Until: until}
		if got := responses.Status(standing(e).Response); got != want {
			t.Errorf("%d: %s, want %s", until, got, want)
		}
	}
}
