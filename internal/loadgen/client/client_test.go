package client

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func serve(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

func newClient(t *testing.T, cfg Config) *Client {
	t.Helper()
	if cfg.Path == "" {
		cfg.Path = "completions"
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = time.Minute
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Abort)
	return c
}

const chunkText = `data: {"choices":[{"text":"a"}]}` + "\n\n"

func TestStream(t *testing.T) {
	var gotPath, gotAuth, gotBody string
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		gotPath, gotAuth, gotBody = r.URL.Path, r.Header.Get("Authorization"), string(b)
		w.Header().Set("Content-Type", "text/event-stream")
		for range 3 {
			io.WriteString(w, chunkText)
			w.(http.Flusher).Flush()
		}
		io.WriteString(w, `data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}`+"\n\ndata: [DONE]\n\n")
	})
	c := newClient(t, Config{URLs: []string{url + "/v1/"}, Stream: true, Header: [][2]string{{"Authorization", "Bearer x"}}})
	var res Result
	for i := range 3 {
		c.Do(t.Context(), &Request{Body: []byte(`{"n":1}`), WantAnswer: true}, &res)
		if !res.OK() || res.Chunks != 3 || len(res.Gaps) != 2 || res.Usage.Prompt != 5 || string(res.Answer) != "aaa" || res.Tokens() != 3 {
			t.Fatalf("%d: %+v", i, res)
		}
		if (res.Connected > 0) != (i == 0) {
			t.Errorf("%d: connected in %v", i, res.Connected)
		}
		if res.FirstToken <= 0 || res.LastToken < res.FirstToken || res.End < res.LastToken || res.Header > res.FirstToken {
			t.Errorf("times: %+v", res)
		}
		if tpot, ok := res.TPOT(); !ok || tpot != (res.LastToken-res.FirstToken)/2 {
			t.Errorf("TPOT %v %v", tpot, ok)
		}
	}
	if gotPath != "/v1/completions" || gotAuth != "Bearer x" || gotBody != `{"n":1}` {
		t.Errorf("%q %q %q", gotPath, gotAuth, gotBody)
	}
}

func TestWhole(t *testing.T) {
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, `{"choices":[{"message":{"content":"hi \u00e9"}}],"usage":{"prompt_tokens":5,"completion_tokens":3}}`)
	})
	c := newClient(t, Config{URLs: []string{url}, Path: "chat/completions"})
	var res Result
	c.Do(t.Context(), &Request{Body: []byte(strings.Repeat("x", 1<<20)), WantAnswer: true}, &res)
	if !res.OK() || res.Tokens() != 3 || string(res.Answer) != `hi \u00e9` || res.LastToken == 0 || res.FirstToken != 0 {
		t.Errorf("%+v", res)
	}
	if _, ok := res.TPOT(); ok {
		t.Error("a TPOT without a stream")
	}
}

func TestTLS(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, `{"choices":[{"text":"a"}]}`)
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(s.Close)
	var res Result
	if newClient(t, Config{URLs: []string{s.URL}, Insecure: true}).Do(t.Context(), &Request{}, &res); !res.OK() {
		t.Errorf("%+v", res)
	}
	if newClient(t, Config{URLs: []string{s.URL}}).Do(t.Context(), &Request{}, &res); res.Kind != Connect || !strings.Contains(res.Message, "certificate") {
		t.Errorf("an unknown certificate: %+v", res)
	}
}

