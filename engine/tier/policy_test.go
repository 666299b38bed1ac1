package tier

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// policy is config under a policy, with room for 16 units in host memory.
func policy(p WritePolicy, dir string) testConfig {
	c := config(dir)
	c.Write, c.WriteHits = p, 2
	return c
}

// TestTune: what the pool announces under each policy: units that were asked for so often, or those in the
// next quarter of its blocks to be evicted, and at least in the next block.
func TestTune(t *testing.T) {
	for _, c := range []struct {
		policy            WritePolicy
		blocks, hot, cold int
	}{{Through, 64, 0, 0}, {Selective, 64, 2, 0}, {Back, 64, 0, 16}, {Back, 3, 0, 1}} {
		pool := kvcache.Config{Blocks: c.blocks}
		(&Tiers{cfg: policy(c.policy, "").Config}).Tune(&pool)
		if pool.HotHits != c.hot || pool.Ahead != c.cold {
			t.Errorf("%s, %d blocks: after %d hits, %d blocks ahead, want %d and %d", c.policy, c.blocks, pool.HotHits, pool.Ahead, c.hot, c.cold)
		}
	}
}

// TestSelective: a unit is written below when it was asked for twice.
func TestSelective(t *testing.T) {
	r := newRig(t, policy(Selective, t.TempDir()))
	once, often := prompt(1, 96), prompt(100, 96)
	r.run(once, 0)
	r.run(often, 0)
	r.run(often, 96)
	r.saved(tierHost, 0)
	r.run(often, 96)
	r.saved(tierHost, 6)
	r.saved(tierSSD, 0)
	for range 2 {
		r.cache.Clear()
		r.load(once, 0)
		r.saved(tierSSD, 0)
		r.load(often, 96)
	}
	r.saved(tierSSD, 6)
	r.run(often, 96) // right rows
}

// TestBack: units are written when the pool needs room, and from host memory when that
// does; whatever comes back is right.
func TestBack(t *testing.T) {
	cfg := policy(Back, t.TempDir())
	cfg.DirBytes = 2 << 20
	r := newRig(t, cfg)
	r.tiers.patience = time.Minute
	for i := range 6 { // 48 of 64 blocks, the rest is the margin
		r.run(prompt(1000+256*i, 128), 0)
	}
	r.saved(tierHost, 0)
	for i := range 30 {
		r.run(prompt(1000+256*(6+i), 128), 0)
		r.quiet() // the saver has its turn
	}
	if n := r.value("dropped_units_total", ""); n != 0 {
		t.Errorf("%v units lost, %v of them by host memory", n, r.value("dropped_units_total", tierSSD))
	}
	r.saved(tierHost, r.tiers.slots-r.tiers.spare)
	warm := 0
	for i := range 36 { // from the pool, host memory, SSD
		tokens := prompt(1000+256*i, 128)
		n := r.tiers.Load(t.Context(), tokens, "", 128)
		if hit, err := r.compute(tokens, "", "run"); err != nil || hit < n {
			t.Errorf("prompt %d: %d tokens loaded, %d were there: %v", i, n, hit, err)
		} else {
			warm += hit
		}
		r.quiet()
	}
	// A load makes room for what it reads at once, so some went unwritten: 16
	// slots are few for that.
	if warm < 36*128/2 {
		t.Errorf("%d tokens of %d were there", warm, 36*128)
	}
	if n := r.value("loaded_units_total", tierSSD); n < 100 {
		t.Errorf("%v units from the SSD", n)
	}
}

// TestBackRush: an allocation larger than what was announced does not wait; units that
// were not copied are counted.
func TestBackRush(t *testing.T) {
	r := newRig(t, policy(Back, ""))
	r.run(prompt(1, 128), 0)
	ids, err := r.cache.Alloc(64, "all") // at once
	if err != nil {
		t.Fatal(err)
	}
	r.quiet()
	r.cache.Release(ids, "all")
	if n := r.value("dropped_units_total", tierHost); n != 8 {
		t.Errorf("%v units counted as lost, want 8", n)
	}
}

// TestBackRestart: a worker that ends writes what only host memory has.
func TestBackRestart(t *testing.T) {
	cfg := policy(Back, filepath.Join(t.TempDir(), "kv"))
	r := newRig(t, cfg)
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	for range 5 { // slowly, so that it is announced in time
		if _, err := r.cache.Alloc(10, "all"); err != nil {
			t.Fatal(err)
		}
		r.quiet()
	}
	r.saved(tierHost, 6)
	r.saved(tierSSD, 0)
	r.cache.ReleaseAll("all")
	r.close()
	r = newRig(t, cfg)
	r.load(tokens, 96)
	r.run(tokens, 96)
}

// TestBackKeeps: a unit that is loaded while it is being evicted stays.
func TestBackKeeps(t *testing.T) {
	r := newRig(t, policy(Back, ""))
	r.run(prompt(1, 32), 0)
	r.sink()
	l := r.host.Leave(1 << 20)
	u := l.Unit()
	if u.Pos != 16 {
		t.Errorf("the unit at %d goes first, want the prompt's end", u.Pos)
	}
	r.host.Get(u.Key).Release()
	l.Release()
	r.saved(tierHost, 2)
	r.host.Leave(1 << 20).Release()
	r.saved(tierHost, 1)
	if err := r.host.Check(nil); err != nil {
		t.Error(err)
	}
}

