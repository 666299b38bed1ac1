package main

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"
)

// ask sends a request to a mock engine and returns its reply and the number of writes.
func ask(t *testing.T, e mockEngine, method, path, body string) (*fasthttp.Response, int) {
	t.Helper()
	here, there := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- e.serve(there) }()
	defer func() { here.Close(); <-done }()
	if err := here.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	req := bytes.Replace(post(path, body), []byte("POST"), []byte(method), 1)
	go func() { _, _ = here.Write(req) }() // a failure shows in the reply
	n := &counted{Conn: here}
	var resp fasthttp.Response
	if err := resp.Read(bufio.NewReaderSize(n, 1<<20)); err != nil {
		t.Fatal(err)
	}
	return &resp, n.reads
}

// counted counts reads: a pipe has one per write if the buffer is large enough.
type counted struct {
	net.Conn
	reads int
}

func (c *counted) Read(p []byte) (int, error) { c.reads++; return c.Conn.Read(p) }

func TestEngine(t *testing.T) {
	f := func(e mockEngine, method, path, body, want string) int {
		t.Helper()
		resp, reads := ask(t, e, method, path, body)
		if got := string(resp.Body()); resp.StatusCode() != 200 || !strings.Contains(got, want) {
			t.Errorf("%s %s: %d %q, want %q", path, body, resp.StatusCode(), got, want)
		}
		return reads
	}
	const path = "/v1/completions"
	f(mockEngine{}, "GET", "/v1/models?x", "", `"max_model_len"`)
	f(mockEngine{}, "GET", "/health", "", `{}`)
	f(mockEngine{}, "POST", path, completion("words", false, 4, ""), wholeAnswer)
	f(mockEngine{}, "POST", path, `{"stream":true,"kv_transfer_params":{"do_remote_decode":true}}`, `"remote_block_ids"`)
	if n := f(mockEngine{}, "POST", path, completion(words(9<<10), true, 5, ""), "data: [DONE]"); n < 6 {
		t.Errorf("five chunks in %d writes", n)
	}
	if n := f(mockEngine{burst}, "POST", path, `{"stream":true,"max_tokens":5,"stream_options":{"include_usage":true}}`, `"completion_tokens":5`); n != 2 {
		t.Errorf("a burst in %d writes, want 2", n)
	}
	began := time.Now()
	f(mockEngine{}, "POST", path, completion("words", true, 3, pacePrefix+"20"), "data: [DONE]")
	if took := time.Since(began); took < 50*time.Millisecond {
		t.Errorf("three chunks, 20 ms apart, took %v", took)
	}
}

// TestEngineFrames: to a router that asks, the engine says which token each event stands for; it can
// hold a stream.
func TestEngineFrames(t *testing.T) {
	here, there := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- mockEngine{}.serve(there) }()
	if err := here.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	req := bytes.Replace(post("/v1/completions", completion("x", true, 9, holdPrefix+"2")), []byte("\r\n"), []byte("\r\nx-xpyd-tokens: 1\r\n"), 1)
	go func() { _, _ = here.Write(req) }() // a failure shows in the reply
	got, events := "", 0
	for r := bufio.NewReader(here); events < 2; {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if got += line; strings.HasPrefix(line, "data: ") {
			events++
		}
	}
	here.Close()
	if err := <-done; err != nil && !errors.Is(err, io.ErrClosedPipe) && !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	if !strings.Contains(got, ":t 0 02L@ 1 0123456789abcdef\ndata: {") || !strings.Contains(got, ":t 0 02LA\ndata: {") {
		t.Errorf("%q", got)
	}
	resp, _ := ask(t, mockEngine{}, "POST", "/v1/completions", completion("x", true, 2, ""))
	if strings.Contains(string(resp.Body()), ":t ") {
		t.Errorf("nobody asked: %q", resp.Body())
	}
}

func TestEngineRefuses(t *testing.T) {
	for _, head := range []string{"Content-Length: x", "Content-Length: -1", "Content-Length: 99999999999", "Transfer-Encoding: chunked"} {
		if _, _, _, err := readHead(bufio.NewReader(strings.NewReader("POST / HTTP/1.1\r\n" + head + "\r\n\r\n"))); err == nil {
			t.Errorf("%q is taken", head)
		}
	}
}
