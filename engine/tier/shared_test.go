package tier

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/redis"
	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/engine/tier/shared"
)

// sharedConfig is host memory over a real Redis.
func sharedConfig(t *testing.T, s *redistest.Server, blockTokens int) testConfig {
	t.Helper()
	return withStore(t, s, blockTokens, patience)
}

func withStore(t *testing.T, s *redistest.Server, blockTokens int, timeout time.Duration) testConfig {
	t.Helper()
	a, err := redis.ParseURL(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	size := shared.ValueBytes(newMemPool(1, blockTokens).Layout())
	c, err := redis.New(redis.Config{Address: a, Timeout: timeout, TTL: time.Hour, MaxValue: size})
	if err != nil {
		t.Fatal(err)
	}
	cfg := config("")
	cfg.HostBytes, cfg.Store, cfg.StoreWrites = 4<<20, c, true
	return cfg
}

// cold forgets what the worker has by itself.
func (r *rig) cold() {
	r.cache.Clear()
	r.host.Clear()
}

// name is the key in the store of the unit that ends at a token.
func (r *rig) name(tokens []int32, end int) string {
	chain := r.cache.NewChain("")
	chain.Extend(tokens)
	return r.store.Key(chain.Name(end))
}

// TestSharedStore: what one worker computes, another loads, and after a restart
// the same; other models and layouts find nothing.
func TestSharedStore(t *testing.T) {
	for _, blockTokens := range []int{1, 16, 64, 256} {
		t.Run(fmt.Sprint(blockTokens), func(t *testing.T) {
			s := redistest.Start(t)
			unit := max(blockTokens, 16)
			start := func() *rig {
				return newRigOf(t, sharedConfig(t, s, blockTokens), 48*unit/blockTokens, blockTokens)
			}
			tokens := prompt(1, 40*unit) // more than one window
			a := start()
			a.run(tokens, 0)
			a.quiet()
			if keys := s.Keys(); len(keys) != 40 {
				t.Fatalf("%d keys", len(keys))
			}
			b := start()
			b.load(tokens, 40*unit)
			b.run(tokens, 40*unit)
			if n := b.value("loaded_units_total", tierStore); n != 40 {
				t.Errorf("%v units from the store", n)
			}
			b.cache.Clear()
			b.load(tokens, 40*unit) // now from host memory
			if n := b.value("loaded_units_total", tierHost); n != 40 {
				t.Errorf("%v units from host memory", n)
			}
			a.close()
			a = start()
			a.load(tokens[:7*unit], 7*unit)
			a.run(tokens, 7*unit)
			a.quiet()
			if n := a.value("saved_units_total", tierStore); n != 0 {
				t.Errorf("%v units written again", n)
			}
			cfg := sharedConfig(t, s, blockTokens)
			cfg.Identity = "another model"
			c := newRigOf(t, cfg, 48*unit/blockTokens, blockTokens)
			c.load(tokens, 0)
			if n, err := c.tiers.Purge(t.Context()); n != 0 || err != nil {
				t.Error(n, err)
			}
			if n, err := b.tiers.Purge(t.Context()); n != 40 || err != nil {
				t.Error(n, err)
			}
			b.cold()
			b.load(tokens, 0)
		})
	}
}

// TestSharedGap: the store fills gaps in what a worker has, and the worker those of the
// store.
func TestSharedGap(t *testing.T) {
	s := redistest.Start(t)
	r := newRig(t, sharedConfig(t, s, 16))
	tokens := prompt(1, 160)
	r.run(tokens, 0)
	r.quiet()
	chain := r.cache.NewChain("")
	chain.Extend(tokens)
	for _, end := range []int{32, 48, 160} {
		r.host.Forget(chain.Name(end))
	}
	if _, err := s.Do("UNLINK", r.name(tokens, 64), r.name(tokens, 16)); err != nil {
		t.Fatal(err)
	}
	r.cache.Clear()
	r.load(tokens, 160)
	r.run(tokens, 160)
	if n := r.value("loaded_units_total", tierStore); n != 3 {
		t.Errorf("%v units from the store", n)
	}
}

// TestSharedSpoilt: whatever bad value a key has, it is not served, and it is deleted.
func TestSharedSpoilt(t *testing.T) {
	s := redistest.Start(t)
	tokens := prompt(1, 96)
	edit := func(f func(b []byte) []byte) func(r *rig, key string) {
		return func(r *rig, key string) { s.Set(key, f(s.Value(key))) }
	}
	flip := func(at int) func(r *rig, key string) {
		return edit(func(b []byte) []byte { b[(at+len(b))%len(b)] ^= 4; return b })
	}
	for name, harm := range map[string]func(r *rig, key string){
		"rows":       flip(headerSize + 100),
		"digest":     flip(-1),
		"header":     flip(9),
		"mark":       flip(33),
		"cut":        edit(func(b []byte) []byte { return b[:len(b)-1] }),
		"cut off":    edit(func(b []byte) []byte { return b[:headerSize] }),
		"cut short":  edit(func(b []byte) []byte { return b[:3] }),
		"empty":      edit(func(b []byte) []byte { return nil }),
		"huge":       edit(func(b []byte) []byte { return make([]byte, 64<<20) }),
		"one more":   edit(func(b []byte) []byte { return append(b, 0) }),
		"all others": edit(func(b []byte) []byte { return bytes.Repeat([]byte{0xff}, len(b)) }),
		"astray":     func(r *rig, key string) { s.Set(key, s.Value(r.name(tokens, 96))) },
		"other type": func(r *rig, key string) {
			if _, err := s.Do("UNLINK", key); err != nil {
				r.t.Fatal(err)
			}
			if _, err := s.Do("LPUSH", key, "x"); err != nil {
				r.t.Fatal(err)
			}
		},
		"foreign": func(r *rig, key string) { // the same unit, of a model with other rows
			value := s.Value(key)
			h, err := level.ParseHeader(value)
			if err != nil {
				r.t.Fatal(err)
			}
			h.Segment++ // the mark
			h.Encode(value)
			s.Set(key, value)
		},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := s.Do("FLUSHALL"); err != nil {
				t.Fatal(err)
			}
			r := newRig(t, sharedConfig(t, s, 16))
			r.run(tokens, 0)
			r.quiet()
			r.cold()
			harm(r, r.name(tokens, 64))
			r.load(tokens, 48)
			r.quiet() // the bad one is deleted
			r.run(tokens, 48)
			r.quiet()
			r.cold()
			r.load(tokens, 96)
			r.run(tokens, 96)
			if n := r.value("corrupt_units_total", tierStore); n != 1 {
				t.Errorf("%v units reported", n)
			}
			if !r.store.Breaker().Allow() {
				t.Error("one bad value, and the store is left alone")
			}
		})
	}
}

