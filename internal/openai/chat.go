package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// ParseChat reads and validates a chat body. Nothing of body is kept.
func ParseChat(body []byte, vocab int) (*Chat, *Error) {
	c := &Chat{Sampling: defaults(), AddGenerationPrompt: true}
	p := parser{vocab: vocab}
	p.begin(body)
	for p.Next() == jsonscan.Key {
		p.chatField(c, p.Decoded())
	}
	if err := p.end(); err != nil {
		return nil, err
	}
	if err := p.checkChat(c); err != nil {
		return nil, err
	}
	return c, nil
}

// chatField reads one field of a chat.
func (p *parser) chatField(c *Chat, key []byte) {
	p.values = 0
	switch string(key) {
	case "messages":
		if p.batch {
			p.conversations = p.conversationList()
		} else {
			c.Messages = p.messages("messages")
		}
	case "max_tokens":
		if n := p.optInt("max_tokens", 1, math.MaxInt32); !p.completionTokens {
			c.MaxTokens = n
		}
	case "max_completion_tokens": // wins over max_tokens, which it replaced
		if n := p.optInt("max_completion_tokens", 1, math.MaxInt32); n != nil {
			c.MaxTokens, p.completionTokens = n, true
		}
	case "logprobs":
		c.Logprobs = p.bool("logprobs", false)
	case "top_logprobs":
		c.TopLogprobs = p.intOr("top_logprobs", 0, All, maxListed)
		p.topLogprobs = c.TopLogprobs != 0
	case "tools":
		c.Tools = p.tools()
	case "tool_choice":
		c.ToolChoice = p.toolChoice()
	case "parallel_tool_calls":
		c.OneCall = !p.bool("parallel_tool_calls", true)
	case "include_reasoning":
		c.HideReasoning = !p.bool("include_reasoning", true)
	case "reasoning_effort":
		if p.effort = p.string("reasoning_effort"); p.effort != "" && !slices.Contains(efforts, p.effort) {
			p.refuse("reasoning_effort", "reasoning_effort must be one of %s, not %q", strings.Join(efforts, ", "), clip(p.effort, 40))
		}
	case "documents":
		p.documents = p.documentList()
	case "echo":
		c.Echo = p.bool("echo", false)
	case "response_format":
		p.responseFormat(&c.Sampling)
	case "add_generation_prompt":
		p.generationGiven = p.Peek() != jsonscan.Null
		c.AddGenerationPrompt = p.bool("add_generation_prompt", true)
	case "continue_final_message":
		c.ContinueFinalMessage = p.bool("continue_final_message", false)
	case "add_special_tokens":
		c.AddSpecial = p.bool("add_special_tokens", false)
	case "chat_template_kwargs":
		c.TemplateKwargs = p.templateKwargs()
	case "chat_template":
		if c.Template = p.string("chat_template"); len(c.Template) > maxTemplate {
			p.refuse("chat_template", "chat_template has %d bytes; %d is the limit", len(c.Template), maxTemplate)
		}
	case "functions", "function_call", "audio", "media_io_kwargs", "mm_processor_kwargs":
		name := string(key)
		if p.raw() != nil {
			p.refuse(name, "%s is not supported", name)
		}
	case "modalities":
		p.modalities()
	default:
		p.sampling(&c.Sampling, key)
	}
}

func (p *parser) checkChat(c *Chat) *Error {
	switch {
	case len(c.Messages) == 0:
		return BadRequest("messages", "messages is required and must not be empty")
	case p.topLogprobs && !c.Logprobs:
		return BadRequest("top_logprobs", "top_logprobs needs logprobs to be true")
	case c.LogprobIDs != nil && !c.Logprobs:
		return BadRequest("logprob_token_ids", "logprob_token_ids needs logprobs to be true")
	case c.ContinueFinalMessage && c.AddGenerationPrompt && p.generationGiven:
		return BadRequest("continue_final_message", "continue_final_message and add_generation_prompt cannot both be true")
	}
	if c.ContinueFinalMessage {
		c.AddGenerationPrompt = false
	}
	if p.effort != "" {
		c.setEffort(p.effort)
	}
	if p.documents != nil && c.TemplateKwargs["documents"] == nil {
		c.set("documents", p.documents)
	}
	return c.check(p.streamOptionsGiven)
}

// Opening is the text that an answer with echo begins with: the final message's, if it is the
// assistant's, which the answer continues.
func (c *Chat) Opening() string {
	var m struct{ Role, Content string }
	if json.Unmarshal(c.Messages[len(c.Messages)-1], &m) != nil || m.Role != "assistant" {
		return ""
	}
	return m.Content
}

// efforts are the values of reasoning_effort.
var efforts = []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}

