package tokenizer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/tokenizer/jinja"
)

// Names that Hugging Face gives to a model's templates.
const (
	defaultTemplate = "default"
	toolTemplate    = "tool_use"
)

// ErrKwargs is wrapped by RenderChat's errors about ChatInput.Kwargs.
var ErrKwargs = errors.New("chat_template_kwargs")

// ErrNoChatTemplate is returned by RenderChat for a model without a template.
var ErrNoChatTemplate = errors.New("the model has no chat template")

// chat is the parsed chat templates of a model.
type chat struct {
	named   map[string]chatTemplate
	special map[string]string // bos_token, eos_token, …
	bounds  jinja.Limits      // of rendering; zero fields are jinja's defaults
}

type chatTemplate struct {
	source string
	parsed *jinja.Template
	parts  bool  // takes content as a list of parts
	err    error // why it does not parse; returned to chats
}

// ChatInput is a conversation in the shape of OpenAI's API, as JSON text:
// templates see the order of an object's keys, and how a number is written.
type ChatInput struct {
	Messages             []json.RawMessage // objects
	Tools                []json.RawMessage // nil: none
	AddGenerationPrompt  bool
	ContinueFinalMessage bool                       // leave the last message open, to be continued
	Kwargs               map[string]json.RawMessage // chat_template_kwargs, such as enable_thinking
	Now                  time.Time                  // what strftime_now says; zero: the present
}

// newChat parses templates. A template that does not parse is an error only when used: the
// model can still complete text.
func newChat(sources, special map[string]string) chat {
	c := chat{named: map[string]chatTemplate{}, special: maps.Clone(special)}
	maps.DeleteFunc(c.special, func(_, token string) bool { return token == "" })
	for name, src := range sources {
		parsed, err := jinja.Parse(src)
		t := chatTemplate{source: src, parsed: parsed, err: err}
		if err == nil {
			t.parts = parsed.LoopsOver("content")
		}
		c.named[name] = t
	}
	return c
}

// sources returns everything that decides a rendering, in canonical order.
func (c *chat) sources() []string {
	var out []string
	for name, t := range c.named {
		out = append(out, "template "+name+"\n"+t.source)
	}
	for name, tok := range c.special {
		out = append(out, name+"\n"+tok)
	}
	slices.Sort(out)
	return out
}

// pick returns the template for an input with or without tools.
func (c *chat) pick(tools bool) (chatTemplate, bool) {
	if t, ok := c.named[toolTemplate]; ok && tools {
		return t, true
	}
	t, ok := c.named[defaultTemplate]
	return t, ok
}

// ChatTemplates returns the text of the model's chat templates, in no order.
func (t *Tokenizer) ChatTemplates() (list []string) {
	for _, c := range t.chat.named {
		list = append(list, c.source)
	}
	return list
}

// HasChatTemplate reports whether RenderChat can work.
func (t *Tokenizer) HasChatTemplate() bool {
	_, ok := t.chat.pick(false)
	return ok
}

// ChatTemplate returns the text of the template for a chat without tools; "" if there is none.
func (t *Tokenizer) ChatTemplate() string {
	tmpl, _ := t.chat.pick(false)
	return tmpl.source
}

// SpecialTokens returns the texts of bos_token, eos_token and so on, by these names.
func (t *Tokenizer) SpecialTokens() map[string]string { return maps.Clone(t.chat.special) }

// WithChatTemplate returns a copy of t with another chat template, which must
// parse.
func (t *Tokenizer) WithChatTemplate(source string) (*Tokenizer, error) {
	c := *t
	c.chat = newChat(map[string]string{defaultTemplate: source}, t.chat.special)
	if err := c.chat.named[defaultTemplate].err; err != nil {
		return nil, fmt.Errorf("chat template: %w", err)
	}
	c.finish()
	return &c, nil
}

// strange bounds the rendering of a template that a client brings, to some 100 ms at the worst: a model's own may
// need more, and its operator chose it. A conversation of a thousand messages takes a fifth of the steps.
var strange = jinja.Limits{Steps: 256 << 10, Bytes: 16 << 20}

// WithRequestTemplate is WithChatTemplate for a template that a client brings: rendering it has
// tighter bounds. The copy has t's fingerprint.
func (t *Tokenizer) WithRequestTemplate(source string) (*Tokenizer, error) {
	c := *t
	c.chat = newChat(map[string]string{defaultTemplate: source}, t.chat.special)
	if err := c.chat.named[defaultTemplate].err; err != nil {
		return nil, err
	}
	c.chat.bounds = strange
	return &c, nil
}

// continueMark stands at the end of the message to be continued, and shows
// where the template puts it. The space at its end shows whether the template
// trims.
const continueMark = "XPYD_CONTINUE_FINAL_MESSAGE "

