package redis_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/tier/redis"
	"github.com/xpyd/xpyd/engine/tier/redis/redistest"
	"github.com/xpyd/xpyd/engine/tier/store"
)

const most = 100 << 10

func client(t *testing.T, url string, change func(*redis.Config)) *redis.Client {
	t.Helper()
	a, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg := redis.Config{Address: a, Timeout: time.Minute, TTL: time.Hour, MaxValue: most}
	if change != nil {
		change(&cfg)
	}
	c, err := redis.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// value reads one key.
func value(c *redis.Client, key string) (v []byte, err error) {
	bad := c.Read(context.Background(), []string{key}, func(_ int, b []byte, e error) { v, err = bytes.Clone(b), e })
	return v, errors.Join(err, bad)
}

// TestStore goes through what a store does.
func TestStore(t *testing.T) {
	s := redistest.Start(t, "--requirepass", "")
	goThrough(t, client(t, s.URL()+"?db=3", nil))
}

// TestFake: the fake that tests use where there is no Redis does the same.
func TestFake(t *testing.T) {
	s := redistest.StartFake(t)
	goThrough(t, client(t, s.URL(), nil))
	goThrough(t, client(t, s.URL(), func(c *redis.Config) { c.ReadOnly = true }))
}

func goThrough(t *testing.T, c *redis.Client) {
	t.Helper()
	ctx := t.Context()
	big := bytes.Repeat([]byte("0123456789"), most/10)
	for i := range 1000 {
		if ok, err := c.Write(ctx, fmt.Sprintf("a:%d", i), fmt.Append(nil, i)); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	if ok, err := c.Write(ctx, "b:big", big); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if ok, err := c.Write(ctx, "b:big", []byte("other")); ok || err != nil {
		t.Fatal("written twice", err)
	}
	if v, err := value(c, "b:big"); err != nil || !bytes.Equal(v, big) {
		t.Fatal(len(v), err)
	}
	keys := []string{"a:1", "none", "b:big", "a:999"}
	if have, err := c.Exists(ctx, keys); err != nil || fmt.Sprint(have) != "[true false true true]" {
		t.Fatal(have, err)
	}
	n := 0
	if err := c.Read(ctx, keys, func(i int, v []byte, err error) {
		if i != n || err != nil || (v == nil) != (i == 1) {
			t.Errorf("%d: %d bytes, %v", i, len(v), err)
		}
		n++
	}); err != nil || n != 4 {
		t.Fatal(n, err)
	}
	if err := c.Delete(ctx, "a:1"); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Purge(ctx, "a:"); n != 999 || err != nil {
		t.Fatal(n, err)
	}
	if have, err := c.Exists(ctx, keys); err != nil || fmt.Sprint(have) != "[false false true false]" {
		t.Fatal(have, err)
	}
	if n, err := c.Purge(ctx, ""); n != 1 || err != nil {
		t.Fatal(n, err)
	}
}

// TestTTL: what is read stays, unless the client only reads.
func TestTTL(t *testing.T) {
	s := redistest.Start(t)
	ttl := func() int64 {
		n, err := s.Do("PTTL", "k")
		if err != nil {
			t.Fatal(err)
		}
		return n.(int64)
	}
	c := client(t, s.URL(), nil)
	if _, err := c.Write(t.Context(), "k", []byte("v")); err != nil {
		t.Fatal(err)
	}
	if n := ttl(); n <= 0 || n > time.Hour.Milliseconds() {
		t.Errorf("%d ms", n)
	}
	longer := func(c *redis.Config) { c.TTL = 100 * time.Hour }
	if _, err := value(client(t, s.URL(), func(c *redis.Config) { longer(c); c.ReadOnly = true }), "k"); err != nil {
		t.Fatal(err)
	}
	if n := ttl(); n > time.Hour.Milliseconds() {
		t.Errorf("%d ms after a client that only reads", n)
	}
	if _, err := value(client(t, s.URL(), longer), "k"); err != nil {
		t.Fatal(err)
	}
	if n := ttl(); n < 2*time.Hour.Milliseconds() {
		t.Errorf("%d ms after a read", n)
	}
}

// TestRefused: errors that a server answers are of their own kind, and leave
// the connection in order.
func TestRefused(t *testing.T) {
	s := redistest.Start(t)
	c := client(t, s.URL(), nil)
	if _, err := s.Do("LPUSH", "list", "x"); err != nil {
		t.Fatal(err)
	}
	s.Set("k", []byte("v"))
	var errs []error
	if err := c.Read(t.Context(), []string{"list", "k"}, func(_ int, v []byte, err error) { errs = append(errs, err) }); err != nil || !errors.Is(errs[0], store.ErrForeign) || errs[1] != nil {
		t.Fatal(err, errs)
	}
	if _, err := s.Do("CONFIG", "SET", "maxmemory", "1"); err != nil {
		t.Fatal(err)
	}
	if ok, err := c.Write(t.Context(), "more", []byte("v")); ok || !errors.Is(err, store.ErrRefused) {
		t.Fatal(ok, err)
	}
}

// TestTooLarge: a value too large to be ours is not read, but the values before it are.
func TestTooLarge(t *testing.T) {
	s := redistest.Start(t)
	c := client(t, s.URL(), nil)
	s.Set("big", make([]byte, 64<<20))
	s.Set("k", []byte("v"))
	for range 2 { // also on a used connection
		if _, err := value(c, "k"); err != nil {
			t.Fatal(err)
		}
		var errs []error
		err := c.Read(t.Context(), []string{"k", "big", "k"}, func(_ int, v []byte, err error) { errs = append(errs, err) })
		if !errors.Is(err, store.ErrForeign) || len(errs) != 2 || errs[0] != nil || !errors.Is(errs[1], store.ErrForeign) {
			t.Fatal(err, errs)
		}
	}
}

// TestGone: a server that restarted is not missed; one that is gone or hangs
// is an error in time.
func TestGone(t *testing.T) {
	s := redistest.Start(t)
	c := client(t, s.URL(), nil)
	s.Set("k", []byte("v"))
	if _, err := value(c, "k"); err != nil {
		t.Fatal(err)
	}
	s.Kill()
	if _, err := c.Exists(t.Context(), []string{"k"}); err == nil || errors.Is(err, store.ErrRefused) {
		t.Fatal(err)
	}
	s.Run()
	c = client(t, s.URL(), nil)
	if have, err := c.Exists(t.Context(), []string{"k"}); err != nil || have[0] {
		t.Fatal(have, err)
	}
	s.Kill()
	s.Run() // the connection that lies idle is dead
	if have, err := c.Exists(t.Context(), []string{"k"}); err != nil || have[0] {
		t.Fatal(have, err)
	}
	s.Stop()
	hasty := client(t, s.URL(), func(c *redis.Config) { c.Timeout = 10 * time.Millisecond })
	late := func(err error) bool { // on a starved machine while it connects
		var e net.Error
		return errors.As(err, &e) && e.Timeout()
	}
	if _, err := hasty.Exists(t.Context(), []string{"k"}); !late(err) {
		t.Error(err)
	}
	if _, err := hasty.Write(t.Context(), "k", make([]byte, most)); !late(err) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := value2(ctx, c); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	s.Continue()
	if _, err := value(c, "k"); err != nil {
		t.Error(err)
	}
}

func value2(ctx context.Context, c *redis.Client) (n int, err error) {
	err = c.Read(ctx, []string{"k"}, func(int, []byte, error) { n++ })
	return n, err
}

// TestAuth: user and password are sent, and no error shows a wrong password.
func TestAuth(t *testing.T) {
	s := redistest.Start(t, "--requirepass", "right")
	url := func(p string) string { return "unix://:" + p + "@" + strings.TrimPrefix(s.URL(), "unix://") }
	if _, err := client(t, url("right"), nil).Exists(t.Context(), []string{"k"}); err != nil {
		t.Error(err)
	}
	if _, err := client(t, "unix://default:right@"+strings.TrimPrefix(s.URL(), "unix://"), nil).Exists(t.Context(), []string{"k"}); err != nil {
		t.Error(err)
	}
	for _, u := range []string{url("wrong"), s.URL()} {
		c := client(t, u, nil)
		if _, err := c.Exists(t.Context(), []string{"k"}); err == nil || strings.Contains(err.Error()+c.String(), "wrong") {
			t.Errorf("%v of %v", err, c)
		}
	}
}

// TestHostile: a server that answers anything.
func TestHostile(t *testing.T) {
	for name, reply := range map[string]string{
		"a number":             ":1\r\n",
		"a huge length":        "$99999999999\r\n",
		"a huger length":       "$99999999999999999999999999\r\n",
		"a huge array":         "*1000000000\r\n",
		"a deep array":         strings.Repeat("*1\r\n", 10_000),
		"an endless line":      "+" + strings.Repeat("x", 1<<20),
		"resp 3":               "%1\r\n+a\r\n+b\r\n",
		"a negative length":    "$-5\r\n",
		"an empty line":        "\r\n",
		"no line's end":        "$1\nx\r\n",
		"a string cut short":   "$100\r\nabc",
		"nothing":              "",
		"a wrong string's end": "$1\r\nabcdefgh\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			defer wg.Wait()
			defer l.Close()
			wg.Go(func() {
				for {
					n, err := l.Accept()
					if err != nil {
						return
					}
					b := make([]byte, 1<<10)
					if _, err := n.Read(b); err == nil {
						_, _ = n.Write([]byte(reply))
					}
					n.Close()
				}
			})
			c := client(t, "redis://"+l.Addr().String(), nil)
			if v, err := value(c, "k"); err == nil || v != nil {
				t.Errorf("read: %q, %v", v, err)
			}
			if ok, err := c.Write(t.Context(), "k", []byte("v")); err == nil || ok {
				t.Errorf("write: %v, %v", ok, err)
			}
			if n, err := c.Purge(t.Context(), "k"); err == nil || n != 0 {
				t.Errorf("purge: %d, %v", n, err)
			}
			if have, err := c.Exists(t.Context(), []string{"k"}); err == nil && name != "a number" {
				t.Errorf("exists: %v", have)
			}
		})
	}
}

func TestParseURL(t *testing.T) {
	for in, want := range map[string]string{
		"redis://h":                   "redis://h:6379/0",
		"valkey://u:p%40ss@h:1/7":     "redis://h:1/7",
		"rediss://[::1]:2/":           "rediss://[::1]:2/0",
		"valkeys://:pass@h":           "rediss://h:6379/0",
		"unix:///run/s":               "unix:///run/s?db=0",
		"unix://u:secret@/run/s?db=2": "unix:///run/s?db=2",
	} {
		a, err := redis.ParseURL(in)
		if err != nil || a.String() != want {
			t.Errorf("%s: %v, %v", in, a, err)
		}
		if strings.Contains(in, "%40") && (a.User != "u" || a.Password != "p@ss") {
			t.Errorf("%+v", a)
		}
	}
	for _, in := range []string{"", "h:6379", "http://h", "redis://", "redis://h/x", "redis://h/-1", "redis://h?a=b", "redis:h", "unix://h/s", "unix://", "redis://:secret@h:port", "redis://:secret@h/99999999"} {
		if a, err := redis.ParseURL(in); err == nil {
			t.Errorf("%s became %v", in, a)
		} else if strings.Contains(err.Error(), "secret") {
			t.Error(err)
		}
	}
}
