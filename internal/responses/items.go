package responses

import (
	"fmt"
	"slices"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// Lookup returns an item that a request refers to by its ID, as JSON. It is of a response that is kept.
type Lookup func(id string) ([]byte, *openai.Error)

// addItems adds an input, or a response's output, to a conversation: a JSON string, or a list of items.
func addItems(c *chat.Conversation, list []byte, find Lookup) *openai.Error {
	switch {
	case c.Full():
		return full(c)
	case len(list) == 0 || list[0] != '"' && list[0] != '[': // of a response that somebody else has kept
		return openai.BadRequest("previous_response_id", "what is kept of the conversation cannot be read")
	case list[0] == '"':
		c.User(chat.Part{Text: list[1 : len(list)-1]})
		return nil
	}
	p := &itemReader{Reader: openai.NewListReader(list), c: c, find: find}
	for n := 0; p.Item(); n++ {
		if c.Full() {
			p.Fail(full(c))
		}
		p.item(fmt.Sprintf("input[%d]", n))
	}
	return p.Fault()
}

func full(c *chat.Conversation) *openai.Error {
	return openai.TooLarge("the conversation has more than %d messages and parts, or %d bytes", chat.MaxMessages, c.Most)
}

type itemReader struct {
	*openai.Reader
	c    *chat.Conversation
	find Lookup
}

// item is what items of all types have, as far as a chat can say it.
type item struct {
	kind, role              string
	parts                   []chat.Part // of content, or of a call's output
	id                      string
	callID, name, arguments chat.Text
	namespace               chat.Text
	thought, summary        chat.Text
	hasContent, hasOutput   bool
	hasArguments            bool
}

func (p *itemReader) item(name string) {
	var it item
	if !object(p.Reader, "input", name) {
		return
	}
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			it.kind = p.Str("input")
		case "role":
			it.role = p.Str("input")
		case "content":
			it.hasContent = p.Peek() != jsonscan.Null
			p.content(&it, name+".content")
		case "output":
			it.hasOutput = p.Peek() != jsonscan.Null
			p.content(&it, name+".output")
		case "summary":
			p.summaries(&it, name+".summary")
		case "id":
			it.id = p.Str("input")
		case "call_id":
			it.callID = p.Quoted("input")
		case "name":
			it.name = p.Quoted("input")
		case "namespace":
			it.namespace = p.Quoted("input")
		case "arguments":
			it.hasArguments = p.Peek() == jsonscan.String
			it.arguments = p.Quoted("input")
		default:
			p.Skip()
		}
	}
	if p.Err() == nil {
		p.add(&it, name)
	}
}

// add says an item in a chat.
func (p *itemReader) add(it *item, name string) {
	switch it.kind {
	case "message", "":
		if it.kind == "" && it.role == "" && it.id != "" { // the API's own libraries leave the type out
			p.reference(it.id, name)
			return
		}
		p.message(it, name)
	case "item_reference":
		p.reference(it.id, name)
	case "function_call":
		if len(it.callID) == 0 || len(it.name) == 0 || !it.hasArguments {
			p.Refuse("input", "%s: call_id, name and arguments are required", name)
			return
		}
		if len(it.namespace) > 0 {
			it.name = flatText(it.namespace, it.name)
		}
		p.c.Call(chat.Call{ID: it.callID, Name: it.name, Arguments: it.arguments})
	case "function_call_output":
		if len(it.callID) == 0 || !it.hasOutput {
			p.Refuse("input", "%s: call_id and output are required", name)
			return
		}
		p.c.Result(it.callID, it.parts...)
	case "reasoning":
		thought := it.thought
		if len(thought) == 0 {
			thought = it.summary
		}
		if len(thought) > 0 { // else only another provider could read it
			p.c.Reason(thought)
		}
	default:
		p.Refuse("input", "%s.type is %q; supported are message, function_call, function_call_output, reasoning and item_reference", name, openai.Clip(it.kind))
	}
}

