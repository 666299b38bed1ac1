package tier

import (
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// unit is the name of the prompt's unit that ends at a token.
func (r *rig) unit(tokens []int32, end int) kvcache.Hash {
	chain := r.cache.NewChain("")
	chain.Extend(tokens)
	return chain.Name(end)
}

// TestStalled: an SSD whose reads and writes take 500 ms delays the requests of one
// moment by 100 ms, and later ones not at all, until it has recovered. Nothing is written
// to it meanwhile.
func TestStalled(t *testing.T) {
	for _, policy := range []WritePolicy{Through, Back} {
		t.Run(string(policy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { testStalled(t, policy) })
		})
	}
}

func testStalled(t *testing.T, policy WritePolicy) {
	cfg := config(t.TempDir())
	cfg.DirIO, cfg.Write = IOPread, policy // see TestTTL
	cfg.LoadTimeout, cfg.DirTimeout = 300*time.Millisecond, 100*time.Millisecond
	r := newRig(t, cfg)
	defer r.close()
	tokens, other := prompt(1, 96), prompt(700, 96)
	for _, p := range [][]int32{tokens, other} {
		r.run(p, 0)
		r.quiet()
	}
	r.sink()
	forget := func() {
		r.cache.Clear()
		r.host.Clear()
	}
	forget()
	var by atomic.Int64
	r.stall(&by)
	by.Store(int64(500 * time.Millisecond))
	began := make(chan struct{})
	over := make(chan time.Duration, 1)
	go func() { // together with the first
		close(began)
		at := time.Now()
		r.tiers.Load(t.Context(), other, "", 96)
		over <- time.Since(at)
	}()
	<-began
	r.took(tokens, 0, cfg.DirTimeout)
	if d := <-over; d != cfg.DirTimeout {
		t.Errorf("a request beside it waited for %v", d)
	}
	for range 20 {
		r.took(tokens, 0, 0)
		r.took(other, 0, 0)
	}
	s := r.tiers.Stats()[1]
	if s.LeftAlone == "" || r.value("ssd_open", "") != 1 || r.value("ssd_late_total", "read") == 0 || r.tiers.Knows(r.unit(tokens, 16)) {
		t.Errorf("%+v, %v late", s, r.value("ssd_late_total", "read"))
	}
	if !strings.Contains(s.LeftAlone, cfg.Dir) {
		t.Error(s.LeftAlone)
	}
	time.Sleep(10 * time.Second) // probes find it as slow
	r.took(other, 96, 0)         // what came late is in host memory
	r.run(other, 96)
	forget()
	r.took(other, 0, 0)
	more := prompt(300, 96)
	r.run(more, 0)
	r.sink() // not written, and nobody waits
	r.quiet()
	if n := r.value("dropped_units_total", tierSSD); policy == Through && n != 6 {
		t.Errorf("%v units left out", n)
	}
	if r.disk.Has(r.unit(more, 16)) {
		t.Error("written to an SSD that is left alone")
	}
	forget()
	by.Store(0)
	time.Sleep(probeLast)
	synctest.Wait()
	if s := r.tiers.Stats()[1]; s.LeftAlone != "" || r.value("ssd_open", "") != 0 {
		t.Errorf("still left alone: %+v", s)
	}
	r.took(tokens, 96, 0)
	r.took(other, 96, 0)
	r.run(other, 96)

	by.Store(int64(500 * time.Millisecond)) // a write is enough
	r.run(prompt(900, 96), 0)
	r.sink()
	r.quiet()
	if r.value("ssd_open", "") != 1 || r.value("ssd_late_total", "write") == 0 {
		t.Errorf("writes stall: %+v", r.tiers.Stats()[1])
	}
	forget()
	r.took(tokens, 0, 0)
}
