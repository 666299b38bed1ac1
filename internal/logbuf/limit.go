package logbuf

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"
)

const (
	// Burst is how many lines of one message a log takes in a Window.
	Burst = 30
	// Window is how long lines are counted.
	Window = time.Minute
	// maxMessages are counted apart in a window; those beyond count together.
	maxMessages = 256
	// maxValue is how many bytes of an attribute are shown.
	maxValue = 1 << 10
)

// Limiter keeps clients, engines and workers from flooding a log: it writes only the first lines of
// each message in a window, and at its end how many it left out.
type Limiter struct {
	h       slog.Handler
	routine []string

	mu     sync.Mutex
	counts map[message]*tally // of this window
	began  time.Time
	timer  *time.Timer // ends a window in which lines were left out
	closed bool
}

// message is the key by which lines are counted, without attributes, which others choose.
type message struct {
	level slog.Level
	text  string
}

type tally struct{ written, left int }

// Limit returns a limiter of what is logged to h. Debug lines, and info lines whose message is
// routine, pass as they are. Close it before the process ends.
func Limit(h slog.Handler, routine ...string) *Limiter {
	return &Limiter{h: h, routine: routine, counts: map[message]*tally{}}
}

// Handler is the limited one.
func (l *Limiter) Handler() slog.Handler { return &limited{l.h, l} }

// Close logs how many lines were left out since the last such line.
func (l *Limiter) Close() {
	l.mu.Lock()
	l.closed = true
	if l.timer != nil {
		l.timer.Stop()
	}
	lines := l.next(time.Now())
	l.mu.Unlock()
	l.write(lines)
}

// admit counts a line and reports whether to write it, after those that the end of a window brings.
func (l *Limiter) admit(m message, now time.Time) (before []slog.Record, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.began) >= Window {
		before = l.next(now)
	}
	t := l.counts[m]
	if t == nil {
		if len(l.counts) >= maxMessages {
			m = message{m.level, "other messages"}
		}
		if t = l.counts[m]; t == nil {
			t = &tally{}
			l.counts[m] = t
		}
	}
	if t.written < Burst {
		t.written++
		return before, true
	}
	if t.left++; l.timer == nil && !l.closed {
		l.timer = time.AfterFunc(l.began.Add(Window).Sub(now), func() {
			var lines []slog.Record
			l.mu.Lock()
			if now := time.Now(); now.Sub(l.began) >= Window { // else a line has ended the window just now
				lines = l.next(now)
			}
			l.mu.Unlock()
			l.write(lines)
		})
	}
	return before, false
}

// next begins a window and returns the lines about the one before. l.mu is held.
func (l *Limiter) next(now time.Time) (lines []slog.Record) {
	for m, t := range l.counts {
		if t.left > 0 {
			lines = append(lines, slog.NewRecord(now, m.level, fmt.Sprintf("%s … and %s more in the last minute", m.text, grouped(t.left)), 0))
		}
	}
	clear(l.counts)
	l.began = now
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	return lines
}

func (l *Limiter) write(lines []slog.Record) {
	for _, r := range lines {
		if l.h.Enabled(context.Background(), r.Level) {
			_ = l.h.Handle(context.Background(), r) // a log that cannot be written has nobody to tell
		}
	}
}

// grouped writes 1203 as 1,203.
func grouped(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// limited is a handler behind a Limiter, with attributes or without.
type limited struct {
	slog.Handler
	l *Limiter
}

func (h *limited) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < slog.LevelInfo || r.Level == slog.LevelInfo && slices.Contains(h.l.routine, r.Message) {
		return h.Handler.Handle(ctx, r)
	}
	if len(r.Message) > maxValue {
		r.Message = r.Message[:maxValue] + "…"
	}
	before, ok := h.l.admit(message{r.Level, r.Message}, time.Now())
	h.l.write(before)
	if !ok {
		return nil
	}
	return h.Handler.Handle(ctx, cut(r))
}

func (h *limited) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &limited{h.Handler.WithAttrs(attrs), h.l}
}

func (h *limited) WithGroup(name string) slog.Handler {
	return &limited{h.Handler.WithGroup(name), h.l}
}

// cut shortens a record's long texts, which others may have caused.
func cut(r slog.Record) slog.Record {
	long := false
	r.Attrs(func(a slog.Attr) bool {
		_, long = shortened(a.Value)
		return !long
	})
	if !long {
		return r
	}
	out := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
	r.Attrs(func(a slog.Attr) bool {
		if s, cut := shortened(a.Value); cut {
			a.Value = slog.StringValue(s)
		}
		out.AddAttrs(a)
		return true
	})
	return out
}

// shortened returns a text that is too long, cut, and reports whether it is one.
func shortened(v slog.Value) (string, bool) {
	v = v.Resolve()
	s := ""
	switch v.Kind() {
	case slog.KindString:
		s = v.String()
	case slog.KindAny:
		if err, ok := v.Any().(error); ok && err != nil {
			s = err.Error()
		}
	}
	if len(s) <= maxValue {
		return "", false
	}
	return fmt.Sprintf("%s… (%s bytes)", s[:maxValue], grouped(len(s))), true
}
