package talk_test

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/talk"
)

// serve answers with a status and a text, and keeps what was asked last.
func serve(t *testing.T, status int, text string) (*talk.Client, *string, *map[string]any) {
	t.Helper()
	var path string
	var asked map[string]any
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, asked = r.URL.Path+" "+r.Header.Get("Authorization"), nil
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
			t.Error(err)
		}
		w.WriteHeader(status)
		io.WriteString(w, text)
	}))
	t.Cleanup(srv.Close)
	return &talk.Client{URL: srv.URL + "/v1", APIKey: "k", Silence: 10 * time.Second, HTTP: srv.Client()}, &path, &asked
}

var hello = []talk.Message{{Role: "system", Content: "Be brief."}, {Role: "user", Content: "Hello"}}

func TestAsk(t *testing.T) {
	const chat = `: a comment
data: {"choices":[{"delta":{"role":"assistant","content":""}}]}

data: {"choices":[{"delta":{"content":"Hi "}}],"usage":null}

data: {"choices":[{"delta":{"content":"there"},"finish_reason":"stop"}]}

data: {"choices":[],"usage":{"completion_tokens":2}}

data: [DONE]

`
	c, path, asked := serve(t, 200, chat)
	c.Model, c.MaxTokens, c.Temperature = "m", 7, new(float64)
	var pieces []string
	a, err := c.Ask(t.Context(), hello, func(s string) { pieces = append(pieces, s) })
	if err != nil || a.Text != "Hi there" || a.Tokens != 2 || a.Finish != "stop" || a.First <= 0 || a.Took < a.First || strings.Join(pieces, "|") != "Hi |there" {
		t.Errorf("%+v, %v, %q", a, err, pieces)
	}
	if *path != "/v1/chat/completions Bearer k" || (*asked)["model"] != "m" || (*asked)["max_tokens"] != 7. || (*asked)["temperature"] != 0. || len((*asked)["messages"].([]any)) != 2 {
		t.Errorf("%s %v", *path, *asked)
	}
	c, path, asked = serve(t, 200, "data: {\"choices\":[{\"text\":\", world\"}]}\ndata: [DONE]\n")
	c.Raw = true
	if a, err = c.Ask(t.Context(), hello, func(string) {}); err != nil || a.Text != ", world" {
		t.Errorf("%+v, %v", a, err)
	}
	if *path != "/v1/completions Bearer k" || (*asked)["prompt"] != "Hello" || (*asked)["messages"] != nil {
		t.Errorf("%s %v", *path, *asked)
	}
}

// TestAskFails: each error says what it is, and what came before it is kept.
func TestAskFails(t *testing.T) {
	for name, c := range map[string]struct {
		status     int
		text, want string
		kept       string
		template   bool
	}{
		"refused":     {400, `{"error":{"message":"model m has no chat template; use /v1/completions"}}`, "model m has no chat template; use /v1/completions", "", true},
		"a proxy's":   {502, `<html>`, "502 Bad Gateway", "", false},
		"in a stream": {200, "data: {\"choices\":[{\"text\":\"On\"}]}\ndata: {\"error\":{\"message\":\"gone\"}}\n", "gone", "On", false},
		"cut":         {200, "data: {\"choices\":[{\"text\":\"On\"}]}\n", "the stream ended without [DONE]: unexpected EOF", "On", false},
		"no JSON":     {200, "data: {\n", "an event of the stream: unexpected end of JSON input", "", false},
		"long":        {200, "data: " + strings.Repeat("x", 5<<20), "bufio.Scanner: token too long", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			client, _, _ := serve(t, c.status, c.text)
			a, err := client.Ask(t.Context(), hello, func(string) {})
			if err == nil || err.Error() != c.want || a.Text != c.kept || talk.NoTemplate(err) != c.template {
				t.Errorf("%q, %v", a.Text, err)
			}
		})
	}
}

// TestSilence: a server that says nothing is given up on.
func TestSilence(t *testing.T) {
	release := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { <-release }))
	defer srv.Close()
	defer close(release)
	c := &talk.Client{URL: srv.URL, Silence: time.Millisecond, HTTP: srv.Client()}
	_, err := c.Ask(t.Context(), hello, func(string) {})
	if refused := new(talk.Refused); err == nil || errors.As(err, &refused) || err.Error() != "the server fell silent for 1ms" {
		t.Error(err)
	}
}
