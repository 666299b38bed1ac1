package worker_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/worker"
)

// told is what an answer may tell.
type told struct {
	Choices []struct {
		Text     string
		Message  struct{ Content string }
		Finish   string  `json:"finish_reason"`
		IDs      []int32 `json:"token_ids"`
		Prompt   []int32 `json:"prompt_token_ids"`
		Listed   []any   `json:"prompt_logprobs"`
		Logprobs *struct {
			Tokens  []string
			Top     []map[string]float64 `json:"top_logprobs"`
			Content []struct {
				Token string
				Top   []struct{ Token string } `json:"top_logprobs"`
			}
		}
	}
	Prompt []int32 `json:"prompt_token_ids"`
	Listed []any   `json:"prompt_logprobs"`
}

func tell(t *testing.T, w *worker.Worker, path, body string) *told {
	t.Helper()
	resp, b := ask(t, w.URL()+path, nil, body)
	a := &told{}
	if err := json.Unmarshal(b, a); err != nil || resp.StatusCode != 200 || len(a.Choices) == 0 {
		t.Fatalf("%s: %d %s", body, resp.StatusCode, b)
	}
	return a
}

// TestFieldsServed: what vLLM's own fields do.
func TestFieldsServed(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Model, c.TrustTemplates, c.MaxLogprobs = talking(t), true, -1 })
	const path, chat, hi = "/v1/completions", "/v1/chat/completions", `"messages":[{"role":"user","content":"Once upon a time"}],"temperature":0,"max_tokens":6`
	plain := tell(t, w, path, `{"prompt":"Once upon a time","temperature":0,"max_tokens":24,"return_token_ids":true}`).Choices[0]

	got := tell(t, w, path, `{"prompt":"Once upon a time","temperature":0,"max_tokens":24,"bad_words":["was","girl named"]}`).Choices[0]
	if !strings.Contains(plain.Text, "was") || strings.Contains(got.Text, " was") || strings.Contains(got.Text, "girl named") {
		t.Errorf("%q, without bad words %q", plain.Text, got.Text)
	}
	got = tell(t, w, path, `{"prompt":"Once upon a time","max_tokens":24,"allowed_token_ids":[403,407],"return_token_ids":true}`).Choices[0]
	if len(got.IDs) != 24 || slices.ContainsFunc(got.IDs, func(id int32) bool { return id != 403 && id != 407 }) {
		t.Errorf("%v", got.IDs)
	}
	got = tell(t, w, path, `{"prompt":"Once","max_tokens":1,"temperature":0,"logprobs":3,"logprob_token_ids":[5],"allowed_token_ids":[9],"return_tokens_as_token_ids":true}`).Choices[0]
	if l := got.Logprobs; fmt.Sprint(l.Tokens) != "[token_id:9]" || len(l.Top[0]) != 2 || l.Top[0]["token_id:5"] == 0 || l.Top[0]["token_id:9"] == 0 {
		t.Errorf("%+v", l)
	}
	got = tell(t, w, chat, `{`+hi+`,"logprobs":true,"top_logprobs":5,"logprob_token_ids":[5,5,7],"return_tokens_as_token_ids":true}`).Choices[0]
	if top := got.Logprobs.Content[0].Top; len(top) != 3 || top[0].Token != got.Logprobs.Content[0].Token || top[1].Token != "token_id:5" || top[2].Token != "token_id:7" {
		t.Errorf("%+v", top)
	}
	if got = tell(t, w, chat, `{`+hi+`,"logprobs":true,"top_logprobs":-1}`).Choices[0]; len(got.Logprobs.Content[0].Top) != 512 {
		t.Errorf("%d of all", len(got.Logprobs.Content[0].Top))
	}

	whole := tell(t, w, chat, `{`+hi+`,"return_token_ids":true,"prompt_logprobs":-1}`)
	if one, _ := whole.Listed[1].(map[string]any); len(whole.Prompt) != 5 || len(whole.Listed) != 5 || len(one) != 512 || whole.Choices[0].Prompt != nil || whole.Choices[0].Listed != nil {
		t.Errorf("%v, %d of %d", whole.Prompt, len(one), len(whole.Listed))
	}
	both := tell(t, w, path, `{"prompt":[[1,2,3],[4]],"max_tokens":1,"return_token_ids":true,"prompt_logprobs":0}`)
	if both.Prompt != nil || both.Listed != nil || len(both.Choices[0].Prompt) != 3 || len(both.Choices[1].Prompt) != 1 || len(both.Choices[0].Listed) != 3 {
		t.Errorf("%+v", both)
	}

	for _, c := range []struct {
		fields string
		want   []int32
	}{
		{`"truncate_prompt_tokens":2`, []int32{7, 8}}, {`"truncate_prompt_tokens":2,"truncation_side":"right"`, []int32{4, 5}},
		{`"truncate_prompt_tokens":5`, []int32{4, 5, 6, 7, 8}}, {`"truncate_prompt_tokens":-1`, []int32{4, 5, 6, 7, 8}},
	} {
		if got := tell(t, w, path, `{"prompt":[4,5,6,7,8],"max_tokens":1,"return_token_ids":true,`+c.fields+`}`).Choices[0].Prompt; !slices.Equal(got, c.want) {
			t.Errorf("%s: %v", c.fields, got)
		}
	}
	long := strings.TrimSuffix(strings.Repeat("7,", 600), ",")
	if got := tell(t, w, path, `{"prompt":[`+long+`],"max_tokens":12,"truncate_prompt_tokens":-1,"return_token_ids":true,"ignore_eos":true}`).Choices[0]; len(got.Prompt) != 500 || len(got.IDs) != 12 {
		t.Errorf("%d tokens remain, %d are drawn", len(got.Prompt), len(got.IDs))
	}
	if got := tell(t, w, path, `{"prompt":[403,407,261,378],"max_tokens":0,"echo":true,"truncate_prompt_tokens":2}`).Choices[0]; got.Text != "on a" && got.Text != " on a" && strings.Contains(got.Text, "Once") {
		t.Errorf("echo of a part: %q", got.Text)
	}

	const said = `"messages":[{"role":"user","content":"Once"},{"role":"assistant","content":" upon a"}],"continue_final_message":true,"temperature":0,"max_tokens":5`
	echo, mute := tell(t, w, chat, `{`+said+`,"echo":true}`).Choices[0], tell(t, w, chat, `{`+said+`}`).Choices[0]
	if echo.Message.Content != " upon a"+mute.Message.Content || mute.Message.Content == "" {
		t.Errorf("%q, echoed %q", mute.Message.Content, echo.Message.Content)
	}
	if got := tell(t, w, chat, `{`+hi+`,"echo":true}`).Choices[0].Message.Content; got != tell(t, w, chat, `{`+hi+`}`).Choices[0].Message.Content {
		t.Errorf("a user's message is echoed: %q", got)
	}

	a := tell(t, w, chat, `{`+hi+`,"chat_template":"{{ bos_token }}{{ documents[0].text }}{{ reasoning_effort }}","documents":[{"text":"Lily"}],"reasoning_effort":"low","return_token_ids":true}`)
	b := tell(t, w, path, `{"prompt":"Lilylow","max_tokens":1,"return_token_ids":true}`).Choices[0]
	if !slices.Equal(a.Prompt, b.Prompt) {
		t.Errorf("by its own template %v, want %v", a.Prompt, b.Prompt)
	}
	for _, template := range []string{ // more of them: tokenizer.TestStrangers
		"{% for", "{{ raise_exception('no') }}", "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
		"{% macro a(n) %}{% if n %}{{ a(n-1) }}{{ a(n-1) }}{% endif %}{% endmacro %}{{ a(90) }}", "{{ messages[0].content * 1000000000 }}",
		"{% set ns = namespace(s='ab') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "{{ " + strings.Repeat("(", 200_000),
	} {
		if resp, text := ask(t, w.URL()+chat, nil, `{`+hi+`,"chat_template":"`+template+`"}`); resp.StatusCode != 400 || !strings.Contains(string(text), `"param":"chat_template"`) {
			t.Errorf("%.100s: %d %s", template, resp.StatusCode, text)
		}
	}
	empty(t, w)
}

// TestFieldsByPair: what shapes a draw shapes prefill's first one too.
func TestFieldsByPair(t *testing.T) {
	p, d := pair(t, nil)
	for _, fields := range []string{
		`"allowed_token_ids":[403,407,9]`, `"bad_words":["there","was","girl"]`, `"logprobs":2,"logprob_token_ids":[5,9]`,
		`"allowed_token_ids":[403,407,9],"bad_words":["\t"],"min_tokens":2,"n":3,"logprobs":0,"logprob_token_ids":[7]`,
	} {
		body := `{"prompt":"Once upon a time, there","max_tokens":9,"seed":4,"return_token_ids":true,` + fields + `}`
		link := ticket.NewLink().String()
		report := leg(p, link)
		resp, got := ask(t, d.URL()+"/v1/completions", linked(p, link), body)
		if r := <-report; resp.StatusCode != 200 || !strings.HasPrefix(r, "200 ") {
			t.Fatalf("%s: %d %s, %s", fields, resp.StatusCode, got, r)
		}
		_, want := ask(t, d.URL()+"/v1/completions", nil, body)
		if g, w := choicesOf(t, got), choicesOf(t, want); g != w {
			t.Errorf("%s:\n got %s\nwant %s", fields, g, w)
		}
	}
}

func choicesOf(t *testing.T, body []byte) string {
	t.Helper()
	var a struct{ Choices json.RawMessage }
	if err := json.Unmarshal(body, &a); err != nil {
		t.Fatal(err)
	}
	return string(a.Choices)
}

// TestChatChunks: a chat's stream has the role before all else and the end behind it, as OpenAI's; see
// TestContinuousUsage too.
func TestChatChunks(t *testing.T) {
	w := start(t, func(c *worker.Config) { c.Model = talking(t) })
	_, b := ask(t, w.URL()+"/v1/chat/completions", nil, `{"messages":[{"role":"user","content":"Once upon a time"}],"max_tokens":2,"temperature":0,"stream":true,"logprobs":true,"return_token_ids":true,"stream_options":{"include_usage":true}}`)
	type chunk struct {
		Choices []struct {
			Delta    map[string]any
			Logprobs any
			Finish   *string `json:"finish_reason"`
			IDs      []int32 `json:"token_ids"`
		}
		Prompt []int32 `json:"prompt_token_ids"`
		Usage  *usage
	}
	var list []chunk
	for line := range strings.Lines(string(b)) {
		if data, ok := strings.CutPrefix(line, "data: {"); ok {
			var c chunk
			if err := json.Unmarshal([]byte("{"+data), &c); err != nil {
				t.Fatal(err)
			}
			list = append(list, c)
		}
	}
	if len(list) != 5 {
		t.Fatalf("%s", b)
	}
	first, end := list[0], list[3]
	if u := list[4].Usage; u == nil || u.Completion != 2 || end.Usage != nil {
		t.Errorf("usage %+v, before it %+v", u, end.Usage)
	}
	if d := first.Choices[0].Delta; d["role"] != "assistant" || d["content"] != "" || first.Choices[0].Logprobs != nil || len(first.Prompt) != 5 || len(first.Choices[0].IDs) != 0 {
		t.Errorf("the first is %+v", first)
	}
	for i, c := range list[1:3] {
		if _, role := c.Choices[0].Delta["role"]; role || c.Choices[0].Delta["content"] == "" || c.Choices[0].Logprobs == nil || c.Prompt != nil || len(c.Choices[0].IDs) != 1 || c.Choices[0].Finish != nil {
			t.Errorf("token %d is %+v", i, c)
		}
	}
	if c := end.Choices[0]; len(c.Delta) != 0 || c.Finish == nil || *c.Finish != "length" || c.Logprobs != nil || len(c.IDs) != 0 {
		t.Errorf("the end is %+v", end)
	}
}
