package openai_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

func idsOf(ids ...int32) []byte { return openai.AppendIDs(nil, ids) }

// TestAppendReplay: what another engine is asked for in the middle of a stream.
func TestAppendReplay(t *testing.T) {
	f := func(body, want string) {
		t.Helper()
		top, oerr := openai.Scan([]byte(body))
		if oerr != nil {
			t.Fatal(oerr)
		}
		got, err := openai.AppendReplay(nil, []byte(body), &top, idsOf(7, 8), idsOf(9, 300), 100)
		if err != nil || string(got) != want || !json.Valid(got) {
			t.Errorf("%s: %v\n%s\nwant\n%s", body, err, got, want)
		}
		if _, err := openai.Replayable([]byte(body), &top); err != nil {
			t.Errorf("%s: %v", body, err)
		}
	}
	const rest = `,"return_token_ids":true}`
	f(`{"prompt":"x"}`, `{"prompt":[7,8,9,300],"max_tokens":14`+rest) // of sixteen
	f(`{"prompt":"x","max_tokens":null}`, `{"prompt":[7,8,9,300],"max_tokens":96`+rest)
	f(`{"prompt":"x","max_tokens":3,"min_tokens":3}`, `{"prompt":[7,8,9,300],"max_tokens":1,"min_tokens":1`+rest)
	f(`{"prompt":[1,2],"max_tokens":3,"min_tokens":2}`, `{"prompt":[7,8,9,300],"max_tokens":1`+rest)
	f(`{"messages":[{"role":"user","content":"x"}]}`, `{"prompt":[7,8,9,300],"max_tokens":96`+rest)
	f(`{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]},{"role":"user"}],"max_tokens":9,"max_completion_tokens":5}`, `{"prompt":[7,8,9,300],"max_tokens":3`+rest)
	f(`{"model":"m","prompt":"x", "stream" : true,"stream_options":{"include_usage":true},"temperature":0.5,"repetition_penalty":1.1,"n":1,"echo":false,"logprobs":null,"presence_penalty":0.0,"tools":[],"functions":null}`,
		`{"model":"m","stream":true,"stream_options":{"include_usage":true},"temperature":0.5,"repetition_penalty":1.1,"prompt":[7,8,9,300],"max_tokens":14`+rest)
	f(`{"prompt":"x","seed":1,"temperature":0}`, `{"seed":1,"temperature":0,"prompt":[7,8,9,300],"max_tokens":14`+rest)
	f(`{"prompt":"x","seed":null,"stop":["ab","c"]}`, `{"stop":["ab","c"],"prompt":[7,8,9,300],"max_tokens":14`+rest)
}

// TestReplayNoLimit: a request without a limit needs the engine's, and every one needs a token to come.
func TestReplayNoLimit(t *testing.T) {
	for _, c := range []struct {
		body    string
		context int
		want    string
	}{
		{`{"messages":[]}`, 0, "not known"}, {`{"prompt":"x","max_tokens":null}`, 0, "not known"}, {`{"messages":[]}`, 4, "all its tokens"},
		{`{"messages":[]}`, 5, ""}, {`{"prompt":"x"}`, 0, ""}, {`{"messages":[],"max_tokens":3}`, 0, ""}, {`{"prompt":"x","max_tokens":2}`, 0, "all its tokens"},
	} {
		top, _ := openai.Scan([]byte(c.body))
		_, err := openai.AppendReplay(nil, []byte(c.body), &top, idsOf(7, 8), idsOf(9, 300), c.context)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, %d: %v", c.body, c.context, err)
		}
	}
}

