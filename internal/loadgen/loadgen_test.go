package loadgen_test

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen"
	"github.com/xpyd/xpyd/internal/loadgen/arrival"
	"github.com/xpyd/xpyd/internal/loadgen/client"
	"github.com/xpyd/xpyd/internal/loadgen/record"
	"github.com/xpyd/xpyd/internal/loadgen/workload"
)

// server takes a while for each request and records when they came.
type server struct {
	takes time.Duration
	begin time.Time

	mu          sync.Mutex
	came        []time.Duration
	busy, most  int
	aborted     chan struct{}
	abortedOnce sync.Once
}

func newServer(takes time.Duration) *server {
	return &server{takes: takes, begin: time.Now(), aborted: make(chan struct{})}
}

func (s *server) Do(ctx context.Context, _ *client.Request, res *client.Result) {
	*res = client.Result{Start: time.Now(), Gaps: res.Gaps[:0]}
	s.mu.Lock()
	s.came = append(s.came, time.Since(s.begin))
	s.busy++
	s.most = max(s.most, s.busy)
	s.mu.Unlock()
	select {
	case <-time.After(s.takes):
	case <-s.aborted:
		res.Kind = client.Cancelled
	}
	s.mu.Lock()
	s.busy--
	s.mu.Unlock()
	res.End = time.Since(res.Start)
	res.FirstToken, res.LastToken, res.Chunks = res.End, res.End, 1
}

func (s *server) Abort() { s.abortedOnce.Do(func() { close(s.aborted) }) }

// items are requests at the given times, or without end.
type items struct {
	at   []time.Duration
	next atomic.Int64
	done atomic.Int64
}

func (s *items) Next(ctx context.Context) (*workload.Item, bool) {
	i := s.next.Add(1) - 1
	if s.at == nil {
		return &workload.Item{In: 1, Out: 1}, true
	}
	if int(i) >= len(s.at) {
		return nil, false
	}
	return &workload.Item{At: s.at[i], In: 1, Out: 1}, true
}

func (s *items) Done(*workload.Item, *client.Result) { s.done.Add(1) }

func run(t *testing.T, ctx context.Context, srv *server, src *items, p loadgen.Phase) *record.Stats {
	t.Helper()
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	enc, err := workload.NewEncoder("m", "")
	if err != nil {
		t.Fatal(err)
	}
	rec := record.NewPhase(record.SLO{}, time.Now())
	r := &loadgen.Runner{Post: srv, Encode: enc}
	r.Run(ctx, &p, src, rec)
	s := rec.Stats()
	if int(src.done.Load()) != s.Started+s.Unsent || s.Started != s.Ramped+s.Completed+s.Failed+s.Cancelled {
		t.Errorf("%d given back of %d: %d in the ramp, %d completed, %d cancelled", src.done.Load(), s.Started, s.Ramped, s.Completed, s.Cancelled)
	}
	return s
}

func TestClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newServer(time.Second)
		s := run(t, t.Context(), srv, &items{}, loadgen.Phase{Clients: 4, Requests: 40})
		if s.Completed != 40 || srv.most != 4 || time.Since(srv.begin) != 10*time.Second {
			t.Errorf("%d completed, %d at once, %v", s.Completed, srv.most, time.Since(srv.begin))
		}
		if s.SchedE2E.Count != 0 {
			t.Error("a schedule in a closed loop")
		}
	})
}

// TestClosedRamp: clients start one after another, and requests until all have started are not
// counted.
func TestClosedRamp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newServer(time.Second)
		s := run(t, t.Context(), srv, &items{}, loadgen.Phase{Clients: 4, Duration: 7500 * time.Millisecond, Ramp: 4 * time.Second, Drain: time.Minute})
		for i, want := range []time.Duration{0, 1, 1, 2, 2, 2, 3, 3, 3, 3} {
			if srv.came[i] != want*time.Second {
				t.Errorf("request %d came at %v", i, srv.came[i])
			}
		}
		if s.Ramped != 10 || s.Completed != 16 {
			t.Errorf("%d in the ramp, %d completed", s.Ramped, s.Completed)
		}
	})
}

// TestOpen: requests go out on time although the server is stuck, and the wait shows.
func TestOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newServer(10 * time.Second)
		s := run(t, t.Context(), srv, &items{}, loadgen.Phase{Open: true, Clients: 1000, Requests: 50, Arrival: &arrival.Config{Rate: 8, Burstiness: math.Inf(1)}})
		for i, at := range srv.came {
			if want := time.Duration(i+1) * 125 * time.Millisecond; at != want {
				t.Fatalf("request %d at %v, want %v", i, at, want)
			}
		}
		if s.Completed != 50 || s.Late.Max != 0 {
			t.Errorf("%d completed, late by %d", s.Completed, s.Late.Max)
		}
	})
}

