package responses

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// Request is a POST /v1/responses body. Its texts alias the body.
type Request struct {
	Stream     bool
	Store      bool
	Background bool   // it outlives its connection
	Previous   string // previous_response_id; "" for none
	Input      []byte // a JSON string, or a list of items

	model        chat.Text
	instructions []byte // a JSON string; nil for none
	chat         chat.Request
	logprobs     bool
	summary      bool                  // reasoning is given as a summary
	spaced       map[string]spacedName // functions of namespaces, by the names that the chat has for them

	// What a response says of its request, as JSON; nil where the API's default counts.
	echo map[string][]byte
}

// echoes are the members of a response that say what was asked for, and their defaults. The user is a string in
// OpenAI's specification, and must be there in Open Responses'.
var echoes = []struct{ name, def string }{
	{"instructions", "null"}, {"max_output_tokens", "null"}, {"max_tool_calls", "null"}, {"metadata", "{}"},
	{"parallel_tool_calls", "true"}, {"previous_response_id", "null"}, {"prompt_cache_key", "null"},
	{"reasoning", `{"effort":null,"summary":null}`}, {"safety_identifier", "null"}, {"service_tier", `"default"`},
	{"store", "true"}, {"temperature", "1"}, {"text", `{"format":{"type":"text"}}`}, {"tool_choice", `"auto"`},
	{"tools", "[]"}, {"top_logprobs", "0"}, {"top_p", "1"}, {"truncation", `"disabled"`}, {"user", `""`},
	{"presence_penalty", "0"}, {"frequency_penalty", "0"},
}

// Parse reads and validates a body.
func Parse(body []byte) (*Request, *openai.Error) {
	q := &Request{Store: true, echo: map[string][]byte{}}
	p := &parser{Reader: openai.NewReader(body), q: q}
	for p.Next() == jsonscan.Key {
		p.field(string(p.Decoded()))
	}
	if err := p.Fault(); err != nil {
		return nil, err
	}
	if q.Input == nil && q.Previous == "" {
		return nil, openai.BadRequest("input", "input is required")
	}
	if q.Background && !q.Store {
		return nil, openai.BadRequest("background", "background can only be used when `store` is true")
	}
	if err := p.choose(); err != nil {
		return nil, err
	}
	if p.topLogprobs != nil && string(p.topLogprobs) != "0" {
		q.logprobs = true
	}
	if q.logprobs {
		q.chat.Set("logprobs", []byte("true"))
		q.chat.Set("top_logprobs", p.topLogprobs)
	}
	if q.Stream {
		q.chat.Set("stream", []byte("true"))
		q.chat.Set("stream_options", []byte(`{"include_usage":true}`))
	}
	return q, nil
}

type parser struct {
	*openai.Reader
	q           *Request
	topLogprobs []byte
	named       map[string]bool // functions of no namespace
	choice      []byte          // the function that tool_choice names, as a JSON string
}