// TestReplayable: how much an engine holds back, and what cannot be carried over.
func TestReplayable(t *testing.T) {
	f := func(fields string, held int, why string) {
		t.Helper()
		body := []byte(`{"prompt":"x",` + fields + `}`)
		if strings.Contains(fields, "messages") {
			body = []byte(`{` + fields + `}`)
		}
		top, oerr := openai.Scan(body)
		if oerr != nil {
			t.Fatal(oerr)
		}
		got, err := openai.Replayable(body, &top)
		if (err == nil) != (why == "") || err != nil && !strings.Contains(err.Error(), why) || err == nil && got != held {
			t.Errorf("%s: %d, %v", body, got, err)
		}
	}
	f(`"stop":"é日x"`, 2, "")
	f(`"stop":["a","b"]`, 0, "")
	f(`"stop":[]`, 0, "")
	f(`"stop":null`, 0, "")
	f(`"min_tokens":null`, 0, "")
	f(`"stop":"`+strings.Repeat("é", 256)+`"`, 255, "")
	f(`"stop":"`+strings.Repeat("é", 257)+`"`, 0, "stop")
	f(`"stop":["a",""]`, 0, "stop")
	f(`"stop":[1]`, 0, "stop")
	f(`"stop":{}`, 0, "stop")
	f(`"temperature":0.5,"temperature":0.5`, 0, "temperature is there twice")
	f(`"temperature":0.5,"temper\u0061ture":0.5`, 0, "temperature is there twice")
	f(`"seed":1`, 0, "seed")
	f(`"seed":1,"temperature":null`, 0, "seed")
	f(`"seed":1,"temperature":0.001`, 0, "seed")
	f(`"max_tokens":0`, 0, "")
	for _, field := range []string{`"n":2`, `"best_of":2`, `"echo":true`, `"logprobs":1`, `"logprobs":true`, `"top_logprobs":2`, `"prompt_logprobs":0`, `"presence_penalty":0.1`,
		`"frequency_penalty":-1`, `"tools":[{}]`, `"response_format":{"type":"text"}`, `"return_token_ids":true`, `"include_stop_str_in_output":true`, `"bad_words":["x"]`,
		`"use_beam_search":true`, `"structured_outputs":{"regex":"a"}`, `"regex":"a"`, `"guided_json":{}`, `"whatever":0`, `"min_tokens":-1`, `"min_tokens":"x"`} {
		f(field, 0, strings.Split(field, `"`)[1])
	}
	f(`"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"data:x"}}]}]`, 0, "messages")
	f(`"messages":[{"role":"user","content":["x"]}]`, 0, "messages")
	f(`"messages":["x"]`, 0, "messages")
}

// TestAskIDs: an engine is asked for ids whatever the client's body says of them.
func TestAskIDs(t *testing.T) {
	for body, want := range map[string]string{
		`{"prompt":"x"}`: `{"prompt":"x","return_token_ids":true}`,
		`{"return_token_ids":false,"prompt":"x"}`: `{"return_token_ids":true,"prompt":"x"}`,
	} {
		top, err := openai.Scan([]byte(body))
		if got := string(openai.AskIDs([]byte(body), &top)); err != nil || got != want {
			t.Errorf("%s: %s, %v", body, got, err)
		}
	}
}

