package messages

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// talk reads system and messages, whose order in a body is any.
func (p *parser) talk() *openai.Error {
	if p.system != nil {
		if err := p.systemText(); err != nil {
			return err
		}
	}
	r := &parser{Reader: openai.NewListReader(p.messages), q: p.q}
	for n := 0; r.Item(); n++ {
		r.message(fmt.Sprintf("messages[%d]", n))
	}
	return r.Fault()
}

// billing begins a block in which Claude Code says what a request is to be accounted as. It differs with each
// request, so that no prompt would ever begin like another.
var billing = []byte("x-anthropic-billing-header:")

func (p *parser) systemText() *openai.Error {
	if p.system[0] == '"' {
		if t := p.system[1 : len(p.system)-1]; len(t) > 0 {
			p.q.talk.System(t)
		}
		return nil
	}
	r := &parser{Reader: openai.NewListReader(p.system), q: p.q}
	for n := 0; r.Item(); n++ {
		name := fmt.Sprintf("system[%d]", n)
		b, ok := r.block("system", name)
		switch {
		case !ok:
		case b.kind != "text":
			r.Refuse("system", "%s.type is %q; only text is supported", name, openai.Clip(b.kind))
		case len(b.text) > 0 && !bytes.HasPrefix(b.text, billing):
			p.q.talk.System(b.text)
		}
	}
	return r.Fault()
}

func (p *parser) message(name string) {
	if p.q.talk.Full() {
		p.Refuse("messages", "messages has more than %d messages and blocks", chat.MaxMessages)
	}
	if !p.object("messages", name) {
		return
	}
	role, content := "", []byte(nil)
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "role":
			role = p.Str("messages")
		case "content":
			if k := p.Peek(); k != jsonscan.String && k != jsonscan.Array && k != jsonscan.Null {
				p.Of("messages", jsonscan.Array, "a string or a list of blocks")
				return
			}
			content = p.Given()
		default:
			p.Skip()
		}
	}
	switch {
	case p.Err() != nil:
	case content == nil:
		p.Refuse("messages", "%s.content is required", name)
	case role != "user" && role != "assistant" && role != "system":
		p.Refuse("messages", "%s.role must be user or assistant, not %q", name, openai.Clip(role))
	default:
		if err := p.say(role, content, name+".content"); err != nil {
			p.Fail(err)
		}
	}
}

// say adds what somebody says: a JSON string, or a list of blocks.
func (p *parser) say(role string, content []byte, name string) *openai.Error {
	talk := &p.q.talk
	if content[0] == '"' {
		text := chat.Text(content[1 : len(content)-1])
		switch role {
		case "user":
			talk.User(chat.Part{Text: text})
		case "system":
			talk.System(text)
		default:
			talk.Say(text)
			talk.EndText()
		}
		return nil
	}
	r := &parser{Reader: openai.NewListReader(content), q: p.q}
	var said []chat.Part
	asked := false
	for n := 0; r.Item(); n++ {
		name := fmt.Sprintf("%s[%d]", name, n)
		if n+len(said) > chat.MaxMessages || talk.Full() {
			r.Refuse("messages", "messages has more than %d messages and blocks", chat.MaxMessages)
			break
		}
		b, ok := r.block("messages", name)
		if !ok {
			break
		}
		switch {
		case role == "assistant":
			r.assistant(&b, name)
		case b.kind == "tool_result" && role == "user":
			r.result(&b, name)
			asked = true
		default:
			if part, ok := r.part(&b, name); ok {
				said = append(said, part)
			}
		}
	}
	if err := r.Fault(); err != nil {
		return err
	}
	switch {
	case role == "assistant":
		talk.EndText()
	case role == "system":
		for _, part := range said {
			if part.URL != nil {
				return openai.BadRequest("messages", "%s: only a user's message may have images", name)
			}
			talk.System(part.Text)
		}
	case len(said) > 0 || !asked:
		talk.User(said...)
	}
	return nil
}

// block is what blocks of all types have, as far as a chat can say it.
type block struct {
	kind, source     string // types
	text, thinking   chat.Text
	media, data, url chat.Text // of a source
	id, name         chat.Text
	input, content   []byte
	called           chat.Text // tool_use_id
	hasText          bool
}

