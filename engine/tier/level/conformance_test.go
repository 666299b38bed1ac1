package level_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/redis"
	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/engine/tier/shared"
	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kvlayout"
)

const room = 32 // units of a level that is bounded

var shape = level.NewShape(kvlayout.Plain(2, 2, 4, 16, kvlayout.F32), 1)

// memoryLevel has host memory do what a level below it does: it copies records.
type memoryLevel struct{ *host.Memory }

type memoryConfig struct{ host.Config }

func (c memoryConfig) Open(ctx context.Context, env *level.Env) (level.Level, error) {
	m, err := c.Config.Open(ctx, env)
	return memoryLevel{m}, err
}

func (m memoryLevel) Breaker() *level.Breaker { return nil }
func (m memoryLevel) Limits() level.Limits    { return level.Limits{Loads: 1, Burst: 1, Writers: 1} }
func (m memoryLevel) Metrics() level.Metrics  { return nil }

func (m memoryLevel) Load(_ context.Context, reads []level.Read, got func(i int, born time.Time, err error)) {
	for i, r := range reads {
		l := m.Get(r.Key)
		if l == nil {
			got(i, time.Time{}, level.ErrGone)
			continue
		}
		copy(r.Rec, l.Record())
		born := l.Unit().Born
		l.Release()
		got(i, born, nil)
	}
}

func (m memoryLevel) Save(_ context.Context, u level.Unit, rec []byte) (saved bool, err error) {
	l, _ := m.Take(u)
	if l == nil {
		if m.Has(u.Key) {
			return false, nil
		}
		return false, level.ErrLeftOut
	}
	copy(l.Record(), rec)
	l.Publish(time.Time{})
	l.Release()
	return true, nil
}

// kind is a level to be tested.
type kind struct {
	owner   *testing.T // of folder and server, which outlive a level
	config  func(t *testing.T) level.Config
	bounded bool // it has room for so many units
	keeps   bool // what it has outlives it
	// harm changes byte off of a unit's record behind the level's back.
	harm func(t *testing.T, l level.Level, key kvcache.Hash, off int)
}

// kinds are all levels: a new one is one entry.
func kinds() map[string]*kind {
	var server *redistest.Server
	var dir string
	return map[string]*kind{
		"host": {
			config:  func(*testing.T) level.Config { return memoryConfig{host.Config{Bytes: room * level.Page}} },
			bounded: true,
			harm: func(t *testing.T, l level.Level, key kvcache.Hash, off int) {
				lease := l.(memoryLevel).Peek(key)
				lease.Record()[off] ^= 4
				lease.Release()
			},
		},
		"ssd": {
			config: func(t *testing.T) level.Config {
				if dir == "" {
					dir = filepath.Join(t.TempDir(), "kv")
				}
				return ssd.Config{Dir: dir, Bytes: room * level.Page}
			},
			bounded: true, keeps: true,
			harm: func(t *testing.T, _ level.Level, key kvcache.Hash, off int) {
				files, _ := filepath.Glob(filepath.Join(dir, "*.xpydkv"))
				for _, path := range files {
					b, err := os.ReadFile(path)
					if err != nil {
						t.Fatal(err)
					}
					for at := level.Page; at < len(b); at += shape.Record() {
						if h, err := level.ParseHeader(b[at:]); err == nil && h.Key == key {
							b[at+off] ^= 4
						}
					}
					if err := os.WriteFile(path, b, 0o600); err != nil {
						t.Fatal(err)
					}
				}
			},
		},
		"shared": {
			config: func(t *testing.T) level.Config {
				if server == nil {
					server = redistest.Start(t)
				}
				a, err := redis.ParseURL(server.URL())
				if err != nil {
					t.Fatal(err)
				}
				c, err := redis.New(redis.Config{Address: a, Timeout: time.Minute, TTL: time.Hour, MaxValue: shared.ValueBytes(shape.Layout)})
				if err != nil {
					t.Fatal(err)
				}
				return shared.Config{Store: c, Writes: true}
			},
			keeps: true,
			harm: func(t *testing.T, l level.Level, key kvcache.Hash, off int) {
				name := l.(*shared.Shared).Key(key)
				b := server.Value(name)
				b[off] ^= 4
				server.Set(name, b)
			},
		},
	}
}

