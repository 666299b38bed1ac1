package logbuf

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// safe is a buffer that timers may write to.
type safe struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safe) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

// take returns what was written since the last time.
func (s *safe) take() string {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.b.Reset()
	return s.b.String()
}

func limitedLog() (*slog.Logger, *Limiter, *safe) {
	out := &safe{}
	l := Limit(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}), "request", "audit")
	return slog.New(l.Handler()), l, out
}

func TestLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, l, out := limitedLog()
		defer l.Close()
		lines := func(want int, what string) {
			t.Helper()
			if got := strings.Count(out.take(), "\n"); got != want {
				t.Errorf("%s: %d lines, want %d", what, got, want)
			}
		}
		for i := range Burst + 1203 {
			log.With("id", i).Warn("refused", "peer", i) // attributes are the peer's to choose
		}
		lines(Burst, "the first")
		log.Warn("something else")
		log.Error("refused") // another level
		lines(2, "other messages")
		for range 2 * Burst {
			log.Info("request")
			log.Info("audit")
			log.Debug("refused")
		}
		lines(6*Burst, "routine and debug lines")
		time.Sleep(Window - 1)
		lines(0, "within the window")
		time.Sleep(time.Nanosecond)
		if got := out.take(); got != "level=WARN msg=\"refused … and 1,203 more in the last minute\"\n" {
			t.Errorf("%q", got)
		}
		time.Sleep(time.Hour)
		lines(0, "nothing is left out, nothing is said")
		log.Warn("refused")
		lines(1, "a new window")
	})
}

// TestLimitNext: a line that comes before the timer has run tells first what was
// left out; Close tells the rest.
func TestLimitNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, l, out := limitedLog()
		for range Burst + 2 {
			log.Info("join")
		}
		out.take()
		l.admit(message{}, time.Now().Add(Window)) // its clock, ahead of the timer
		for range Burst + 1 {
			log.Info("join")
		}
		out.take()
		l.Close()
		if got := out.take(); !strings.Contains(got, "join … and 1 more") {
			t.Errorf("%q", got)
		}
		for range Burst + 1 {
			log.Info("late") // no timer any more
		}
		if got := strings.Count(out.take(), "\n"); got != Burst {
			t.Errorf("%d lines after the end", got)
		}
	})
}

// TestLimitBounds: neither messages nor values without number take memory or the
// log.
func TestLimitBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, l, out := limitedLog()
		defer l.Close()
		for i := range 10 * maxMessages {
			log.Warn(fmt.Sprint("message ", i))
		}
		l.mu.Lock()
		if n := len(l.counts); n != maxMessages+1 {
			t.Errorf("%d counters", n)
		}
		l.mu.Unlock()
		if n := strings.Count(out.take(), "\n"); n != maxMessages+Burst {
			t.Errorf("%d lines", n)
		}
		time.Sleep(Window)
		if got := out.take(); got != fmt.Sprintf("level=WARN msg=\"other messages … and %s more in the last minute\"\n", grouped(9*maxMessages-Burst)) {
			t.Errorf("%q", got)
		}
		long := strings.Repeat("x", 5000)
		log.Warn("said", "id", 7, "text", long, "err", errors.New(long))
		got := out.take()
		if len(got) > 2*maxValue+200 || strings.Count(got, "x… (5,000 bytes)") != 2 || !strings.Contains(got, "id=7") {
			t.Errorf("%d bytes: %.100q", len(got), got)
		}
	})
}

func TestGrouped(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"} {
		if got := grouped(n); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
