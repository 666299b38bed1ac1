package openai_test

import (
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
)

// TestChatBatch: conversations are read each as a chat's messages are, and what a batch cannot have is named.
func TestChatBatch(t *testing.T) {
	const two = `"messages":[[{"role":"user","content":"a"}],[{"role":"system","content":[{"type":"text","text":"b"}]},{"role":"user","content":"c"}]]`
	c, chats, err := openai.ParseChatBatch([]byte(`{`+two+`,"max_tokens":7,"logprobs":true,"tools":[]}`), 0)
	if err != nil || len(chats) != 2 || len(chats[0]) != 1 || len(chats[1]) != 2 || string(chats[1][0]) != `{"role":"system","content":"b"}` || *c.MaxTokens != 7 || len(c.Messages) != 1 {
		t.Errorf("%v %q %+v", err, chats, c)
	}
	for _, bad := range []struct{ body, param, message string }{
		{`{}`, "messages", "required"},
		{`{"messages":[]}`, "messages", "required"},
		{`{"messages":null}`, "messages", "required"},
		{`{"messages":{}}`, "messages", "a list of conversations"},
		{`{"messages":[{"role":"user","content":"a"}]}`, "messages", "messages[0] must be a conversation"},
		{`{"messages":[[{"role":"user","content":"a"}],[]]}`, "messages", "messages[1] is empty"},
		{`{"messages":[[{"role":"user","content":"a"}],null]}`, "messages", "messages[1] must be a conversation"},
		{`{"messages":[[{"role":"user","content":"a"}],[{"role":"user"}]]}`, "messages", "messages[1][0].content"},
		{`{"messages":[` + strings.Repeat(`[{"role":"user","content":"a"}],`, 256) + `[{"role":"user","content":"a"}]]}`, "messages", "more than 256 conversations"},
		{`{` + two + `,"stream":true}`, "stream", "does not stream"},
		{`{` + two + `,"n":2}`, "n", "must be 1"},
		{`{` + two + `,"tools":[{"type":"function","function":{"name":"f"}}]}`, "tools", "not supported in a batch"},
		{`{` + two + `,"top_logprobs":2}`, "top_logprobs", "logprobs"},
	} {
		_, _, err := openai.ParseChatBatch([]byte(bad.body), 0)
		if err == nil || err.Param != bad.param || !strings.Contains(err.Message, bad.message) {
			t.Errorf("%.100s: %+v", bad.body, err)
		}
	}
	for body, want := range map[string]int{`{` + two + `}`: 2, `{"messages":[]}`: 1, `{"messages":[[]]}`: 1, `{"messages":"x"}`: 1} {
		top, err := openai.Scan([]byte(body))
		if top.CountChats(); err != nil || top.Prompts != want {
			t.Errorf("%s: %v, %d prompts", body, err, top.Prompts)
		}
	}
}

// TestBatchShape: what is said of a prompt stands in the choice that it is of.
func TestBatchShape(t *testing.T) {
	choices := []openai.Choice{{Index: 0, PromptTokenIDs: []int32{1}}, {Index: 1, PromptTokenIDs: []int32{2}}}
	enc := openai.NewEncoder(openai.Meta{Chat: true, Batch: true, ReturnTokenIDs: true})
	got := string(enc.AppendFull(nil, choices, openai.Usage{}))
	if !strings.Contains(got, `"prompt_logprobs":null,"prompt_token_ids":[1]},{"index":1`) || !strings.Contains(got, `"prompt_token_ids":[2]}],"usage"`) {
		t.Error(got)
	}
}

// TestTiming: a request's time in milliseconds, under vLLM's names, behind the usage.
func TestTiming(t *testing.T) {
	u := openai.Usage{Timing: &openai.Timing{Queue: 1500 * time.Microsecond, First: time.Second, Decode: time.Second, Tokens: 5}}
	const first = `"metrics":{"time_to_first_token_ms":1000.000,"generation_time_ms":`
	for _, c := range []struct {
		tokens int
		decode time.Duration
		want   string
	}{
		{5, time.Second, first + `1000.000,"queue_time_ms":1.500,"mean_itl_ms":250.000,"tokens_per_second":2.500}}`},
		{1, 0, first + `0.000,"queue_time_ms":1.500,"tokens_per_second":1.000}}`},
		{1, -3 * time.Second, first + `0.000,"queue_time_ms":1.500}}`}, // a clock that was set
	} {
		u.Timing.Tokens, u.Timing.Decode = c.tokens, c.decode
		enc := openai.NewEncoder(openai.Meta{Chat: true})
		if got := string(enc.AppendFull(nil, []openai.Choice{{}}, u)); !strings.HasSuffix(got, c.want) {
			t.Errorf("%s, want %s", got, c.want)
		}
		if got := string(enc.AppendUsage(nil, u)); !strings.HasSuffix(got, c.want+"\n\n") {
			t.Errorf("%s, want %s", got, c.want)
		}
		if got := string(enc.AppendChunk(nil, &openai.Choice{}, &u)); strings.Contains(got, "metrics") {
			t.Errorf("a chunk before the last: %s", got)
		}
	}
}