// each runs a test for every level.
func each(t *testing.T, f func(t *testing.T, k *kind)) {
	for name, k := range kinds() {
		t.Run(name, func(t *testing.T) {
			k.owner = t
			f(t, k)
		})
	}
}

// open opens a level, with env as change leaves it; it is closed with the test.
func (k *kind) open(t *testing.T, change func(env *level.Env)) level.Level {
	t.Helper()
	pool, err := cpu.NewPool(shape.Layout, 1)
	if err != nil {
		t.Fatal(err)
	}
	awake, rest := context.WithCancel(context.Background())
	env := &level.Env{Shape: shape, Identity: "identity", Pool: pool, LoadTimeout: time.Minute, Complain: func(error) {}, Log: slog.New(slog.DiscardHandler), Awake: awake}
	if change != nil {
		change(env)
	}
	l, err := k.config(k.owner).Open(t.Context(), env)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sync.OnceFunc(func() {
		rest()
		l.Breaker().Close()
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}))
	return l
}

// aligned is a buffer for one record.
func aligned() []byte {
	b := make([]byte, 2*level.Page)
	off := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (level.Page - 1)
	return b[off : off+level.Page : off+level.Page]
}

// record makes the record of a unit, with rows of its own and their digests.
func record(u *level.Unit) []byte {
	rec := aligned()
	sums := make([]uint64, shape.Heads)
	for layer := range shape.ByLayer {
		l := &shape.ByLayer[layer]
		rows := rec[l.RowsAt:][:l.BlockBytes()]
		for i := range rows {
			rows[i] = byte(i*(layer+3)) + u.Key[0] + 3*u.Key[1]
		}
		kernels.DigestRows(&l.Layer, u.Pos, shape.BlockTokens, rows, sums)
		for h, d := range sums {
			binary.LittleEndian.PutUint64(rec[l.DigestsAt+8*h:], d)
		}
	}
	return rec
}

// born is when all units entered the tiers.
var born = time.Now().Add(-time.Minute).Truncate(time.Second)

func unit(i int) level.Unit {
	return level.Unit{Key: kvcache.Hash{byte(i), byte(i >> 8), 1}, Root: kvcache.Hash{9}, Pos: 16 * i, Born: born}
}

func save(t *testing.T, l level.Level, u level.Unit, want bool) {
	t.Helper()
	if saved, err := l.Save(t.Context(), u, record(&u)); saved != want || err != nil {
		t.Fatalf("saved %t, %v, want %t", saved, err, want)
	}
}

// load reads units one by one; whether what came is right.
func load(t *testing.T, ctx context.Context, l level.Level, units ...level.Unit) (right []bool, errs []error) {
	t.Helper()
	for _, u := range units {
		rec, calls := aligned(), 0
		l.Load(ctx, []level.Read{{Key: u.Key, Pos: u.Pos, Rec: rec}}, func(i int, born time.Time, err error) {
			calls++
			errs = append(errs, err)
			right = append(right, err == nil && shape.Right(u.Pos, rec) && bytes.Equal(rec[level.HeaderSize:], record(&u)[level.HeaderSize:]))
			if err == nil && !born.Equal(u.Born) {
				t.Errorf("born %v, want %v", born, u.Born)
			}
		})
		if calls != 1 {
			t.Fatalf("%d answers to one question", calls)
		}
	}
	return right, errs
}

// has reports whether a level has a unit, by asking where it has to be asked.
func has(t *testing.T, l level.Level, u level.Unit) bool {
	t.Helper()
	if r, ok := l.(level.Remote); ok {
		have, ok := r.Ask(t.Context(), []kvcache.Hash{u.Key})
		if !ok || len(have) != 1 {
			t.Fatal("no answer")
		}
		return have[0]
	}
	if l.Has(u.Key) != l.Born(u.Key).Equal(u.Born) {
		t.Errorf("has it: %t, born %v", l.Has(u.Key), l.Born(u.Key))
	}
	return l.Has(u.Key)
}

// gone fails unless a unit is neither known nor loaded.
func gone(t *testing.T, l level.Level, u level.Unit) {
	t.Helper()
	if has(t, l, u) {
		t.Error("it is still there")
	}
	if right, errs := load(t, t.Context(), l, u); right[0] || errs[0] == nil {
		t.Errorf("loaded: %v", errs)
	}
}