// TestCoordinatedOmission: with a bound on requests in flight, latencies from the schedule include
// the wait that others hide.
func TestCoordinatedOmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := run(t, t.Context(), newServer(time.Second), &items{}, loadgen.Phase{Open: true, Clients: 1, Requests: 10, Arrival: &arrival.Config{Rate: 2, Burstiness: math.Inf(1)}})
		if s.E2E.Max != int64(time.Second) || s.SchedE2E.Max != int64(5500*time.Millisecond) || s.Late.Max != int64(4500*time.Millisecond) {
			t.Errorf("E2E %v, from schedule %v, late %v", time.Duration(s.E2E.Max), time.Duration(s.SchedE2E.Max), time.Duration(s.Late.Max))
		}
	})
}

// TestLateAreSent: requests due within the duration are sent however late; those not sent before
// the drain ends are counted.
func TestLateAreSent(t *testing.T) {
	for _, c := range []struct {
		drain                        time.Duration
		completed, cancelled, unsent int
		late                         time.Duration
	}{{time.Minute, 7, 0, 0, 3 * time.Second}, {time.Second, 4, 1, 2, 1500 * time.Millisecond}, {0, 3, 1, 3, time.Second}} {
		synctest.Test(t, func(t *testing.T) {
			srv := newServer(time.Second)
			p := loadgen.Phase{Open: true, Clients: 1, Duration: 4 * time.Second, Drain: c.drain, Arrival: &arrival.Config{Rate: 2, Burstiness: math.Inf(1)}}
			s := run(t, t.Context(), srv, &items{}, p)
			if s.Completed != c.completed || s.Cancelled != c.cancelled || s.Unsent != c.unsent || s.Late.Max != int64(c.late) {
				t.Errorf("drain %v: %d completed, %d cancelled, %d unsent, late %v", c.drain, s.Completed, s.Cancelled, s.Unsent, time.Duration(s.Late.Max))
			}
		})
	}
}

// TestTrace: items go at their own times until none is left.
func TestTrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := newServer(time.Second)
		src := &items{at: []time.Duration{0, 0, 3 * time.Second, 3500 * time.Millisecond}}
		s := run(t, t.Context(), srv, src, loadgen.Phase{Open: true, Clients: 10})
		for i, want := range src.at {
			if srv.came[i] != want {
				t.Errorf("request %d at %v, want %v", i, srv.came[i], want)
			}
		}
		if s.Completed != 4 || time.Since(srv.begin) != 4500*time.Millisecond {
			t.Errorf("%d completed in %v", s.Completed, time.Since(srv.begin))
		}
	})
}

// TestDrain: after the duration only late requests start; those running when the drain ends are
// aborted and counted separately.
func TestDrain(t *testing.T) {
	for _, open := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			srv := newServer(4 * time.Second)
			p := loadgen.Phase{Clients: 2, Duration: 10 * time.Second, Drain: time.Second}
			if open {
				p.Open, p.Arrival = true, &arrival.Config{Rate: 0.5, Burstiness: math.Inf(1)}
			}
			s := run(t, t.Context(), srv, &items{}, p)
			if last := srv.came[len(srv.came)-1]; last >= 10*time.Second || time.Since(srv.begin) != 11*time.Second {
				t.Errorf("open %v: last start %v, end %v", open, last, time.Since(srv.begin))
			}
			if s.Cancelled == 0 || s.Completed == 0 {
				t.Errorf("open %v: %d completed, %d cancelled", open, s.Completed, s.Cancelled)
			}
		})
	}
}

// TestInterrupt: the end of the context ends everything at once.
func TestInterrupt(t *testing.T) {
	for _, open := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
			defer cancel()
			p := loadgen.Phase{Clients: 2}
			if open {
				p.Open, p.Arrival = true, &arrival.Config{Rate: 1, Burstiness: 1}
			}
			srv := newServer(time.Hour)
			s := run(t, ctx, srv, &items{}, p)
			if s.Completed != 0 || time.Since(srv.begin) != 2500*time.Millisecond {
				t.Errorf("open %v: %d completed, %v", open, s.Completed, time.Since(srv.begin))
			}
		})
	}
}

func TestValidate(t *testing.T) {
	for _, p := range []loadgen.Phase{{}, {Clients: 1, Requests: -1}, {Clients: 1, Duration: 1, Ramp: 2}, {Clients: 1, Arrival: &arrival.Config{}}} {
		if p.Validate() == nil {
			t.Errorf("%+v was taken", p)
		}
	}
}
