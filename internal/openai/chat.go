package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// ParseChat reads and validates a chat body. Nothing of body is kept.
func ParseChat(body []byte, lim Limits) (*Chat, *Error) {
	c := &Chat{Sampling: defaults(), AddGenerationPrompt: true}
	p := parser{lim: lim.withDefaults()}
	if err := p.body(body, func(key []byte) *Error { return p.chatField(c, key) }); err != nil {
		return nil, err
	}
	if err := p.checkChat(c); err != nil {
		return nil, err
	}
	return c, nil
}

func (p *parser) chatField(c *Chat, key []byte) (err *Error) {
	r := &p.r
	switch string(key) {
	case "messages":
		c.Messages, err = p.messages()
	case "max_tokens":
		var n *int
		if n, err = p.optInt("max_tokens", 1, math.MaxInt32); !p.completionTokens {
			c.MaxTokens = n
		}
	case "max_completion_tokens": // wins over max_tokens, which it replaced
		var n *int
		if n, err = p.optInt("max_completion_tokens", 1, math.MaxInt32); n != nil {
			c.MaxTokens, p.completionTokens = n, true
		}
	case "logprobs":
		c.Logprobs, _, err = r.readBool("logprobs")
	case "top_logprobs":
		var n *int
		n, err = p.optInt("top_logprobs", 0, int64(p.lim.MaxLogprobs))
		p.topLogprobs = n != nil && *n > 0
		if c.TopLogprobs = 0; n != nil {
			c.TopLogprobs = *n
		}
	case "tools":
		c.Tools, err = p.tools()
	case "tool_choice":
		if k := r.peek(); k != '"' && k != '{' && k != 'n' {
			return r.wrong("tool_choice", "a string or an object")
		}
		c.ToolChoice, err = p.keep()
	case "response_format":
		if c.ResponseFormat, err = p.keep(); err == nil && c.ResponseFormat != nil {
			var kind string
			kind, err = objectType(c.ResponseFormat, "response_format", p.lim.MaxDepth)
			if err == nil && kind == "" {
				err = BadRequest("response_format", "response_format.type is required")
			}
			if kind == "text" {
				c.ResponseFormat = nil
			}
		}
	case "add_generation_prompt":
		c.AddGenerationPrompt, p.generationGiven, err = r.readBool("add_generation_prompt")
		if !p.generationGiven {
			c.AddGenerationPrompt = true
		}
	case "continue_final_message":
		c.ContinueFinalMessage, _, err = r.readBool("continue_final_message")
	case "add_special_tokens":
		c.AddSpecial, _, err = r.readBool("add_special_tokens")
	case "chat_template_kwargs":
		c.TemplateKwargs, err = p.templateKwargs()
	case "functions", "function_call", "audio", "chat_template":
		name := string(key)
		var raw []byte
		if raw, err = r.raw(); err == nil && raw != nil {
			err = BadRequest(name, "%s is not supported", name)
		}
	case "modalities":
		var raw []byte
		if raw, err = r.raw(); err == nil && strings.Contains(string(raw), "audio") {
			err = BadRequest("modalities", "only text is supported")
		}
	default:
		err = p.sampling(&c.Sampling, key)
	}
	return err
}

func (p *parser) checkChat(c *Chat) *Error {
	switch {
	case len(c.Messages) == 0:
		return BadRequest("messages", "messages is required and must not be empty")
	case p.topLogprobs && !c.Logprobs:
		return BadRequest("top_logprobs", "top_logprobs needs logprobs to be true")
	case c.ContinueFinalMessage && c.AddGenerationPrompt && p.generationGiven:
		return BadRequest("continue_final_message", "continue_final_message and add_generation_prompt cannot both be true")
	}
	if c.ContinueFinalMessage {
		c.AddGenerationPrompt = false
	}
	return c.check()
}

func (p *parser) keep() ([]byte, *Error) {
	raw, err := p.r.raw()
	return clone(raw), err
}

