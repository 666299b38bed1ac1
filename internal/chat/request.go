package chat

import (
	"slices"

	"github.com/xpyd/xpyd/internal/openai"
)

// Text is a text as a JSON string has it, without its quotes. It may alias what it was read from.
type Text []byte

// Plain makes s a Text.
func Plain(s string) Text {
	quoted := openai.AppendString(nil, s)
	return quoted[1 : len(quoted)-1]
}

// lineBreak is what separates the texts of a message.
const lineBreak = `\n`

// Part is a part of a message: a text, or an image if it has a URL.
type Part struct {
	Text   Text
	URL    Text // of an image: http, https or data
	Detail Text // how closely to look at it; empty: as the model does
}

// Call is a call of a tool, as the model wrote it.
type Call struct{ ID, Name, Arguments Text }

// message is a chat's message.
type message struct {
	role      string // system, user, assistant or tool
	parts     []Part
	reasoning []Text // an assistant's
	calls     []Call
	id        Text // of the call that a tool answers
}

// MaxMessages bounds a conversation's messages, and the parts of all of them.
const MaxMessages = 100_000

// Conversation is a chat's messages, being written.
type Conversation struct {
	Most int // bytes of its texts; 0: any number

	list   []message
	parts  int
	bytes  int
	images []Part // that tools have answered, which only a user's message can have
	closed bool   // the last message takes no more text
}

// Full reports whether it has MaxMessages messages or parts, or more than Most bytes: a text may be there many
// times and be one in memory, until it is written.
func (c *Conversation) Full() bool {
	return len(c.list)+c.parts+len(c.images) >= MaxMessages || c.Most > 0 && c.bytes > c.Most
}

// count counts what is added.
func (c *Conversation) count(parts ...Part) {
	c.parts += len(parts)
	for _, p := range parts {
		c.bytes += len(p.Text) + len(p.URL)
	}
}

// System adds a system message. At the beginning there is one of them: many templates take no more.
func (c *Conversation) System(t Text) {
	if len(c.list) == 1 && c.list[0].role == "system" {
		c.list[0].parts = append(c.list[0].parts, Part{Text: t})
		c.count(Part{Text: t})
		return
	}
	c.add(message{role: "system", parts: []Part{{Text: t}}})
}

// User adds a user's message.
func (c *Conversation) User(parts ...Part) {
	if len(c.images) > 0 {
		parts = append(c.images, parts...)
		c.images = nil
	}
	c.add(message{role: "user", parts: parts})
}

// EndText has an assistant's next text or reasoning begin another message; calls still belong to this one.
func (c *Conversation) EndText() { c.closed = true }

// Reason adds what an assistant thought.
func (c *Conversation) Reason(t Text) {
	m := c.assistant(func(m *message) bool { return len(m.parts) == 0 && len(m.calls) == 0 && !c.closed })
	m.reasoning = append(m.reasoning, t)
	c.count(Part{Text: t})
}

// Say adds what an assistant said.
func (c *Conversation) Say(t Text) {
	m := c.assistant(func(m *message) bool { return len(m.calls) == 0 && !c.closed })
	m.parts = append(m.parts, Part{Text: t})
	c.count(Part{Text: t})
}

// Call adds an assistant's call of a tool.
func (c *Conversation) Call(call Call) {
	m := c.assistant(func(*message) bool { return true })
	m.calls = append(m.calls, call)
	c.count(Part{Text: call.Name}, Part{Text: call.Arguments})
}

// Result adds what a tool answered. Its images come with the user's next message.
func (c *Conversation) Result(id Text, parts ...Part) {
	m := message{role: "tool", id: id}
	for _, p := range parts {
		if p.URL != nil {
			c.images = append(c.images, p)
		} else {
			m.parts = append(m.parts, p)
		}
	}
	c.list = append(c.list, m)
	c.count(m.parts...)
	c.closed = false
}

// Goes reports whether the last message is an assistant's text, to go on with.
func (c *Conversation) Goes() bool {
	n := len(c.list)
	return n > 0 && len(c.images) == 0 && c.list[n-1].role == "assistant" && len(c.list[n-1].calls) == 0 && len(c.list[n-1].parts) > 0
}

// Empty reports whether nobody has said anything.
func (c *Conversation) Empty() bool {
	return len(c.images) == 0 && !slices.ContainsFunc(c.list, func(m message) bool { return m.role != "system" })
}

