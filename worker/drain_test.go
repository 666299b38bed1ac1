package worker_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// TestDrain: running requests finish, new ones are told to go elsewhere.
func TestDrain(t *testing.T) {
	w := start(t, nil)
	half := strings.Replace(many, `"n":24`, `"n":12`, 1) // still more than the sockets hold: it does not end before it is read
	_, r := dial(t, w, "/v1/completions", half)
	firstEvent(t, r)
	line, err := client.Get(w.URL() + "/xpyd/v1/lifeline")
	if err != nil {
		t.Fatal(err)
	}
	defer line.Body.Close()
	closed := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		closed <- w.Close(ctx)
	}()
	soon(t, slack, func() error {
		if !w.Instance().Draining {
			return fmt.Errorf("not announced")
		}
		return nil
	})
	soon(t, slack, func() error {
		resp, b := ask(t, w.URL()+"/v1/completions", nil, `{"prompt":"x","max_tokens":1}`)
		if resp.StatusCode != 503 || resp.Header.Get("x-xpyd-outcome") != "no_space" {
			return fmt.Errorf("%d %v %s", resp.StatusCode, resp.Header, b)
		}
		return nil
	})
	rest, err := io.ReadAll(r)
	if err != nil || !bytes.Contains(rest, []byte("[DONE]")) {
		t.Errorf("the stream was cut: %v, ends with %s", err, rest[max(0, len(rest)-300):])
	}
	if _, err := io.ReadAll(line.Body); err != nil { // ends in order
		t.Error(err)
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// TestDrainRefuses: a worker that closes says so to whoever comes, whatever for.
func TestDrainRefuses(t *testing.T) {
	w := start(t, nil)
	const body = `{"prompt":"x","max_tokens":8,"ignore_eos":true,"stream":true}`
	say := given(1, framedStream(t, w, "/v1/completions", nil, body, "")[:2])
	c, r := dial(t, w, "/v1/completions", many)
	firstEvent(t, r)
	closed := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		closed <- w.Close(ctx)
	}()
	for path, sent := range map[string]string{"/v1/completions": `{"prompt":"x","max_tokens":1}`, "/xpyd/v1/bring": body + say,
		"/xpyd/v1/prefill": `{"link":"00112233445566778899aabbccddeeff","deadline_ms":20}`} {
		header := map[string]string{}
		if path == "/xpyd/v1/bring" {
			header = map[string]string{"x-xpyd-given": strconv.Itoa(len(body)), "x-xpyd-deadline-ms": "1000"}
		}
		soon(t, slack, func() error {
			if resp, b := ask(t, w.URL()+path, header, sent); resp.StatusCode != 503 || resp.Header.Get("x-xpyd-outcome") != "no_space" || !strings.Contains(string(b), "shutting down") {
				return fmt.Errorf("%s: %d %v %s", path, resp.StatusCode, resp.Header, b)
			}
			return nil
		})
	}
	c.Close()
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// TestDrainTimeout: requests that have not finished in time are told why, a router in a comment:
// another worker may go on.
func TestDrainTimeout(t *testing.T) {
	for header, begins := range map[string]string{"": "data: {\"error\"", "x-xpyd-tokens: 1\r\n": ":e {\"error\""} {
		w := start(t, nil)
		_, r := dialWith(t, w, "/v1/completions", header, many)
		firstEvent(t, r)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			_ = w.Close(ctx)
		}()
		var last []byte
		for {
			line, err := r.ReadBytes('\n')
			if err != nil {
				break
			}
			if bytes.HasPrefix(line, []byte("data: ")) || bytes.HasPrefix(line, []byte(":e ")) {
				last = line
			}
		}
		if !bytes.HasPrefix(last, []byte(begins)) || !bytes.Contains(last, []byte("shutting down")) {
			t.Errorf("%q: the stream ends with %.300s", header, last)
		}
	}
}

// TestControl: drain, undrain, role and the small endpoints.
func TestControl(t *testing.T) {
	w := start(t, nil)
	f := func(path, body string, status int, want string) {
		t.Helper()
		resp, b := ask(t, w.URL()+path, nil, body)
		if resp.StatusCode != status || !strings.Contains(string(b), want) {
			t.Errorf("%s: %d %s", path, resp.StatusCode, b)
		}
	}
	f("/xpyd/v1/drain", "", 200, `"draining":true`)
	f("/v1/completions", `{"prompt":"x","max_tokens":1}`, 200, `"choices"`) // announced, not enforced
	f("/xpyd/v1/undrain", "", 200, `"id"`)
	f("/xpyd/v1/drain", `{"wait_only":true}`, 200, `"wait_only":true`)
	f("/xpyd/v1/drain", `{"wait_only":1}`, 400, `"param":"wait_only"`)
	if err := w.Drain(); err != nil || !w.Instance().WaitOnly { // as at its end
		t.Errorf("%v %+v", err, w.Instance())
	}
	f("/xpyd/v1/drain", "{}", 200, `"draining":true`)
	if w.Instance().WaitOnly {
		t.Error("still to wait only")
	}
	f("/xpyd/v1/drain", `{"wait_only":true}`, 200, `"wait_only":true`)
	f("/xpyd/v1/undrain", "", 200, `"id"`)
	if w.Instance().Draining || w.Instance().WaitOnly {
		t.Error("still draining")
	}
	f("/xpyd/v1/role", `{"role":"prefill"}`, 200, `"role":"prefill"`)
	if w.Role() != fleet.Prefill {
		t.Error(w.Role())
	}
	f("/xpyd/v1/role", `{"role":"router"}`, 400, `"param":"role"`)
	f("/xpyd/v1/log", `{"level":"warn"}`, 200, `"level":"warn"`)
	f("/xpyd/v1/log", `{"level":"WARN"}`, 400, `"param":"level"`)
	f("/xpyd/v1/log", "", 400, `"param":"level"`)
	f("/xpyd/v1/prefill", `{"link":"x"}`, 400, `"param":"link"`)
	f("/xpyd/v1/prefill", `{"link":"00112233445566778899aabbccddeeff","deadline_ms":-1}`, 400, `"param":"deadline_ms"`)
	f("/xpyd/v1/prefill", `{"link":"00112233445566778899aabbccddeeff","deadline_ms":20}`, 504, `"outcome":"late"`)
	f("/nowhere", "", 404, `"code":"not_found"`)
	f("/tokenize", `{"prompt":"Once","return_token_strs":true}`, 200, `"token_strs"`)
	f("/detokenize", `{"tokens":[403]}`, 200, `"prompt"`)
	for _, path := range []string{"/health", "/version", "/v1/models", "/metrics", "/debug/ledger", "/query"} {
		if resp, _ := send(t, http.MethodGet, w.URL()+path, nil, ""); resp.StatusCode != 200 {
			t.Errorf("%s: %d", path, resp.StatusCode)
		}
	}
	empty(t, w)
}