// tools checks that tools is a list of objects with a type and keeps its text;
// order of keys matters to templates.
func (p *parser) tools() ([]byte, *Error) {
	if k := p.r.peek(); k != '[' && k != 'n' {
		return nil, p.r.wrong("tools", "a list")
	}
	p.values = 0
	raw, err := p.value("tools")
	if err != nil || string(raw) == "null" {
		return nil, err
	}
	raw = clone(raw)
	r := reader{b: raw, maxDepth: p.lim.MaxDepth}
	r.peek()
	n := 0
	err = r.array(func(i int) *Error {
		n++
		item, err := r.raw()
		if err != nil {
			return err
		}
		kind, err := objectType(item, "tools", p.lim.MaxDepth)
		if err == nil && kind == "" {
			err = BadRequest("tools", "tools[%d].type is required", i)
		}
		return err
	})
	if n == 0 {
		raw = nil
	}
	return raw, err
}

// templateKwargs reads what the client wants to tell the template.
func (p *parser) templateKwargs() (map[string]json.RawMessage, *Error) {
	const name = "chat_template_kwargs"
	if null, err := p.r.null(); null || err != nil {
		return nil, err
	}
	if p.r.peek() != '{' {
		return nil, p.r.wrong(name, "an object")
	}
	p.values = 0
	out := map[string]json.RawMessage{}
	err := p.r.object(func(key []byte) *Error {
		k := string(key)
		raw, err := p.value(name)
		out[k] = clone(raw)
		return err
	})
	return out, err
}

// messages reads the conversation.
func (p *parser) messages() ([]json.RawMessage, *Error) {
	if null, err := p.r.null(); null || err != nil {
		return nil, err
	}
	if p.r.peek() != '[' {
		return nil, p.r.wrong("messages", "a list")
	}
	p.values = 0
	var out []json.RawMessage
	err := p.r.array(func(i int) *Error {
		m, err := p.message(fmt.Sprintf("messages[%d]", i))
		out = append(out, m)
		return err
	})
	if err != nil {
		err.Param = paramRoot(err.Param)
	}
	return out, err
}

// message checks one message and brings it to the form that templates expect.
func (p *parser) message(name string) (json.RawMessage, *Error) {
	r := &p.r
	if r.peek() != '{' {
		return nil, r.wrong(name, "an object")
	}
	if err := p.count("messages"); err != nil {
		return nil, err
	}
	start := r.i
	role, content := "", byte(0) // of the content, what it begins with
	var from, to int             // where it is, if it is a list of parts
	var text string              // which make this
	err := r.object(func(key []byte) (err *Error) {
		switch string(key) {
		case "role":
			role, err = p.stringOr("messages")
		case "content":
			switch content = r.peek(); content {
			case '"', 'n':
				err = p.walk("messages")
			case '[':
				from = r.i
				text, err = p.joinParts(name)
				to = r.i
			default:
				err = r.wrong(name+".content", "a string or a list of parts")
			}
		case "tool_calls":
			err = p.toolCalls(name + ".tool_calls")
		default:
			err = p.walk("messages")
		}
		return err
	})
	raw := r.b[start:r.i]
	switch {
	case err != nil:
		return nil, err
	case role == "":
		return nil, BadRequest("messages", "%s.role is required and must be a string", name)
	case content == '[':
		out := append(make([]byte, 0, len(raw)), r.b[start:from]...)
		return append(AppendString(out, text), r.b[to:r.i]...), nil
	case (content == 0 || content == 'n') && role != "assistant":
		return nil, BadRequest("messages", "%s.content is required", name)
	case content == 0: // the object is not empty: it has a role
		return append(clone(raw[:len(raw)-1]), `,"content":null}`...), nil
	}
	return clone(raw), nil
}

// toolCalls checks the calls that an assistant made. Templates want their
// arguments as JSON, and get them so also where they are text that holds it.
func (p *parser) toolCalls(name string) *Error {
	r := &p.r
	switch r.peek() {
	case 'n':
		return p.walk("messages")
	case '[':
	default:
		return r.wrong(name, "a list")
	}
	object := func(name string, field func(key []byte) *Error) *Error {
		if r.peek() != '{' {
			return r.wrong(name, "an object")
		}
		if err := p.count("messages"); err != nil {
			return err
		}
		return r.object(field)
	}
	return r.array(func(i int) *Error {
		name, called := fmt.Sprintf("%s[%d]", name, i), false
		err := object(name, func(key []byte) *Error {
			if string(key) != "function" {
				return p.walk("messages")
			}
			called = true
			return object(name+".function", func(key []byte) *Error {
				if string(key) == "arguments" && r.peek() == '"' {
					return p.argumentText(name)
				}
				return p.walk("messages")
			})
		})
		if err == nil && !called {
			err = BadRequest("messages", "%s.function must be an object", name)
		}
		return err
	})
}

