package tier

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// model is where units are, as Changed tells.
type model struct {
	mu       sync.Mutex
	at       map[string]map[kvcache.Hash]bool // by tier
	wrong    error
	clearing atomic.Bool             // pinned units may go as well
	pinned   func(kvcache.Hash) bool // set before anything changes
}

func (m *model) changed(c Change) {
	m.mu.Lock()
	defer m.mu.Unlock()
	have := m.at[c.Tier]
	switch {
	case have[c.Key] == c.Stored:
		m.wrong = fmt.Errorf("%x in %s: stored %t, twice", c.Key, c.Tier, c.Stored)
	case c.Stored && c.Root == (kvcache.Hash{}):
		m.wrong = fmt.Errorf("%x in %s: nobody's", c.Key, c.Tier)
	case !c.Stored && m.pinned(c.Key) && !m.clearing.Load():
		m.wrong = fmt.Errorf("%x is pinned, and has left %s", c.Key, c.Tier)
	}
	if c.Stored {
		have[c.Key] = true
	} else {
		delete(have, c.Key)
	}
}

// restart takes over what the tiers have found on the SSD.
func (m *model) restart(r *rig) {
	m.at = map[string]map[kvcache.Hash]bool{tierHost: {}, tierSSD: {}}
	m.pinned = r.tiers.pins.has
	_ = r.disk.Check(func(has map[kvcache.Hash]bool) error {
		m.at[tierSSD] = has
		return nil
	})
}

// agrees reports whether a level has what it should.
func (m *model) agrees(tier string) func(has map[kvcache.Hash]bool) error {
	return func(has map[kvcache.Hash]bool) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.wrong != nil || !maps.Equal(has, m.at[tier]) {
			return fmt.Errorf("%s has %d units, not the model's %d: %w", tier, len(has), len(m.at[tier]), m.wrong)
		}
		return nil
	}
}

// rounds is how many things a random test does.
func rounds() int {
	if underRace {
		return 1500
	}
	return 10_000
}

// TestRandom does 10,000 random things under all policies and orders in turn,
// with two tenants and with pins. After each one it looks whether the books
// agree with each other and with a model, and every row that the index leads
// to is what its tokens make.
func TestRandom(t *testing.T) {
	t.Parallel()
	cfg := config(t.TempDir())
	cfg.HostBytes, cfg.DirBytes, cfg.LoadBlocks, cfg.PinShare, cfg.WriteHits = 24*page, 48*page, 32, 0.25, 2
	gen := rand.New(rand.NewPCG(7, 7))
	m := &model{}
	cfg.Changed = m.changed
	seen := map[string]int{}
	var r *rig
	begin := func() {
		cfg.Write = []WritePolicy{Through, Selective, Back}[gen.IntN(3)]
		cfg.Eviction = []Eviction{LRU, LFU, S3FIFO}[gen.IntN(3)]
		cfg.TenantShare = []float64{0, 0, 0.6}[gen.IntN(3)]
		r = newRig(t, cfg)
		r.tiers.patience = time.Millisecond
		m.restart(r)
	}
	begin()
	loaded, failed := map[WritePolicy]int{}, 0.0
	clearing := func(f func()) {
		m.clearing.Store(true)
		defer m.clearing.Store(false)
		before := r
		f()
		_ = before.host.Check(nil) // who decided before f, is done after this
		_ = before.disk.Check(nil)
	}
	for i := range rounds() {
		tokens := prompt(gen.IntN(64), 16*(1+gen.IntN(8)))
		salt := []string{"", "", "another"}[gen.IntN(3)]
		op := gen.IntN(24)
		r.prio = int8(gen.IntN(3) - 1)
		switch op {
		case 0:
			r.cache.Clear()
		case 1:
			clearing(func() { r.host.Clear() })
		case 2:
			if gen.IntN(8) == 0 {
				clearing(func() {
					if err := r.tiers.Flush(t.Context()); err != nil {
						t.Fatal(err)
					}
				})
			}
		case 3:
			ids, err := r.cache.Alloc(1+gen.IntN(64), "storm") // much is evicted
			if err == nil {
				r.cache.Release(ids, "storm")
			}
		case 4:
			if gen.IntN(8) == 0 {
				clearing(r.close)
				failed += r.value("io_errors_total", "") + r.value("corrupt_units_total", "")
				begin()
			}
		case 5:
			clearing(func() { // until it is pinned it may go
				if _, err := r.tiers.Pin(tokens, salt, time.Hour); err != nil && !errors.Is(err, ErrPinned) {
					t.Fatal(err)
				}
			})
		case 6:
			for _, p := range r.tiers.Pins() {
				if gen.IntN(3) > 0 {
					r.tiers.Unpin(p.ID)
				}
			}
		case 7, 8, 9, 10, 11, 12, 13, 14:
			loaded[cfg.Write] += r.tiers.Load(t.Context(), tokens, salt, len(tokens))
			fallthrough
		case 15, 16:
			if op > 14 { // not loaded, on a device: read into host memory
				r.tiers.Stage(t.Context(), tokens, salt, len(tokens))
			}
			fallthrough
		default:
			if _, err := r.compute(tokens, salt, "run"); err != nil && !errors.Is(err, kvcache.ErrNoSpace) {
				t.Fatalf("operation %d: %v", i, err)
			}
		}
		seen[fmt.Sprint(cfg.Write, " ", cfg.Eviction)]++
		for _, err := range []error{r.cache.Check(), r.host.Check(m.agrees(tierHost)), r.disk.Check(m.agrees(tierSSD))} {
			if err != nil {
				t.Fatalf("operation %d (%d under %s, %s, tenants %v): %v", i, op, cfg.Write, cfg.Eviction, cfg.TenantShare, err)
			}
		}
	}
	r.close()
	if failed += r.value("io_errors_total", "") + r.value("corrupt_units_total", ""); failed != 0 {
		t.Errorf("%v reads or writes failed", failed)
	}
	t.Log("operations", seen, "tokens loaded", loaded)
	if !underRace && (len(seen) != 9 || loaded[Through] < 1000 || loaded[Selective] < 1000 || loaded[Back] < 1000) {
		t.Error("the test tests little")
	}
}
