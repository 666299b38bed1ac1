package tier

import (
	"context"
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestFlushHung: a flush of an SSD that hangs ends when its time is over and says
// so. Nothing is found any more all the same, and the files are deleted once
// the SSD answers, before the next flush begins.
func TestFlushHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(t.TempDir())
		cfg.DirIO = IOPread // see TestTTL
		r := newRig(t, cfg)
		defer r.close()
		tokens := prompt(1, 96)
		r.run(tokens, 0)
		r.quiet()
		old := r.tiers.disk.log[0].path
		var by atomic.Int64
		r.stall(&by)
		by.Store(int64(time.Hour))
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

// TestFlushClosed: a flush beside the end of the tiers begins nothing.
func TestFlushClosed(t *testing.T) {
	r := newRig(t, config(t.TempDir()))
	r.close()
	if err := r.tiers.Flush(t.Context()); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}