// reference adds an item that was given before. It may refer to none.
func (p *itemReader) reference(id, name string) {
	if id == "" {
		p.Refuse("input", "%s.id is required", name)
		return
	}
	raw, err := p.find(id)
	if err == nil {
		none := func(string) ([]byte, *openai.Error) {
			return nil, openai.BadRequest("input", "%s refers to an item that refers to another", name)
		}
		err = addItems(p.c, slices.Concat([]byte{'['}, raw, []byte{']'}), none)
	}
	if err != nil {
		p.Fail(err)
	}
}

func (p *itemReader) message(it *item, name string) {
	if !it.hasContent {
		p.Refuse("input", "%s.content is required", name)
		return
	}
	switch it.role {
	case "user":
		p.c.User(it.parts...)
	case "system", "developer", "assistant":
		for _, part := range it.parts {
			if part.URL != nil {
				p.Refuse("input", "%s: only a user's message may have images", name)
				return
			}
		}
		if it.role != "assistant" { // templates know no developer
			var text chat.Text
			for i, part := range it.parts {
				if i > 0 {
					text = append(text, `\n`...)
				}
				text = append(text, part.Text...)
			}
			p.c.System(text)
			return
		}
		for _, part := range it.parts {
			p.c.Say(part.Text)
		}
		p.c.EndText()
	default:
		p.Refuse("input", "%s.role must be user, system, developer or assistant, not %q", name, openai.Clip(it.role))
	}
}

// content reads a string, or a list of parts.
func (p *itemReader) content(it *item, name string) {
	switch p.Peek() {
	case jsonscan.String:
		it.parts = []chat.Part{{Text: p.Quoted("input")}}
		return
	case jsonscan.Null:
		p.Skip()
		return
	case jsonscan.Array:
		p.Next()
	default:
		p.Of("input", jsonscan.Array, "a string or a list of parts")
		return
	}
	it.parts = nil
	for n := 0; p.Item(); n++ {
		if n == chat.MaxMessages {
			p.Refuse("input", "%s has more than %d parts", name, chat.MaxMessages)
			return
		}
		p.part(it, fmt.Sprintf("%s[%d]", name, n))
	}
}

func (p *itemReader) part(it *item, name string) {
	if !object(p.Reader, "input", name) {
		return
	}
	var kind string
	var text, refusal, url, detail chat.Text
	var hasText bool
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			kind = p.Str("input")
		case "text":
			hasText = p.Peek() == jsonscan.String
			text = p.Quoted("input")
		case "refusal":
			refusal = p.Quoted("input")
		case "image_url":
			url = p.Quoted("input")
		case "detail":
			detail = p.Quoted("input")
		default:
			p.Skip()
		}
	}
	switch kind {
	case "input_text", "output_text", "text":
		if !hasText {
			p.Refuse("input", "%s.text is required", name)
		}
		it.parts = append(it.parts, chat.Part{Text: text})
	case "refusal":
		it.parts = append(it.parts, chat.Part{Text: refusal})
	case "reasoning_text":
		it.thought = append(it.thought, text...)
	case "input_image":
		if len(url) == 0 {
			p.Refuse("input", "%s.image_url is required: files are not kept here", name)
		}
		it.parts = append(it.parts, chat.Part{URL: url, Detail: detail})
	default:
		p.Refuse("input", "%s.type is %q; supported are input_text, output_text, input_image, refusal and reasoning_text", name, openai.Clip(kind))
	}
}

func (p *itemReader) summaries(it *item, name string) {
	if !p.Is("input", jsonscan.Array, "a list") {
		return
	}
	for n := 0; p.Item(); n++ {
		if !object(p.Reader, "input", fmt.Sprintf("%s[%d]", name, n)) {
			return
		}
		for p.Next() == jsonscan.Key {
			if string(p.Decoded()) != "text" {
				p.Skip()
				continue
			}
			if len(it.summary) > 0 {
				it.summary = append(it.summary, `\n`...)
			}
			it.summary = append(it.summary, p.Quoted("input")...)
		}
	}
}
