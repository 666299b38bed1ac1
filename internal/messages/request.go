package messages

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// Request is a POST /v1/messages body, or one that asks how many tokens it has.
type Request struct {
	Stream bool

	model chat.Text
	talk  chat.Conversation
	chat  chat.Request
	stops []chat.Text
}

// Parse reads and validates a body. A request that only counts tokens needs no max_tokens.
func Parse(body []byte, counts bool) (*Request, *openai.Error) {
	q := &Request{}
	p := &parser{Reader: openai.NewReader(body), q: q}
	for p.Next() == jsonscan.Key {
		p.field(string(p.Decoded()))
	}
	if err := p.Fault(); err != nil {
		return nil, err
	}
	if p.messages == nil {
		return nil, openai.BadRequest("messages", "messages is required")
	}
	if p.maxTokens == 0 && !counts {
		return nil, openai.BadRequest("max_tokens", "max_tokens is required")
	}
	if err := p.talk(); err != nil {
		return nil, err
	}
	if q.talk.Empty() {
		return nil, openai.BadRequest("messages", "messages must not be empty")
	}
	if q.talk.Goes() { // the answer goes on with an assistant's words
		q.chat.Set("continue_final_message", []byte("true"))
		q.chat.Set("add_generation_prompt", []byte("false"))
	}
	if q.Stream {
		q.chat.Set("stream", []byte("true"))
		q.chat.Set("stream_options", []byte(`{"include_usage":true}`))
	}
	return q, nil
}

// Chat is the chat completion for the request.
func (q *Request) Chat() []byte { return q.chat.Append(nil, &q.talk) }

// Tokenize is the question how many tokens its prompt has, as a POST /tokenize body.
func (q *Request) Tokenize() []byte {
	return q.chat.Only("model", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "continue_final_message", "add_generation_prompt").
		Append(nil, &q.talk)
}

type parser struct {
	*openai.Reader
	q         *Request
	system    []byte
	messages  []byte
	maxTokens int
}

// field reads one field. Unknown ones are skipped, as in chats.
func (p *parser) field(name string) {
	q := p.q
	switch name {
	case "model":
		if q.model = p.Quoted(name); len(q.model) > 0 {
			q.chat.SetText(name, q.model)
		}
	case "messages":
		p.messages = p.Of(name, jsonscan.Array, "a list")
	case "system":
		if k := p.Peek(); k != jsonscan.String && k != jsonscan.Array && k != jsonscan.Null {
			p.Of(name, jsonscan.Array, "a string or a list of text blocks")
			return
		}
		p.system = p.Given()
	case "max_tokens":
		if n, given := p.Count(name, 1); given {
			p.maxTokens = n
			q.chat.Set("max_completion_tokens", strconv.AppendInt(nil, int64(n), 10))
		}
	case "stream":
		q.Stream = p.Bool(name, false)
	case "temperature", "top_p", "top_k":
		q.chat.Set(name, p.Number(name))
	case "stop_sequences":
		p.stopSequences()
	case "tools":
		p.tools()
	case "tool_choice":
		p.toolChoice()
	case "metadata":
		p.metadata()
	case "thinking":
		p.thinking()
	case "output_config":
		p.outputConfig()
	case "service_tier", "stop": // not OpenAI's; and not this API's
		p.Skip()
	case "mcp_servers", "container":
		if raw := p.Given(); raw != nil && string(raw) != "[]" {
			p.Refuse(name, "%s is not supported", name)
		}
	default:
		link, passed := openai.LinkField([]byte(name)), chat.PassedOn(name)
		switch raw := p.Given(); {
		case raw != nil && link != "":
			p.Refuse(link, "%s links prefill and decode inside the fleet; a client may not set it", link)
		case passed:
			q.chat.Set(name, raw)
		}
	}
}

// maxStops bounds stop_sequences; what engines take may be less.
const maxStops = 8191

func (p *parser) stopSequences() {
	const name = "stop_sequences"
	p.Peek()
	from := p.Pos()
	p.q.stops = nil
	if !p.Is(name, jsonscan.Array, "a list of strings") {
		return
	}
	for p.Item() {
		if len(p.q.stops) == maxStops {
			p.Refuse(name, "stop_sequences has more than %d entries", maxStops)
			return
		}
		t := p.Quoted(name)
		if p.Err() == nil && len(t) == 0 {
			p.Refuse(name, "stop_sequences[%d] must be a string and not empty", len(p.q.stops))
		}
		p.q.stops = append(p.q.stops, bytes.Clone(t))
	}
	if len(p.q.stops) > 0 {
		p.q.chat.Set("stop", p.Since(from))
	}
}

func (p *parser) metadata() {
	if !p.Is("metadata", jsonscan.Object, "an object") {
		return
	}
	for p.Next() == jsonscan.Key {
		if string(p.Decoded()) == "user_id" {
			p.q.chat.Set("user", p.Of("metadata.user_id", jsonscan.String, "a string"))
		} else {
			p.Skip()
		}
	}
}