// argumentText checks arguments of a call that are JSON in a string, or an
// empty one.
func (p *parser) argumentText(name string) *Error {
	text, err := p.stringOr("messages")
	if err != nil || text == "" {
		return err
	}
	in := parser{r: reader{b: []byte(text), maxDepth: p.lim.MaxDepth}, values: p.values}
	if err = in.walk("messages"); err == nil {
		err = in.r.end()
	}
	p.values = in.values
	if err != nil && err.Param == "" {
		err = BadRequest("messages", "%s.function.arguments is not valid JSON", name)
	}
	return err
}

// joinParts makes one text of a list of text parts.
func (p *parser) joinParts(name string) (string, *Error) {
	r := &p.r
	var texts []string
	err := r.array(func(i int) *Error {
		if err := p.count("messages"); err != nil {
			return err
		}
		var kind string
		var text, refusal *string
		var err *Error
		read := func(to **string) *Error {
			*to = nil
			if r.peek() != '"' {
				return p.walk("messages")
			}
			s, err := p.stringOr("messages")
			*to = &s
			return err
		}
		switch r.peek() {
		case '"':
			err = read(&text)
		case '{':
			err = r.object(func(key []byte) (err *Error) {
				switch string(key) {
				case "type":
					kind, err = p.stringOr("messages")
				case "text":
					err = read(&text)
				case "refusal":
					err = read(&refusal)
				default:
					err = p.walk("messages")
				}
				return err
			})
		default:
			err = r.wrong(fmt.Sprintf("%s.content[%d]", name, i), "an object")
		}
		if err != nil {
			return err
		}
		switch kind {
		case "refusal":
			if text == nil {
				text = refusal
			}
		case "text", "input_text", "output_text", "":
		default:
			return BadRequest("messages", "%s.content[%d] has type %q; only text is supported", name, i, clip(kind, 40))
		}
		if text == nil {
			return BadRequest("messages", "%s.content[%d].text must be a string", name, i)
		}
		texts = append(texts, *text)
		return nil
	})
	return strings.Join(texts, "\n"), err
}

// maxValues bounds what templates are given: a value takes memory by its
// number, not by its length, and there can be one in two bytes of a body.
const maxValues = 100_000

// count counts a JSON value of field.
func (p *parser) count(field string) *Error {
	if p.values++; p.values > maxValues {
		return BadRequest(field, "%s has more than %d JSON values", field, maxValues)
	}
	return nil
}

// value returns the text of a JSON value that templates are given.
func (p *parser) value(field string) ([]byte, *Error) {
	p.r.peek()
	start := p.r.i
	err := p.walk(field)
	return p.r.b[start:p.r.i], err
}

// walk steps over a value, as skip does, and counts it and those in it.
func (p *parser) walk(field string) *Error {
	r := &p.r
	if err := p.count(field); err != nil {
		return err
	}
	switch c := r.peek(); {
	case c == '{':
		return r.object(func([]byte) *Error { return p.walk(field) })
	case c == '[':
		return r.array(func(int) *Error { return p.walk(field) })
	case c == '-' || c >= '0' && c <= '9':
		text, err := r.num()
		if err != nil || !bytes.ContainsAny(text, ".eE") { // integers may have any size
			return err
		}
		if _, perr := strconv.ParseFloat(string(text), 64); perr != nil {
			return r.syntax("number out of range")
		}
		return nil
	}
	return r.skip()
}

// stringOr reads a string, or steps over what is none.
func (p *parser) stringOr(field string) (string, *Error) {
	if p.r.peek() != '"' {
		return "", p.walk(field)
	}
	if err := p.count(field); err != nil {
		return "", err
	}
	s, _, err := p.r.readString(field)
	return s, err
}
