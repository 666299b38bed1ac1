package router_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
)

// TestLineEnds: events are relayed as they come, whatever their lines end in.
func TestLineEnds(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	for _, end := range []string{"\n", "\r\n", "\r"} {
		first, last := "data:{\"n\":1}"+end+end, "data: [DONE]"+end+end
		seen := make(chan struct{})
		h := func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, first)
			w.(http.Flusher).Flush()
			select {
			case <-seen:
			case <-r.Context().Done():
			case <-time.After(20 * time.Second):
				t.Errorf("%q: the first event did not come", end)
			}
			io.WriteString(w, last)
		}
		d.on(&d.decode, h)
		if status, text := g.stream(askStream, func() { close(seen) }); status != 200 || text != first+last {
			t.Errorf("%d %q", status, text)
		}
	}
}

// events answers with parts of a stream, each of them flushed.
func events(parts ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, p := range parts {
			io.WriteString(w, p)
			w.(http.Flusher).Flush()
		}
	}
}

// TestHalfEvent: of a stream that ends within an event only whole events reach
// the client, and then the error.
func TestHalfEvent(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	const one = "data: {\"n\":1}\n\n"
	for _, path := range []string{"/v1/completions", "/v1/moderations"} {
		for _, half := range []string{"data: {\"cho", "data: {\"n\":2}\n"} {
			d.on(&d.decode, events(one, half))
			d.on(&d.other, events(one, half))
			if _, text := g.post(path, askStream); !strings.HasPrefix(text, one+"data: {\"error\":") || !strings.HasSuffix(text, "}\n\n") {
				t.Errorf("%s: %q behind %q", path, text, half)
			}
		}
	}
	d.on(&d.decode, events(one, "data: [DONE]"))
	if _, text := g.post("/v1/completions", askStream); text != one+"data: [DONE]\n\n" {
		t.Errorf("%q", text)
	}
}

// TestComments: an engine's comments do not count as the first event. If the stream then
// fails, the request is tried elsewhere; if nothing follows, it ends with decode_silence.
// Otherwise the comments are relayed with what follows them.
func TestComments(t *testing.T) {
	t.Parallel()
	const ping, said = ": ping\n\n", "data: {\"choices\":[]}\n\ndata: [DONE]\n\n"
	g := newRig(t, 0, 0, func(c *router.Config) { c.Attempts, c.Pick.Policy = 2, "round_robin" })
	var turn atomic.Int64
	turn.Store(99) // while it is probed
	for _, id := range []string{"e0", "e1"} {
		m := g.add(id, fleet.Decode, func(i *fleet.Instance) { i.Dialect = "openai" })
		m.on(&m.decode, func(w http.ResponseWriter, r *http.Request) {
			if turn.Add(1) == 1 {
				events(ping, "data: {\"error\":{\"message\":\"no\"}}\n\n")(w, r)
				return
			}
			events(ping, ping, said)(w, r)
		})
	}
	g.allProbed(2)
	turn.Store(0)
	if resp, text := g.post("/v1/completions", askStream); resp.StatusCode != 200 || text != ping+ping+said || turn.Load() != 2 {
		t.Errorf("%d %q after %d", resp.StatusCode, text, turn.Load())
	}

	g = newRig(t, 0, 0, func(c *router.Config) { c.Attempts, c.DecodeSilence = 1, 50*time.Millisecond })
	offloading := func(i *fleet.Instance) { i.Dialect = "vllm-offloading" }
	p, d := g.add("p", fleet.Prefill, offloading), g.add("d", fleet.Decode, offloading)
	p.on(&p.decode, whole)
	d.on(&d.decode, whole)
	g.allProbed(2)
	d.on(&d.decode, func(w http.ResponseWriter, r *http.Request) {
		events(ping)(w, r)
		<-r.Context().Done()
	})
	if resp, text := g.post("/v1/completions", askStream); resp.StatusCode != 504 || !strings.Contains(text, "silent") {
		t.Errorf("%d %q", resp.StatusCode, text)
	}
}

// TestEmptyAnswer: a foreign engine's 200 with nothing in it is no answer. Another engine is
// asked; if that has none either, the client gets a 502.
func TestEmptyAnswer(t *testing.T) {
	t.Parallel()
	g := newRig(t, 0, 0, func(c *router.Config) { c.Attempts = 2 })
	for _, id := range []string{"e0", "e1"} {
		m := g.add(id, fleet.Decode, func(i *fleet.Instance) { i.Dialect = "openai" })
		m.on(&m.decode, whole)
	}
	g.allProbed(2)
	empty := func(http.ResponseWriter, *http.Request) {}
	for _, body := range []string{ask, askStream} {
		g.first(empty, whole)
		if resp, text := g.post("/v1/completions", body); resp.StatusCode != 200 || text != `{"whole":true}` {
			t.Errorf("%d %q", resp.StatusCode, text)
		}
		g.first(empty, empty)
		if resp, text := g.post("/v1/completions", body); resp.StatusCode != 502 || !strings.Contains(text, "empty") {
			t.Errorf("%d %q", resp.StatusCode, text)
		}
	}
}

// TestEarlyHints: what an engine says before its answer is not the answer.
func TestEarlyHints(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1)
	d := g.workers["d0"]
	hints := func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusProcessing)
		w.Header().Set("Link", "</x>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		whole(w, r)
	}
	d.on(&d.decode, hints)
	p := g.workers["p0"]
	p.on(&p.other, hints)
	for _, path := range []string{"/v1/completions", "/v1/embeddings"} {
		if resp, text := g.post(path, ask); resp.StatusCode != 200 || text != `{"whole":true}` {
			t.Errorf("%s: %d %s", path, resp.StatusCode, text)
		}
	}
}

// TestBodyInTime: read_timeout, not idle_timeout, bounds the time that a body may
// take on a connection that is kept.
func TestBodyInTime(t *testing.T) {
	t.Parallel()
	g := newRig(t, 1, 1, func(c *router.Config) { c.ReadTimeout, c.IdleTimeout = 500*time.Millisecond, 10*time.Minute })
	for _, path := range []string{"/v1/completions", "/v1/embeddings"} {
		conn := g.dial()
		defer conn.Close()
		if err := conn.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(conn)
		for _, c := range []struct {
			body   string
			status int
		}{{ask, 200}, {ask[:len(ask)/2], 408}} {
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", path, len(ask), c.body)
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != c.status {
				t.Errorf("%s: %d %v, want %d", path, resp.StatusCode, err, c.status)
			}
		}
	}
}
