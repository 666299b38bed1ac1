package router_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router"
)

// TestClientLeaves: both legs are closed when the client leaves, whatever is
// going on.
func TestClientLeaves(t *testing.T) {
	for _, secure := range []bool{false, true} {
		for _, body := range []string{ask, askStream} {
			for _, streaming := range []bool{false, true} {
				if streaming && body == ask {
					continue
				}
				t.Run(fmt.Sprintf("tls %v, stream %v, started %v", secure, body == askStream, streaming), func(t *testing.T) {
					clientLeaves(t, secure, body, streaming)
				})
			}
		}
	}
}

// clientLeaves: only the client's leaving ends the legs here. How soon that happens
// depends on the machine, so BenchmarkClientLeaves measures it.
func clientLeaves(t *testing.T, secure bool, body string, streaming bool) {
	a := newAuthority(t)
	g := newRig(t, 1, 1, func(c *router.Config) {
		if secure {
			c.TLSCert, c.TLSKey, _ = a.issue("router")
		}
	})
	started, ended := make(chan time.Time, 2), make(chan time.Time, 2)
	p, d := g.workers["p0"], g.workers["d0"]
	p.on(&p.prefill, hold(started, ended))
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		if streaming {
			begin(w)
		}
		hold(started, ended)(w, r)
	})
	conn := g.dial()
	if secure {
		conn = tls.Client(conn, &tls.Config{RootCAs: a.pool(), ServerName: "router"})
	}
	sendRaw(t, conn, body)
	<-started
	<-started
	if streaming {
		if _, err := io.ReadAtLeast(conn, make([]byte, 4096), 100); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-ended:
		t.Error("a leg ended while the client was there")
	default:
	}
	conn.Close()
	g.until("both legs to end", func() bool { return len(ended) == 2 })
	g.until("the request to be over", g.idle)
	g.until("a 499 in the log", func() bool { return strings.Contains(g.logs.String(), "status=499") })
}

// TestDeadline: the header shortens a request's life; before the first byte it
// is a 504, after it an error event.
func TestDeadline(t *testing.T) {
	g := newRig(t, 1, 1)
	p, d := g.workers["p0"], g.workers["d0"]
	started, ended := make(chan time.Time, 32), make(chan time.Time, 32)
	p.on(&p.prefill, hold(started, ended))
	d.on(&d.decode, hold(started, ended))
	g.untilLate("/v1/completions", ask, started)
	g.until("both legs to end", func() bool { return p.active.Load()+d.active.Load() == 0 })
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		begin(w)
		<-r.Context().Done()
	})
	body := ""
	for limit := 80; !strings.Contains(body, `{"n":0}`) && limit < 60_000; limit *= 2 { // one that has begun by then
		if _, body = g.post("/v1/completions", askStream, "x-request-timeout-ms", strconv.Itoa(limit)); !strings.Contains(body, `"code":"deadline_exceeded"`) {
			t.Errorf("%q", body)
		}
	}
	if resp, _ := g.post("/v1/completions", ask, "x-request-timeout-ms", "-1"); resp.StatusCode != 400 {
		t.Errorf("%d", resp.StatusCode)
	}
}

// untilLate sends a request with longer and longer deadlines, which it must miss, until
// one of its legs has started before the deadline.
func (g *rig) untilLate(path, body string, started <-chan time.Time) {
	g.t.Helper()
	for limit := 50; limit < 60_000; limit *= 2 {
		resp, text := g.post(path, body, "x-request-timeout-ms", strconv.Itoa(limit))
		if resp.StatusCode != 504 {
			g.t.Errorf("%d %q", resp.StatusCode, text)
		}
		apiError(g.t, text)
		select {
		case <-started:
			return
		default:
		}
	}
	g.t.Fatal("no leg has ever started")
}

// TestShutdown: running streams go on to their end, idle connections do not
// delay it; past the deadline streams end with an error event.
func TestShutdown(t *testing.T) {
	for _, patient := range []bool{true, false} {
		g := newRig(t, 1, 1)
		d := g.workers["d0"]
		free := make(chan struct{})
		d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
			streamed(3, func(i int) {
				if i == 1 {
					select {
					case <-free:
					case <-r.Context().Done():
					}
				}
			})(w, r)
		})
		got := make(chan string, 1)
		go func() {
			_, body := g.post("/v1/completions", askStream)
			got <- body
		}()
		g.until("the stream", func() bool { return d.calls.Load() == 1 && !g.idle() })
		g.stopped = true
		timeout := time.Minute
		if !patient {
			timeout = 150 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		done := make(chan error, 1)
		go func() { done <- g.r.Shutdown(ctx) }()
		g.until("not ready", func() bool { return !g.r.Ready() })
		if patient {
			close(free)
		}
		err := <-done
		body := <-got
		cancel()
		if patient && (err != nil || body != storyText) {
			t.Errorf("%v, %q", err, body)
		}
		if !patient && (err == nil || !strings.HasPrefix(err.Error(), "drain: ") || !strings.Contains(body, "shutting down")) {
			t.Errorf("%v, %q", err, body)
		}
		if g.r.Spawn(func() { t.Error("it runs") }) {
			t.Error("something begins, and nobody waits for it")
		}
	}
}
