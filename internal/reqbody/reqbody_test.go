package reqbody_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttputil"

	"github.com/xpyd/xpyd/internal/reqbody"
)

const limit = 1 << 20

// serve answers 200 with the body's length and sum, or 400 with the error.
func serve(t *testing.T) *fasthttputil.InmemoryListener {
	t.Helper()
	ln := fasthttputil.NewInmemoryListener()
	s := &fasthttp.Server{StreamRequestBody: true, MaxRequestBodySize: limit, Handler: func(ctx *fasthttp.RequestCtx) {
		if err := reqbody.Read(ctx, limit); err != nil {
			status := 400
			if errors.Is(err, fasthttp.ErrBodyTooLarge) {
				status = 413
			}
			ctx.Error(err.Error(), status)
			ctx.SetConnectionClose()
			return
		}
		sum := 0
		for _, c := range ctx.PostBody() {
			sum += int(c)
		}
		fmt.Fprintf(ctx, "%d %d", len(ctx.PostBody()), sum)
	}}
	done := make(chan error, 1)
	go func() { done <- s.Serve(ln) }()
	t.Cleanup(func() {
		ln.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return ln
}

func TestRead(t *testing.T) {
	ln := serve(t)
	conn, err := ln.Dial()
	if err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(conn)
	f := func(status int, body string, chunk int) {
		t.Helper()
		request := fmt.Sprintf("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		if chunk > 0 {
			var b strings.Builder
			b.WriteString("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
			for rest := body; rest != ""; {
				n := min(chunk, len(rest))
				fmt.Fprintf(&b, "%x\r\n%s\r\n", n, rest[:n])
				rest = rest[n:]
			}
			request = b.String() + "0\r\n\r\n"
		}
		go func() { _, _ = io.WriteString(conn, request) }()
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != status {
			t.Fatalf("%d bytes in chunks of %d: %d %s %v", len(body), chunk, resp.StatusCode, got, err)
		}
		if status != 200 { // that connection is over
			conn.Close()
			if conn, err = ln.Dial(); err != nil {
				t.Fatal(err)
			}
			in.Reset(conn)
		} else if want := fmt.Sprintf("%d %d", len(body), len(body)*'x'); string(got) != want {
			t.Errorf("%d bytes in chunks of %d: %s, want %s", len(body), chunk, got, want)
		}
	}
	for _, n := range []int{0, 1, 100, 4095, 8 << 10, 8<<10 + 1, 64 << 10, 64<<10 + 1, 100_000, limit - 1, limit} {
		for _, chunk := range []int{0, 1000, limit} {
			f(200, strings.Repeat("x", n), chunk)
		}
	}
	f(200, strings.Repeat("x", 3000), 1)
	for _, chunk := range []int{0, 1000, limit + 1} {
		f(413, strings.Repeat("x", limit+1), chunk)
		f(413, strings.Repeat("x", 3*limit), chunk)
	}
	conn.Close()
}

// TestMemory: a thousand that announce a mebibyte each and send a byte take
// nothing like a gibibyte.
func TestMemory(t *testing.T) {
	ln := serve(t)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 1000 {
		conn, err := ln.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", limit, strings.Repeat("x", 9000)); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(50 * time.Millisecond) // for the servers to read; too short a time only hides a fault
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 300<<20 {
		t.Errorf("%d MiB", grown>>20)
	}
}
