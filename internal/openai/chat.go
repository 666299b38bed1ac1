package openai

import (
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
		c.TemplateKwargs = nil
		if k := r.peek(); k == 'n' {
			return r.skip()
		} else if k != '{' {
			return r.wrong("chat_template_kwargs", "an object")
		}
		var v any
		v, err = r.value()
		c.TemplateKwargs, _ = v.(map[string]any)
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
	raw, err := p.keep()
	if err != nil || raw == nil {
		return nil, err
	}
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

// messages reads the conversation.
func (p *parser) messages() ([]map[string]any, *Error) {
	if null, err := p.r.null(); null || err != nil {
		return nil, err
	}
	if p.r.peek() != '[' {
		return nil, p.r.wrong("messages", "a list")
	}
	var out []map[string]any
	err := p.r.array(func(i int) *Error {
		name := fmt.Sprintf("messages[%d]", i)
		if p.r.peek() != '{' {
			return p.r.wrong(name, "an object")
		}
		v, err := p.r.value()
		if err != nil {
			return err
		}
		m, _ := v.(map[string]any)
		out = append(out, m)
		return p.message(name, m)
	})
	if err != nil {
		err.Param = paramRoot(err.Param)
	}
	return out, err
}

// message checks one message and brings it to the form that templates expect.
func (p *parser) message(name string, m map[string]any) *Error {
	role, _ := m["role"].(string)
	if role == "" {
		return BadRequest("messages", "%s.role is required and must be a string", name)
	}
	switch content := m["content"].(type) {
	case string:
	case nil:
		m["content"] = nil
		if role != "assistant" {
			return BadRequest("messages", "%s.content is required", name)
		}
	case []any:
		text, err := joinParts(name, content)
		if err != nil {
			return err
		}
		m["content"] = text
	default:
		return BadRequest("messages", "%s.content must be a string or a list of parts", name)
	}
	calls, given := m["tool_calls"]
	if !given || calls == nil {
		return nil
	}
	list, ok := calls.([]any)
	if !ok {
		return BadRequest("messages", "%s.tool_calls must be a list", name)
	}
	for i, call := range list {
		if err := p.toolCall(fmt.Sprintf("%s.tool_calls[%d]", name, i), call); err != nil {
			return err
		}
	}
	return nil
}

func (p *parser) toolCall(name string, call any) *Error {
	m, ok := call.(map[string]any)
	if !ok {
		return BadRequest("messages", "%s must be an object", name)
	}
	fn, ok := m["function"].(map[string]any)
	if !ok {
		return BadRequest("messages", "%s.function must be an object", name)
	}
	switch args := fn["arguments"].(type) {
	case nil:
		fn["arguments"] = map[string]any{}
	case string:
		if args == "" {
			fn["arguments"] = map[string]any{}
			return nil
		}
		r := reader{b: []byte(args), maxDepth: p.lim.MaxDepth}
		err := r.skip()
		if err == nil {
			err = r.end()
		}
		if err != nil {
			return BadRequest("messages", "%s.function.arguments is not valid JSON", name)
		}
		fn["arguments"] = json.RawMessage(args) // templates see its keys in the client's order
	}
	return nil
}

// joinParts makes one text of a list of text parts.
func joinParts(name string, parts []any) (string, *Error) {
	texts := make([]string, 0, len(parts))
	for i, part := range parts {
		switch v := part.(type) {
		case string:
			texts = append(texts, v)
		case map[string]any:
			kind, _ := v["type"].(string)
			switch kind {
			case "text", "input_text", "output_text", "refusal", "":
			default:
				return "", BadRequest("messages", "%s.content[%d] has type %q; only text is supported", name, i, clip(kind, 40))
			}
			text, ok := v["text"].(string)
			if !ok && kind == "refusal" {
				text, ok = v["refusal"].(string)
			}
			if !ok {
				return "", BadRequest("messages", "%s.content[%d].text must be a string", name, i)
			}
			texts = append(texts, text)
		default:
			return "", BadRequest("messages", "%s.content[%d] must be an object", name, i)
		}
	}
	return strings.Join(texts, "\n"), nil
}

// value builds any JSON value: map[string]any, []any, string, bool, nil,
// int64 for integers that fit, float64 for other numbers.
func (r *reader) value() (any, *Error) {
	switch c := r.peek(); {
	case c == '"':
		s, _, err := r.readString("")
		return s, err
	case c == '{':
		m := map[string]any{}
		err := r.object(func(key []byte) *Error {
			k := string(key)
			v, err := r.value()
			m[k] = v
			return err
		})
		return m, err
	case c == '[':
		l := []any{}
		err := r.array(func(int) *Error {
			v, err := r.value()
			l = append(l, v)
			return err
		})
		return l, err
	case c == '-' || c >= '0' && c <= '9':
		text, err := r.num()
		if err != nil {
			return nil, err
		}
		if n, perr := strconv.ParseInt(string(text), 10, 64); perr == nil {
			return n, nil
		}
		f, perr := strconv.ParseFloat(string(text), 64)
		if perr != nil {
			return nil, r.syntax("number out of range")
		}
		return f, nil
	case c == 't':
		return true, r.literal("true")
	case c == 'f':
		return false, r.literal("false")
	}
	return nil, r.skip()
}
