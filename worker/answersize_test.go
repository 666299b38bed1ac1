package worker_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/worker"
)

// repeated is a JSON list of n times the same.
func repeated(n int, s string) string {
	return "[" + strings.TrimSuffix(strings.Repeat(s+",", n), ",") + "]"
}

// TestAnswerTooLarge: what could become larger than an answer may be is refused
// with the field that makes it so, before anything is computed.
func TestAnswerTooLarge(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Model = talking(t) })
	f := func(path, body, param string, header ...string) {
		t.Helper()
		h := map[string]string{}
		for i := 0; i < len(header); i += 2 {
			h[header[i]] = header[i+1]
		}
		resp, b := ask(t, w.URL()+path, h, body)
		if resp.StatusCode != 400 || !strings.Contains(string(b), `"param":"`+param+`","code":"answer_too_large"`) || resp.Header.Get("x-xpyd-outcome") != "" {
			t.Errorf("%.100s: %d %.300s", body, resp.StatusCode, b)
		}
	}
	f("/v1/completions", `{"n":128,"max_tokens":60,"logprobs":20,"temperature":1,"ignore_eos":true,"prompt":`+repeated(32, `"Once upon a time"`)+`}`, "logprobs")
	f("/v1/completions", `{"n":128,"max_tokens":400,"return_token_ids":true,"prompt":`+repeated(32, `"Once upon a time"`)+`}`, "n", "x-xpyd-max-answer", "1048576")
	f("/v1/completions", `{"max_tokens":400,"prompt":`+repeated(256, `"Once upon a time"`)+`}`, "prompt", "x-xpyd-max-answer", "524288")
	f("/v1/completions", `{"n":128,"max_tokens":1,"echo":true,"logprobs":20,"prompt":`+repeated(2, repeated(500, "403"))+`}`, "logprobs")
	f("/v1/completions", `{"n":128,"max_tokens":1,"prompt_logprobs":20,"prompt":`+repeated(2, repeated(500, "403"))+`}`, "prompt_logprobs")
	chat := `"messages":[{"role":"user","content":"hello"}]}`
	f("/v1/chat/completions", `{"n":128,"max_tokens":400,"logprobs":true,"top_logprobs":20,`+chat, "top_logprobs")
	f("/v1/chat/completions", `{"n":128,"logprobs":true,"top_logprobs":20,`+chat, "top_logprobs")
	// A router that takes less has the last word.
	f("/v1/completions", `{"n":4,"max_tokens":100,"logprobs":5,"prompt":"a"}`, "logprobs", "x-xpyd-max-answer", "65536")
	f("/v1/completions", `{"max_tokens":500,"prompt":"a"}`, "max_tokens", "x-xpyd-max-answer", "6000")
	f("/detokenize", `{"tokens":`+repeated(10_000_000, "410")+`}`, "tokens")
	_, metrics := send(t, http.MethodGet, w.URL()+"/metrics", nil, "")
	for line := range strings.Lines(string(metrics)) {
		if strings.HasPrefix(line, "vllm:prompt_tokens_total") && !strings.HasSuffix(line, " 0\n") {
			t.Errorf("something was computed: %s", line)
		}
	}
}

// TestAnswerOfUnsaidLength: a chat that leaves the number of tokens to us gets as
// many as fit into an answer, unless they are few.
func TestAnswerOfUnsaidLength(t *testing.T) {
	dir := talking(t)
	c := modeltest.Tiny("llama")
	c.Vocab, c.MaxPositions = 512, 4096
	if err := modeltest.WriteHF(dir, c, modeltest.HFOptions{Seed: 3, DType: kernels.F32}); err != nil {
		t.Fatal(err)
	}
	const template = `{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}`
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	w := start(t, func(c *worker.Config) { c.Model, c.MaxAnswer = dir, 5<<20 })
	if n := w.Instance().MaxModelLen; n != 4096 {
		t.Fatalf("%d tokens", n)
	}
	f := func(more string, status int) {
		t.Helper()
		resp, b := ask(t, w.URL()+"/v1/chat/completions", nil,
			`{"logprobs":true,"top_logprobs":20,"logit_bias":{"2":100},"messages":[{"role":"user","content":"hello"}]`+more+`}`)
		if resp.StatusCode != status {
			t.Errorf("%s: %d %.300s", more, resp.StatusCode, b)
		}
	}
	f("", 200)
	f(`,"max_tokens":4000`, 400)
	f(`,"max_tokens":4000,"stream":true`, 200)
	f(`,"n":3`, 400)
	f(`,"min_tokens":4000`, 400)
}

