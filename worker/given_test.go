package worker_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/worker"
)

// framed is one event of a stream with ticket.HeaderTokens.
type framed struct {
	index           int // -1: it is of no choice
	created, prompt string
	ids             []int32
	done            bool
	data            string // without how much was cached
}

var cached = regexp.MustCompile(`"cached_tokens":\d+`)

// framedStream posts a streamed request, of a body and what follows it, and reads its events.
func framedStream(t testing.TB, w *worker.Worker, path string, header map[string]string, body, given string) []framed {
	t.Helper()
	h := map[string]string{"x-xpyd-tokens": "1", "x-request-id": "req-1", "x-xpyd-seed": "77"}
	maps.Copy(h, header)
	if given != "" {
		h["x-xpyd-given"] = strconv.Itoa(len(body))
	}
	resp, b := ask(t, w.URL()+path, h, body+given)
	if resp.StatusCode != 200 {
		t.Fatalf("%s%s: %d %s", body, given, resp.StatusCode, b)
	}
	var list []framed
	for _, e := range strings.SplitAfter(string(b), "\n\n") {
		if e == "" {
			continue
		}
		f := framed{index: -1}
		if line, data, ok := strings.Cut(e, "\n"); ok && (strings.HasPrefix(line, ":t ") || strings.HasPrefix(line, ":f ")) {
			p := strings.Split(line, " ")
			n := openai.CountIDs([]byte(p[2]))
			if e = data; n < 0 || (p[0] == ":f") != strings.Contains(e, `"finish_reason":"`) {
				t.Fatalf("%q", line)
			}
			if len(p) > 3 {
				f.created, f.prompt = p[3], p[4]
			}
			f.index, _ = strconv.Atoi(p[1])
			for i := range n {
				f.ids = append(f.ids, openai.IDAt([]byte(p[2]), i))
			}
		}
		f.data = cached.ReplaceAllString(e, "")
		if has := strings.Contains(e, `"choices":[{`); !strings.HasPrefix(e, "data: ") || has != (f.index >= 0) {
			t.Fatalf("%q", e)
		}
		f.done = strings.Contains(e, `"finish_reason":"`)
		list = append(list, f)
	}
	for i, f := range list {
		if f.index >= 0 && ((f.created == "") != (i > 0) || len(f.prompt) != 16 != (i > 0)) {
			t.Fatalf("event %d: %+v", i, f)
		}
	}
	if len(list) == 0 || list[len(list)-1].data != "data: [DONE]\n\n" {
		t.Fatalf("%s", b)
	}
	return list
}

// given is what a router tells of a stream of n choices of which it has seen so much.
func given(n int, seen []framed) string {
	type choice struct {
		IDs   []int32 `json:"ids"`
		Done  bool    `json:"done,omitempty"`
		Begun bool    `json:"begun,omitempty"`
	}
	choices := make([]choice, n)
	for i := range choices {
		choices[i].IDs = []int32{}
	}
	for _, f := range seen {
		if f.index >= 0 {
			c := &choices[f.index]
			c.IDs, c.Done, c.Begun = append(c.IDs, f.ids...), c.Done || f.done, true
		}
	}
	b, _ := json.Marshal(choices)
	return fmt.Sprintf(`{"created":%s,"prompt":"%s","choices":%s}`, seen[0].created, seen[0].prompt, b)
}

// follows compares a stream that goes on behind seen events with the rest of a whole one: each
// choice's events, and those of no choice.
func follows(t *testing.T, how string, seen, rest, got []framed) {
	t.Helper()
	of := func(list []framed, index int) (ids []int32, all string) {
		for _, f := range list {
			if f.index == index {
				ids, all = append(ids, f.ids...), all+f.data
			}
		}
		return ids, all
	}
	for i := -1; i <= slices.MaxFunc(seen, func(a, b framed) int { return a.index - b.index }).index; i++ {
		wantIDs, want := of(rest, i)
		gotIDs, have := of(got, i)
		if have != want || !slices.Equal(gotIDs, wantIDs) {
			t.Fatalf("%s, choice %d:\n got %v %s\nwant %v %s", how, i, gotIDs, have, wantIDs, want)
		}
	}
	if first := got[0]; first.index >= 0 && (first.created != seen[0].created || first.prompt != seen[0].prompt) {
		t.Errorf("%s: first frame %+v, want %+v", how, first, seen[0])
	}
}

