package worker_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/worker"
)

// brought is the answer to a request to bring a stream.
type brought struct {
	Prompt bool
	Tokens int
}

// bring has a worker bring what another has of a stream of which so much was seen.
func bring(t *testing.T, to *worker.Worker, header map[string]string, body, given string) (b brought) {
	t.Helper()
	h := map[string]string{"x-xpyd-given": strconv.Itoa(len(body)), "x-xpyd-deadline-ms": "60000"}
	maps.Copy(h, header)
	resp, text := ask(t, to.URL()+"/xpyd/v1/bring?chat="+strconv.FormatBool(strings.Contains(body, "messages")), h, body+given)
	if err := json.Unmarshal(text, &b); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	return b
}

// goesOnAlone are the headers of a stream's move to where its KV was brought.
func goesOnAlone(from *worker.Worker) map[string]string {
	h := peerHeader(from, 1<<20)
	h["x-xpyd-brought"] = "1"
	return h
}

// TestBrought: a stream goes on at a worker that has brought its KV from where it ran: with the same
// events, behind any of them, and next to nothing is computed again.
func TestBrought(t *testing.T) {
	story := stories(1)[0]
	set := func(c *worker.Config) { patient(c); c.Model = talking(t) }
	from, to := start(t, set), start(t, set)
	for _, c := range []struct {
		path, fields string
		n            int
	}{
		{"/v1/completions", fmt.Sprintf(`"prompt":%q,"max_tokens":60,"ignore_eos":true,"logprobs":2,"stream_options":{"include_usage":true}`, story), 1},
		{"/v1/completions", fmt.Sprintf(`"prompt":%q,"max_tokens":60,"ignore_eos":true,"n":3,"echo":true,"logprobs":1,"frequency_penalty":0.7,"stop":["was a"]`, story), 3},
		{"/v1/completions", `"prompt":"x","max_tokens":40,"n":2,"seed":4,"ignore_eos":true,"return_token_ids":true,` + bytesOn, 2},
		{"/v1/chat/completions", fmt.Sprintf(`"messages":[{"role":"user","content":%q}],"max_tokens":40,"min_tokens":38,"n":2,"logprobs":true,"top_logprobs":2`, story), 2},
	} {
		body := "{" + c.fields + `,"stream":true}`
		whole := framedStream(t, from, c.path, nil, body, "")
		for cut := c.n; cut < len(whole) && whole[cut-1].index >= 0; cut += 9 {
			seen, rest := whole[:cut], whole[cut:]
			all, drawn := 0, map[int]bool{}
			for _, f := range seen {
				all += len(f.ids)
				if len(f.ids) > 0 {
					drawn[f.index] = true
				}
			}
			if len(drawn) < c.n { // the prompt's end is computed once more for who has drawn nothing
				continue
			}
			ask(t, to.URL()+"/xpyd/v1/cache/flush", nil, "")
			got := bring(t, to, peerHeader(from, 1<<20), body, given(c.n, seen))
			if want := all - 16*c.n; !got.Prompt || got.Tokens < want {
				t.Errorf("%s cut at %d: %+v, want %d tokens", body, cut, got, want)
			}
			before := counter(t, to, `xpyd_engine_tokens_total{phase="prefill"}`)
			follows(t, fmt.Sprintf("%s cut at %d", body, cut), seen, rest, framedStream(t, to, c.path, goesOnAlone(from), body, given(c.n, seen)))
			if n := counter(t, to, `xpyd_engine_tokens_total{phase="prefill"}`) - before; int(n) > 17*c.n {
				t.Errorf("%s cut at %d: %v positions computed again", body, cut, n)
			}
		}
	}
	empty(t, from)
	empty(t, to)
}

// TestBroughtNot: what cannot be brought is said, and a stream whose prompt is not there is refused,
// so that it is not computed by a decode worker.
func TestBroughtNot(t *testing.T) {
	from, to := start(t, func(c *worker.Config) { patient(c) }), start(t, func(c *worker.Config) { patient(c) })
	off := start(t, func(c *worker.Config) { c.KV.Peers = "off" })
	const path = "/v1/completions"
	body := fmt.Sprintf(`{"prompt":%q,"max_tokens":40,"ignore_eos":true,"stream":true}`, stories(1)[0])
	seen := framedStream(t, from, path, nil, body, "")[:20]
	say := given(1, seen)
	f := func(what string, to *worker.Worker, header map[string]string) {
		t.Helper()
		if got := bring(t, to, header, body, say); got != (brought{}) {
			t.Errorf("%s: %+v", what, got)
		}
	}
	f("nobody", to, nil)
	f("a stranger", to, map[string]string{"x-xpyd-kv-peer": "x 1 http://192.0.2.1:1 192.0.2.1:1 999"})
	f("itself", to, peerHeader(to, 999))
	f("another run of it", to, map[string]string{"x-xpyd-kv-peer": fmt.Sprintf("%s 1 %s %s 999", from.ID(), from.URL(), from.Instance().KVAddr)})
	f("without peers", off, peerHeader(from, 999))
	f("from who has none", to, peerHeader(off, 999))
	salted := strings.Replace(body, `"stream"`, `"cache_salt":"mine","stream"`, 1)
	if got := bring(t, to, peerHeader(from, 999), salted, given(1, framedStream(t, from, path, nil, salted, "")[:20])); got != (brought{}) {
		t.Errorf("salted, where others can listen: %+v", got)
	}
	header := goesOnAlone(off)
	header["x-xpyd-given"], header["x-xpyd-tokens"] = strconv.Itoa(len(body)), "1"
	if resp, b := ask(t, to.URL()+path, header, body+say); resp.StatusCode != 503 || resp.Header.Get("x-xpyd-outcome") != "no_space" {
		t.Errorf("a prompt that is not there: %d %s", resp.StatusCode, b)
	}
	bad := func(status int, header map[string]string, body, say, msg string) {
		t.Helper()
		h := map[string]string{"x-xpyd-given": strconv.Itoa(len(body)), "x-xpyd-deadline-ms": "1000"}
		maps.Copy(h, header)
		if resp, b := ask(t, to.URL()+"/xpyd/v1/bring", h, body+say); resp.StatusCode != status || !strings.Contains(string(b), msg) {
			t.Errorf("%d %s; want %d, %s", resp.StatusCode, b, status, msg)
		}
	}
	bad(400, map[string]string{"x-xpyd-given": ""}, body, "", "x-xpyd-given is required")
	bad(400, map[string]string{"x-xpyd-deadline-ms": ""}, body, say, "x-xpyd-deadline-ms")
	bad(400, map[string]string{"x-xpyd-deadline-ms": "-1"}, body, say, "x-xpyd-deadline-ms")
	bad(400, nil, `{"prompt":5}`, say, `"param":"prompt"`)
	bad(409, nil, body, strings.Replace(say, seen[0].prompt, "0123456789abcdef", 1), "other_prompt")
	bad(400, nil, strings.Replace(body, `"stream":true`, `"stream":false`, 1), say, "is for streams")
	two := `{"prompt":["Once","Tim"],"max_tokens":8,"stream":true}`
	bad(400, nil, two, given(2, framedStream(t, from, path, nil, two, "")[:3]), "one prompt at a time")
	empty(t, from)
	empty(t, to)
}