// block reads a block. Marks for a cache, citations and the like are left out.
func (p *parser) block(field, name string) (b block, ok bool) {
	if !p.object(field, name) {
		return b, false
	}
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			b.kind = p.Str(field)
		case "text":
			b.hasText = p.Peek() == jsonscan.String
			b.text = p.Quoted(field)
		case "thinking":
			b.thinking = p.Quoted(field)
		case "id":
			b.id = p.Quoted(field)
		case "name":
			b.name = p.Quoted(field)
		case "input":
			b.input = p.Given()
		case "tool_use_id":
			b.called = p.Quoted(field)
		case "content":
			b.content = p.Given()
		case "source":
			p.source(&b, field)
		default:
			p.Skip()
		}
	}
	return b, p.Err() == nil
}

func (p *parser) source(b *block, field string) {
	if !p.Is(field, jsonscan.Object, "an object") {
		return
	}
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			b.source = p.Str(field)
		case "media_type":
			b.media = p.Quoted(field)
		case "data":
			b.data = p.Quoted(field)
		case "url":
			b.url = p.Quoted(field)
		default:
			p.Skip()
		}
	}
}

// part makes a block a part of a message.
func (p *parser) part(b *block, name string) (part chat.Part, ok bool) {
	switch {
	case b.kind == "text" && b.hasText:
		return chat.Part{Text: b.text}, true
	case b.kind == "text":
		p.Refuse("messages", "%s.text is required", name)
	case b.kind == "document" && b.source == "text" && b.data != nil:
		return chat.Part{Text: b.data}, true
	case b.kind == "image" && b.source == "url" && len(b.url) > 0:
		return chat.Part{URL: b.url}, true
	case b.kind == "image" && b.source == "base64" && len(b.data) > 0 && len(b.media) > 0:
		return chat.Part{URL: slices.Concat(chat.Text("data:"), b.media, chat.Text(";base64,"), b.data)}, true
	case b.kind == "image":
		p.Refuse("messages", "%s.source must have type base64 with media_type and data, or type url with url", name)
	case b.kind == "document":
		p.Refuse("messages", "%s.source.type is %q; a document must be text", name, openai.Clip(b.source))
	default:
		p.Refuse("messages", "%s.type is %q; supported are text, image, document, tool_use, tool_result and thinking", name, openai.Clip(b.kind))
	}
	return part, false
}

func (p *parser) assistant(b *block, name string) {
	talk := &p.q.talk
	switch b.kind {
	case "text":
		if !b.hasText {
			p.Refuse("messages", "%s.text is required", name)
			return
		}
		talk.Say(b.text)
	case "thinking":
		if len(b.thinking) > 0 {
			talk.Reason(b.thinking)
		}
	case "redacted_thinking": // only another provider could read it
	case "tool_use":
		if len(b.id) == 0 || len(b.name) == 0 || len(b.input) == 0 || b.input[0] != '{' {
			p.Refuse("messages", "%s: id, name and an object as input are required", name)
			return
		}
		talk.Call(chat.Call{ID: b.id, Name: b.name, Arguments: chat.Plain(string(b.input))})
	default:
		p.Refuse("messages", "%s.type is %q; an assistant's may be text, thinking or tool_use", name, openai.Clip(b.kind))
	}
}

func (p *parser) result(b *block, name string) {
	if len(b.called) == 0 {
		p.Refuse("messages", "%s.tool_use_id is required", name)
		return
	}
	var parts []chat.Part
	switch {
	case b.content == nil:
	case b.content[0] == '"':
		parts = append(parts, chat.Part{Text: b.content[1 : len(b.content)-1]})
	case b.content[0] == '[':
		r := &parser{Reader: openai.NewListReader(b.content), q: p.q}
		for n := 0; r.Item(); n++ {
			if n == chat.MaxMessages {
				r.Refuse("messages", "%s.content has more than %d blocks", name, chat.MaxMessages)
				break
			}
			name := fmt.Sprintf("%s.content[%d]", name, n)
			inner, ok := r.block("messages", name)
			if !ok {
				break
			}
			if part, ok := r.part(&inner, name); ok {
				parts = append(parts, part)
			}
		}
		if err := r.Fault(); err != nil {
			p.Fail(err)
			return
		}
	default:
		p.Refuse("messages", "%s.content must be a string or a list of blocks", name)
		return
	}
	p.q.talk.Result(b.called, parts...)
}