// bytesOn makes a model that draws bytes of whole and broken characters, at random.
const bytesOn = `"logit_bias":{"198":60,"172":60,"243":60,"162":60,"133":60,"100":60},"temperature":1.7`

// TestGiven: a stream that was cut behind any of its events goes on elsewhere, and a client that
// has both parts has the same bytes as without a cut.
func TestGiven(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Model = talking(t) })
	const chat = "/v1/chat/completions"
	for _, c := range []struct {
		path, fields string
		n, held      int // choices; tokens that some event stands for
	}{
		{"", `"prompt":"Once upon a time","max_tokens":20,"temperature":0`, 1, 1},
		{"", `"prompt":"Once upon","max_tokens":24,"n":2,"seed":3,"logprobs":2,"return_token_ids":true,"stream_options":{"include_usage":true}`, 2, 1},
		{"", `"prompt":["Once","Lily was"],"max_tokens":10,"n":2,"temperature":1.4,"echo":true,"logprobs":1,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`, 4, 1},
		{"", `"prompt":"Lily","max_tokens":9,"echo":true,"return_token_ids":true,"seed":1`, 1, 1},
		{"", `"prompt":["Once upon","Tim"],"max_tokens":0,"echo":true,"logprobs":1,"stream_options":{"include_usage":true}`, 2, 0},
		{"", `"prompt":[1],"max_tokens":16,"n":3,"echo":true,"temperature":1.2`, 3, 1},
		{"", `"prompt":"Once upon a time","max_tokens":40,"n":3,"seed":9,"stop":["was a","ay, ","he wan"],"frequency_penalty":0.7`, 3, 1},
		{"", `"prompt":"Once upon a time","max_tokens":60,"temperature":0,"stop":[" was a little girl named Lily. She loved to play","zz"],"include_stop_str_in_output":true,"stream_options":{"include_usage":true}`, 1, 14},
		{"", `"prompt":"x","max_tokens":40,"n":2,"seed":4,"stop":["éa","\ufffda"],"min_tokens":12,"logprobs":0,` + bytesOn, 2, 4},
		{"", `"prompt":"x","max_tokens":30,"seed":4,"ignore_eos":true,"return_token_ids":true,` + bytesOn, 1, 2},
		{"", `"prompt":"Once upon a time","max_tokens":30,"n":2,"stop_token_ids":[403,426,286],"seed":2,"min_tokens":3,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`, 2, 1},
		{"", `"prompt":"Once upon a time","max_tokens":24,"n":2,"seed":3,"bad_words":["was","girl named","play outside"],"logprobs":0,"logprob_token_ids":[5,9],"return_tokens_as_token_ids":true`, 2, 1},
		{"", `"prompt":"Once upon a time","max_tokens":24,"n":2,"seed":5,"allowed_token_ids":[403,407,261,378,432,286,376],"min_tokens":3,"bad_words":["was a"]`, 2, 1},
		{chat, `"messages":[{"role":"user","content":"Once"},{"role":"assistant","content":" upon"}],"continue_final_message":true,"echo":true,"max_tokens":12,"return_token_ids":true,"seed":2`, 1, 1},
		{chat, `"messages":[{"role":"user","content":"Once upon a time"}],"max_tokens":16,"n":2,"logprobs":true,"top_logprobs":2,"stream_options":{"include_usage":true}`, 2, 1},
		{chat, `"messages":[{"role":"user","content":"Once"}],"max_tokens":30,"seed":5,"stop":["éa"],"stream_options":{"include_usage":true,"continuous_usage_stats":true},` + bytesOn, 1, 3},
		{chat, `"messages":[{"role":"user","content":"Once"}],"max_tokens":80,"ignore_eos":true,"logit_bias":{"1":90}`, 1, 64}, // no text, for more tokens than are kept unsaid
	} {
		body := "{" + c.fields + `,"stream":true}`
		path := c.path
		if path == "" {
			path = "/v1/completions"
		}
		whole := framedStream(t, w, path, nil, body, "")
		resp, b := ask(t, w.URL()+path, map[string]string{"x-request-id": "req-1", "x-xpyd-seed": "77"}, body)
		if resp.StatusCode != 200 || bytes.Contains(b, []byte(":t ")) {
			t.Fatalf("unasked: %d %s", resp.StatusCode, b)
		}
		if n := bytes.Count(b, []byte("\n\n")); n != len(whole) && !strings.Contains(body, `"1":90`) {
			t.Errorf("%s: %d events, %d with frames", body, n, len(whole))
		}
		longest := slices.MaxFunc(whole, func(a, b framed) int { return len(a.ids) - len(b.ids) })
		if len(longest.ids) != c.held {
			t.Errorf("%s: an event stands for %d tokens, want %d", body, len(longest.ids), c.held)
		}
		for cut := 1; cut < len(whole); cut++ {
			seen, rest := whole[:cut], whole[cut:]
			if seen[cut-1].index < 0 {
				break // the usage has come: a router needs nobody for [DONE]
			}
			got := framedStream(t, w, path, nil, body, given(c.n, seen))
			follows(t, fmt.Sprintf("%s cut at %d", body, cut), seen, rest, got)
		}
	}
	empty(t, w)
}