// set gives the template a variable.
func (c *Chat) set(name string, v json.RawMessage) {
	if c.TemplateKwargs == nil {
		c.TemplateKwargs = map[string]json.RawMessage{}
	}
	c.TemplateKwargs[name] = v
}

// modalities reads a list of what the answer may be.
func (p *parser) modalities() {
	if !p.is("modalities", jsonscan.Array, "a list") {
		return
	}
	for p.Item() {
		if p.string("modalities") != "text" {
			p.refuse("modalities", "only text is supported")
		}
	}
}

// documentList reads what a template for retrieval shows the model; nil when it is empty.
func (p *parser) documentList() json.RawMessage {
	p.Peek()
	from, n := p.Pos(), 0
	if !p.is("documents", jsonscan.Array, "a list") {
		return nil
	}
	for ; p.Item(); n++ {
		if p.Peek() != jsonscan.Object {
			p.wrong(fmt.Sprintf("documents[%d]", n), "an object")
		}
		p.walk("documents")
	}
	if n == 0 {
		return nil
	}
	return bytes.Clone(p.Since(from))
}

// toolChoice reads one of the choices, or an object that names a function, as it is.
func (p *parser) toolChoice() json.RawMessage {
	k := p.Peek()
	if k != jsonscan.String && k != jsonscan.Object && k != jsonscan.Null {
		p.wrong("tool_choice", "a string or an object")
	}
	raw := bytes.Clone(p.raw())
	if k == jsonscan.String && p.Err() == nil && !slices.Contains([]string{`"none"`, `"auto"`, `"required"`}, string(raw)) {
		p.refuse("tool_choice", "tool_choice must be none, auto, required or an object that names a function, not %s", clip(string(raw), 40))
	}
	return raw
}

// UsesTools reports whether the model is told of tools. With tool_choice "none" it is not, as in vLLM.
func (c *Chat) UsesTools() bool { return c.Tools != nil && string(c.ToolChoice) != `"none"` }

// setEffort tells the template how hard to think, unless chat_template_kwargs does. "none" also sets
// the switches by which templates turn thinking off.
func (c *Chat) setEffort(effort string) {
	set := map[string]json.RawMessage{"reasoning_effort": AppendString(nil, effort)}
	if effort == "none" {
		set["enable_thinking"], set["thinking"] = json.RawMessage("false"), json.RawMessage("false")
	}
	for name, v := range c.TemplateKwargs {
		set[name] = v
	}
	c.TemplateKwargs = set
}

// templateKwargs reads the client's variables for the template.
func (p *parser) templateKwargs() map[string]json.RawMessage {
	const name = "chat_template_kwargs"
	if !p.is(name, jsonscan.Object, "an object") {
		return nil
	}
	out := map[string]json.RawMessage{}
	for p.Next() == jsonscan.Key {
		key := string(p.Decoded())
		p.Peek()
		from := p.Pos()
		p.walk(name)
		out[key] = bytes.Clone(p.Since(from))
	}
	return out
}

// messages reads a conversation.
func (p *parser) messages(field string) (out []json.RawMessage) {
	if !p.is(field, jsonscan.Array, "a list") {
		return nil
	}
	for p.Item() {
		out = append(out, p.message(fmt.Sprintf("%s[%d]", field, len(out))))
	}
	return out
}

// openMessage opens an object within messages, where nothing may be null.
func (p *parser) openMessage(name string) bool {
	if p.Peek() != jsonscan.Object {
		p.wrong(name, "an object")
	}
	p.count("messages")
	return p.Next() == jsonscan.Object
}

// message checks one message and converts it to the form that templates expect.
func (p *parser) message(name string) json.RawMessage {
	p.Peek()
	start := p.Pos()
	if !p.openMessage(name) {
		return nil
	}
	role, content := "", jsonscan.None
	var from, to int // where content is, if it is a list of parts or null
	var text string  // those parts, joined
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "role":
			role = p.stringOr("messages")
		case "content":
			switch content = p.Peek(); content {
			case jsonscan.String:
				p.walk("messages")
			case jsonscan.Null:
				from = p.Pos()
				p.walk("messages")
				to = p.Pos()
			case jsonscan.Array:
				from = p.Pos()
				text = p.joinParts(name)
				to = p.Pos()
			default:
				p.wrong(name+".content", "a string or a list of parts")
			}
		case "tool_calls":
			p.toolCalls(name + ".tool_calls")
		default:
			p.walk("messages")
		}
	}
	raw := p.Since(start)
	switch {
	case raw == nil:
	case role == "":
		p.refuse("messages", "%s.role is required and must be a string", name)
	case content == jsonscan.Array:
		from, to = from-start, to-start
		out := append(make([]byte, 0, len(raw)), raw[:from]...)
		return append(AppendString(out, text), raw[to:]...)
	case (content == jsonscan.None || content == jsonscan.Null) && role != "assistant":
		p.refuse("messages", "%s.content is required", name)
	case content == jsonscan.None: // the object is not empty: it has a role
		return append(bytes.Clone(raw[:len(raw)-1]), `,"content":""}`...)
	case content == jsonscan.Null:
		out := append(make([]byte, 0, len(raw)), raw[:from-start]...)
		return append(append(out, `""`...), raw[to-start:]...)
	}
	return bytes.Clone(raw)
}

