package ssd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/ssd/uring"
)

// TestIO: without io_uring the SSD is read and written all the same, and the reason is
// reported; a configuration that insists on io_uring is refused at start.
func TestIO(t *testing.T) {
	none := func(int) (*uring.Ring, error) { return nil, fmt.Errorf("%w: by test", uring.ErrUnavailable) }
	e, err := newDiskIO(IOAuto, 4, level.Page, none)
	if err != nil || e.way() != IOPread || !errors.Is(e.why, uring.ErrUnavailable) {
		t.Fatalf("%+v %v", e, err)
	}
	f, err := e.Open(filepath.Join(t.TempDir(), "x"), os.O_RDWR|os.O_CREATE)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(aligned(level.Page), 0); err != nil {
		t.Error(err)
	}
	if err := errors.Join(f.Close(), e.close(t.Context())); err != nil {
		t.Error(err)
	}
	if _, err := newDiskIO(IOUring, 4, crossover, none); !errors.Is(err, uring.ErrUnavailable) {
		t.Errorf("insisted upon: %v", err)
	}
	if e, err := newDiskIO(IOPread, 4, level.Page, func(int) (*uring.Ring, error) { panic("nobody asked") }); err != nil || e.why != nil {
		t.Errorf("%+v %v", e, err)
	}
	if e, err := newDiskIO(IOAuto, 4, crossover, func(int) (*uring.Ring, error) { panic("not for large units") }); err != nil || e.way() != IOPread || e.why == nil {
		t.Errorf("%+v %v", e, err)
	}

	for _, by := range []IO{IOAuto, IOPread} {
		l, err := Config{Dir: filepath.Join(t.TempDir(), "kv"), Bytes: 128 * level.Page, IO: by}.Open(t.Context(), env(t))
		if err != nil {
			t.Fatal(err)
		}
		d := l.(*Disk)
		for i := range 6 {
			if ok, err := put(t, d, level.Unit{Key: key(i)}); !ok || err != nil {
				t.Error(ok, err)
			}
		}
		s := d.Stats(false)
		want := d.io.way()
		if by == IOPread {
			want = IOPread
		}
		if s.Units != 6 || s.IO != string(want) || (s.NoIOU != "") != (by == IOAuto && want == IOPread) {
			t.Errorf("%s: %+v", by, s)
		}
		reg := prometheus.NewPedanticRegistry()
		reg.MustRegister(d.Metrics())
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		said := false
		for _, f := range families {
			said = said || f.GetName() == "xpyd_kvtier_ssd_io_info" && f.GetMetric()[0].GetLabel()[0].GetValue() == string(want)
		}
		if !said {
			t.Errorf("%s: the metric says something else", by)
		}
		if ring := d.io.ring; ring != nil {
			if s := ring.Stats(); s.Submitted < 7 || s.Direct != 0 {
				t.Errorf("%+v: it went another way", s)
			}
		}
		if err := d.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if ring := d.io.ring; ring != nil {
			if s := ring.Stats(); s.Submitted != s.Completed || s.Stray != 0 {
				t.Errorf("%+v after its end", s)
			}
		}
	}
	if _, err := (Config{Dir: t.TempDir(), Bytes: 128 * level.Page, IO: "floppy"}).Open(t.Context(), env(t)); err == nil || !strings.Contains(err.Error(), "floppy") {
		t.Errorf("another way: %v", err)
	}
}