// TestGivenToPair: a stream goes on with a prompt that prefill computes again.
func TestGivenToPair(t *testing.T) {
	p, d := pair(t, nil)
	for _, c := range []struct {
		fields string
		n      int
	}{
		{`"prompt":"Once upon a time, there was a little girl","max_tokens":14,"n":2,"logprobs":1,"stop":["was"]`, 2},
		{`"prompt":["Once upon","Lily was","Tim"],"max_tokens":4,"n":2,"echo":true,"logprobs":1,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`, 6},
	} {
		body := "{" + c.fields + `,"stream":true}`
		linkedStream := func(given string) []framed {
			link := ticket.NewLink().String()
			report := leg(p, link)
			got := framedStream(t, d, "/v1/completions", linked(p, link), body, given)
			if r := <-report; !strings.HasPrefix(r, "200 ") {
				t.Fatalf("the leg got %s", r)
			}
			return got
		}
		whole := linkedStream("")
		for cut := 1; cut < len(whole) && whole[cut-1].index >= 0; cut++ {
			follows(t, fmt.Sprintf("%s cut at %d", body, cut), whole[:cut], whole[cut:], linkedStream(given(c.n, whole[:cut])))
		}
	}
	empty(t, p)
	empty(t, d)
}

// TestGivenRefused: what cannot be gone on from is refused and named before anything is computed.
func TestGivenRefused(t *testing.T) {
	w := start(t, nil)
	const path = "/v1/completions"
	body := `{"prompt":"Once upon a time","max_tokens":6,"n":2,"stream":true,"stop":["ab"],"logit_bias":{"2":-100}}`
	hash := framedStream(t, w, path, nil, body, "")[0].prompt
	say := func(choices string) string {
		return `{"created":1732550000,"prompt":"` + hash + `","choices":` + choices + `}`
	}
	f := func(body, header, given string, status int, msg string) {
		t.Helper()
		resp, b := ask(t, w.URL()+path, map[string]string{"x-xpyd-given": header, "x-xpyd-tokens": "1"}, body+given)
		if resp.StatusCode != status || !strings.Contains(string(b), msg) || status != 200 && !strings.Contains(string(b), `"param":"x-xpyd-given"`) {
			t.Errorf("%s: %d %s; want %d, %s", given, resp.StatusCode, b, status, msg)
		}
	}
	n := strconv.Itoa(len(body))
	const good = `[{"ids":[403]},{"ids":[403,407],"done":true}]`
	f(body, n, say(good), 200, `"created":1732550000`)
	f(body, n, say(`[{"ids":[],"done":true},{"done":true}]`), 200, "data: [DONE]")
	for _, header := range []string{"0", "-1", "x", "99999999999999999999", strconv.Itoa(len(body + say(good)))} {
		f(body, header, say(good), 400, "not the length")
	}
	f(body, n, "{", 400, "JSON")
	f(body, n, say(`[{"ids":[403]}]`), 400, "1 entries for 2")
	f(body, n, say(`[{"ids":[403]},{},{}]`), 400, "3 entries for 2")
	f(body, n, say(`[{"ids":[512]},{}]`), 400, "ids")
	f(body, n, say(`[{"ids":[403,2]},{}]`), 400, "its token 2 of 2 ends it (stop)")
	f(body, n, say(`[{},{"ids":[2,403]}]`), 400, "choice 1: its token 1 of 2 ends it (stop)")
	f(body, n, say(`[{},{"ids":[403,403,403,403,403,403]}]`), 400, "its token 6 of 6 ends it (length)")
	f(body, n, say(`[{},{"ids":[403,403,403,403,403,403,403],"done":true}]`), 400, "7 tokens, max_tokens is 6")
	f(body, n, say(`[{"ids":[403,100,101]},{}]`), 400, "choice 0: its token 3 of 3 ends it")
	f(body, n, strings.Replace(say(good), hash, "0123456789abcdef", 1), 409, `"code":"other_prompt"`)
	whole := strings.Replace(body, `"stream":true`, `"stream":false`, 1)
	f(whole, strconv.Itoa(len(whole)), say(good), 400, "is for streams")
	empty(t, w)
}

