package trace

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestParse(t *testing.T) {
	const id, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	f := func(in string, ok, sampled bool) {
		t.Helper()
		c, got := Parse(in, "a=b")
		if got != ok || c.Sampled != sampled || ok && c.State != "a=b" {
			t.Errorf("%q: %v %+v", in, got, c)
		}
		if ok && strings.HasPrefix(in, "00-") && c.Parent() != in {
			t.Errorf("%q became %q", in, c.Parent())
		}
	}
	f("00-"+id+"-"+span+"-01", true, true)
	f("00-"+id+"-"+span+"-00", true, false)
	f("cc-"+id+"-"+span+"-03-later", true, true)
	for _, bad := range []string{"", "00", "00-" + id + "-" + span, "ff-" + id + "-" + span + "-01", "00-" + id + "-" + span + "-01-x",
		"00-" + strings.Repeat("0", 32) + "-" + span + "-01", "00-" + id + "-" + strings.Repeat("0", 16) + "-01",
		"00-" + strings.ToUpper(id) + "-" + span + "-01", "00-" + strings.Repeat("x", 32) + "-" + span + "-01"} {
		f(bad, false, false)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	f.Fuzz(func(t *testing.T, in string) {
		if c, ok := Parse(in, ""); ok {
			if again, ok := Parse(c.Parent(), ""); !ok || again != c {
				t.Fatalf("%q: %v, then %v", in, c, again)
			}
		}
	})
}

func TestRatio(t *testing.T) {
	for _, ratio := range []float64{0, 0.25, 1} {
		n := 0
		for range 10000 {
			if Root(ratio).Sampled {
				n++
			}
		}
		if got := float64(n) / 10000; got < ratio-0.05 || got > ratio+0.05 {
			t.Errorf("%v: %v", ratio, got)
		}
	}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// TestRetries: a busy collector is tried again, one that refuses is not; spans that do
// not fit are dropped and counted, and the rest is sent at the end.
func TestRetries(t *testing.T) {
	var status atomic.Int64
	var posts atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if posts.Add(1) == 1 && status.Load() == 503 {
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(503)
			return
		}
		if status.Load() == 400 {
			w.WriteHeader(400)
		}
	}))
	defer srv.Close()
	f := func(s int64, wantPosts int64, exported, dropped uint64) {
		t.Helper()
		status.Store(s)
		posts.Store(0)
		cfg := DefaultConfig()
		cfg.Endpoint, cfg.Queue = srv.URL, 5
		e := New(cfg, "1", quiet())
		e.Add(make([]Span, 3))
		e.Add(make([]Span, 3)) // one too many
		e.Add(make([]Span, 2))
		e.flush(context.Background())
		if x, d := e.Counts(); posts.Load() != wantPosts || x != exported || d != dropped {
			t.Errorf("status %d: %d posts, %d exported, %d dropped", s, posts.Load(), x, d)
		}
	}
	f(200, 1, 5, 3)
	f(400, 1, 0, 8)
	f(503, 2, 5, 3)
}

// TestRun exports by the clock and at the end.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := make(chan struct{}, 10)
		cfg := DefaultConfig()
		cfg.Endpoint = "http://collector/v1/traces"
		e := New(cfg, "1", quiet())
		e.client.Transport = roundTrip(func(r *http.Request) (*http.Response, error) {
			got <- struct{}{}
			return &http.Response{StatusCode: 200, Body: http.NoBody}, nil
		})
		e.Start()
		start := time.Now()
		e.Add(make([]Span, 1))
		<-got
		if took := time.Since(start); took != cfg.Interval {
			t.Errorf("after %v", took)
		}
		e.Add(make([]Span, batch))
		<-got
		if took := time.Since(start); took != cfg.Interval {
			t.Errorf("a full batch waited: %v", took)
		}
		synctest.Wait()
		e.Add(make([]Span, 1))
		e.Close()
		if n, d := e.Counts(); n != batch+2 || d != 0 {
			t.Errorf("%d exported, %d dropped", n, d)
		}
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
