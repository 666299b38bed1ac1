package kept

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
)

func entry(owner string, before ...string) *Entry {
	return &Entry{Owner: owner, Before: before, Input: []byte(`"a"`), Response: []byte(`{"output":[]}`)}
}

func open(t testing.TB, edit func(*Config)) *Store {
	t.Helper()
	cfg := DefaultConfig()
	if edit != nil {
		edit(&cfg)
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func put(t *testing.T, s *Store, id string, e *Entry) {
	t.Helper()
	if err := s.Put(t.Context(), id, e); err != nil {
		t.Fatalf("%s: %v", id, err)
	}
}

func has(t *testing.T, s *Store, owner, id string) bool {
	t.Helper()
	_, err := s.Find(t.Context(), owner, id)
	if err != nil && !errors.Is(err, ErrNone) {
		t.Fatal(err)
	}
	return err == nil
}

// TestStores: what holds in memory and in a Redis, real or not.
func TestStores(t *testing.T) {
	for name, edit := range map[string]func(*Config){
		"memory": nil,
		"fake":   func(c *Config) { c.Redis = redistest.StartFake(t).URL() },
		"redis":  func(c *Config) { c.Redis = redistest.Start(t).URL() },
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, edit)
			if !s.On() || s.Shared() != (name != "memory") {
				t.Error(s.On(), s.Shared())
			}
			put(t, s, "r1", entry("a"))
			put(t, s, "r2", entry("a", "r1"))
			put(t, s, "r3", &Entry{Owner: "a", Before: []string{"r1", "r2"}, Input: []byte(`[{"x":"<ä>"}]`), Response: []byte(`{"id":"r3"}`)})
			chain, err := s.Chain(t.Context(), "a", "r3")
			if err != nil || len(chain) != 3 || len(chain[0].Before) != 0 || len(chain[1].Before) != 1 || !bytes.Contains(chain[2].Response, []byte("r3")) {
				t.Fatalf("%+v %v", chain, err)
			}
			if one, err := s.Chain(t.Context(), "a", "r1"); err != nil || len(one) != 1 {
				t.Errorf("%v %v", one, err)
			}
			for _, id := range []string{"r1", "r3", "none"} {
				_, err := s.Chain(t.Context(), "b", id)
				if derr := s.Delete(t.Context(), "b", id); has(t, s, "b", id) || !errors.Is(err, ErrNone) || !errors.Is(derr, ErrNone) {
					t.Errorf("%s: another finds it: %v %v", id, err, derr)
				}
			}
			if err := s.Delete(t.Context(), "a", "r1"); err != nil || has(t, s, "a", "r1") {
				t.Errorf("%v", err)
			}
			_, err = s.Chain(t.Context(), "a", "r3")
			var missing *MissingError
			if !errors.As(err, &missing) || missing.ID != "r1" || !errors.Is(err, ErrNone) {
				t.Errorf("%v", err)
			}
			if s.Shared() {
				runs := &Entry{Owner: "a", Input: []byte(`"a"`), Response: []byte(`{"status":"queued"}`), Until: 7}
				if err := s.Announce(t.Context(), "r4", runs); err != nil {
					t.Error(err)
				}
				if e, err := s.Find(t.Context(), "a", "r4"); err != nil || e.Until != 7 || has(t, s, "b", "r4") {
					t.Errorf("%+v %v", e, err)
				}
				put(t, s, "r4", entry("a"))
				if e, err := s.Find(t.Context(), "a", "r4"); err != nil || e.Until != 0 {
					t.Errorf("%+v %v", e, err)
				}
				if err := errors.Join(s.Delete(t.Context(), "a", "r4"), s.Retract(t.Context(), "r4")); err != nil || has(t, s, "a", "r4") {
					t.Error(err)
				}
			}
			put(t, s, "forged", entry("a", "r2", "foreign"))
			put(t, s, "foreign", entry("b"))
			if _, err = s.Chain(t.Context(), "a", "forged"); !errors.As(err, &missing) || missing.ID != "foreign" {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestBounds(t *testing.T) {
	s := open(t, func(c *Config) { c.Entries = 3 })
	for i := range 4 {
		put(t, s, fmt.Sprint(i), entry(""))
	}
	if has(t, s, "", "0") || !has(t, s, "", "1") {
		t.Error("the oldest is not the one that went")
	}
	put(t, s, "4", entry("")) // 1 was used since
	if has(t, s, "", "2") || !has(t, s, "", "1") {
		t.Error("the one used longest ago is not the one that went")
	}
	put(t, s, "4", entry(""))
	if n := s.Stats(); n.Entries != 3 || n.Full != 2 || n.Bytes != 3*entry("").size() {
		t.Errorf("%+v", n)
	}

	big := entry("")
	big.Response = []byte(strings.Repeat("x", 3000))
	s = open(t, func(c *Config) { c.Bytes = 2 * big.size() })
	for i := range 5 {
		put(t, s, fmt.Sprint(i), big)
	}
	if n := s.Stats(); n.Entries != 2 || n.Bytes > 2*big.size() || n.Full != 3 {
		t.Errorf("%+v", n)
	}
	if err := s.Delete(t.Context(), "", "4"); err != nil || s.Stats().Bytes != big.size() {
		t.Errorf("%v %+v", err, s.Stats())
	}
	larger := *big
	larger.Input = []byte(strings.Repeat("x", 6000))
	if err := s.Put(t.Context(), "l", &larger); !errors.Is(err, ErrLarge) || s.Stats().Large != 1 || !has(t, s, "", "3") {
		t.Errorf("%v %+v", err, s.Stats())
	}

	if s = open(t, func(c *Config) { c.Entries = 0 }); s.On() {
		t.Error("it is on")
	}
}

// TestChainStays: who uses the last of a conversation has used all of it.
func TestChainStays(t *testing.T) {
	s := open(t, func(c *Config) { c.Entries = 4 })
	put(t, s, "r1", entry(""))
	put(t, s, "r2", entry("", "r1"))
	put(t, s, "x", entry(""))
	put(t, s, "y", entry(""))
	if _, err := s.Chain(t.Context(), "", "r2"); err != nil {
		t.Fatal(err)
	}
	put(t, s, "z1", entry(""))
	put(t, s, "z2", entry(""))
	if _, err := s.Chain(t.Context(), "", "r2"); err != nil || has(t, s, "", "x") {
		t.Errorf("%v", err)
	}
	put(t, s, "z3", entry(""))
	put(t, s, "z4", entry(""))
	put(t, s, "z5", entry("")) // of the conversation, its end goes first
	if has(t, s, "", "r2") || !has(t, s, "", "r1") {
		t.Error("the beginning went before the end")
	}
}

func TestTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, func(c *Config) { c.TTL = time.Hour })
		put(t, s, "r1", entry(""))
		put(t, s, "r2", entry(""))
		time.Sleep(40 * time.Minute)
		if !has(t, s, "", "r1") {
			t.Fatal("r1 went early")
		}
		time.Sleep(20 * time.Minute)
		if has(t, s, "", "r2") || !has(t, s, "", "r1") {
			t.Error("r2 has had its hour, r1 was used")
		}
		time.Sleep(time.Hour)
		if n := s.Stats(); n.Entries != 0 || n.Bytes != 0 || n.Expired != 2 {
			t.Errorf("%+v", n)
		}
	})
}

