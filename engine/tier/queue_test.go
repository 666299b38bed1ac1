package tier

import (
	"fmt"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
)

// TestManyAtOnce: however many requests load at once, from the SSD or from the store,
// each gets all that is there: they take turns, and none is cut short because others ask
// or read. The first are held until as many as may be are under way.
func TestManyAtOnce(t *testing.T) {
	for _, from := range []string{tierSSD, tierStore} {
		for _, n := range []int{1, 2, 3, 4, 8, 50} {
			for _, slots := range []int{1024, 64} { // of host memory: for all, for few
				t.Run(fmt.Sprintf("%d from %s through %d slots", n, from, slots), func(t *testing.T) { testManyAtOnce(t, from, n, slots, false) })
			}
			t.Run(fmt.Sprintf("%d from %s staged", n, from), func(t *testing.T) { testManyAtOnce(t, from, n, 1024, true) })
		}
	}
}

func testManyAtOnce(t *testing.T, from string, n, slots int, stage bool) {
	const units = 18 // more than a window
	var s *redistest.Server
	cfg := config(t.TempDir())
	cfg.DirBytes, cfg.HostBytes = 16<<20, 1<<20
	if from == tierStore {
		s = redistest.Start(t)
		cfg = sharedConfig(t, s, 16)
	}
	w := newRigOf(t, cfg, 2*units, 16)
	all := make([][]int32, n)
	for i := range all {
		all[i] = prompt(256*(i+1), 16*units)
		w.run(all[i], 0)
		w.quiet()
	}
	w.close()

	gate := make(chan struct{})
	release := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	if s != nil {
		cfg = sharedConfig(t, s, 16)
		cfg.Store = &faulty{Store: cfg.Store, ask: func() { <-gate }}
	}
	cfg.HostBytes = int64(slots) * page
	r := newRigOf(t, cfg, n*units+16, 16)
	reads := r.tiers.lane(from).reads
	if s == nil {
		r.block(gate, nil)
	}
	load := r.tiers.Load
	if stage {
		load = r.tiers.Stage
	}
	var wg sync.WaitGroup
	for _, tokens := range all {
		wg.Go(func() { load(t.Context(), tokens, "", len(tokens)) })
	}
	most := min(n, cap(reads))
	if s == nil {
		most = min(n*window, cap(reads))
	}
	soon(t, "reads under way", func() bool { return len(reads) == most })
	release()
	wg.Wait()
	if stage {
		for _, tokens := range all {
			r.tiers.Load(t.Context(), tokens, "", len(tokens))
		}
	}
	for i, tokens := range all {
		if hit, err := r.compute(tokens, "", "run"); err != nil || hit != len(tokens) {
			t.Errorf("of prompt %d %d of %d tokens came: %v", i, hit, len(tokens), err)
		}
	}
	if left := r.value("left_units_total", ""); left != 0 {
		t.Errorf("%v units left out", left)
	}
}

// TestReadsTogether: the units of a prompt that the store has are asked for in one question and read
// in as few reads as may be.
func TestReadsTogether(t *testing.T) {
	const units = 18
	s := redistest.Start(t)
	tokens := prompt(1, 16*units)
	w := newRig(t, sharedConfig(t, s, 16))
	w.run(tokens, 0)
	w.quiet()
	for _, n := range []int{1, 2, units} {
		cfg := sharedConfig(t, s, 16)
		f := &faulty{Store: cfg.Store}
		cfg.Store = f
		r := newRig(t, cfg)
		most := r.tiers.lane(tierStore).limits.Burst
		r.load(tokens[:16*n], 16*n)
		if got, want := f.asked.Load(), int64(1+(n+most-1)/most); got != want {
			t.Errorf("%d units: the store was asked %d times, want %d", n, got, want)
		}
	}
}
