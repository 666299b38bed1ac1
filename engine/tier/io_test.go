package tier

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

// TestHung: an SSD that never answers gets a bounded number of reads; requests go on
// without it, and the worker can end.
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
	r.host.Clear()
	gate := make(chan struct{})
	release := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	r.block(gate, nil)
	for _, tokens := range all {
		r.load(tokens, 0)
		r.run(tokens, 0)
	}
	if n := len(r.tiers.lane(tierSSD).reads); n == 0 || n > cap(r.tiers.lane(tierSSD).reads) {
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