// TestLostRedis: what the Redis does not do is an error that is no absence, in time.
func TestLostRedis(t *testing.T) {
	s := open(t, func(c *Config) { c.Redis = "unix:///nowhere/at/all" })
	if err := s.Put(t.Context(), "r1", entry("")); err == nil {
		t.Error("put")
	}
	_, err := s.Find(t.Context(), "", "r1")
	_, chain := s.Chain(t.Context(), "", "r1")
	for _, err := range []error{err, chain, s.Delete(t.Context(), "", "r1")} {
		if err == nil || errors.Is(err, ErrNone) {
			t.Errorf("%v", err)
		}
	}
	if n := s.Stats(); n.Failed != 4 {
		t.Errorf("%+v", n)
	}
	for range maxOps { // all that may be under way
		s.places <- struct{}{}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Find(ctx, "", "r1"); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestTogether(t *testing.T) {
	s := open(t, func(c *Config) { c.Entries = 20 })
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 200 {
				id := fmt.Sprint(i % 30)
				switch (g + i) % 4 {
				case 0:
					_, _ = s.Chain(t.Context(), "", id)
				case 1:
					_ = s.Delete(t.Context(), "", id)
				default:
					_ = s.Put(t.Context(), id, entry("", fmt.Sprint((i+1)%30)))
				}
			}
		})
	}
	wg.Wait()
	n, walked, bytes := s.Stats(), 0, int64(0)
	for h := s.memory.first; h != nil; h = h.next {
		walked++
		bytes += h.entry.size()
	}
	if n.Entries != walked || n.Bytes != bytes || n.Entries > 20 {
		t.Errorf("%+v, and the list has %d with %d bytes", n, walked, bytes)
	}
}

func TestConfig(t *testing.T) {
	f := func(key string, edit func(*Config)) {
		t.Helper()
		cfg := DefaultConfig()
		edit(&cfg)
		if err := cfg.Validate(); err == nil || !strings.HasPrefix(err.Error(), key+": ") {
			t.Errorf("%s: %v", key, err)
		}
	}
	f("entries", func(c *Config) { c.Entries = -1 })
	f("bytes", func(c *Config) { c.Bytes = -1 })
	f("ttl", func(c *Config) { c.TTL = time.Millisecond })
	f("background", func(c *Config) { c.Background = -1 })
	f("background_bytes", func(c *Config) { c.BackgroundBytes = -1 })
	f("redis_timeout", func(c *Config) { c.RedisTimeout = 0 })
	f("redis", func(c *Config) { c.Redis = "http://x" })
	if _, err := New(Config{Redis: "http://x"}); err == nil {
		t.Error("New takes any address")
	}
}

// FuzzDecode: what a Redis holds is read, or is none of ours.
func FuzzDecode(f *testing.F) {
	b, err := entry("a", "r1").encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"v":1,"input":[],"response":{}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		e := decode(b)
		if e == nil {
			return
		}
		again, err := e.encode()
		if err != nil {
			t.Fatalf("%q: %v", b, err)
		}
		next := decode(again)
		if next == nil || next.Owner != e.Owner || len(next.Before) != len(e.Before) || len(e.Before) > MaxChain || len(e.Input) == 0 || e.Response[0] != '{' {
			t.Fatalf("%q: %+v", b, next)
		}
	})
}
