package logbuf

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		b := New(&out)
		log := slog.New(Handler(slog.NewTextHandler(b, nil), b, "request")).With("a", 1).WithGroup("g")
		lines := func(want int, what string) {
			t.Helper()
			synctest.Wait()
			b.mu.Lock()
			defer b.mu.Unlock()
			if got := strings.Count(out.String(), "\n"); got != want {
				t.Errorf("%s: %d lines are out, want %d", what, got, want)
			}
		}
		log.Info("request")
		log.Info("request")
		lines(0, "routine lines wait")
		time.Sleep(Delay)
		lines(2, "not for long")
		log.Info("request")
		log.Info("fleet")
		lines(4, "another line takes them along")
		log.Warn("request")
		lines(5, "a warning is no routine")
		log.Info("request", "long", strings.Repeat("x", Most))
		lines(6, "one that does not fit")
		for range Most / 100 {
			log.Info("request", "pad", strings.Repeat("x", 100))
		}
		synctest.Wait()
		if b.mu.Lock(); out.Len() < Most || len(b.buf) == 0 || len(b.buf) > Most {
			t.Errorf("%d bytes are out, %d wait", out.Len(), len(b.buf))
		}
		b.mu.Unlock()
		if err := b.Flush(); err != nil {
			t.Error(err)
		}
	})
}

func TestConcurrent(t *testing.T) {
	var out bytes.Buffer
	b := New(&out)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 500 {
				b.Write([]byte("0123456789\n"))
			}
		})
	}
	wg.Wait()
	if err := b.Flush(); err != nil || out.String() != strings.Repeat("0123456789\n", 4000) {
		t.Errorf("%d bytes, %v", out.Len(), err)
	}
}