// TestLevelKeeps: what was saved can be loaded any number of times, and saving it again
// does nothing; what was forgotten or cleared is not found, and can be saved again.
func TestLevelKeeps(t *testing.T) {
	each(t, func(t *testing.T, k *kind) {
		l := k.open(t, nil)
		a, b := unit(1), unit(2)
		gone(t, l, a)
		save(t, l, a, true)
		save(t, l, a, false)
		save(t, l, b, true)
		for range 2 {
			if right, errs := load(t, t.Context(), l, a, b); !right[0] || !right[1] {
				t.Fatal(errs)
			}
		}
		if !has(t, l, a) {
			t.Error("it does not know what it has")
		}
		l.Forget(a.Key)
		r, remote := l.(level.Remote)
		if remote {
			r.Delete(t.Context(), a.Key)
		}
		gone(t, l, a)
		save(t, l, a, true)
		if erase := l.Clear(); erase != nil {
			if err := erase(); err != nil {
				t.Error(err)
			}
		}
		if remote {
			if n, err := r.Purge(t.Context()); n != 2 || err != nil {
				t.Error(n, err)
			}
		}
		gone(t, l, a)
		gone(t, l, b)
		save(t, l, b, true)
	})
}

// TestLevelBurst: units of one Load are answered in order, including those that are not
// there.
func TestLevelBurst(t *testing.T) {
	each(t, func(t *testing.T, k *kind) {
		l := k.open(t, nil)
		var reads []level.Read
		for i := range l.Limits().Burst {
			u := unit(i)
			if i%2 == 0 {
				save(t, l, u, true)
			}
			reads = append(reads, level.Read{Key: u.Key, Pos: u.Pos, Rec: aligned()})
		}
		next := 0
		l.Load(t.Context(), reads, func(i int, _ time.Time, err error) {
			if i != next || (err == nil) != (i%2 == 0) {
				t.Errorf("%d as the %d-th: %v", i, next, err)
			}
			next++
		})
		if next != len(reads) {
			t.Errorf("%d answers of %d", next, len(reads))
		}
	})
}

// TestLevelFull: a full level makes room for a new unit; pinned units stay, and each
// eviction is reported.
func TestLevelFull(t *testing.T) {
	each(t, func(t *testing.T, k *kind) {
		if !k.bounded {
			t.Skip("it has no bound of its own")
		}
		pinned := unit(3)
		var mu sync.Mutex
		told := map[kvcache.Hash]bool{}
		l := k.open(t, func(e *level.Env) {
			e.Pinned = func(key kvcache.Hash) bool { return key == pinned.Key }
			e.Changed = func(_ string, u level.Unit, stored bool) {
				mu.Lock()
				defer mu.Unlock()
				if told[u.Key] == stored {
					t.Errorf("%x: stored %t, twice", u.Key, stored)
				}
				told[u.Key] = stored
			}
		})
		for i := range 4 * room {
			save(t, l, unit(i), true)
		}
		s := l.Stats(true)
		if s.Capacity > room || s.Units > s.Capacity || s.Units < room/2 || s.Evicted < 2*room || s.Tier != l.Name() || s.OldestS < 59 {
			t.Errorf("%+v", s)
		}
		n := 0
		for i := range 4 * room {
			here := has(t, l, unit(i))
			if here {
				n++
			}
			if told[unit(i).Key] != here || (i == 3 || i == 4*room-1) && !here {
				t.Errorf("unit %d is here: %t", i, here)
			}
		}
		if n != s.Units {
			t.Errorf("%d units are here, %d were said", n, s.Units)
		}
		if right, errs := load(t, t.Context(), l, pinned, unit(4*room-1)); !right[0] || !right[1] {
			t.Error(errs)
		}
	})
}

