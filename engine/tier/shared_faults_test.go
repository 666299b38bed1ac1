package tier

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/engine/tier/store"
)

// faulty is a store with something in the way.
type faulty struct {
	store.Store
	asked atomic.Int64 // operations, but for probes
	ask   func()       // called before each question
	read  func(i int)  // called before each value is handed on
	write func()       // before each write
}

func (f *faulty) Exists(ctx context.Context, keys []string) ([]bool, error) {
	if !strings.HasSuffix(keys[0], "probe") {
		f.asked.Add(1)
		if f.ask != nil {
			f.ask()
		}
	}
	return f.Store.Exists(ctx, keys)
}

func (f *faulty) Read(ctx context.Context, keys []string, got func(int, []byte, error)) error {
	f.asked.Add(1)
	return f.Store.Read(ctx, keys, func(i int, b []byte, err error) {
		if f.read != nil {
			f.read(i)
		}
		got(i, b, err)
	})
}

func (f *faulty) Write(ctx context.Context, key string, value []byte) (bool, error) {
	if f.write != nil {
		f.write()
	}
	return f.Store.Write(ctx, key, value)
}

// well waits until the breaker lets operations through again.
func (r *rig) well() {
	r.t.Helper()
	soon(r.t, "the store is not left alone any more", r.store.Breaker().Allow)
}

// TestSharedKilled: if a store dies in the middle of a load, only what it has not given
// yet is lost. Later loads do not ask it; when it is back, it is used.
func TestSharedKilled(t *testing.T) {
	s := redistest.Start(t)
	cfg := sharedConfig(t, s, 16)
	f := &faulty{Store: cfg.Store}
	cfg.Store = f
	r := newRig(t, cfg)
	tokens := prompt(1, 640)
	r.run(tokens, 0)
	r.quiet()
	r.cold()
	var values atomic.Int64
	f.read = func(int) {
		if values.Add(1) == 3 {
			s.Kill()
		}
	}
	n := r.tiers.Load(t.Context(), tokens, "", len(tokens))
	if n >= 640 || r.value("store_open", "") != 1 {
		t.Fatalf("%d tokens loaded, %v", n, r.tiers.StoreStats())
	}
	r.run(tokens, n)
	asked := f.asked.Load()
	r.cold()
	r.load(tokens, 0)
	if st := r.tiers.StoreStats(); f.asked.Load() > asked || st.Reachable || st.LastError == "" {
		t.Errorf("asked %d times more: %+v", f.asked.Load()-asked, st)
	}
	r.run(tokens, 0)
	r.quiet()
	s.Run()
	r.well()
	r.cold()
	r.run(tokens, 0)
	r.quiet()
	r.cold()
	r.load(tokens, 640)
	r.run(tokens, 640)
}

// TestSharedHung: a store that hangs costs one load its timeout.
func TestSharedHung(t *testing.T) {
	s := redistest.Start(t)
	tokens := prompt(1, 96)
	w := newRig(t, sharedConfig(t, s, 16))
	w.run(tokens, 0)
	w.quiet()
	cfg := withStore(t, s, 16, 200*time.Millisecond)
	f := &faulty{Store: cfg.Store}
	cfg.Store = f
	r := newRig(t, cfg)
	s.Stop()
	r.load(tokens, 0) // within cfg.LoadTimeout, or the rig's would be a failure
	if r.store.Breaker().Allow() {
		t.Fatal("the store hangs, and is still asked")
	}
	for range 50 {
		r.load(tokens, 0)
	}
	if f.asked.Load() != 1 {
		t.Error("a later load asks it")
	}
	r.run(tokens, 0) // to be written: dropped
	r.quiet()
	if r.value("dropped_units_total", tierStore) == 0 || r.value("store_errors_total", "") == 0 {
		t.Error("nothing is counted")
	}
	s.Continue()
	soon(t, "all is loaded in time", func() bool { // a slow machine's may be late
		r.well()
		r.cold()
		return r.tiers.Load(t.Context(), tokens, "", 96) == 96
	})
	r.run(tokens, 96)
}

// TestSharedImpatient: a load whose time is over does not wait for the store's timeout,
// and what comes later does no harm.
func TestSharedImpatient(t *testing.T) {
	s := redistest.Start(t)
	cfg := sharedConfig(t, s, 16)
	cfg.LoadTimeout = 20 * time.Millisecond
	r := newRig(t, cfg)
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	r.quiet()
	r.cold()
	s.Stop()
	r.load(tokens, 0)
	r.run(tokens, 0)
	r.cold()
	s.Continue()
	r.quiet()
	r.tiers.cfg.LoadTimeout = patience
	r.load(tokens, 96)
	r.run(tokens, 96)
}

// TestSharedPressure: writes delay nobody; units that do not fit into the queue are
// counted.
func TestSharedPressure(t *testing.T) {
	s := redistest.Start(t)
	cfg := sharedConfig(t, s, 16)
	gate := make(chan struct{})
	release := sync.OnceFunc(func() { close(gate) })
	cfg.Store = &faulty{Store: cfg.Store, write: func() { <-gate }}
	cfg.HostBytes = 8 << 20 // more than the queue
	r := newRig(t, cfg)
	t.Cleanup(release)
	for i := 0; r.value("dropped_units_total", tierStore) == 0; i++ {
		if i == 1000 {
			t.Fatal("nothing is dropped")
		}
		r.cache.Clear()
		if _, err := r.compute(prompt(i<<8, 512), "", "run"); err != nil {
			t.Fatal(err)
		}
	}
	release()
	r.quiet()
	if n := r.value("saved_units_total", tierStore); n < writeQueue {
		t.Errorf("%v units saved", n)
	}
}

// TestSharedRefused: a full store is read, and not written to for a while; one
// that is only read is not written to.
func TestSharedRefused(t *testing.T) {
	s := redistest.Start(t)
	r := newRig(t, sharedConfig(t, s, 16))
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	r.quiet()
	if _, err := s.Do("CONFIG", "SET", "maxmemory", "1"); err != nil {
		t.Fatal(err)
	}
	more := prompt(5000, 96)
	r.run(more, 0)
	r.quiet()
	if n := r.value("dropped_units_total", tierStore); n < 3 || len(s.Keys()) != 6 {
		t.Errorf("%v units dropped, %d keys", n, len(s.Keys()))
	}
	r.cold()
	r.load(tokens, 96)
	r.run(tokens, 96)
	if st := r.tiers.StoreStats(); !st.Reachable || !strings.Contains(st.LastError, "OOM") || st.Written != 6 {
		t.Errorf("%+v", st)
	}
	if _, err := s.Do("CONFIG", "SET", "maxmemory", "0"); err != nil {
		t.Fatal(err)
	}
	cfg := sharedConfig(t, s, 16)
	cfg.StoreWrites = false
	reader := newRig(t, cfg)
	reader.load(tokens, 96)
	reader.run(more, 0)
	reader.quiet()
	if n := len(s.Keys()); n != 6 {
		t.Errorf("%d keys", n)
	}
	if _, err := reader.tiers.Purge(t.Context()); !errors.Is(err, ErrNoStore) {
		t.Error(err)
	}
}
