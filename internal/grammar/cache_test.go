package grammar

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
)

func TestCache(t *testing.T) {
	v := small()
	c := NewCache(v, Limits{}, 1<<20)
	ctx := context.Background()
	good, bad := Spec{Kind: Regex, Text: "a+b"}, Spec{Kind: Regex, Text: "a("}
	var got sync.Map
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			g, err := c.Get(ctx, good)
			if err != nil {
				t.Error(err)
				return
			}
			got.Store(g, true)
			_, err = c.Get(ctx, bad)
			var e *Error
			if !errors.As(err, &e) {
				t.Errorf("%v is no *Error", err)
			}
			got.Store(err, true)
			m := g.Matcher()
			bits := make([]uint32, v.words)
			for _, b := range "aaab"[i%3:] {
				m.Mask(bits)
				if !m.Accept(b) {
					t.Errorf("%c is not accepted", b)
				}
			}
		})
	}
	wg.Wait()
	n := 0
	got.Range(func(_, _ any) bool { n++; return true })
	if n != 2 {
		t.Errorf("%d results of two specs", n)
	}
}

func TestCacheBound(t *testing.T) {
	c := NewCache(small(), Limits{}, 100_000)
	ctx := context.Background()
	first := Spec{Kind: Regex, Text: "first"}
	for i := range 500 {
		if _, err := c.Get(ctx, Spec{Kind: Regex, Text: fmt.Sprintf("[a-z]{%d}", i+1)}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Get(ctx, first); err != nil { // stays: it is asked for
			t.Fatal(err)
		}
	}
	if n := c.Len(); n < 3 || n > 100 {
		t.Errorf("%d entries", n)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.entries[first] == nil {
		t.Error("what was asked for last is gone")
	}
}

// TestCacheWaits says that a caller that waits for another's compiling ends with its ctx.
func TestCacheWaits(t *testing.T) {
	c := NewCache(small(), Limits{}, 1<<20)
	s := Spec{Kind: Regex, Text: "x"}
	c.entries[s] = c.recent.PushFront(&entry{spec: s, done: make(chan struct{})})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := c.Get(ctx, s); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