// TestSharedAge: a unit's age counts from when it first came into a tier, not
// from when it came here; what is too old is computed, and written anew.
func TestSharedAge(t *testing.T) {
	s := redistest.Start(t)
	a := newRig(t, sharedConfig(t, s, 16))
	tokens := prompt(1, 96)
	a.run(tokens, 0)
	a.quiet()
	age := func(key string, by time.Duration) {
		h, err := level.ParseHeader(s.Value(key))
		if err != nil {
			t.Fatal(err)
		}
		value := s.Value(key)
		h.Born -= int64(by / time.Second)
		h.Encode(value)
		s.Set(key, value)
	}
	age(a.name(tokens, 32), 10*time.Hour)
	age(a.name(tokens, 64), 30*time.Hour)
	age(a.name(tokens, 16), -30*time.Hour) // by a clock of the future
	cfg := sharedConfig(t, s, 16)
	cfg.TTL = 24 * time.Hour
	b := newRig(t, cfg)
	b.load(tokens, 48)
	chain := b.cache.NewChain("")
	chain.Extend(tokens)
	for end, least := range map[int]time.Duration{16: 0, 32: 10 * time.Hour} {
		l := b.host.Peek(chain.Name(end))
		if old := time.Since(l.Unit().Born); old < least || old > least+time.Hour {
			t.Errorf("unit %d is %v old", end, old)
		}
		l.Release()
	}
	b.quiet()
	b.run(tokens, 48)
	b.quiet()
	b.cold()
	b.load(tokens, 96)
	if n := b.value("corrupt_units_total", ""); n != 0 {
		t.Errorf("%v units reported", n)
	}
}

// TestSharedRandom: two workers and somebody who does things to the store; no
// row is ever wrong.
func TestSharedRandom(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	cfg := func() testConfig {
		c := sharedConfig(t, s, 16)
		c.HostBytes = 24 * page
		return c
	}
	workers := []*rig{newRig(t, cfg()), newRig(t, cfg())}
	gen := rand.New(rand.NewPCG(3, 3))
	loaded := 0
	for i := range rounds() / 5 {
		w := gen.IntN(2)
		r := workers[w]
		tokens := prompt(gen.IntN(64), 16*(1+gen.IntN(8)))
		switch gen.IntN(20) {
		case 0, 1, 2:
			r.cold()
		case 3:
			if gen.IntN(10) == 0 {
				r.close()
				workers[w] = newRig(t, cfg())
			}
		case 4, 5:
			key := r.name(tokens, 16)
			if b, err := s.Do("GET", key); err == nil && b != nil {
				value := b.([]byte)
				value[gen.IntN(len(value))] ^= byte(1 + gen.IntN(255))
				s.Set(key, value[:len(value)-gen.IntN(2)])
			}
		case 6:
			if _, err := s.Do("UNLINK", r.name(tokens, len(tokens))); err != nil {
				t.Fatal(err)
			}
		case 7, 8, 9, 10, 11, 12:
			loaded += r.tiers.Load(t.Context(), tokens, "", len(tokens))
			fallthrough
		default:
			if _, err := r.compute(tokens, "", "run"); err != nil && !errors.Is(err, kvcache.ErrNoSpace) {
				t.Fatalf("operation %d: %v", i, err)
			}
		}
		if err := errors.Join(r.cache.Check(), r.host.Check(nil)); err != nil {
			t.Fatalf("operation %d: %v", i, err)
		}
	}
	if loaded < rounds()/5 {
		t.Errorf("only %d tokens were loaded: the test tests little", loaded)
	}
}

// TestSharedShunned: a worker that may not write to the store cannot delete a bad value,
// and does not read it with each request either.
func TestSharedShunned(t *testing.T) {
	s := redistest.Start(t)
	w := newRig(t, sharedConfig(t, s, 16))
	tokens := prompt(1, 96)
	w.run(tokens, 0)
	w.quiet()
	name := w.name(tokens, 48)
	b := s.Value(name)
	b[headerSize+100] ^= 4
	s.Set(name, b)
	cfg := sharedConfig(t, s, 16)
	cfg.StoreWrites = false
	r := newRig(t, cfg)
	load := func(corrupt float64) {
		t.Helper()
		r.cold()
		r.load(tokens, 32)
		r.quiet()
		if n := r.value("corrupt_units_total", tierStore); n != corrupt {
			t.Errorf("read as bad %v times, want %v", n, corrupt)
		}
	}
	for range 3 {
		load(1)
	}
}