// TestTenants: a tenant that has its share makes room from its own units.
func TestTenants(t *testing.T) {
	for _, order := range []Eviction{LRU, LFU, S3FIFO} {
		t.Run(string(order), func(t *testing.T) {
			cfg := config("")
			cfg.TenantShare, cfg.Eviction = 0.25, order // 4 of 16 units
			r := newRig(t, cfg)
			compute := func(n int, salt string) {
				if _, err := r.compute(prompt(n, 32), salt, "run"); err != nil {
					t.Fatal(err)
				}
				r.quiet()
				if err := r.host.Check(nil); err != nil {
					t.Fatal(err)
				}
			}
			compute(256, "modest")
			for i := range 10 {
				compute(256*i, "greedy")
			}
			compute(512, "modest")
			r.saved(tierHost, 8)
			r.cache.Clear()
			for _, n := range []int{256, 512} {
				if got := r.tiers.Load(t.Context(), prompt(n, 32), "modest", 32); got != 32 {
					t.Errorf("the modest one lost its prompt %d", n)
				}
			}
			if n := r.value("tenant_evicted_units_total", ""); n != 16 {
				t.Errorf("%v units went for their tenant's share, want 16", n)
			}
			if n := r.value("tenants", ""); n != 2 {
				t.Errorf("%v tenants", n)
			}
		})
	}
}

// TestPriorities: what came with a higher priority, or got one since, leaves host
// memory last; what came with a lower one leaves it first.
func TestPriorities(t *testing.T) {
	for _, order := range []Eviction{LRU, LFU, S3FIFO} {
		t.Run(string(order), func(t *testing.T) {
			cfg := config("")
			cfg.Eviction = order
			r := newRig(t, cfg)
			compute := func(n int, prio int8) {
				r.prio = prio
				r.run(prompt(n, 32), 0)
				r.quiet()
			}
			compute(256, 5)
			compute(512, 0)
			r.prio = 3
			r.run(prompt(512, 32), 32) // found in the pool
			for i := range 5 {
				compute(1024+256*i, 0)
			}
			compute(8192, -1)
			r.saved(tierHost, 16) // all of it
			compute(9216, 0)
			for _, c := range []struct{ n, want int }{{8192, 0}, {256, 32}, {512, 32}, {1024, 32}} {
				r.cache.Clear()
				if got := r.tiers.Load(t.Context(), prompt(c.n, 32), "", 32); got != c.want {
					t.Errorf("%d tokens of prompt %d are left, want %d", got, c.n, c.want)
				}
			}
			for i := range 20 {
				compute(16384+256*i, 0)
			}
			for _, c := range []struct{ n, want int }{{256, 32}, {512, 32}, {1280, 0}} {
				r.cache.Clear()
				if got := r.tiers.Load(t.Context(), prompt(c.n, 32), "", 32); got != c.want {
					t.Errorf("%d tokens of prompt %d are left at the end, want %d", got, c.n, c.want)
				}
			}
			if err := r.host.Check(nil); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestQuota: loads take what their bytes a second allow.
func TestQuota(t *testing.T) {
	b := bucket{rate: 100}
	now := time.Unix(1000, 0)
	for _, step := range []struct {
		after  time.Duration
		n, got int
	}{{0, 7, 7}, {0, 7, 3}, {0, 1, 0}, {500 * time.Millisecond, 9, 5}, {time.Hour, 100, 10}, {0, 0, 0}} {
		now = now.Add(step.after)
		if got := b.take(step.n, 10, now); got != step.got {
			t.Errorf("%d of %d after %v, want %d", got, step.n, step.after, step.got)
		}
	}
	small := bucket{rate: 1}
	if got := small.take(5, 10, now); got != 1 {
		t.Errorf("%d of a unit larger than the rate", got)
	}
	if got := (&bucket{}).take(5, 10, now); got != 5 {
		t.Errorf("%d without a rate", got)
	}
	cfg := config("")
	cfg.LoadQuota = 2 * page // two units a second
	r := newRig(t, cfg)
	tokens := prompt(1, 96)
	r.run(tokens, 0)
	r.saved(tierHost, 6)
	r.cache.Clear()
	r.load(tokens, 32)
	r.run(tokens, 32) // the rest is computed
	if r.value("no_quota_total", "") != 1 {
		t.Error("not counted")
	}
}

// TestPolicyRows: tokens are right under each policy and block size.
func TestPolicyRows(t *testing.T) {
	t.Parallel()
	turns := 5
	if underRace {
		turns = 2
	}
	for _, p := range []WritePolicy{Through, Selective, Back} {
		for _, blockTokens := range []int{1, 16, 64, 256} {
			t.Run(fmt.Sprint(p, blockTokens), func(t *testing.T) {
				cfg := policy(p, t.TempDir())
				cfg.HostBytes, cfg.DirBytes = 1<<20, 4<<20
				unit := max(blockTokens, 16)
				r := newRigOf(t, cfg, 8*unit/blockTokens, blockTokens)
				for range turns {
					for i := range 6 {
						tokens := prompt(1000+256*i, 3*unit)
						r.tiers.Load(t.Context(), tokens, "", len(tokens))
						if _, err := r.compute(tokens, "", "run"); err != nil {
							t.Fatal(err)
						}
						for range 2 {
							if _, err := r.compute(tokens, "", "again"); err != nil {
								t.Fatal(err)
							}
						}
						r.quiet()
					}
				}
				if n := r.value("loaded_tokens_total", ""); n < float64(7*(turns-1)*unit) {
					t.Errorf("%v tokens loaded", n)
				}
			})
		}
	}
}
