package tier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/tier/uring"
)

// TestIO: without io_uring the SSD is read and written all the same, and it is
// said why; who insists on it is refused at start.
func TestIO(t *testing.T) {
	none := func(int) (*uring.Ring, error) { return nil, fmt.Errorf("%w: by test", uring.ErrUnavailable) }
	e, err := newDiskIO(IOAuto, 4, page, none)
	if err != nil || e.way() != IOPread || !errors.Is(e.why, uring.ErrUnavailable) {
		t.Fatalf("%+v %v", e, err)
	}
	f, err := e.open(filepath.Join(t.TempDir(), "x"), os.O_RDWR|os.O_CREATE)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(aligned(page), 0); err != nil {
		t.Error(err)
	}
	if err := errors.Join(f.Close(), e.close(t.Context())); err != nil {
		t.Error(err)
	}
	if _, err := newDiskIO(IOUring, 4, crossover, none); !errors.Is(err, uring.ErrUnavailable) {
		t.Errorf("insisted upon: %v", err)
	}
	if e, err := newDiskIO(IOPread, 4, page, func(int) (*uring.Ring, error) { panic("nobody asked") }); err != nil || e.why != nil {
		t.Errorf("%+v %v", e, err)
	}
	if e, err := newDiskIO(IOAuto, 4, crossover, func(int) (*uring.Ring, error) { panic("not for large units") }); err != nil || e.way() != IOPread || e.why == nil {
		t.Errorf("%+v %v", e, err)
	}

	for _, by := range []IO{IOAuto, IOPread} {
		cfg := config(filepath.Join(t.TempDir(), "kv"))
		cfg.DirIO = by
		r := newRig(t, cfg)
		r.run(prompt(1, 96), 0)
		r.saved(tierSSD, 6)
		s := r.tiers.Stats()[1]
		want := r.tiers.io.way()
		if by == IOPread {
			want = IOPread
		}
		if s.IO != want || (s.NoIOU != "") != (by == IOAuto && want == IOPread) {
			t.Errorf("%s: %+v", by, s)
		}
		if n := r.value("ssd_io_info", string(want)); n != 1 {
			t.Errorf("%s: the metric says %v", by, n)
		}
		if ring := r.tiers.io.ring; ring != nil {
			if s := ring.Stats(); s.Submitted < 7 || s.Direct != 0 {
				t.Errorf("%+v: it went another way", s)
			}
		}
		r.close()
		if ring := r.tiers.io.ring; ring != nil {
			if s := ring.Stats(); s.Submitted != s.Completed || s.Stray != 0 {
				t.Errorf("%+v after its end", s)
			}
		}
	}
	cfg := config(t.TempDir())
	cfg.DirIO = "floppy"
	if _, err := New(t.Context(), cfg, newMemPool(8, 16), 1, slog.New(slog.DiscardHandler), prometheus.NewRegistry()); err == nil || !strings.Contains(err.Error(), "floppy") {
		t.Errorf("another way: %v", err)
	}
}

// TestHung: an SSD that never answers takes so many reads and no more; requests
// go on without it, and so does the worker's end.
func TestHung(t *testing.T) {
	cfg := config(t.TempDir())
	cfg.LoadTimeout = time.Millisecond
	r := newRig(t, cfg)
	all := make([][]int32, 10)
	for i := range all {
		all[i] = prompt(1000+256*i, 96)
		r.run(all[i], 0)
		r.saved(tierSSD, 6*(i+1))
		r.cache.Clear()
	}
	r.tiers.host.clear()
	gate := make(chan struct{})
	release := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	r.wrap(gate, nil)
	for _, tokens := range all {
		r.load(tokens, 0)
		r.run(tokens, 0)
	}
	if n := len(r.tiers.reads); n == 0 || n > reads {
		t.Errorf("%d reads under way", n)
	}
	for by := time.Now().Add(time.Minute); r.tiers.unsaved.Load() > 0 && time.Now().Before(by); time.Sleep(time.Millisecond) {
	} // what is being saved holds blocks
	if held := r.cache.Holders(); len(held) > 0 {
		t.Errorf("still held: %+v", held)
	}
	r.tiers.grace = time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.tiers.Close(ctx); !errors.Is(err, ErrHung) {
		t.Errorf("closed: %v", err)
	}
	r.load(all[0], 0)
	release() // as the disk comes back, nothing breaks
	r.tiers.wg.Wait()
}