// TestLevelCorrupt: whatever byte of a record has changed, the level says so or the
// digests do, and no other unit suffers.
func TestLevelCorrupt(t *testing.T) {
	each(t, func(t *testing.T, k *kind) {
		l := k.open(t, nil)
		a, b := unit(1), unit(2)
		save(t, l, b, true)
		for _, off := range []int{9, 26, 45, 61, level.HeaderSize + 5, shape.ByLayer[0].DigestsAt - 1, level.HeaderSize + shape.Payload() - 1} {
			save(t, l, a, true)
			k.harm(t, l, a.Key, off)
			right, errs := load(t, t.Context(), l, a, b)
			if _, memory := l.(memoryLevel); right[0] && !(memory && off < level.HeaderSize) { // memory reads no header
				t.Errorf("byte %d: %v", off, errs[0])
			}
			if errs[0] != nil && !errors.Is(errs[0], level.ErrCorrupt) {
				t.Errorf("byte %d: %v", off, errs[0])
			}
			if !right[1] {
				t.Errorf("byte %d: the other unit is gone: %v", off, errs[1])
			}
			l.Forget(a.Key)
			if r, ok := l.(level.Remote); ok {
				r.Delete(t.Context(), a.Key)
			}
		}
	})
}

// TestLevelCloses: what a level keeps is found when it is opened again, only under the
// same identity.
func TestLevelCloses(t *testing.T) {
	each(t, func(t *testing.T, k *kind) {
		a := unit(1)
		t.Run("first", func(t *testing.T) { save(t, k.open(t, nil), a, true) })
		t.Run("again", func(t *testing.T) {
			l := k.open(t, nil)
			if right, errs := load(t, t.Context(), l, a); right[0] != k.keeps {
				t.Error(errs)
			}
		})
		t.Run("other", func(t *testing.T) {
			gone(t, k.open(t, func(e *level.Env) { e.Identity = "another" }), a)
		})
	})
}

// TestLevelCancelled: a load whose time is over is answered all the same, and the level
// keeps working.
func TestLevelCancelled(t *testing.T) {
	each(t, func(t *testing.T, k *kind) {
		l := k.open(t, nil)
		a := unit(1)
		save(t, l, a, true)
		over, cancel := context.WithCancel(t.Context())
		cancel()
		if right, errs := load(t, over, l, a); !right[0] && errs[0] == nil {
			t.Error("wrong rows without an error")
		}
		if right, errs := load(t, t.Context(), l, a); !right[0] || !l.Breaker().Allow() {
			t.Error(errs)
		}
	})
}

// TestLevelOld: a unit is not found from kv.ttl on, by a level of this worker's own.
func TestLevelOld(t *testing.T) {
	each(t, func(t *testing.T, k *kind) {
		l := k.open(t, func(e *level.Env) { e.TTL = time.Hour })
		young, old := unit(1), unit(2)
		old.Born = old.Born.Add(-time.Hour)
		save(t, l, young, true)
		save(t, l, old, true)
		if !has(t, l, young) {
			t.Error("it is not that old")
		}
		if _, ok := l.(level.Remote); !ok { // whoever asks a remote one looks at the age
			gone(t, l, old)
		}
	})
}

// TestLevelTogether: many callers at once, within the limits, see whole units only.
func TestLevelTogether(t *testing.T) {
	each(t, func(t *testing.T, k *kind) {
		l := k.open(t, nil)
		var all sync.WaitGroup
		for w := range 4 {
			all.Go(func() {
				for i := range 100 {
					u := unit((i*7 + w) % 24)
					if _, err := l.Save(t.Context(), u, record(&u)); err != nil && !errors.Is(err, level.ErrLeftOut) {
						t.Error(err)
					}
					u.Born = time.Time{}
					rec := aligned()
					l.Load(t.Context(), []level.Read{{Key: u.Key, Pos: u.Pos, Rec: rec}}, func(_ int, _ time.Time, err error) {
						if err == nil && !bytes.Equal(rec[level.HeaderSize:], record(&u)[level.HeaderSize:]) {
							t.Error("another unit, or half of one")
						}
					})
					if i%10 == 9 {
						l.Forget(u.Key)
					}
				}
			})
		}
		all.Wait()
	})
}

// TestLevelMetrics: a level describes what it collects, under the tiers' names.
func TestLevelMetrics(t *testing.T) {
	each(t, func(t *testing.T, k *kind) {
		l := k.open(t, nil)
		save(t, l, unit(1), true)
		reg := prometheus.NewRegistry()
		if err := reg.Register(l.Metrics()); err != nil {
			t.Fatal(err)
		}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if name := f.GetName(); len(name) < 12 || name[:12] != "xpyd_kvtier_" {
				t.Error(name)
			}
		}
		if lim := l.Limits(); lim.Loads < 1 || lim.Burst < 1 || lim.Writers < 1 {
			t.Errorf("%+v", lim)
		}
	})
}
