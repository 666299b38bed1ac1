package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/talk"
)

// echo is a server whose chats answer with the number of messages and the last one's text; it
// answers completions with what they say, and has no chat template if it is plain.
func echo(t *testing.T, plain bool) *httptest.Server {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		switch {
		case r.URL.Path == "/v1/models":
			io.WriteString(w, `{"data":[{"id":"parrot"}]}`)
		case r.URL.Path == "/v1/completions":
			io.WriteString(w, "data: {\"choices\":[{\"text\":\" and on\",\"finish_reason\":\"length\"}],\"usage\":{\"completion_tokens\":2}}\n\ndata: [DONE]\n\n")
		case plain:
			w.WriteHeader(400)
			io.WriteString(w, `{"error":{"message":"model parrot has no chat template"}}`)
		case strings.Contains(string(body), "fail"):
			w.WriteHeader(503)
			io.WriteString(w, `{"error":{"message":"no decode worker"}}`)
		default:
			fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":\"%d\\u001b[2J messages\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n", strings.Count(string(body), `"role"`))
		}
	}))
	t.Cleanup(srv.Close)
	return srv
}

func TestChat(t *testing.T) {
	for name, c := range map[string]struct {
		plain     bool
		args      []string
		out, errs string
		code      int
	}{
		"a message":   {args: []string{"Hello", "you"}, out: "1[2J messages\n"},
		"a system's":  {args: []string{"--system", "Be brief.", "Hello"}, out: "2[2J messages\n"},
		"times":       {args: []string{"--timing", "--raw", "Hello"}, out: " and on\n", errs: "2 tokens"},
		"raw":         {args: []string{"--raw", "Hello"}, out: " and on\n", errs: "(cut off"},
		"no template": {plain: true, args: []string{"Hello"}, out: " and on\n", errs: "parrot has no chat template: it continues your text"},
		"an error":    {args: []string{"fail"}, errs: "xpyd: no decode worker\n", code: exitFailed},
		"no text":     {errs: "xpyd: the message is empty\n", code: exitUsage},
		"bad flags":   {args: []string{"--max-tokens", "-1", "x"}, errs: "--max-tokens", code: exitUsage},
	} {
		t.Run(name, func(t *testing.T) {
			out, errs, code := xpyd(t, append([]string{"chat", "--url", echo(t, c.plain).URL}, c.args...)...)
			if out != c.out || !strings.Contains(errs, c.errs) || code != c.code {
				t.Errorf("%q, %q, %d", out, errs, code)
			}
		})
	}
	_, errs, code := xpyd(t, "chat", "--url", "127.0.0.1:1", "Hello")
	if code != exitFailed || !strings.Contains(errs, "`xpyd up`") {
		t.Errorf("%q, %d", errs, code)
	}
}

// TestConverse: each line is a turn that knows of those before it, but not of one that failed.
func TestConverse(t *testing.T) {
	var out, notes strings.Builder
	c := &chat{client: talk.Client{URL: echo(t, false).URL, Silence: 1 << 40, HTTP: http.DefaultClient}, out: &out, notes: &notes, system: "Be brief."}
	c.forget()
	lines := []string{"one", "", "fail", "two", "/new", "three"}
	err := c.converse(t.Context(), func() (string, error) {
		if len(lines) == 0 {
			return "", io.EOF
		}
		line := lines[0]
		lines = lines[1:]
		return line + "\n", nil
	})
	const want = "2[2J messages\n4[2J messages\n2[2J messages\n"
	if err != nil || out.String() != want || strings.Count(notes.String(), "no decode worker") != 1 {
		t.Errorf("%v: %q, %q", err, out.String(), notes.String())
	}
}

// TestTypedLines: lines come as they are typed, and who waits for one is released.
func TestTypedLines(t *testing.T) {
	in, typed, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	defer typed.Close()
	ctx, cancel := context.WithCancel(t.Context())
	next := typedLines(ctx, in)
	if _, err := io.WriteString(typed, "one\ntwo\n"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"one\n", "two\n"} {
		if line, err := next(); err != nil || line != want {
			t.Errorf("%q, %v", line, err)
		}
	}
	done := make(chan error)
	go func() {
		_, err := next()
		done <- err
	}()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