// TestLargeAnswer: an answer as large as it may be is whole, and it is not held
// while it is sent.
func TestLargeAnswer(t *testing.T) {
	w := start(t, nil)
	body := `{"n":128,"max_tokens":1,"echo":true,"logprobs":20,"prompt":` + repeated(500, "403") + `}`
	defer debug.SetGCPercent(debug.SetGCPercent(10))
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	before, peak := m.HeapAlloc, uint64(0)
	resp, err := http.Post(w.URL()+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	size, choices, tail, buf := 0, 0, "", make([]byte, 1<<20)
	for err == nil {
		var n int
		n, err = io.ReadFull(resp.Body, buf)
		size += n
		choices += strings.Count(tail+string(buf[:n]), `"index":`)
		tail = string(buf[max(0, n-len(`"index":`)+1):n])
		runtime.ReadMemStats(&m)
		peak = max(peak, m.HeapAlloc)
	}
	if err != io.ErrUnexpectedEOF || choices != 128 || !strings.HasSuffix(string(tail), "}}}") || size < 20<<20 {
		t.Errorf("%v: %d choices in %d bytes, ending in %q", err, choices, size, tail)
	}
	t.Logf("%d bytes, %d of memory", size, peak-before)
	if took := peak - before; took > uint64(size)/2 {
		t.Errorf("an answer of %d bytes took %d of memory", size, took)
	}
}

// TestPieces: an answer that is sent in pieces is the same as one that is not.
func TestPieces(t *testing.T) {
	w := start(t, nil)
	whole := func(n int) []any {
		_, b := ask(t, w.URL()+"/v1/completions", nil, fmt.Sprintf(`{"n":%d,"max_tokens":12,"echo":true,"logprobs":20,"seed":7,"return_token_ids":true,"prompt":"Once upon a time there was"}`, n))
		var a struct{ Choices []any }
		if err := json.Unmarshal(b, &a); err != nil || len(a.Choices) != n {
			t.Fatalf("%v: %.200s", err, b)
		}
		return a.Choices
	}
	few, many := whole(2), whole(64)
	for i := range few {
		if fmt.Sprint(few[i]) != fmt.Sprint(many[i]) {
			t.Errorf("choice %d:\n%v\n%v", i, few[i], many[i])
		}
	}
}

// TestSilentStream: tokens without text do not pile up in a stream.
func TestSilentStream(t *testing.T) {
	w := start(t, nil)
	resp, err := http.Post(w.URL()+"/v1/completions", "application/json", strings.NewReader(
		`{"stream":true,"max_tokens":300,"logprobs":20,"ignore_eos":true,"return_token_ids":true,"logit_bias":{"1":100},"temperature":0,"prompt":"Once"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	events, tokens := 0, 0
	in := bufio.NewReader(resp.Body)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			break
		}
		data, ok := strings.CutPrefix(line, "data: {")
		if !ok {
			continue
		}
		var e struct {
			Choices []struct {
				Text string
				IDs  []int `json:"token_ids"`
			}
		}
		if err := json.Unmarshal([]byte("{"+data), &e); err != nil {
			t.Fatal(err)
		}
		events++
		for _, c := range e.Choices {
			if len(c.IDs) > 64 || c.Text != "" {
				t.Errorf("an event of %d tokens, with text %q", len(c.IDs), c.Text)
			}
			tokens += len(c.IDs)
		}
	}
	if tokens != 300 || events < 5 {
		t.Errorf("%d tokens in %d events", tokens, events)
	}
}

// TestAnswerMemory: a request that needs more than there is for all is told so, and
// what answers took is given back.
func TestAnswerMemory(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.AnswerMemory = 4 << 20 })
	resp, b := ask(t, w.URL()+"/v1/completions", nil, `{"n":128,"max_tokens":120,"logprobs":20,"prompt":"a"}`)
	if resp.StatusCode != 400 || !strings.Contains(string(b), "of memory") || !strings.Contains(string(b), `"param":"logprobs"`) {
		t.Errorf("%d %.300s", resp.StatusCode, b)
	}
	done := make(chan int, 24)
	for range 24 { // a fifth of them at a time
		go func() {
			resp, _ := ask(t, w.URL()+"/v1/completions", nil, `{"n":16,"max_tokens":16,"logprobs":5,"prompt":"a"}`)
			done <- resp.StatusCode
		}()
	}
	for range 24 {
		if s := <-done; s != 200 {
			t.Errorf("status %d", s)
		}
	}
	if _, b := send(t, http.MethodGet, w.URL()+"/metrics", nil, ""); !strings.Contains(string(b), "\nxpyd_worker_answer_bytes 0\n") || !strings.Contains(string(b), "\nxpyd_worker_answers_waiting 0\n") {
		t.Errorf("memory is not given back")
	}
}

// TestAnswersFit: an accepted answer is never larger than allowed, whatever the request.
func TestAnswersFit(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Model = talking(t) })
	r := rand.New(rand.NewPCG(7, 7))
	tight := 0
	for range 120 {
		chat := r.IntN(3) == 0
		limit := 5_000 + r.IntN(60_000)
		body := fmt.Sprintf(`{"seed":%d,"n":%d,"max_tokens":%d,"temperature":%d`, r.IntN(1000), 1+r.IntN(4), 1+r.IntN(30), r.IntN(3))
		maybe := func(odds int, format string, args ...any) {
			if r.IntN(odds) == 0 {
				body += fmt.Sprintf(","+format, args...)
			}
		}
		maybe(2, `"ignore_eos":true`)
		maybe(2, `"return_token_ids":true`)
		maybe(3, `"prompt_logprobs":%d`, r.IntN(6))
		maybe(3, `"skip_special_tokens":false`)
		maybe(3, `"logit_bias":{"%d":100}`, r.IntN(512))
		maybe(3, `"stop":["%s"],"include_stop_str_in_output":true`, strings.Repeat("a", 1+r.IntN(40)))
		path := "/v1/completions"
		if chat {
			path = "/v1/chat/completions"
			maybe(2, `"logprobs":true,"top_logprobs":%d`, r.IntN(21))
			body += `,"messages":[{"role":"user","content":"Once \u0001 é"}]}`
		} else {
			maybe(2, `"logprobs":%d`, r.IntN(21))
			maybe(2, `"echo":true`)
			body += `,"prompt":` + repeated(1+r.IntN(3), []string{`"Once \u0001\"é🙂"`, `[1,403,198,199,3,4,5]`}[r.IntN(2)]) + `}`
		}
		resp, b := ask(t, w.URL()+path, map[string]string{"x-xpyd-max-answer": fmt.Sprint(limit)}, body)
		switch {
		case resp.StatusCode == 200 && len(b) > limit:
			t.Errorf("%s: %d bytes of at most %d", body, len(b), limit)
		case resp.StatusCode == 200 && len(b) > limit/4:
			tight++
		case resp.StatusCode != 200 && !strings.Contains(string(b), "answer_too_large"):
			t.Errorf("%s: %d %s", body, resp.StatusCode, b)
		}
	}
	if tight < 5 {
		t.Errorf("of few answers the bound was near: %d", tight)
	}
}