// assistant returns the last message if it is an assistant's that takes more, else a new one.
func (c *Conversation) assistant(takes func(*message) bool) *message {
	n := len(c.list)
	if n == 0 || len(c.images) > 0 || c.list[n-1].role != "assistant" || !takes(&c.list[n-1]) {
		c.add(message{role: "assistant"})
		n = len(c.list)
	}
	return &c.list[n-1]
}

func (c *Conversation) add(m message) {
	if len(c.images) > 0 {
		c.User()
	}
	c.list = append(c.list, m)
	c.count(m.parts...)
	c.closed = false
}

// Append appends the messages as JSON.
func (c *Conversation) Append(dst []byte) []byte {
	if len(c.images) > 0 {
		c.User()
	}
	dst = append(dst, '[')
	for i := range c.list {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = c.list[i].append(dst)
	}
	return append(dst, ']')
}

func (m *message) append(dst []byte) []byte {
	dst = append(append(append(dst, `{"role":"`...), m.role...), '"')
	if len(m.id) > 0 {
		dst = member(dst, "tool_call_id", m.id)
	}
	dst = m.appendContent(append(dst, `,"content":`...))
	if len(m.reasoning) > 0 {
		dst = append(appendLines(append(dst, `,"reasoning_content":"`...), m.reasoning), '"')
	}
	for i, call := range m.calls {
		if i == 0 {
			dst = append(dst, `,"tool_calls":[`...)
		} else {
			dst = append(dst, ',')
		}
		dst = member(append(dst, `{"type":"function"`...), "id", call.ID)
		dst = quote(append(dst, `,"function":{"name":`...), call.Name)
		dst = append(member(dst, "arguments", call.Arguments), "}}"...)
	}
	if len(m.calls) > 0 {
		dst = append(dst, ']')
	}
	return append(dst, '}')
}

// appendContent writes texts alone as one string, which all templates take.
func (m *message) appendContent(dst []byte) []byte {
	if !slices.ContainsFunc(m.parts, func(p Part) bool { return p.URL != nil }) {
		texts := make([]Text, len(m.parts))
		for i, p := range m.parts {
			texts[i] = p.Text
		}
		return append(appendLines(append(dst, '"'), texts), '"')
	}
	dst = append(dst, '[')
	for i, p := range m.parts {
		if i > 0 {
			dst = append(dst, ',')
		}
		if p.URL == nil {
			dst = append(quote(append(dst, `{"type":"text","text":`...), p.Text), '}')
			continue
		}
		dst = quote(append(dst, `{"type":"image_url","image_url":{"url":`...), p.URL)
		if len(p.Detail) > 0 {
			dst = member(dst, "detail", p.Detail)
		}
		dst = append(dst, "}}"...)
	}
	return append(dst, ']')
}

// appendLines appends texts with line breaks between them.
func appendLines(dst []byte, texts []Text) []byte {
	for i, t := range texts {
		if i > 0 {
			dst = append(dst, lineBreak...)
		}
		dst = append(dst, t...)
	}
	return dst
}

func quote(dst []byte, t Text) []byte { return append(append(append(dst, '"'), t...), '"') }

func member(dst []byte, name string, t Text) []byte {
	return quote(append(append(append(dst, `,"`...), name...), `":`...), t)
}

// Request is the rest of a chat completion: its fields, as JSON.
type Request struct{ fields []field }

type field struct {
	name string
	raw  []byte
}

// Set gives a field a value; nil takes it away.
func (r *Request) Set(name string, raw []byte) {
	r.fields = slices.DeleteFunc(r.fields, func(f field) bool { return f.name == name })
	if raw != nil {
		r.fields = append(r.fields, field{name, raw})
	}
}

// SetText gives a field a text.
func (r *Request) SetText(name string, t Text) { r.Set(name, quote(nil, t)) }

// Only returns a request with some of its fields.
func (r *Request) Only(names ...string) *Request {
	return &Request{slices.DeleteFunc(slices.Clone(r.fields), func(f field) bool { return !slices.Contains(names, f.name) })}
}

// Append appends the request with these messages.
func (r *Request) Append(dst []byte, c *Conversation) []byte {
	dst = append(dst, '{')
	for _, f := range r.fields {
		dst = append(append(append(append(append(dst, '"'), f.name...), `":`...), f.raw...), ',')
	}
	return append(c.Append(append(dst, `"messages":`...)), '}')
}

// PassedOn reports whether a field that is none of another API's is known to engines in a chat and
// passed on: their own, and what only a chat has.
func PassedOn(name string) bool {
	switch name {
	case "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop",
		"min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
		"chat_template_kwargs", "cache_salt", "cache_priority", "priority",
		"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf":
		return true
	}
	return false
}
