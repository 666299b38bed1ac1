package worker_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/worker"
)

// answer is what the tests read of a completion.
type answer struct {
	ID      string
	Choices []struct {
		Index          int
		Text           string
		Finish         *string         `json:"finish_reason"`
		Stop           json.RawMessage `json:"stop_reason"`
		TokenIDs       []int32         `json:"token_ids"`
		PromptTokenIDs []int32         `json:"prompt_token_ids"`
		PromptLogprobs []any           `json:"prompt_logprobs"`
		Logprobs       *struct {
			Offsets []int `json:"text_offset"`
			Tokens  []string
			Values  []*float64       `json:"token_logprobs"`
			Top     []map[string]any `json:"top_logprobs"`
		}
	}
	Usage *usage
	KV    map[string]any `json:"kv_transfer_params"`
	Error *struct{ Message, Param, Code string }
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Details    struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

const (
	// patience bounds each wait for what must come: long for a starved machine, and
	// short of the limit of go test, which would not say what hung.
	patience = 2 * time.Minute
	// slack is what a busy machine may take for what is done at once. It is less than
	// the 10 s for which tickets and blocks are waited for, so that what ends only
	// when they give up is too late.
	slack = 8 * time.Second
)

var client = &http.Client{Timeout: patience}

// send sends a request and reads the answer.
func send(t testing.TB, verb, url string, header map[string]string, body string) (*http.Response, []byte) {
	t.Helper()
	return sendBy(t, client, verb, url, header, body)
}

func sendBy(t testing.TB, client *http.Client, verb, url string, header map[string]string, body string) (*http.Response, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), verb, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, b
}

// ask posts a JSON body.
func ask(t testing.TB, url string, header map[string]string, body string) (*http.Response, []byte) {
	t.Helper()
	return send(t, http.MethodPost, url, header, body)
}

// complete posts a completion and expects 200.
func complete(t testing.TB, w *worker.Worker, header map[string]string, body string) *answer {
	t.Helper()
	resp, b := ask(t, w.URL()+"/v1/completions", header, body)
	var a answer
	if err := json.Unmarshal(b, &a); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	return &a
}

// events posts a streamed completion and returns its events' data.
func events(t testing.TB, w *worker.Worker, body string) []string {
	t.Helper()
	resp, b := ask(t, w.URL()+"/v1/completions", nil, body)
	if resp.StatusCode != 200 || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	var out []string
	for _, e := range strings.Split(strings.TrimSuffix(string(b), "\n\n"), "\n\n") {
		out = append(out, strings.TrimPrefix(e, "data: "))
	}
	return out
}

// soon waits until f is nil; longer than limit is an error.
func soon(t testing.TB, limit time.Duration, f func() error) {
	t.Helper()
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Since(began) > limit {
			t.Fatalf("not within %v: %v", limit, err)
		}
	}
}

// empty waits until a worker holds nothing.
func empty(t testing.TB, w *worker.Worker) {
	t.Helper()
	soon(t, slack, func() error {
		if l := w.Ledger(); !l.Empty() {
			b, _ := json.Marshal(l)
			return fmt.Errorf("ledger %s", b)
		}
		return nil
	})
}

// dial sends a request on a connection of its own.
func dial(t testing.TB, w *worker.Worker, path, body string) (net.Conn, *bufio.Reader) {
	t.Helper()
	return dialWith(t, w, path, "", body)
}

// dialWith has header lines too.
func dialWith(t testing.TB, w *worker.Worker, path, header, body string) (net.Conn, *bufio.Reader) {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(w.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s", path, header, len(body), body); err != nil {
		t.Fatal(err)
	}
	return c, bufio.NewReaderSize(c, 64<<10)
}

// firstEvent reads up to the first token.
func firstEvent(t testing.TB, r *bufio.Reader) {
	t.Helper()
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(line, "data: ") {
			return
		}
	}
}

// TestStreamIsWhole: a stream's chunks add up to the answer without one.
func TestStreamIsWhole(t *testing.T) {
	w := start(t, nil)
	for _, fields := range []string{
		`"prompt":"Once upon a time","max_tokens":30,"temperature":0`,
		`"prompt":"Once","max_tokens":20,"n":3,"seed":1,"logprobs":2,"return_token_ids":true`,
		`"prompt":["Once","Lily"],"max_tokens":9,"n":2,"seed":-5,"echo":true,"logprobs":0`,
		`"prompt":"Once upon","max_tokens":60,"temperature":0,"stop":["was a","Tim"],"include_stop_str_in_output":true`,
		`"prompt":"Once upon","max_tokens":0,"echo":true,"logprobs":1`,
		`"prompt":[1,403,407],"max_tokens":12,"min_tokens":12,"seed":3,"temperature":1.5,"skip_special_tokens":false`,
	} {
		want := complete(t, w, nil, "{"+fields+"}")
		type sum struct {
			text, finish, stop, tokens string
			ids                        []int32
		}
		got := make([]sum, len(want.Choices))
		all := events(t, w, "{"+fields+`,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`)
		if all[len(all)-1] != "[DONE]" {
			t.Fatalf("%s: ends with %s", fields, all[len(all)-1])
		}
		completion := map[int]int{}
		for i, e := range all[:len(all)-1] {
			var a answer
			if err := json.Unmarshal([]byte(e), &a); err != nil || a.Usage == nil {
				t.Fatalf("%s: %s", fields, e)
			}
			if i == len(all)-2 {
				if *a.Usage != *want.Usage && a.Usage.Details.Cached == want.Usage.Details.Cached {
					t.Errorf("%s: usage %+v, want %+v", fields, a.Usage, want.Usage)
				}
				break
			}
			c := a.Choices[0]
			s := &got[c.Index]
			s.text += c.Text
			s.ids = append(s.ids, c.TokenIDs...)
			completion[c.Index] = a.Usage.Completion
			if c.Logprobs != nil {
				s.tokens += strings.Join(c.Logprobs.Tokens, "")
			}
			if c.Finish != nil {
				if s.finish != "" {
					t.Errorf("%s: choice %d ended twice", fields, c.Index)
				}
				s.finish, s.stop = *c.Finish, string(c.Stop)
			}
		}
		total := 0
		for i, c := range want.Choices {
			w := sum{text: c.Text, finish: *c.Finish, stop: string(c.Stop), ids: c.TokenIDs}
			if c.Logprobs != nil {
				w.tokens = strings.Join(c.Logprobs.Tokens, "")
			}
			if c.Index != i || !reflect.DeepEqual(got[i], w) {
				t.Errorf("%s: choice %d\n got %+v\nwant %+v", fields, i, got[i], w)
			}
			total += completion[i]
		}
		if total != want.Usage.Completion {
			t.Errorf("%s: choices count %d tokens, usage %d", fields, total, want.Usage.Completion)
		}
	}
	empty(t, w)
}

