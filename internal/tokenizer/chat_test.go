package tokenizer_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/tokenizer"
)

type chatGoldens struct {
	Tools []json.RawMessage
	Chats map[string][]json.RawMessage
	Cases []struct {
		Template, Chat, Out, Err string
		Tools, Prompt            bool
		Kwargs                   map[string]json.RawMessage
	}
}

// TestChatGoldens compares with Jinja2; see testdata/chat_goldens.py.
func TestChatGoldens(t *testing.T) {
	path := "chat.json"
	if p := os.Getenv("XPYD_CHAT_GOLDENS"); p != "" { // made from other templates by the same script
		path = p
	}
	var g chatGoldens
	if err := json.Unmarshal(read(t, path), &g); err != nil {
		t.Fatal(err)
	}
	templates := map[string]*tokenizer.Tokenizer{}
	bad := 0
	for _, c := range g.Cases {
		tok := templates[c.Template]
		if tok == nil {
			var err error
			if tok, err = load(t, "stories260k").WithChatTemplate(templateSource(t, c.Template)); err != nil {
				t.Errorf("%s: %v", c.Template, err)
				continue
			}
			templates[c.Template] = tok
		}
		in := tokenizer.ChatInput{Messages: g.Chats[c.Chat], AddGenerationPrompt: c.Prompt, Kwargs: c.Kwargs, Now: time.Date(2024, 7, 26, 9, 5, 3, 0, time.UTC)}
		if c.Tools {
			in.Tools = g.Tools
		}
		got, err := tok.RenderChat(t.Context(), in)
		if got != c.Out || (err != nil) != (c.Err != "") {
			t.Errorf("%s, %s, tools %v, prompt %v, %v:\nhave %q, %v\nwant %q, %s", c.Template, c.Chat, c.Tools, c.Prompt, c.Kwargs, got, err, c.Out, c.Err)
			if bad++; bad > 10 {
				t.Fatal("too many")
			}
		}
	}
	t.Logf("%d cases", len(g.Cases))
}

func templateSource(t *testing.T, name string) string {
	t.Helper()
	if name == "qwen3" {
		var c struct {
			Template string `json:"chat_template"`
		}
		if err := json.Unmarshal(read(t, "qwen3.config.json"), &c); err != nil {
			t.Fatal(err)
		}
		return c.Template
	}
	if !filepath.IsAbs(name) {
		name = filepath.Join("testdata/templates", name+".jinja")
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestChatInput(t *testing.T) {
	qwen := load(t, "qwen3")
	if !qwen.HasChatTemplate() || load(t, "stories260k").HasChatTemplate() {
		t.Error("HasChatTemplate is wrong")
	}
	messages := func(text ...string) []json.RawMessage {
		var out []json.RawMessage
		for _, m := range text {
			out = append(out, json.RawMessage(m))
		}
		return out
	}
	const user = `{"role":"user","content":"hi"}`
	if _, err := load(t, "stories260k").RenderChat(t.Context(), tokenizer.ChatInput{Messages: messages(user)}); !errors.Is(err, tokenizer.ErrNoChatTemplate) {
		t.Errorf("have %v", err)
	}
	f := func(in tokenizer.ChatInput, want string) {
		t.Helper()
		got, err := qwen.RenderChat(t.Context(), in)
		if err != nil || got != want {
			t.Errorf("have %q, %v\nwant %q", got, err, want)
		}
	}
	f(tokenizer.ChatInput{Messages: messages(`{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}`), AddGenerationPrompt: true},
		"<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n")
	f(tokenizer.ChatInput{Messages: messages(user, `{"role":"assistant","content":"Hel "}`), ContinueFinalMessage: true},
		"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHel ")
	// OpenAI's arguments are JSON text, and the order of keys stays.
	f(tokenizer.ChatInput{Messages: messages(user, `{"role":"assistant","content":"","tool_calls":[
			{"id":"1","type":"function","function":{"name":"f","arguments":"{\"z\": 1.0, \"a\": [2]}"}}]}`)},
		"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"z\": 1.0, \"a\": [2]}}\n</tool_call><|im_end|>\n")

	for name, in := range map[string]tokenizer.ChatInput{
		"no messages": {},
		"no object":   {Messages: messages("1")},
		"both":        {Messages: messages(user), AddGenerationPrompt: true, ContinueFinalMessage: true},
		"kwargs":      {Messages: messages(user), Kwargs: map[string]json.RawMessage{"messages": nil}},
		"image":       {Messages: messages(`{"role":"user","content":[{"type":"image_url","image_url":"x"}]}`)},
		"arguments":   {Messages: messages(`{"role":"assistant","tool_calls":[{"function":{"arguments":"{"}}]}`)},
	} {
		if got, err := qwen.RenderChat(t.Context(), in); err == nil {
			t.Errorf("%s: have %q", name, got)
		}
	}
	if _, err := qwen.WithChatTemplate("{% if %}"); err == nil || !strings.Contains(err.Error(), "line 1") {
		t.Errorf("have %v", err)
	}
}

// TestChatOrder: Mistral's template prints the call as it came, and every token
// after a key or number written otherwise would be another.
func TestChatOrder(t *testing.T) {
	tok, err := load(t, "stories260k").WithChatTemplate(`{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}` +
		`{{ m.content }}{% if m.x is defined %}{{ m.x | tojson }} {{ m.x[0] + 1 }}{% endif %}{% endfor %} {{ big }}`)
	if err != nil {
		t.Fatal(err)
	}
	got, err := tok.RenderChat(t.Context(), tokenizer.ChatInput{
		Messages: []json.RawMessage{
			json.RawMessage(`{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":"{\"z\":1.0,\"a\":12345678901234567890}"}}]}`),
			json.RawMessage(`{"role":"tool","content":"c","x":[1.0,-0,1e2,0.00001,123456789012345678901234567890,{"z":1,"a":2}]}`)},
		Kwargs: map[string]json.RawMessage{"big": json.RawMessage(`-98765432109876543210`)},
	})
	const want = `{"name": "f", "arguments": {"z": 1.0, "a": 12345678901234567890}}` +
		`c[1.0, 0, 100.0, 1e-05, 123456789012345678901234567890, {"z": 1, "a": 2}] 2.0 -98765432109876543210`
	if err != nil || got != want {
		t.Errorf("have %s, %v\nwant %s", got, err, want)
	}
}