// thinking turns reasoning on or off by the switches that templates have for it. What "adaptive" means
// is the model's to decide.
func (p *parser) thinking() {
	const name = "thinking"
	if !p.Is(name, jsonscan.Object, "an object") {
		return
	}
	kind := ""
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			kind = p.Str(name)
		case "budget_tokens":
			p.Count("thinking.budget_tokens", 1)
		default:
			p.Skip()
		}
	}
	switch kind {
	case "enabled", "disabled":
		on := strconv.FormatBool(kind == "enabled")
		p.q.chat.Set("chat_template_kwargs", []byte(`{"enable_thinking":`+on+`,"thinking":`+on+`}`))
	case "adaptive", "between_tools":
	default:
		p.Refuse(name, "thinking.type must be enabled, disabled, adaptive or between_tools, not %q", openai.Clip(kind))
	}
}

// outputConfig reads how much effort an answer is worth, and the form that it must have.
func (p *parser) outputConfig() {
	const name = "output_config"
	if !p.Is(name, jsonscan.Object, "an object") {
		return
	}
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "effort":
			if raw := p.Of(name+".effort", jsonscan.String, "a string"); raw != nil {
				p.q.chat.Set("reasoning_effort", raw)
			}
		case "format":
			p.format()
		default:
			p.Skip()
		}
	}
}

func (p *parser) format() {
	const name = "output_config.format"
	if !p.Is(name, jsonscan.Object, "an object") {
		return
	}
	kind, schema := "", []byte(nil)
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			kind = p.Str(name)
		case "schema":
			schema = p.Of(name+".schema", jsonscan.Object, "an object")
		default:
			p.Skip()
		}
	}
	switch {
	case kind != "json_schema":
		p.Refuse(name, "output_config.format.type must be json_schema, not %q", openai.Clip(kind))
	case schema == nil:
		p.Refuse(name, "output_config.format.schema is required")
	default:
		p.q.chat.Set("response_format", slices.Concat([]byte(`{"type":"json_schema","json_schema":{"name":"output","strict":true,"schema":`), schema, []byte("}}")))
	}
}

func (p *parser) tools() {
	const name = "tools"
	if !p.Is(name, jsonscan.Array, "a list") {
		return
	}
	list, n, names := []byte{'['}, 0, chat.ToolNames{}
	for ; p.Item(); n++ {
		if n > 0 {
			list = append(list, ',')
		}
		list = p.tool(list, fmt.Sprintf("tools[%d]", n), names)
	}
	if n > 0 {
		p.q.chat.Set(name, append(list, ']'))
	}
}

func (p *parser) tool(list []byte, name string, names chat.ToolNames) []byte {
	if !p.object("tools", name) {
		return nil
	}
	kind := ""
	var called, description, schema, strict []byte
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			kind = p.Str(name + ".type")
		case "name":
			called = p.Of(name+".name", jsonscan.String, "a string")
		case "description":
			description = p.Of(name+".description", jsonscan.String, "a string")
		case "input_schema":
			schema = p.Of(name+".input_schema", jsonscan.Object, "an object")
		case "strict":
			strict = strconv.AppendBool(nil, p.Bool(name+".strict", false))
		default:
			p.Skip()
		}
	}
	switch {
	case kind != "" && kind != "custom":
		p.Refuse(name+".type", "%s.type is %q; only custom tools are supported: the application runs them", name, openai.Clip(kind))
	case len(called) <= len(`""`):
		p.Refuse(name+".name", "%s.name is required", name)
	case schema == nil:
		p.Refuse(name+".input_schema", "%s.input_schema is required", name)
	}
	names.Add(p.Reader, name, string(called))
	list = fmt.Appendf(list, `{"type":"function","function":{"name":%s`, called)
	if description != nil {
		list = append(append(list, `,"description":`...), description...)
	}
	list = append(append(list, `,"parameters":`...), schema...)
	if strict != nil {
		list = append(append(list, `,"strict":`...), strict...)
	}
	return append(list, "}}"...)
}

func (p *parser) toolChoice() {
	const name = "tool_choice"
	if !p.Is(name, jsonscan.Object, "an object") {
		return
	}
	kind, called := "", []byte(nil)
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			kind = p.Str(name)
		case "name":
			called = p.Of(name, jsonscan.String, "a string")
		case "disable_parallel_tool_use":
			if p.Bool(name, false) {
				p.q.chat.Set("parallel_tool_calls", []byte("false"))
			}
		default:
			p.Skip()
		}
	}
	switch kind {
	case "auto", "none":
		p.q.chat.Set(name, []byte(`"`+kind+`"`))
	case "any":
		p.q.chat.Set(name, []byte(`"required"`))
	case "tool":
		if len(called) <= len(`""`) {
			p.Refuse(name, "tool_choice.name is required")
		}
		p.q.chat.Set(name, fmt.Appendf(nil, `{"type":"function","function":{"name":%s}}`, called))
	default:
		p.Refuse(name, "tool_choice.type must be auto, any, tool or none, not %q", openai.Clip(kind))
	}
}

// object opens an object in a list, where nothing may be null.
func (p *parser) object(field, name string) bool {
	if p.Peek() == jsonscan.Object {
		p.Next()
		return true
	}
	if p.Err() == nil {
		p.Refuse(field, "%s must be an object", name)
	}
	return false
}
