package worker_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/worker"
)

// start runs a worker without a fleet. Its peers are of this process: one that is
// silent for a while is starved, not dead.
func start(t *testing.T, change func(*worker.Config), given ...func(*worker.Deps)) *worker.Worker {
	t.Helper()
	cfg := worker.DefaultConfig(fleet.Decode)
	cfg.Threads, cfg.KVMemory = 1, 8<<20
	cfg.KV.DialTimeout, cfg.KV.HandshakeTimeout, cfg.KV.AcceptTimeout, cfg.KV.PeerSilence = patience, patience, patience, patience
	if change != nil {
		change(&cfg)
	}
	tr := tcp.New(nil)
	deps := worker.Deps{Log: slog.New(slog.DiscardHandler), Level: new(slog.LevelVar), Registry: prometheus.NewRegistry(), Ways: []way.Kind{way.Network(tr)}, Build: "test"}
	for _, give := range given {
		give(&deps)
	}
	w, err := worker.Start(t.Context(), cfg, deps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := w.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return w
}

// TestStartRefused: a worker that lacks something does not start, and says what.
func TestStartRefused(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	taken := ln.Addr().String()
	mute := talking(t)
	if err := os.Remove(filepath.Join(mute, "tokenizer.json")); err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	start(t, nil, func(d *worker.Deps) { d.Registry = registry })
	for want, change := range map[string]func(*worker.Config, *worker.Deps){
		"no such file or directory": func(c *worker.Config, _ *worker.Deps) { c.Model = t.TempDir() + "/nowhere" },
		"has no tokenizer.json":     func(c *worker.Config, _ *worker.Deps) { c.Model = mute },
		"listen: listen tcp":        func(c *worker.Config, _ *worker.Deps) { c.Listen = taken },
		"kv_listen: listen tcp":     func(c *worker.Config, _ *worker.Deps) { c.KVListen = taken },
		"kv_events: ":               func(c *worker.Config, _ *worker.Deps) { c.KVEvents.Listen = taken },
		"join: nats url":            func(c *worker.Config, _ *worker.Deps) { c.Fleet.URL = "nats://[" },
		"register metrics":          func(_ *worker.Config, d *worker.Deps) { d.Registry = registry },
	} {
		cfg := worker.DefaultConfig(fleet.Decode)
		cfg.Threads, cfg.KVMemory = 1, 8<<20
		deps := worker.Deps{Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(), Ways: []way.Kind{way.Network(tcp.New(nil))}, Build: "test"}
		change(&cfg, &deps)
		w, err := worker.Start(t.Context(), cfg, deps)
		if err == nil {
			t.Errorf("%s: it starts: %v", want, w.Close(t.Context()))
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// talking is stories260k with a chat template, which it lacks.
func talking(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "stories260k")
	if err := os.CopyFS(dir, os.DirFS("../internal/model/stories260k")); err != nil {
		t.Fatal(err)
	}
	const template = `{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}`
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestRefuse: what only a worker can decide, with the field's name.
func TestRefuse(t *testing.T) {
	dir := talking(t)
	const template = `{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not this') }}{% endif %}{{ m.content }}{% endfor %}`
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	w := start(t, func(c *worker.Config) { c.Model = dir })
	f := func(path, body string, status int, want string) {
		t.Helper()
		resp, b := ask(t, w.URL()+path, nil, body)
		if resp.StatusCode != status || !strings.Contains(string(b), want) {
			t.Errorf("%s %.100s: %d, want %d with %q: %.300s", path, body, resp.StatusCode, status, want, b)
		}
	}
	const chat = `{"max_tokens":1,"messages":[{"role":"user","content":"hello"}],"tools":[{"type":"function","function":{"name":"f"}}]`
	f("/v1/chat/completions", chat+`}`, 200, `"content"`)
	f("/v1/chat/completions", chat+`,"tool_choice":"auto"}`, 200, `"content"`)
	f("/v1/chat/completions", chat+`,"tool_choice":"required"}`, 400, `"param":"tool_choice"`)
	f("/v1/chat/completions", chat+`,"tool_choice":{"type":"function","function":{"name":"f"}}}`, 400, `"param":"tool_choice"`)
	f("/v1/chat/completions", chat+`,"response_format":{"type":"json_object"}}`, 200, `"content":"{"`)
	f("/v1/chat/completions", chat+`,"response_format":{"type":"structural_tag"}}`, 400, `"param":"response_format"`)

	f("/v1/chat/completions", `{"messages":[{"role":"user","content":"no"}]}`, 400, `chat template: `)
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":"no"}]}`, 400, `"param":"messages"`)
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":""}]}`, 400, `the chat template renders nothing`)
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":"hello"}],"tools":{"a":1}}`, 400, `"param":"tools"`)
	f("/v1/completions", `{"prompt":["a",""],"add_special_tokens":false}`, 400, `prompt 1 is empty","type":"invalid_request_error","param":"prompt"`)

	// Just over the limit in tokens; and far over it in bytes, which is
	// refused before the work of tokenising.
	words, book := strings.Repeat("hello ", 600), strings.Repeat("hello ", 200_000)
	for path, body := range map[string]string{"/v1/completions": `{"prompt":"TEXT"}`, "/v1/chat/completions": `{"messages":[{"role":"user","content":"TEXT"}]}`} {
		param := `"param":"prompt"`
		if strings.Contains(body, "messages") {
			param = `"param":"messages"`
		}
		f(path, strings.Replace(body, "TEXT", words, 1), 400, param)
		f(path, strings.Replace(body, "TEXT", book, 1), 400, param)
		f(path, strings.Replace(body, "TEXT", book, 1), 400, "resulted in more than 512 tokens")
		f(path, strings.Replace(body, "TEXT", book, 1), 400, `"code":"context_length_exceeded"`)
	}
	f("/v1/completions", `{"prompt":["a","`+book+`"]}`, 400, "maximum context length is 512 tokens. However, your prompt resulted in more than")
	f("/v1/completions", `{"prompt":[`+strings.TrimSuffix(strings.Repeat("3,", 512), ",")+`]}`, 400, "resulted in 512 tokens, which leaves none for the answer")
	f("/tokenize", `{"prompt":"`+words+`"}`, 200, `"count":`)
	f("/tokenize", `{"prompt":"`+book+`"}`, 400, "bytes of text")
	f("/v1/completions", `{"prompt":[1,512]}`, 400, `"param":"prompt"`)
	f("/v1/completions", `{"prompt":"x","max_tokens":600,"ignore_eos":true,"seed":1}`, 200, `"total_tokens":512`)
	f("/v1/completions", `{"prompt":"x","max_tokens":600,"min_tokens":512}`, 400, `"param":"min_tokens"`)
	f("/v1/completions", `{"prompt":"x","logprobs":21}`, 400, `logprobs must be between 0 and 20, not 21`)
	f("/v1/completions", `{"prompt":"x","prompt_logprobs":-1}`, 400, `prompt_logprobs must be between 0 and 20, not -1`)
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":"hi"}],"chat_template":"x"}`, 400, `trust_request_chat_template`)
	f("/v1/chat/completions", `{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"tools":[]}}`, 400, `"param":"chat_template_kwargs"`)
	f("/v1/completions", `{"prompt":"x","allowed_token_ids":[2],"min_tokens":1}`, 400, `"param":"allowed_token_ids"`)
	f("/v1/completions", `{"prompt":"x","model":"other"}`, 404, `"code":"model_not_found"`)
}

// TestRefuseMany: what a short request would make much of is bounded.
func TestRefuseMany(t *testing.T) {
	w := start(t, nil)
	f := func(body string, status int, want string) {
		t.Helper()
		resp, b := ask(t, w.URL()+"/v1/completions", nil, body)
		if resp.StatusCode != status || !strings.Contains(string(b), want) {
			t.Errorf("%.100s: %d, want %d with %q: %.300s", body, resp.StatusCode, status, want, b)
		}
	}
	list := func(n int, s string) string { return "[" + strings.TrimSuffix(strings.Repeat(s+",", n), ",") + "]" }
	f(`{"prompt":`+list(33, `"a"`)+`,"n":128,"max_tokens":1}`, 400, `128 for each of 33 prompts: 4224 choices; 4096 is the limit","type":"invalid_request_error","param":"n"`)
	tokens := list(500, "403")
	f(`{"prompt":`+tokens+`,"n":128,"max_tokens":1,"echo":true,"logprobs":20}`, 200, `"index":127`)
	f(`{"prompt":`+list(2, tokens)+`,"n":128,"max_tokens":1,"echo":true,"logprobs":20}`, 400, `"param":"logprobs"`)
	f(`{"prompt":`+list(2, tokens)+`,"n":128,"max_tokens":1,"prompt_logprobs":20}`, 400, `"param":"prompt_logprobs"`)
}

// TestEchoHalf: a prompt of tokens may end inside a character; the answer completes
// it, and it is shown once.
func TestEchoHalf(t *testing.T) {
	w := start(t, nil)
	f := func(more, text string) {
		t.Helper()
		// <0xC3> is token 3 + 0xc3; the next is <0xA9>.
		a := complete(t, w, nil, `{"prompt":[1,403,198],"echo":true,"temperature":0,"logit_bias":{"172":100},"logprobs":0`+more+`}`)
		c := &a.Choices[0]
		if c.Text != text || len(c.Logprobs.Tokens) != len(c.Logprobs.Offsets) {
			t.Errorf("%s: %q, want %q; %+v", more, c.Text, text, c.Logprobs)
		}
	}
	f(`,"max_tokens":1`, "<s> Onceé")
	f(`,"max_tokens":0`, "<s> Once\ufffd")
	f(`,"max_tokens":1,"skip_special_tokens":false`, "<s> Onceé")
}

// TestBothEnds: what the tokenizer calls the end ends an answer, though config.json
// names another token.
func TestBothEnds(t *testing.T) {
	dir := talking(t)
	if err := os.WriteFile(filepath.Join(dir, "tokenizer_config.json"), []byte(`{"eos_token":"▁was","bos_token":"<s>"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	w := start(t, func(c *worker.Config) { c.Model = dir })
	for token, want := range map[string]string{"▁was": "stop", "</s>": "stop", "▁the": "length"} {
		var ids struct{ Tokens []int32 }
		_, b := ask(t, w.URL()+"/tokenize", nil, `{"prompt":"`+strings.ReplaceAll(token, "▁", "")+`","add_special_tokens":false}`)
		if err := json.Unmarshal(b, &ids); err != nil || len(ids.Tokens) != 1 {
			t.Fatalf("%s: %s", token, b)
		}
		a := complete(t, w, nil, fmt.Sprintf(`{"prompt":"Once","temperature":0,"max_tokens":2,"logit_bias":{"%d":100}}`, ids.Tokens[0]))
		if c := &a.Choices[0]; *c.Finish != want {
			t.Errorf("%s: %s, want %s", token, *c.Finish, want)
		}
	}
}

// TestPoolTooSmall: a prompt that no moment's pool could hold is refused at once,
// with what it has and what there is.
func TestPoolTooSmall(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Blocks = 4 }) // of 16 tokens; the model takes 512
	if got := w.Instance(); got.MaxModelLen != 64 || got.KVBytes != 4*16*2*5*4*8*4 {
		t.Errorf("%+v", got)
	}
	resp, b := ask(t, w.URL()+"/v1/completions", nil, `{"prompt":[`+strings.TrimSuffix(strings.Repeat("3,", 70), ",")+`],"max_tokens":1}`)
	if resp.StatusCode != 400 || !strings.Contains(string(b), "70 tokens") || !strings.Contains(string(b), "That is all that the KV pool holds: 4 blocks of 16 tokens") {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
}