// TestGivenCounts: what another worker drew is counted in the answer's usage, not here.
func TestGivenCounts(t *testing.T) {
	w := start(t, nil)
	const body = `{"prompt":"Once upon a time","max_tokens":9,"stream":true,"temperature":0,"ignore_eos":true,"stream_options":{"include_usage":true}}`
	whole := framedStream(t, w, "/v1/completions", nil, body, "")
	framedStream(t, w, "/v1/completions", nil, body, given(1, whole[:5]))
	framedStream(t, w, "/v1/completions", nil, body, given(1, whole[:9])) // its end was there
	m := metrics(t, w)
	for _, line := range []string{"vllm:generation_tokens_total{engine=\"0\",model_name=\"stories260k\"} 13",
		"vllm:request_generation_tokens_sum{engine=\"0\",model_name=\"stories260k\"} 13",
		"vllm:request_success_total{engine=\"0\",finished_reason=\"length\",model_name=\"stories260k\"} 2",
		"vllm:request_success_total{engine=\"0\",finished_reason=\"abort\",model_name=\"stories260k\"} 0"} {
		if !strings.Contains(m, line+"\n") {
			t.Errorf("no %s:\n%s\n%s", line, grep(m, "generation_tokens"), grep(m, "success"))
		}
	}
}

// TestGivenTime: a template that prints the time prints that of the stream's beginning.
func TestGivenTime(t *testing.T) {
	dir := talking(t)
	const template = `{{ bos_token }}{{ strftime_now('%Y-%m-%d %H:%M:%S') }}{% for m in messages %}{{ m.content }}{% endfor %}`
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	w := start(t, func(c *worker.Config) { c.Model = dir })
	const path, body = "/v1/chat/completions", `{"messages":[{"role":"user","content":"Once"}],"max_tokens":6,"stream":true}`
	whole := framedStream(t, w, path, nil, body, "")
	soon(t, patience, func() error {
		if fmt.Sprint(time.Now().Unix()) == whole[0].created {
			return errors.New("still the same second")
		}
		return nil
	})
	follows(t, "later", whole[:2], whole[2:], framedStream(t, w, path, nil, body, given(1, whole[:2])))
}