// TestEcho: each choice has the prompt and its log probabilities, not only the first one; with
// max_tokens 0 it has nothing else.
func TestEcho(t *testing.T) {
	w := start(t, nil)
	a := complete(t, w, nil, `{"prompt":["Once upon","Lily"],"n":2,"max_tokens":3,"echo":true,"logprobs":2,"seed":4,"prompt_logprobs":3,"return_token_ids":true}`)
	for _, c := range a.Choices {
		prompt := []string{"Once upon", "Lily"}[c.Index/2]
		n := len(c.PromptTokenIDs)
		if !strings.HasPrefix(c.Text, prompt) || len(c.TokenIDs) != 3 || len(c.Logprobs.Tokens) != n+3 || len(c.PromptLogprobs) != n {
			t.Fatalf("%+v", c)
		}
		for i, v := range c.Logprobs.Values {
			if (v == nil) != (i == 0) {
				t.Errorf("choice %d: log probability %d is %v", c.Index, i, v)
			}
		}
		for i, top := range c.Logprobs.Top {
			if i > 0 && (len(top) < 2 || len(top) > 3) {
				t.Errorf("choice %d: %d alternatives at %d", c.Index, len(top), i)
			}
		}
		if m, _ := c.PromptLogprobs[1].(map[string]any); len(m) < 3 {
			t.Errorf("choice %d: prompt_logprobs %v", c.Index, c.PromptLogprobs[1])
		}
	}
	a = complete(t, w, nil, `{"prompt":"Once upon","max_tokens":0,"echo":true,"logprobs":0}`)
	if c := a.Choices[0]; c.Text != "Once upon" || *c.Finish != "length" || a.Usage.Completion != 0 || len(c.Logprobs.Tokens) != a.Usage.Prompt {
		t.Errorf("%+v, usage %+v", c, a.Usage)
	}
}

// TestSeeds: a list's equal prompts get different answers, unless the client
// gave a seed; the router's seed decides as the client's does.
func TestSeeds(t *testing.T) {
	w := start(t, nil)
	texts := func(fields string, header map[string]string) [2]string {
		a := complete(t, w, header, `{"prompt":["Once upon a time","Once upon a time"],"max_tokens":24,"temperature":1.2`+fields+`}`)
		return [2]string{a.Choices[0].Text, a.Choices[1].Text}
	}
	if s := texts("", nil); s[0] == s[1] {
		t.Errorf("without a seed both are %q", s[0])
	}
	seeded := texts(`,"seed":-7`, nil)
	if seeded[0] != seeded[1] {
		t.Errorf("with a seed: %q", seeded)
	}
	router := map[string]string{"x-xpyd-seed": "9223372036854775807"}
	once := texts("", router)
	if once != texts("", router) || once[0] == once[1] {
		t.Errorf("with the router's seed: %q", once)
	}
	if texts(`,"seed":-7`, router) != seeded {
		t.Error("the router's seed beats the client's")
	}
}

// TestCached: usage says what the prefix cache had.
func TestCached(t *testing.T) {
	w := start(t, nil)
	body := `{"prompt":"` + strings.Repeat("Once upon a time ", 10) + `","max_tokens":1}`
	if a := complete(t, w, nil, body); a.Usage.Details.Cached != 0 {
		t.Errorf("%+v", a.Usage)
	}
	if a := complete(t, w, nil, body); a.Usage.Details.Cached < 16 {
		t.Errorf("%+v", a.Usage)
	}
}

// TestStreamUsage: a stream's chunks say how many tokens there are only as far as its client asked for it.
func TestStreamUsage(t *testing.T) {
	w := start(t, nil)
	for options, c := range map[string]struct{ each, last bool }{
		`{}`:                              {false, false},
		`{"include_usage":true}`:          {false, true},
		`{"continuous_usage_stats":true}`: {false, false},
		`{"include_usage":true,"continuous_usage_stats":true}`: {true, true},
	} {
		all := events(t, w, `{"prompt":"Once","max_tokens":4,"ignore_eos":true,"stream":true,"stream_options":`+options+`}`)
		last := false
		for _, e := range all[:len(all)-1] {
			var a answer
			if err := json.Unmarshal([]byte(e), &a); err != nil {
				t.Fatalf("%s: %s", options, e)
			}
			if len(a.Choices) == 0 {
				last = a.Usage != nil && a.Usage.Completion == 4
			} else if (a.Usage != nil) != c.each {
				t.Errorf("%s: %s", options, e)
			}
		}
		if last != c.last {
			t.Errorf("%s: the usage of all comes last %t: %s", options, last, all)
		}
	}
}
