package worker_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/worker"
)

// TestBatch: each chat of a batch is answered as it is alone.
func TestBatch(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Model = talking(t) })
	const path, chat = "/v1/chat/completions/batch", "/v1/chat/completions"
	const fields = `"temperature":0,"max_tokens":6,"logprobs":true,"return_token_ids":true`
	lists := []string{`[{"role":"user","content":"Once upon a time"}]`, `[{"role":"user","content":"Lily"},{"role":"assistant","content":" and"}]`, `[{"role":"user","content":"Tom"}]`}
	got := tell(t, w, path, `{"messages":[`+strings.Join(lists, ",")+`],`+fields+`}`)
	if len(got.Choices) != len(lists) || got.Prompt != nil {
		t.Fatalf("%+v", got)
	}
	for i, messages := range lists {
		alone, one := tell(t, w, chat, `{"messages":`+messages+`,`+fields+`}`), got.Choices[i]
		want := alone.Choices[0]
		if one.Message != want.Message || fmt.Sprint(one.IDs) != fmt.Sprint(want.IDs) || fmt.Sprint(one.Prompt) != fmt.Sprint(alone.Prompt) || len(one.Prompt) == 0 {
			t.Errorf("%s: %+v, alone %+v", messages, one, alone)
		}
	}
	if got := tell(t, w, path, `{"messages":[`+strings.Join(lists, ",")+`],"temperature":0,"max_tokens":6,"echo":true,"continue_final_message":true}`).Choices; !strings.HasPrefix(got[1].Message.Content, " and") || strings.HasPrefix(got[0].Message.Content, "Once") {
		t.Errorf("echo: %q, %q", got[0].Message.Content, got[1].Message.Content)
	}
	for i, bound := range tell(t, w, path, `{"messages":[`+strings.Join(lists, ",")+`],"max_tokens":40,"structured_outputs":{"choice":["yes","no"]}}`).Choices {
		if text := bound.Message.Content; text != "yes" && text != "no" {
			t.Errorf("choice %d: %q", i, text)
		}
	}
	for body, want := range map[string]string{
		`{"messages":` + lists[0] + `}`:                    "messages[0] must be a conversation",
		`{"messages":[` + lists[0] + `],"stream":true}`:    "does not stream",
		`{"messages":[` + lists[0] + `],"max_tokens":"x"}`: "max_tokens",
	} {
		if resp, b := ask(t, w.URL()+path, nil, body); resp.StatusCode != 400 || !strings.Contains(string(b), want) {
			t.Errorf("%s: %d %s", body, resp.StatusCode, b)
		}
	}
	if resp, b := ask(t, w.URL()+chat, nil, `{"messages":[`+lists[0]+`]}`); resp.StatusCode != 400 || !strings.Contains(string(b), "messages[0]") {
		t.Errorf("a batch as one chat: %d %s", resp.StatusCode, b)
	}
	empty(t, w)
}

// TestContinuousUsage: in a chat's stream that has the usage with each chunk, each says more than the one before,
// also the one that ends the answer.
func TestContinuousUsage(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Model = talking(t) })
	resp, b := ask(t, w.URL()+"/v1/chat/completions", nil, `{"messages":[{"role":"user","content":"Once"}],"max_tokens":4,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`)
	last, finish := -1, ""
	for _, e := range strings.Split(string(b), "\n\n") {
		var a answer
		if json.Unmarshal([]byte(strings.TrimPrefix(e, "data: ")), &a) != nil {
			continue
		}
		switch {
		case a.Usage == nil:
			t.Errorf("no usage: %s", e)
		case len(a.Choices) == 0 && a.Usage.Completion != last, len(a.Choices) > 0 && a.Usage.Completion <= last:
			t.Errorf("%d before %s", last, e)
		default:
			last = a.Usage.Completion
			if len(a.Choices) > 0 && a.Choices[0].Finish != nil {
				finish += *a.Choices[0].Finish
			}
		}
	}
	if resp.StatusCode != 200 || last != 4 || finish != "length" {
		t.Errorf("%d: %d tokens, %q", resp.StatusCode, last, finish)
	}
}

// TestOperatorsChoice: what the configuration has answers look like where the request does not say.
func TestOperatorsChoice(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.TokensAsIDs, c.ForceUsage, c.PerRequestMetrics = true, true, true })
	for fields, named := range map[string]bool{``: true, `,"return_tokens_as_token_ids":null`: true, `,"return_tokens_as_token_ids":false`: false} {
		a := complete(t, w, nil, `{"prompt":"Once","max_tokens":1,"logprobs":0`+fields+`}`)
		if got := strings.HasPrefix(a.Choices[0].Logprobs.Tokens[0], "token_id:"); got != named {
			t.Errorf("%q: %v", fields, a.Choices[0].Logprobs.Tokens)
		}
	}
	type timed struct {
		Choices []any
		Usage   *usage
		Metrics map[string]float64
	}
	check := func(what, text string, names int) {
		t.Helper()
		var a timed
		if err := json.Unmarshal([]byte(text), &a); err != nil || a.Usage == nil || len(a.Metrics) != names {
			t.Errorf("%s: %v %s", what, err, text)
		}
	}
	_, b := ask(t, w.URL()+"/v1/completions", nil, `{"prompt":"Once","max_tokens":4,"ignore_eos":true}`)
	check("whole", string(b), 5)
	_, b = ask(t, w.URL()+"/v1/completions", nil, `{"prompt":"Once","max_tokens":4,"ignore_eos":true,"n":2}`)
	check("two choices", string(b), 0)
	all := events(t, w, `{"prompt":"Once","max_tokens":1,"stream":true}`)
	for i, e := range all[:len(all)-1] {
		names := 0
		if i == len(all)-2 {
			names = 4 // none between tokens
		}
		check("stream", e, names)
	}
	plain := start(t, nil)
	if _, b := ask(t, plain.URL()+"/v1/completions", nil, `{"prompt":"Once","max_tokens":4}`); strings.Contains(string(b), "metrics") {
		t.Errorf("nobody asked: %s", b)
	}
}