// RenderChat returns the text of a conversation, to be encoded without adding special
// tokens: the template writes them itself. As in vLLM, arguments of tool calls that are
// JSON text reach the template as objects, and a list of text parts is joined with newlines
// if the template wants a string. Rendering ends when ctx does.
func (t *Tokenizer) RenderChat(ctx context.Context, in ChatInput) (string, error) {
	tmpl, ok := t.chat.pick(len(in.Tools) > 0)
	switch {
	case !ok:
		return "", ErrNoChatTemplate
	case tmpl.err != nil:
		return "", fmt.Errorf("chat template: %w", tmpl.err)
	case len(in.Messages) == 0:
		return "", errors.New("no messages")
	case in.ContinueFinalMessage && in.AddGenerationPrompt:
		return "", errors.New("continue_final_message excludes add_generation_prompt")
	}
	vars := map[string]any{"tools": nil, "documents": nil, "add_generation_prompt": in.AddGenerationPrompt}
	for name, tok := range t.chat.special {
		vars[name] = tok
	}
	for name, v := range in.Kwargs {
		switch name {
		case "messages", "tools", "add_generation_prompt":
			return "", fmt.Errorf("%w must not set %s", ErrKwargs, name)
		}
		vars[name] = v
	}
	if len(in.Tools) > 0 {
		vars["tools"] = in.Tools
	}
	messages := make([]any, len(in.Messages))
	for i, m := range in.Messages {
		d, err := templateMessage(m, tmpl.parts)
		if err == nil && in.ContinueFinalMessage && i == len(in.Messages)-1 {
			d, err = markFinal(d)
		}
		if err != nil {
			return "", fmt.Errorf("message %d: %w", i, err)
		}
		messages[i] = d
	}
	vars["messages"] = jinja.NewList(messages...)
	lim := t.chat.bounds
	if !in.Now.IsZero() {
		lim.Now = func() time.Time { return in.Now }
	}
	out, err := tmpl.parsed.Render(ctx, vars, lim)
	if err != nil {
		return "", fmt.Errorf("render chat template: %w", err)
	}
	if in.ContinueFinalMessage {
		at := strings.LastIndex(out, strings.TrimSpace(continueMark))
		if at < 0 {
			return "", errors.New("continue_final_message: the template does not show the final message")
		}
		trimmed := !strings.HasPrefix(out[at:], continueMark)
		if out = out[:at]; trimmed {
			out = strings.TrimRight(out, " \t\r\n")
		}
	}
	return out, nil
}

// templateMessage returns a message as templates expect it.
func templateMessage(m json.RawMessage, parts bool) (*jinja.Dict, error) {
	v, err := jinja.FromJSON(m)
	if err != nil {
		return nil, err
	}
	d, ok := v.(*jinja.Dict)
	if !ok {
		return nil, errors.New("not an object")
	}
	if content, ok := d.Get("content"); ok {
		if content, err = templateContent(content, parts); err != nil {
			return nil, fmt.Errorf("content: %w", err)
		}
		d = d.With("content", content)
	}
	if thought, ok := d.Get("reasoning"); ok { // vLLM's name; templates know DeepSeek's
		if _, ok := d.Get("reasoning_content"); !ok {
			d = d.With("reasoning_content", thought)
		}
	}
	if calls, ok := d.Get("tool_calls"); ok {
		d = d.With("tool_calls", toolCalls(calls))
	}
	return d, nil
}

// templateContent joins text parts for a template that wants a string.
func templateContent(v any, parts bool) (any, error) {
	list, ok := v.(*jinja.List)
	if !ok || parts {
		return v, nil
	}
	var texts []string
	for i, part := range list.Items() {
		if d, ok := part.(*jinja.Dict); ok {
			part, _ = d.Get("text")
		}
		text, ok := part.(string)
		if !ok {
			return nil, fmt.Errorf("part %d is not text, and the chat template takes text only", i)
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, "\n"), nil
}

// toolCalls returns tool calls whose arguments are objects instead of JSON; what is no JSON stays a text.
func toolCalls(v any) any {
	list, ok := v.(*jinja.List)
	if !ok {
		return v
	}
	out := make([]any, len(list.Items()))
	for i, item := range list.Items() {
		out[i] = item
		call, _ := item.(*jinja.Dict)
		if call == nil {
			continue
		}
		fn, _ := call.Get("function")
		d, ok := fn.(*jinja.Dict)
		if !ok {
			continue
		}
		a, _ := d.Get("arguments")
		if a == nil || a == "" {
			a = "{}"
		}
		if text, ok := a.(string); ok {
			parsed, err := jinja.FromJSON([]byte(text))
			if err != nil { // a call that broke off
				continue
			}
			out[i] = call.With("function", d.With("arguments", parsed))
		}
	}
	return jinja.NewList(out...)
}

// markFinal returns the last message with continueMark after its text.
func markFinal(m *jinja.Dict) (*jinja.Dict, error) {
	content, _ := m.Get("content")
	switch c := content.(type) {
	case string:
		return m.With("content", c+continueMark), nil
	case *jinja.List:
		items := slices.Clone(c.Items())
		for i := len(items) - 1; i >= 0; i-- {
			part, ok := items[i].(*jinja.Dict)
			if !ok {
				continue
			}
			v, _ := part.Get("text")
			if text, ok := v.(string); ok {
				items[i] = part.With("text", text+continueMark)
				return m.With("content", jinja.NewList(items...)), nil
			}
		}
	}
	return nil, errors.New("continue_final_message: the final message has no text")
}