// field reads one field. Unknown ones are skipped, as in chats.
func (p *parser) field(name string) {
	q := p.q
	switch name {
	case "model":
		if q.model = p.Quoted(name); len(q.model) > 0 {
			q.chat.SetText(name, q.model)
		}
	case "input":
		q.Input = nil
		if k := p.Peek(); k != jsonscan.String && k != jsonscan.Array && k != jsonscan.Null {
			p.Of(name, jsonscan.Array, "a string or a list of items")
			return
		}
		q.Input = p.Given()
	case "instructions":
		q.instructions = p.said(name, p.Of(name, jsonscan.String, "a string"))
	case "previous_response_id":
		if q.Previous = p.Str(name); q.Previous != "" {
			p.said(name, openai.AppendString(nil, q.Previous))
		}
	case "stream":
		q.Stream = p.Bool(name, false)
	case "store":
		q.Store = p.Bool(name, true)
		p.said(name, strconv.AppendBool(nil, q.Store))
	case "max_output_tokens":
		if n, given := p.Count(name, 1); given {
			q.chat.Set("max_completion_tokens", p.said(name, strconv.AppendInt(nil, int64(n), 10)))
		}
	case "temperature", "top_p", "presence_penalty", "frequency_penalty":
		q.chat.Set(name, p.said(name, p.Number(name)))
	case "top_logprobs":
		p.topLogprobs = p.said(name, p.Number(name))
	case "parallel_tool_calls":
		if raw := p.Given(); raw != nil && !isBool(raw) {
			p.Refuse(name, "%s must be a boolean", name)
		} else {
			q.chat.Set(name, p.said(name, raw))
		}
	case "service_tier", "user":
		q.chat.Set(name, p.said(name, p.Of(name, jsonscan.String, "a string")))
	case "safety_identifier", "prompt_cache_key":
		p.said(name, p.Of(name, jsonscan.String, "a string"))
	case "max_tool_calls": // bounds calls of tools that a provider has itself
		p.said(name, p.Number(name))
	case "metadata":
		p.metadata()
	case "reasoning":
		p.reasoning()
	case "text":
		p.text()
	case "tools":
		p.tools()
	case "tool_choice":
		p.toolChoice()
	case "include":
		p.include()
	case "truncation":
		if how := p.Str(name); how != "" && how != "disabled" {
			p.Refuse(name, "truncation %q is not supported: an input that does not fit is refused", openai.Clip(how))
		}
	case "background":
		q.Background = p.Bool(name, false)
	case "conversation", "prompt", "moderation":
		if p.Given() != nil {
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

func isBool(raw []byte) bool { return string(raw) == "true" || string(raw) == "false" }

// said notes what a response says of a field, and returns it.
func (p *parser) said(name string, raw []byte) []byte {
	if raw == nil {
		delete(p.q.echo, name)
	} else {
		p.q.echo[name] = raw
	}
	return raw
}

// Bounds of metadata, which are the API's.
const (
	maxMetadata      = 16
	maxMetadataKey   = 64
	maxMetadataValue = 512
)

func (p *parser) metadata() {
	p.Peek()
	from, n := p.Pos(), 0
	if !p.Is("metadata", jsonscan.Object, "an object of strings") {
		return
	}
	for ; p.Next() == jsonscan.Key; n++ {
		long := len(p.Decoded()) > maxMetadataKey
		if v := p.Str("metadata"); long || len(v) > maxMetadataValue || n == maxMetadata {
			p.Refuse("metadata", "metadata may have %d members with keys of %d and values of %d bytes", maxMetadata, maxMetadataKey, maxMetadataValue)
		}
	}
	p.said("metadata", p.Since(from))
}

func (p *parser) reasoning() {
	if !p.Is("reasoning", jsonscan.Object, "an object") {
		return
	}
	effort, summary := []byte("null"), []byte("null")
	for p.Next() == jsonscan.Key {
		switch key := string(p.Decoded()); key {
		case "effort":
			if raw := p.Of("reasoning.effort", jsonscan.String, "a string"); raw != nil {
				effort = raw
				p.q.chat.Set("reasoning_effort", raw)
			}
		case "summary", "generate_summary":
			if raw := p.Of("reasoning."+key, jsonscan.String, "a string"); raw != nil {
				summary, p.q.summary = raw, true
			}
		default:
			p.Skip()
		}
	}
	p.said("reasoning", fmt.Appendf(nil, `{"effort":%s,"summary":%s}`, effort, summary))
}

// text reads text.format, which a chat has as response_format, and text.verbosity.
func (p *parser) text() {
	if !p.Is("text", jsonscan.Object, "an object") {
		return
	}
	format, verbosity := []byte(`{"type":"text"}`), []byte(nil)
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "format":
			p.Peek()
			from := p.Pos()
			if p.format(); p.Pos() > from+len("null") {
				format = p.Since(from)
			}
		case "verbosity":
			verbosity = p.Of("text.verbosity", jsonscan.String, "a string")
		default:
			p.Skip()
		}
	}
	said := append([]byte(`{"format":`), format...)
	if verbosity != nil {
		said = append(append(said, `,"verbosity":`...), verbosity...)
	}
	p.said("text", append(said, '}'))
}

func (p *parser) format() {
	const field = "text.format"
	if !p.Is(field, jsonscan.Object, "an object") {
		return
	}
	kind, members := "", []byte(nil)
	for p.Next() == jsonscan.Key {
		key := string(p.Decoded())
		switch key {
		case "type":
			kind = p.Str(field + ".type")
			continue
		case "name", "description", "schema", "strict":
		default:
			p.Skip()
			continue
		}
		if raw := p.Given(); raw != nil {
			members = append(append(openai.AppendString(append(members, ','), key), ':'), raw...)
		}
	}
	switch kind {
	case "text":
	case "json_object":
		p.q.chat.Set("response_format", []byte(`{"type":"json_object"}`))
	case "json_schema":
		if !bytes.Contains(members, []byte(`"schema":`)) {
			p.Refuse(field, "text.format.schema is required")
		}
		p.q.chat.Set("response_format", slices.Concat([]byte(`{"type":"json_schema","json_schema":{`), bytes.TrimPrefix(members, []byte(",")), []byte("}}")))
	default:
		p.Refuse(field, "text.format.type must be text, json_object or json_schema, not %q", openai.Clip(kind))
	}
}

// includes are what may be asked for in include. Most is of tools that are none of ours, and of reasoning,
// which is never encrypted here.
var includes = []string{"message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
	"web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"}

func (p *parser) include() {
	if !p.Is("include", jsonscan.Array, "a list") {
		return
	}
	for p.Item() {
		switch what := p.Str("include"); {
		case what == includes[0]:
			p.q.logprobs = true
		case !slices.Contains(includes, what):
			p.Refuse("include", "include has %q, which is none of the API's", openai.Clip(what))
		}
	}
}

// Chat is the chat completion for the request, behind turns that went before. Its texts may have most bytes.
func (q *Request) Chat(turns []Turn, find Lookup, most int) ([]byte, *openai.Error) {
	c := &chat.Conversation{Most: most}
	if n := len(q.instructions); n > 2 {
		c.System(q.instructions[1 : n-1])
	}
	for _, t := range turns {
		for _, list := range [][]byte{t.Input, t.Output} {
			if err := addItems(c, list, find); err != nil {
				return nil, err
			}
		}
	}
	if q.Input != nil {
		if err := addItems(c, q.Input, find); err != nil {
			return nil, err
		}
	}
	if c.Empty() {
		return nil, openai.BadRequest("input", "input must not be empty")
	}
	return q.chat.Append(nil, c), nil
}

// Turn is what an earlier request said, and what was answered: its Input, and its response's output.
type Turn struct{ Input, Output []byte }

// Forget has the response say that it is not kept.
func (q *Request) Forget() {
	q.Store = false
	q.echo["store"] = []byte("false")
}
