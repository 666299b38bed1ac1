// Package input tests that bad input gets the documented answer, and that
// requests beside it notice nothing: real processes, one prefill and one
// decode worker behind the router.
package input

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/e2e/cluster"
)

// TestMain lets all clients that are too slow wait at the same time.
func TestMain(m *testing.M) {
	flag.Parse()
	flag.Set("test.parallel", "8")
	os.Exit(cluster.Main(m))
}

// settings are short where a test would have to wait for them, and long enough
// for a starved machine to take in what is too large.
const settings = `
read_timeout: 4s
public_metrics: true
`

// system is what is under test, and the valid requests beside the bad ones.
type system struct {
	*cluster.Router
	client *http.Client
}

func start(t *testing.T) *system {
	t.Helper()
	file := filepath.Join(t.TempDir(), "up.yaml")
	if err := os.WriteFile(file, []byte(settings), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &system{Router: cluster.Up(t, "--config", file, "--model", talking(t)), client: cluster.NewClient(t)}
	s.beside(t)
	return s
}

// talking is stories260k with a chat template, which it lacks.
func talking(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "stories260k")
	if err := os.CopyFS(dir, os.DirFS("../../internal/model/stories260k")); err != nil {
		t.Fatal(err)
	}
	const template = `{{ bos_token }}{% for m in messages %}{% if m.role not in ["system", "user", "assistant"] %}` +
		`{{ raise_exception("unknown role " + m.role) }}{% endif %}{{ m.content }}{% endfor %}`
	if err := os.WriteFile(filepath.Join(dir, "chat_template.jinja"), []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

const (
	completions = "/v1/completions"
	chat        = "/v1/chat/completions"

	valid     = `{"model":"stories260k","prompt":"Once upon a time","max_tokens":8,"temperature":0}`
	validText = ", there was a little girl"
	long      = `{"model":"stories260k","prompt":"Once upon a time","max_tokens":300,"temperature":0,"stream":true}`
)

// beside streams one story after the other until the test ends, each to be the
// same as the first; after that nothing may be held, and no answer may have
// been the server's fault.
func (s *system) beside(t *testing.T) {
	want := cluster.Post(t.Context(), s.client, s.URL+completions, long)
	if !want.Good() || !strings.HasPrefix(want.Text, validText) {
		t.Fatalf("%v", want)
	}
	var stop atomic.Bool
	done := make(chan int)
	go func() {
		n := 0
		defer func() { done <- n }()
		ctx := context.WithoutCancel(t.Context()) // the last one ends as the others do
		for ; !stop.Load(); n++ {
			if got := cluster.Post(ctx, s.client, s.URL+completions, long); !got.Good() || got.Text != want.Text {
				t.Errorf("a stream beside bad input: %v\n got %q\nwant %q", got, got.Text, want.Text)
				return
			}
		}
	}()
	t.Cleanup(func() {
		stop.Store(true)
		if n := <-done; n == 0 {
			t.Error("nothing ran beside the bad input")
		}
		cluster.Wait(t, time.Second, "nothing is held", s.Idle)
		for line := range strings.SplitSeq(s.metrics(t), "\n") {
			if strings.HasPrefix(line, `xpyd_router_requests_total{code="5`) && !strings.Contains(line, `code="505"`) {
				t.Errorf("the server took the fault: %s", line)
			}
		}
	})
}

// undisturbed sends a valid request.
func (s *system) undisturbed(t *testing.T) {
	t.Helper()
	if got := cluster.Post(t.Context(), s.client, s.URL+completions, valid); !got.Good() || got.Text != validText {
		t.Errorf("a valid request after it: %v, %q", got, got.Text)
	}
}

func (s *system) metrics(t *testing.T) string {
	resp, err := s.client.Get(s.URL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// check tests the whole of an answer: its status, and for an error the
// OpenAI shape with the field's name ("" is null).
func check(t *testing.T, resp *http.Response, status int, param string) {
	t.Helper()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != status || resp.Header.Get("X-Request-Id") == "" {
		t.Errorf("status %d, want %d, request id %q: %.500s", resp.StatusCode, status, resp.Header.Get("X-Request-Id"), body)
	}
	if status < 400 || t.Failed() {
		return
	}
	var e struct {
		Error *struct {
			Message, Type string
			Param, Code   *string
		}
	}
	var keys map[string]map[string]json.RawMessage
	if json.Unmarshal(body, &keys) != nil || json.Unmarshal(body, &e) != nil || e.Error == nil ||
		len(keys) != 1 || len(keys["error"]) != 4 || e.Error.Message == "" || e.Error.Type != "invalid_request_error" {
		t.Fatalf("not the shape of an error: %s", body)
	}
	got := ""
	if e.Error.Param != nil {
		got = *e.Error.Param
	}
	if got != param || len(body) > 1<<10 || strings.ContainsAny(e.Error.Message, "\n\x00") {
		t.Errorf("param %q, want %q: %.1200s", got, param, body)
	}
	if resp.Header.Get("Content-Type") != "application/json" {
		t.Errorf("content type %q", resp.Header.Get("Content-Type"))
	}
}

// with is a valid completion and more fields; later keys win.
func with(fields string) string { return strings.TrimSuffix(valid, "}") + "," + fields + "}" }

// say is a valid chat with these messages and more fields.
func say(messages, fields string) string {
	if fields != "" {
		fields = "," + fields
	}
	return `{"model":"stories260k","max_tokens":4,"messages":` + messages + fields + `}`
}

const hello = `[{"role":"user","content":"hello"}]`

// TestBodies: one line a case, by path.
func TestBodies(t *testing.T) {
	s := start(t)
	f := func(path, name, body string, status int, param string) {
		t.Helper()
		t.Run(strings.ReplaceAll(strings.Trim(path, "/")+" "+name, "/", " "), func(t *testing.T) {
			resp, err := s.client.Post(s.URL+path, "application/json", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			check(t, resp, status, param)
			s.undisturbed(t)
		})
	}
	deep := strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000)

	// No JSON, or not an object.
	for name, body := range map[string]string{
		"nothing": "", "white space": " \n", "text": "hello", "null": "null", "list": "[]", "string": `"x"`, "number": "1",
		"cut": valid[:20], "not closed": strings.TrimSuffix(valid, "}"), "trailing comma": with(`"a":1,`), "two values": valid + valid,
		"trailing text": valid + "x", "trailing zero byte": valid + "\x00", "byte order mark": "\xef\xbb\xbf" + valid,
		"UTF-16": "\xff\xfe{\x00}\x00", "no colon": with(`"a"`), "no value": with(`"a":`), "bare key": with(`a:1`), "quotes": with(`'a':1`),
		"comment": with(`"a":1/*x*/`), "NaN": with(`"temperature":NaN`), "Infinity": with(`"temperature":Infinity`),
		"plus": with(`"n":+1`), "leading zero": with(`"a":01`), "hexadecimal": with(`"a":0x1`), "half a number": with(`"temperature":1.`),
		"half a literal": with(`"stream":tru`), "Python literal": with(`"stream":True`), "control character": with("\"a\":\"\x01\""),
		"newline in a string": with("\"a\":\"\n\""), "bad escape": with(`"a":"\x41"`), "short escape": with(`"a":"\u12"`),
		"lone surrogate": with(`"prompt":"\ud83d"`), "swapped surrogates": with(`"prompt":"\ude00\ud83d"`),
		"lone surrogate in a key": with(`"\udc00":1`), "invalid UTF-8": with("\"prompt\":\"\xff\xfe\""),
		"overlong UTF-8": with("\"prompt\":\"\xc0\x80\""), "encoded surrogate": with("\"prompt\":\"\xed\xa0\x80\""),
		"cut UTF-8": with("\"prompt\":\"\xf0\x9f\x98\""), "deep nesting": with(`"a":` + deep), "deep prompt": with(`"prompt":` + deep),
		"many objects": with(`"a":` + strings.Repeat(`{"a":`, 5000) + "1" + strings.Repeat("}", 5000)),
	} {
		f(completions, name, body, 400, "")
	}

	// Fields of a completion.
	c := func(param, fields string) {
		t.Helper()
		f(completions, fmt.Sprintf("%.40s", fields), with(fields), 400, param)
	}
	f(completions, "no prompt", `{"model":"stories260k"}`, 400, "prompt")
	f(completions, "chat's messages", `{"model":"stories260k","messages":`+hello+`}`, 400, "prompt")
	c("prompt", `"prompt":null`)
	c("prompt", `"prompt":[]`)
	c("prompt", `"prompt":[[]]`)
	c("prompt", `"prompt":7`)
	c("prompt", `"prompt":true`)
	c("prompt", `"prompt":{"text":"x"}`)
	c("prompt", `"prompt":["a",1]`)
	c("prompt", `"prompt":[1,"a"]`)
	c("prompt", `"prompt":[1,[2]]`)
	c("prompt", `"prompt":[null]`)
	c("prompt", `"prompt":[1.5]`)
	c("prompt", `"prompt":[-1]`)
	c("prompt", `"prompt":[512]`)
	c("prompt", `"prompt":[1,99999999999]`)
	c("prompt", `"prompt":[[1],[2,512]]`)
	f(completions, "too many tokens", with(`"prompt":[5`+strings.Repeat(",5", 600)+`]`), 400, "prompt")
	f(completions, "too long a text", with(`"prompt":"`+strings.Repeat("a story ", 100_000)+`"`), 400, "prompt")
	f(completions, "too many prompts", with(`"prompt":["a"`+strings.Repeat(`,"a"`, 10_000)+`]`), 400, "prompt")
	f(completions, "unknown model", with(`"model":"gpt-4"`), 404, "model")
	f(completions, "long model name", with(`"model":"`+strings.Repeat("m", 100_000)+`"`), 404, "model")
	c("model", `"model":7`)
	c("model", `"model":["stories260k"]`)
	for _, field := range []string{"n", "max_tokens", "seed", "top_k", "min_tokens", "logprobs"} {
		c(field, `"`+field+`":"1"`)
		c(field, `"`+field+`":1.5`)
		c(field, `"`+field+`":[1]`)
		c(field, `"`+field+`":1e300`)
		c(field, `"`+field+`":99999999999999999999`)
	}
	c("n", `"n":0`)
	c("n", `"n":-1`)
	c("n", `"n":129`)
	c("max_tokens", `"max_tokens":0`)
	c("max_tokens", `"max_tokens":-1`)
	c("top_k", `"top_k":-2`)
	c("min_tokens", `"min_tokens":-1`)
	c("min_tokens", `"min_tokens":9`)
	c("logprobs", `"logprobs":-1`)
	c("logprobs", `"logprobs":21`)
	c("logprobs", `"logprobs":true`)
	for field, values := range map[string]string{
		"temperature": "-0.1 2.1 1e400", "top_p": "0 -1 1.1", "min_p": "-0.1 1.1", "presence_penalty": "-2.1 2.1",
		"frequency_penalty": "-2.1 2.1", "repetition_penalty": "0 -1 3",
	} {
		for value := range strings.FieldsSeq(values + ` "1" true [0] {}`) {
			c(field, `"`+field+`":`+value)
		}
	}
	for _, field := range []string{"stream", "echo", "ignore_eos", "return_token_ids", "include_stop_str_in_output", "skip_special_tokens"} {
		c(field, `"`+field+`":"true"`)
		c(field, `"`+field+`":1`)
	}
	c("stop", `"stop":7`)
	c("stop", `"stop":""`)
	c("stop", `"stop":["a",7]`)
	c("stop", `"stop":["a",null]`)
	c("stop", `"stop":{}`)
	f(completions, "too many stops", with(`"stop":["a"`+strings.Repeat(`,"a"`, 100)+`]`), 400, "stop")
	f(completions, "too long a stop", with(`"stop":"`+strings.Repeat("a", 100_000)+`"`), 400, "stop")
	c("stop_token_ids", `"stop_token_ids":[-1]`)
	c("stop_token_ids", `"stop_token_ids":"1"`)
	c("logit_bias", `"logit_bias":[1]`)
	c("logit_bias", `"logit_bias":{"x":1}`)
	c("logit_bias", `"logit_bias":{"512":1}`)
	c("logit_bias", `"logit_bias":{"1":101}`)
	c("logit_bias", `"logit_bias":{"1":"1"}`)
	c("stream_options", `"stream_options":7`)
	c("stream_options", `"stream_options":{"include_usage":true}`)
	c("stream_options.include_usage", `"stream":true,"stream_options":{"include_usage":1}`)
	c("user", `"user":7`)
	c("cache_salt", `"cache_salt":7`)
	c("cache_salt", `"cache_salt":""`)
	c("best_of", `"best_of":2`)
	c("suffix", `"suffix":"x"`)
	c("use_beam_search", `"use_beam_search":true`)
	c("prompt_embeds", `"prompt_embeds":"x"`)
	c("kv_transfer_params", `"kv_transfer_params":{"do_remote_decode":true}`)
	c("kv_transfer_params", `"kv_transfer_params":7`)
	c("disaggregated_params", `"disaggregated_params":{}`)
	c("bootstrap_host", `"bootstrap_host":"10.0.0.1"`)
	c("bootstrap_port", `"bootstrap_port":1`)
	c("bootstrap_room", `"bootstrap_room":1`)
	c("seed", `"seed":true`)
	// A field that was right is wrong when it comes again.
	c("n", `"n":1,"n":0`)

	// Chat.
	f(chat, "no messages", `{"model":"stories260k"}`, 400, "messages")
	f(chat, "a prompt", valid, 400, "messages")
	for name, messages := range map[string]string{
		"null": `null`, "empty": `[]`, "text": `"hello"`, "object": `{}`, "list of text": `["hello"]`, "null message": `[null]`,
		"no role": `[{"content":"x"}]`, "number as role": `[{"role":7,"content":"x"}]`, "empty role": `[{"role":"","content":"x"}]`,
		"unknown role": `[{"role":"wizard","content":"x"}]`,
		"no content":   `[{"role":"user"}]`, "null content": `[{"role":"user","content":null}]`, "number": `[{"role":"user","content":7}]`,
		"object as content": `[{"role":"user","content":{"text":"x"}}]`, "number as part": `[{"role":"user","content":[7]}]`,
		"image":        `[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x"}}]}]`,
		"audio":        `[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"","format":"wav"}}]}]`,
		"part no text": `[{"role":"user","content":[{"type":"text"}]}]`, "part with a number": `[{"role":"user","content":[{"type":"text","text":7}]}]`,
		"tool calls": `[{"role":"assistant","content":"x","tool_calls":{}}]`, "tool call": `[{"role":"assistant","content":"x","tool_calls":[7]}]`,
		"call of nothing": `[{"role":"assistant","content":"x","tool_calls":[{"id":"1","type":"function"}]}]`,
	} {
		f(chat, name, say(messages, ""), 400, "messages")
	}
	for field, value := range map[string]string{
		"logprobs": `"x"`, "top_logprobs": `3`, "tools": `7`, "tool_choice": `7`, "response_format": `"json"`,
		"chat_template_kwargs": `7`, "add_generation_prompt": `"x"`, "max_completion_tokens": `0`, "functions": `[]`,
		"modalities": `["audio"]`, "audio": `{}`, "temperature": `3`, "n": `0`, "kv_transfer_params": `{}`,
	} {
		f(chat, field, say(hello, `"`+field+`":`+value), 400, field)
	}
	f(chat, "a call cannot be forced", say(hello, `"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required"`), 400, "tool_choice")
	f(chat, "tool without a type", say(hello, `"tools":[{"function":{"name":"f"}}]`), 400, "tools[0].type")
	f(chat, "response_format is of no kind there is", say(hello, `"response_format":{"type":"structural_tag"}`), 400, "response_format")
	f(chat, "unknown model", `{"model":"nope","messages":`+hello+`}`, 404, "model")
	f(chat, "too long", say(`[{"role":"user","content":"`+strings.Repeat("hello ", 10_000)+`"}]`, ""), 400, "messages")

	// The tokenizer's own.
	for name, body := range map[string]string{"nothing": "", "text": "x", "list": "[]"} {
		f("/tokenize", name, body, 400, "")
		f("/detokenize", name, body, 400, "")
	}
	f("/tokenize", "no prompt", `{"model":"stories260k"}`, 400, "prompt")
	f("/tokenize", "number", `{"model":"stories260k","prompt":7}`, 400, "prompt")
	f("/tokenize", "unknown model", `{"model":"nope","prompt":"x"}`, 404, "model")
	f("/tokenize", "lone surrogate", `{"prompt":"\ud800"}`, 400, "")
	f("/tokenize", "too long", `{"prompt":"`+strings.Repeat("a story ", 1_000_000)+`"}`, 400, "prompt")
	f("/tokenize", "messages", `{"messages":7}`, 400, "messages")
	f("/detokenize", "no tokens", `{"model":"stories260k"}`, 400, "tokens")
	f("/detokenize", "text", `{"tokens":"1,2"}`, 400, "tokens")
	f("/detokenize", "out of range", `{"tokens":[512]}`, 400, "tokens")
	f("/detokenize", "negative", `{"tokens":[-1]}`, 400, "tokens")
	f("/detokenize", "unknown model", `{"model":"nope","tokens":[1]}`, 404, "model")

	// What looks bad and is not.
	for name, fields := range map[string]string{
		"unknown fields": `"frobnicate":{"a":[1,2,{"b":null}]}`, "nulls": `"n":null,"stop":null,"seed":null,"logprobs":null,"suffix":null`,
		"the last of two keys counts": `"n":128,"n":1`, "an escaped key": `"\u006e":1`, "whole floats": `"n":1.0,"max_tokens":4e0`,
		"an empty prompt": `"prompt":""`, "a zero byte in the prompt": `"prompt":"\u0000"`, "a surrogate pair": `"prompt":"\ud83d\ude00"`,
		"an empty suffix": `"suffix":""`, "best_of 1": `"best_of":1`, "the largest seed": `"seed":9223372036854775807`,
		"the smallest seed": `"seed":-9223372036854775808`, "no link": `"kv_transfer_params":null`,
	} {
		f(completions, name, with(fields), 200, "")
	}
	f(chat, "text parts", say(`[{"role":"system","content":"be brief"},{"role":"user","content":[{"type":"text","text":"hello"},{"type":"text","text":"you"}]}]`, ""), 200, "")
	f(chat, "unknown fields of a tool call", say(`[{"role":"user","content":"x"},{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","extra":7,"function":{"name":"f","arguments":"{}","more":[]}}]}]`, ""), 200, "")
	f(chat, "unknown fields of a message", say(`[{"role":"user","content":[{"type":"text","text":"hello","cache_control":{"type":"x"}}],"name":"x","weight":0}]`, ""), 200, "")
	f(chat, "plain", say(hello, `"logprobs":true,"top_logprobs":2,"tools":[],"response_format":{"type":"text"},"tool_choice":"none"`), 200, "")
	f("/tokenize", "an empty prompt", `{"prompt":""}`, 200, "")
	f("/detokenize", "no tokens at all", `{"tokens":[]}`, 200, "")
}
