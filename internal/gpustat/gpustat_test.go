package gpustat

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// fake is a GPU that says, fails and hangs as told.
type fake struct {
	mu     sync.Mutex
	say    Sample
	err    error
	hang   chan struct{} // while not nil, Read waits for it
	reads  int
	closed bool
}

func (f *fake) Read() (Sample, error) {
	f.mu.Lock()
	f.reads++
	s, err, hang := f.say, f.err, f.hang
	f.mu.Unlock()
	if hang != nil {
		<-hang
	}
	return s, err
}

func (f *fake) Close() error { f.closed = true; return nil }

func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// names are the metrics that p shows now, with the direction of those that have one.
func names(t *testing.T, p *Poller) (list []string) {
	t.Helper()
	reg := prometheus.NewRegistry()
	if err := reg.Register(p); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			n := strings.TrimPrefix(f.GetName(), "xpyd_gpu_")
			for _, l := range m.Label {
				n += " " + l.GetValue()
			}
			list = append(list, n)
		}
	}
	return list
}

// TestPoller: what the GPU says is shown, what it does not say is absent; nothing
// is shown of one that fails or hangs, until it is back.
func TestPoller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		say := none()
		say.Busy, say.Power, say.NVLinkRead = 0.5, 300, 1<<40
		f := &fake{say: say}
		p := Poll(f, slog.New(slog.DiscardHandler))
		synctest.Wait()
		want := []string{"nvlink_bytes_total received", "power_watts", "utilization_ratio"}
		if got := names(t, p); !slices.Equal(got, want) {
			t.Errorf("%q", got)
		}
		f.set(func() { f.err = errors.New("lost") })
		time.Sleep(stale + Interval)
		if s, ok := p.Latest(); ok {
			t.Errorf("%+v of a GPU that fails", s)
		}
		f.set(func() { f.err = nil; f.say.Power = 200 })
		time.Sleep(Interval)
		synctest.Wait()
		if s, ok := p.Latest(); !ok || s.Power != 200 {
			t.Errorf("%+v %v of a GPU that is back", s, ok)
		}
		hang := make(chan struct{})
		f.set(func() { f.hang = hang })
		time.Sleep(stale + 2*Interval)
		if got := names(t, p); len(got) != 0 {
			t.Errorf("%q of a GPU that hangs", got)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := p.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("closed while it hangs: %v", err)
		}
		close(hang)
		if err := p.Close(t.Context()); err != nil || !f.closed {
			t.Errorf("%v, closed %v", err, f.closed)
		}
	})
}

// TestNoPoller: a worker without a GPU asks, too.
func TestNoPoller(t *testing.T) {
	if _, ok := (*Poller)(nil).Latest(); ok {
		t.Error("nothing was read")
	}
}
