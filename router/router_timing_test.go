package router_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/router"
)

// benchRig is a router in front of one pair of mocks that answer at once; it
// returns the router's address.
func benchRig(b *testing.B) string {
	b.Helper()
	worker := &fasthttp.Server{NoDefaultServerHeader: true, Handler: func(ctx *fasthttp.RequestCtx) {
		ctx.SetContentType("application/json")
		switch {
		case string(ctx.Path()) == "/xpyd/v1/prefill":
			ctx.SetBodyString(`{"outcome":"done"}`)
		case string(ctx.Request.Header.Peek("x-stream")) != "" || len(ctx.PostBody()) > 40 && string(ctx.PostBody()[:14]) == `{"stream":true`:
			ctx.SetContentType("text/event-stream")
			ctx.SetBodyStreamWriter(func(w *bufio.Writer) {
				for range 16 {
					fmt.Fprint(w, "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"choices\":[{\"index\":0,\"text\":\" word\"}]}\n\n")
					w.Flush()
				}
				fmt.Fprint(w, "data: [DONE]\n\n")
			})
		default:
			ctx.SetBodyString(`{"id":"cmpl-1","choices":[{"index":0,"text":" word"}]}`)
		}
	}}
	return routerBefore(b, worker.Serve)
}

// routerBefore is a router in front of one pair, both of which serve serves.
func routerBefore(b *testing.B, serve func(net.Listener) error) string {
	b.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go serve(ln)
	watcher, err := fleet.Watch(fleet.WatcherConfig{})
	if err != nil {
		b.Fatal(err)
	}
	for id, role := range map[string]fleet.Role{"p": fleet.Prefill, "d": fleet.Decode} {
		if err := watcher.AddStatic(fleet.Instance{ID: id, Epoch: 1, Role: role, URL: "http://" + ln.Addr().String(), Dialect: "native", Model: "m"}, fleet.Static); err != nil {
			b.Fatal(err)
		}
	}
	cfg := router.DefaultConfig()
	cfg.Listen, cfg.AdminListen = "127.0.0.1:0", ""
	r, err := router.New(cfg, router.Deps{Fleet: watcher})
	if err != nil {
		b.Fatal(err)
	}
	if err := r.Start(); err != nil {
		b.Fatal(err)
	}
	for !r.Ready() {
		time.Sleep(time.Millisecond)
	}
	b.Cleanup(func() { r.Shutdown(b.Context()); watcher.Close(); ln.Close() })
	return r.Addr().String()
}

func benchmark(b *testing.B, body string) {
	addr := benchRig(b)
	var client fasthttp.Client
	var req fasthttp.Request
	var resp fasthttp.Response
	req.SetRequestURI("http://" + addr + "/v1/completions")
	req.Header.SetMethod("POST")
	req.SetBodyString(body)
	b.ReportAllocs()
	for b.Loop() {
		if err := client.Do(&req, &resp); err != nil || resp.StatusCode() != 200 {
			b.Fatal(err, resp.StatusCode())
		}
	}
}

func BenchmarkWhole(b *testing.B) {
	benchmark(b, `{"stream":false,"model":"m","prompt":"Once upon a time","max_tokens":1}`)
}

func BenchmarkStream16(b *testing.B) {
	benchmark(b, `{"stream":true,"model":"m","prompt":"Once upon a time","max_tokens":16}`)
}

// BenchmarkClientLeaves: from the moment when a client closes its connection to
// the end of both legs, half before the first token and half behind it. The
// promise is 100 ms.
func BenchmarkClientLeaves(b *testing.B) {
	started, ended := make(chan time.Time, 2), make(chan time.Time, 2)
	var streaming atomic.Bool
	addr := routerBefore(b, (&http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return
		}
		switch decode := r.URL.Path == "/v1/completions"; {
		case r.Header.Get("x-xpyd-probe") == "":
			if decode && streaming.Load() {
				begin(w)
			}
			hold(started, ended)(w, r)
		case decode:
			whole(w, r)
		default:
			prefillDone(w, r)
		}
	})}).Serve)
	var took []time.Duration
	for b.Loop() {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			b.Fatal(err)
		}
		streaming.Store(len(took)%2 == 1)
		fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(askStream), askStream)
		<-started
		<-started
		left := time.Now()
		conn.Close()
		took = append(took, max((<-ended).Sub(left), (<-ended).Sub(left)))
	}
	slices.Sort(took)
	ms := func(q float64) float64 {
		return float64(took[int(q*float64(len(took)))].Microseconds()) / 1e3
	}
	b.ReportMetric(ms(0.5), "p50-ms")
	b.ReportMetric(ms(0.99), "p99-ms")
	if ms(0.5) > 100 {
		b.Errorf("half of them took more than %.1f ms", ms(0.5))
	}
}