// TestChunk: an event without its ids, and as the next one of another stream.
func TestChunk(t *testing.T) {
	h := openai.Head{ID: []byte(`"a"`), Object: []byte(`"o"`), Created: []byte(`5`), Model: []byte(`"m"`)}
	f := func(data, untold, text string, chat bool, goingOn string) {
		t.Helper()
		c, ok := openai.ReadChunk([]byte(data))
		if got := string(c.AppendUntold(nil, []byte(data))); !ok || got != untold {
			t.Errorf("%s: %t, %s", data, ok, got)
		}
		got := c.AppendText(nil)
		if string(got) != text {
			t.Errorf("%s: text %q", data, got)
		}
		on := h.AppendGoingOn(nil, &c, got, chat, 3, 2)
		if want := `{"id":"a","object":"o","created":5,"model":"m","choices":[` + goingOn; string(on) != want || !json.Valid(on) {
			t.Errorf("%s:\n%s\nwant\n%s", data, on, want)
		}
	}
	f(`{"id":"b","choices":[{"index":0,"text":"a\n\u00e9","token_ids":[1, 2],"prompt_token_ids":[3],"finish_reason":null}]}`,
		`{"id":"b","choices":[{"index":0,"text":"a\n\u00e9","token_ids":null,"prompt_token_ids":null,"finish_reason":null}]}`, "a\né", false,
		`{"index":0,"text":"a\né","logprobs":null,"finish_reason":null,"stop_reason":null}]}`)
	f(`{"choices":[{"index":0,"text":"","token_ids":null,"finish_reason":"stop","stop_reason":7}],"prompt_token_ids":[1]}`,
		`{"choices":[{"index":0,"text":"","token_ids":null,"finish_reason":"stop","stop_reason":7}],"prompt_token_ids":null}`, "", true,
		`{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":7}]}`)
	f(`{"choices":[{"delta":{"role":"assistant","content":"x"}}],"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}`,
		`{"choices":[{"delta":{"role":"assistant","content":"x"}}],"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}`, "x", true,
		`{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":{"prompt_tokens":3,"completion_tokens":3,"total_tokens":6}}`)
	f(`{"choices":[],"usage":{"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":4,"x":1}}}`,
		`{"choices":[],"usage":{"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":4,"x":1}}}`, "", false,
		`],"usage":{"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":3,"x":1},"prompt_tokens":3,"total_tokens":9}}`)
	for data, more := range map[string]bool{
		`{"choices":[{"delta":{"content":"x","reasoning":null,"tool_calls":[]}}]}`: false, `{"choices":[{"delta":{"reasoning_content":"x"}}]}`: true,
		`{"choices":[{"delta":{"tool_calls":[{}]}}]}`: true, `{"choices":[{"text":"x","logprobs":{}}]}`: true,
	} {
		if c, ok := openai.ReadChunk([]byte(data)); !ok || c.More != more {
			t.Errorf("%s: %t, more %t", data, ok, c.More)
		}
	}
	own, _ := openai.ReadChunk([]byte(`{"id":"a","object":"o","created":5,"model":"m","choices":[3,{"index":0,"text":"x"}]}`))
	if got := openai.NewHead(&own); !reflect.DeepEqual(got, h) || got.Size() != len(`"a""o"5"m"`) || own.Choices != 2 || string(own.AppendText(nil)) != "x" {
		t.Errorf("%d choices, %q, %d bytes of %s %s %s %s", own.Choices, own.Text, got.Size(), got.ID, got.Object, got.Created, got.Model)
	}
	for _, bad := range []string{``, `[]`, `{`, `{"choices":[}`, `{"choices":[{"text":"x]}`, "{\"a\":\"\xff\"}", `{"a":1}x`} {
		if _, ok := openai.ReadChunk([]byte(bad)); ok {
			t.Errorf("%q is a chunk", bad)
		}
	}
	if got := string(h.AppendLastUsage(nil, 3, 4)); got != `data: {"id":"a","object":"o","created":5,"model":"m","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}`+"\n\n" {
		t.Error(got)
	}
}

// TestAppendList: a list of ids, and what is none.
func TestAppendList(t *testing.T) {
	if got, ok := openai.AppendList(idsOf(1), []byte(`[2, 3]`)); !ok || string(got) != string(idsOf(1, 2, 3)) {
		t.Errorf("%s, %t", got, ok)
	}
	if got, ok := openai.AppendList(nil, []byte(`[]`)); !ok || len(got) > 0 {
		t.Errorf("%s, %t", got, ok)
	}
	for _, bad := range []string{``, `1`, `null`, `["1"]`, `[-1]`, `[1.5]`, `[1e3]`, `[16777216]`, `[1,null]`, `[1,[2]]`, `[1`, `[1]2`, `[99999999999999999999]`} {
		if got, ok := openai.AppendList(nil, []byte(bad)); ok {
			t.Errorf("%s is %s", bad, got)
		}
	}
}

// FuzzChunk: whatever an engine sends, what a client gets of it is JSON.
func FuzzChunk(f *testing.F) {
	for _, s := range []string{`{"id":"b","choices":[{"index":0,"text":"a","token_ids":[1,2],"prompt_token_ids":[3]}],"usage":{"prompt_tokens":1}}`,
		`{"choices":[{"delta":{"content":"\ud800","x":{}}}],"prompt_token_ids":[1]}`, `{"choices":[{},{}],"choices":3}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, ok := openai.ReadChunk(data)
		if !ok {
			return
		}
		if got := c.AppendUntold(nil, data); !json.Valid(got) {
			t.Errorf("%q without ids is %q", data, got)
		}
		h := openai.NewHead(&c)
		if got := h.AppendGoingOn(nil, &c, c.AppendText(nil), true, 1, 1); !json.Valid(got) {
			t.Errorf("%q as the next is %q", data, got)
		}
	})
}