// toolCalls checks the calls that an assistant made, whose arguments may be a string of JSON.
func (p *parser) toolCalls(name string) {
	if !p.is(name, jsonscan.Array, "a list") {
		return
	}
	for i := 0; p.Item(); i++ {
		name, called := fmt.Sprintf("%s[%d]", name, i), false
		if !p.openMessage(name) {
			return
		}
		for p.Next() == jsonscan.Key {
			if string(p.Decoded()) != "function" {
				p.walk("messages")
				continue
			}
			called = true
			if !p.openMessage(name + ".function") {
				return
			}
			for p.Next() == jsonscan.Key {
				if string(p.Decoded()) == "arguments" && p.Peek() == jsonscan.String {
					p.argumentText()
				} else {
					p.walk("messages")
				}
			}
		}
		if !called {
			p.refuse("messages", "%s.function must be an object", name)
		}
	}
}

// argumentText checks arguments of a call that are a string: it is bounded as JSON is, where it is JSON. A
// model's call may have broken off; that stays a text.
func (p *parser) argumentText() {
	text := p.stringOr("messages")
	if text == "" {
		return
	}
	in := parser{values: p.values}
	in.Reset([]byte(text))
	in.walk("messages")
	p.values = in.values
	if err := in.end(); err != nil && err.Param != "" {
		p.Fail(err)
	}
}

// joinParts joins a list of text parts into one text.
func (p *parser) joinParts(name string) string {
	var texts []string
	p.Next() // the bracket
	for p.Item() {
		p.count("messages")
		name := fmt.Sprintf("%s.content[%d]", name, len(texts))
		var kind string
		var text, refusal *string
		switch p.Peek() {
		case jsonscan.String:
			text = p.stringOrNil()
		case jsonscan.Object:
			p.Next()
			for p.Next() == jsonscan.Key {
				switch string(p.Decoded()) {
				case "type":
					kind = p.stringOr("messages")
				case "text":
					text = p.stringOrNil()
				case "refusal":
					refusal = p.stringOrNil()
				default:
					p.walk("messages")
				}
			}
		default:
			p.wrong(name, "an object")
		}
		switch kind {
		case "refusal":
			if text == nil {
				text = refusal
			}
		case "text", "input_text", "output_text", "":
		default:
			p.refuse("messages", "%s has type %q; only text is supported", name, clip(kind, 40))
		}
		if text == nil {
			p.refuse("messages", "%s.text must be a string", name)
			break
		}
		texts = append(texts, *text)
	}
	return strings.Join(texts, "\n")
}

// maxValues bounds what templates get: each value takes memory, and two bytes can hold one.
const maxValues = 100_000

// count counts a JSON value of field.
func (p *parser) count(field string) {
	if p.values++; p.values > maxValues {
		p.refuse(field, "%s has more than %d JSON values", field, maxValues)
	}
}

// walk is Skip for what templates get. It counts the values and refuses numbers, other than
// integers, too large for a float.
func (p *parser) walk(field string) {
	for depth := p.Depth(); ; {
		switch p.Next() {
		case jsonscan.None:
			return
		case jsonscan.Key:
			continue
		case jsonscan.ObjectEnd, jsonscan.ArrayEnd:
		case jsonscan.Number:
			text := p.Text()
			if bytes.ContainsAny(text, ".eE") {
				if _, err := strconv.ParseFloat(string(text), 64); err != nil {
					p.Fail(&jsonscan.SyntaxError{What: "number out of range", At: p.Pos()})
				}
			}
			p.count(field)
		default:
			p.count(field)
		}
		if p.Depth() <= depth {
			return
		}
	}
}

// stringOr reads a string, or skips any other value.
func (p *parser) stringOr(field string) string {
	if p.Peek() != jsonscan.String {
		p.walk(field)
		return ""
	}
	p.count(field)
	return p.string(field)
}

// stringOrNil is stringOr within messages, with nil for anything but a string.
func (p *parser) stringOrNil() *string {
	if is, s := p.Peek() == jsonscan.String, p.stringOr("messages"); is {
		return &s
	}
	return nil
}
