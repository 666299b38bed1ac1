package tier

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// TestFlushHung: a flush of an SSD that hangs ends when its time is over, and says so.
// The units are forgotten even so, and their files are deleted once the SSD answers,
// before the next flush begins.
func TestFlushHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(t.TempDir())
		cfg.DirIO = IOPread // see TestTTL
		r := newRig(t, cfg)
		defer r.close()
		tokens := prompt(1, 96)
		r.run(tokens, 0)
		r.quiet()
		old := r.segments()[0]
		var by atomic.Int64
		r.stall(&by)
		by.Store(int64(time.Hour))
		r.set(func(h *hooks) { h.remove = h.open }) // as slow
		flush := func(within time.Duration) (time.Duration, error) {
			ctx, cancel := context.WithTimeout(t.Context(), within)
			defer cancel()
			began := time.Now()
			err := r.tiers.Flush(ctx)
			return time.Since(began), err
		}
		for range 2 { // the second waits for the first
			if took, err := flush(time.Second); !errors.Is(err, ErrHung) || took != time.Second {
				t.Errorf("%v after %v", err, took)
			}
		}
		r.cache.Clear()
		r.took(tokens, 0, 0)
		if left, _ := filepath.Glob(old); len(left) != 1 {
			t.Error("the file is gone already: nothing hung")
		}
		by.Store(0)
		if _, err := flush(4 * time.Hour); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob(old); len(left) != 0 {
			t.Error("the file is still there")
		}
	})
}

// TestFlushClosed: a flush after the tiers were closed begins nothing.
func TestFlushClosed(t *testing.T) {
	r := newRig(t, config(t.TempDir()))
	r.close()
	if err := r.tiers.Flush(t.Context()); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// TestFlushFull: a full disk is flushed, although there is no room for anything new:
// nothing comes back after a restart, and the room that it gave is used.
func TestFlushFull(t *testing.T) {
	cfg := config(t.TempDir())
	r := newRig(t, cfg)
	s := r.confine(1 << 20)
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	r.saved(tierSSD, 6)
	s.fill()
	if err := r.tiers.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(cfg.Dir, "*.xpydkv")); len(left) > 0 {
		t.Errorf("still there: %q", left)
	}
	r.cache.Clear()
	r.load(tokens, 0)
	r.run(tokens, 0)
	r.saved(tierSSD, 6)
	if err := r.tiers.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.close()
	r = newRig(t, cfg)
	if r.load(tokens, 0); r.tiers.Knows(r.unit(tokens, 16)) {
		t.Error("what was flushed is back")
	}
}

// TestFlushGone: without its folder nothing can come back. Files that cannot be deleted
// are reported until they can.
func TestFlushGone(t *testing.T) {
	cfg := config(t.TempDir())
	r := newRig(t, cfg)
	r.run(prompt(1, 96), 0)
	r.saved(tierSSD, 6)
	r.set(func(h *hooks) { h.remove = func(string) error { return syscall.EROFS } })
	for range 2 {
		if err := r.tiers.Flush(t.Context()); !errors.Is(err, syscall.EROFS) {
			t.Errorf("flushed: %v", err)
		}
	}
	r.set(func(h *hooks) { h.remove = nil })
	if err := r.tiers.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(cfg.Dir, "*.xpydkv")); len(left) > 0 {
		t.Errorf("still there: %q", left)
	}
	r.run(prompt(300, 96), 0)
	r.saved(tierSSD, 6)
	if err := os.RemoveAll(cfg.Dir); err != nil {
		t.Fatal(err)
	}
	if err := r.tiers.Flush(t.Context()); err != nil {
		t.Error(err)
	}
}
