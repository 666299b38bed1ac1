// Package logbuf writes a log's routine lines in batches: a system call for every access line costs
// a router more than making the line.
package logbuf

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"
)

const (
	// Most is how many bytes wait at most.
	Most = 256 << 10
	// Delay is how long a line waits at most.
	Delay = 200 * time.Millisecond
)

// Writer gathers what is written to it. It is safe for concurrent use.
type Writer struct {
	mu    sync.Mutex
	w     io.Writer
	buf   []byte
	timer *time.Timer // running while lines wait
	armed bool
}

// New returns a writer to w. Flush it before the process ends.
func New(w io.Writer) *Writer {
	b := &Writer{w: w}
	b.timer = time.AfterFunc(time.Hour, func() { _ = b.Flush() }) // a log that cannot be written has nobody to tell
	b.timer.Stop()
	return b
}

// Write takes p, which is written within Delay.
func (b *Writer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.buf)+len(p) > Most {
		if err := b.flush(); err != nil {
			return 0, err
		}
	}
	if len(p) > Most {
		return b.w.Write(p)
	}
	b.buf = append(b.buf, p...)
	if !b.armed {
		b.armed = true
		b.timer.Reset(Delay)
	}
	return len(p), nil
}

// Flush writes what waits.
func (b *Writer) Flush() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.flush()
}

func (b *Writer) flush() error {
	if b.armed {
		b.armed = false
		b.timer.Stop()
	}
	if len(b.buf) == 0 {
		return nil
	}
	_, err := b.w.Write(b.buf)
	b.buf = b.buf[:0]
	return err
}

// Handler is h, which writes to b: lines up to level info whose message is routine wait, any other
// is written at once, with all before it.
func Handler(h slog.Handler, b *Writer, routine string) slog.Handler {
	return &handler{h, b, routine}
}

type handler struct {
	slog.Handler
	b       *Writer
	routine string
}

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	err := h.Handler.Handle(ctx, r)
	if err == nil && (r.Level > slog.LevelInfo || r.Message != h.routine) {
		err = h.b.Flush()
	}
	return err
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &handler{h.Handler.WithAttrs(attrs), h.b, h.routine}
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{h.Handler.WithGroup(name), h.b, h.routine}
}