// TestKinds: each way to fail has its name.
func TestKinds(t *testing.T) {
	stream := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, text)
		}
	}
	f := func(want Kind, message string, h http.HandlerFunc) {
		t.Helper()
		timeout := time.Minute
		if want == Timeout {
			timeout = 300 * time.Millisecond
		}
		for url := serve(t, h); ; timeout *= 4 { // on a starved machine nothing has come in a short one
			c := newClient(t, Config{URLs: []string{url}, Stream: true, Timeout: timeout})
			var res Result
			c.Do(t.Context(), &Request{Body: []byte("{}")}, &res)
			if res.Kind == want && strings.Contains(res.Message, message) {
				return
			}
			if timeout >= time.Minute {
				t.Errorf("%q %q, want %q %q", res.Kind, res.Message, want, message)
				return
			}
		}
	}
	f("", "", stream(chunkText+"data: [DONE]\n\n"))
	f("", "", stream(`data: {"choices":[{"text":"a","finish_reason":"stop"}]}`+"\n\n"))
	f("http_503", "no pair", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(503)
		io.WriteString(w, `{"error":{"message":"no pair"}}`)
	})
	f("http_404", "page not found", http.NotFound)
	f(ErrorEvent, "boom", stream(chunkText+`data: {"error":{"message":"boom"}}`+"\n\ndata: [DONE]\n\n"))
	f(ErrorEvent, "boom", stream("event: error\ndata: {\"detail\":\"boom\"}\n\n"))
	f(Truncated, "after 1 chunks", stream(chunkText))
	f(Malformed, "no valid JSON", stream("data: hello\n\n"))
	f(Malformed, "Content-Type", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "{}") })
	f(Empty, "without a token", stream("data: [DONE]\n\n"))
	f(Timeout, "before an answer", func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	f(Timeout, "after 1 chunks", func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		stream(chunkText)(w, r)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	hijack := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			conn, _, _ := http.NewResponseController(w).Hijack()
			io.WriteString(conn, text)
			conn.Close()
		}
	}
	f(Connection, "before an answer", hijack(""))
	f(Malformed, "", hijack("garbage\r\n\r\n"))
	f(Truncated, "after 1 chunks", hijack("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n22\r\n"+chunkText+"\r\n"))
	f(Truncated, "invalid byte in chunk length", hijack("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"))
	f("", "", hijack("HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"+chunkText+"data: [DONE]\n\n"))

	c := newClient(t, Config{URLs: []string{"http://127.0.0.1:1"}}) // where nobody listens
	var res Result
	if c.Do(t.Context(), &Request{}, &res); res.Kind != Connect {
		t.Errorf("%+v", res)
	}
}

// TestStale: an idle connection that the server closed is no failure.
func TestStale(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		for i := range 2 {
			conn, err := ln.Accept()
			if err != nil {
				done <- err
				return
			}
			if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
				done <- err
				return
			}
			io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 29\r\n\r\n"+`{"choices":[{"text":"abcd"}]}`)
			conn.Close()
			if i == 0 {
				close(closed)
			}
		}
		done <- ln.Close()
	}()
	c := newClient(t, Config{URLs: []string{"http://" + ln.Addr().String()}})
	var res Result
	for i := range 2 {
		c.Do(t.Context(), &Request{}, &res)
		if !res.OK() || res.Retried != (i == 1) {
			t.Fatalf("%d: %+v", i, res)
		}
		<-closed
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestAbort: aborted requests are cancelled, not failed.
func TestAbort(t *testing.T) {
	arrived := make(chan struct{})
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		close(arrived)
		<-r.Context().Done()
	})
	c := newClient(t, Config{URLs: []string{url}})
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan Result)
	go func() {
		var res Result
		c.Do(ctx, &Request{}, &res)
		over <- res
	}()
	<-arrived
	cancel()
	c.Abort()
	if res := <-over; res.Kind != Cancelled {
		t.Errorf("%+v", res)
	}
	var res Result
	if c.Do(ctx, &Request{}, &res); res.Kind != Cancelled {
		t.Errorf("after the end: %+v", res)
	}
}

func TestConfig(t *testing.T) {
	for _, cfg := range []Config{{}, {URLs: []string{"x"}}, {URLs: []string{"ftp://x"}}, {URLs: []string{"http://x"}, Header: [][2]string{{"a", "b\r\nc"}}}, {URLs: []string{"http://x"}, Timeout: -1}} {
		if cfg.Timeout == 0 {
			cfg.Timeout = time.Second
		}
		if _, err := New(cfg); err == nil {
			t.Errorf("%+v was taken", cfg)
		}
	}
}

// FuzzBody: chunked bodies are read like net/http reads them.
func FuzzBody(f *testing.F) {
	f.Add([]byte("5\r\nhello\r\n3;x=y\r\nabc\r\n0\r\nTrailer: x\r\n\r\n"))
	f.Add([]byte("fffffffffffffff\r\nx"))
	f.Fuzz(func(t *testing.T, in []byte) {
		var b body
		b.begin(bufio.NewReaderSize(strings.NewReader(string(in)), 64), -1)
		var got []byte
		var err error
		for {
			var p []byte
			if p, err = b.next(); err != nil {
				break
			}
			if len(p) == 0 {
				t.Fatal("nothing, and no error")
			}
			got = append(got, p...)
		}
		resp, rerr := http.ReadResponse(bufio.NewReader(strings.NewReader("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+string(in))), nil)
		if rerr != nil {
			return
		}
		want, rerr := io.ReadAll(resp.Body)
		if rerr == nil && errors.Is(err, io.EOF) && string(got) != string(want) {
			t.Fatalf("%q: %q, want %q", in, got, want)
		}
	})
}
