package responses

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/openai"
)

// Options say what is not the request's to say.
type Options struct {
	ID   string           // of the response, resp_…
	Most int              // bytes that a response may have, as a stream's last event repeats all of it
	Now  func() time.Time // nil: time.Now
	// Background has it outlive its connection: it begins with Queue, and Keep is told of every end.
	Background bool
	// Keep is told of a response that is complete, or cut off at its length, before the client is. Nil: nobody is.
	Keep func(response []byte)
}

// Answer makes a chat's answer a response: Whole, or with each run of its events Append. One goroutine
// uses it.
type Answer struct {
	Options
	created int64
	echo    []byte // what the response says of its request
	summary bool
	spaced  map[string]spacedName
	model   []byte

	items  []output
	size   int // of texts
	seq    int
	quiet  bool // it is whole: there are no events
	queued bool // Queue was called
	begun  bool
	over   bool
	failed *openai.Error
	finish []byte
	usage  chat.Usage
	told   bool
	read   chat.Answer
	out    []byte // of the Append under way
}

// Answer prepares the answer to q, of which it keeps nothing.
func (q *Request) Answer(o Options) *Answer {
	if o.Now == nil {
		o.Now = time.Now
	}
	a := &Answer{Options: o, created: o.Now().Unix(), summary: q.summary, spaced: q.spaced, model: append([]byte(nil), q.model...)}
	for _, e := range echoes {
		a.echo = append(append(append(a.echo, `,"`...), e.name...), `":`...)
		if raw := q.echo[e.name]; raw != nil {
			a.echo = append(a.echo, raw...)
		} else {
			a.echo = append(a.echo, e.def...)
		}
	}
	return a
}

// Over reports whether nothing follows.
func (a *Answer) Over() bool { return a.over }

// Failed is why the answer could not be made a response, of its own doing; nil if it could, or if its
// events said themselves that something failed.
func (a *Answer) Failed() *openai.Error { return a.failed }

// Whole appends the response for a chat's whole answer.
func (a *Answer) Whole(dst, body []byte) ([]byte, *openai.Error) {
	a.quiet = true
	if !chat.Read(body, &a.read) {
		return nil, openai.Upstream("the engine's answer is no chat completion")
	}
	if a.read.Error != nil {
		return nil, a.read.Error
	}
	a.take()
	if a.failed != nil {
		return nil, a.failed
	}
	a.settle()
	status, _ := a.status()
	response := a.appendResponse(nil, status, nil)
	a.over = true
	a.kept(response)
	return append(dst, response...), nil
}

// Append appends what the client gets for a run of whole events of a chat's stream.
func (a *Answer) Append(dst, run []byte) []byte {
	a.out = dst
	said := false
	for data := range chat.Events(run) {
		said = true
		if a.over {
			break
		}
		done := chat.IsDone(data)
		ok := !done && chat.Read(data, &a.read)
		if ok && len(a.model) == 0 {
			a.model = append(a.model, a.read.Model...)
		}
		if !a.begun {
			a.begin()
		}
		switch {
		case done:
			a.complete()
		case !ok:
			a.broke(openai.Upstream("the engine sent an event that is no chat completion's"))
		case a.read.Error != nil:
			a.fail(a.read.Error)
		default:
			if a.take(); a.failed != nil {
				a.fail(a.failed)
			}
		}
	}
	if !said && len(run) > 0 && a.begun && !a.over && !a.Background { // comments, which keep connections alive
		a.out = append(a.out, ":\n\n"...)
	}
	dst, a.out = a.out, nil
	return dst
}

// Close appends what the client gets when a stream has ended, if it has not had its end.
func (a *Answer) Close(dst []byte) []byte {
	a.out = dst
	if !a.over {
		if !a.begun {
			a.begin()
		}
		a.broke(openai.Upstream("the stream ended early"))
	}
	dst, a.out = a.out, nil
	return dst
}

func (a *Answer) broke(e *openai.Error) {
	a.failed = e
	a.fail(e)
}

// take adds what was read.
func (a *Answer) take() {
	r := &a.read
	if len(r.Model) > 0 && len(a.model) == 0 {
		a.model = append(a.model, r.Model...)
	}
	a.reason(r.Reasoning)
	a.say(r.Content, r.Logprobs)
	a.refuse(r.Refusal)
	for i := range r.Calls {
		a.call(&r.Calls[i])
	}
	if len(r.Finish) > 0 {
		a.finish = append(a.finish[:0], r.Finish...)
	}
	if r.Told {
		a.usage, a.told = r.Usage, true
	}
}

// grow counts bytes that the response will have.
func (a *Answer) grow(n int) bool {
	if a.size += n; a.size > a.Most && a.failed == nil {
		a.failed = openai.AnswerTooLarge("max_output_tokens", "the response has more than %d bytes: lower max_output_tokens", a.Most)
	}
	return a.failed == nil
}

func (a *Answer) begin() {
	a.begun = true
	if !a.queued {
		a.stands("response.created", "in_progress")
	}
	a.stands("response.in_progress", "in_progress")
}

// stands writes an event that says how the response stands.
func (a *Answer) stands(name, status string) {
	a.event(name)
	a.out = append(a.out, `,"response":`...)
	a.out = a.appendResponse(a.out, status, nil)
	a.end()
}

// settle ends the last item. An answer without any is an empty message.
func (a *Answer) settle() {
	if len(a.items) == 0 {
		a.openPart(outputText)
	}
	_, why := a.status()
	a.close(why != "")
}

// status is the response's, and why it is incomplete.
func (a *Answer) status() (status, why string) {
	switch string(a.finish) {
	case "length":
		return "incomplete", "max_output_tokens"
	case "content_filter":
		return "incomplete", "content_filter"
	}
	return "completed", ""
}

func (a *Answer) complete() {
	a.settle()
	a.over = true
	status, _ := a.status()
	response := a.appendResponse(nil, status, nil)
	a.kept(response)
	a.event("response." + status)
	a.out = append(append(a.out, `,"response":`...), response...)
	a.end()
}

func (a *Answer) kept(response []byte) {
	if a.Keep != nil {
		a.Keep(response)
	}
}

// fail ends a stream with what went wrong, in both of the API's forms.
func (a *Answer) fail(e *openai.Error) {
	a.over = true
	if it := a.open(); it != nil {
		it.status = "incomplete"
	}
	a.event("error")
	e = renamed(e)
	a.out = stringOrNull(append(a.out, `,"code":`...), e.Code)
	a.out = openai.AppendString(append(a.out, `,"message":`...), e.Message)
	a.out = stringOrNull(append(a.out, `,"param":`...), e.Param)
	a.end()
	response := a.appendResponse(nil, "failed", e)
	if a.Background {
		a.kept(response)
	}
	a.event("response.failed")
	a.out = append(append(a.out, `,"response":`...), response...)
	a.end()
}

func stringOrNull(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return openai.AppendString(dst, s)
}

// event begins an event; end ends it.
func (a *Answer) event(name string) {
	a.out = append(append(append(a.out, "event: "...), name...), "\ndata: {\"type\":\""...)
	a.out = strconv.AppendInt(append(append(a.out, name...), `","sequence_number":`...), int64(a.seq), 10)
	a.seq++
}

func (a *Answer) end() { a.out = append(a.out, "}\n\n"...) }

func (a *Answer) appendResponse(dst []byte, status string, e *openai.Error) []byte {
	dst = append(append(append(dst, `{"id":"`...), a.ID...), `","object":"response","created_at":`...)
	dst = strconv.AppendInt(dst, a.created, 10)
	dst = append(append(append(dst, `,"status":"`...), status...), `","completed_at":`...)
	if status == "completed" {
		dst = strconv.AppendInt(dst, a.Now().Unix(), 10)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"background":`...)
	dst = append(strconv.AppendBool(dst, a.Background), `,"error":`...)
	if e != nil {
		dst = append(append(append(dst, `{"code":"`...), failureCode(e)...), `","message":`...)
		dst = append(openai.AppendString(dst, e.Message), '}')
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"incomplete_details":`...)
	if _, why := a.status(); status == "incomplete" {
		dst = append(append(append(dst, `{"reason":"`...), why...), `"}`...)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(append(append(dst, `,"model":"`...), a.model...), `","output":[`...)
	for i := range a.items {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = a.items[i].append(dst)
	}
	dst = append(dst, `],"usage":`...)
	if a.told && status != "in_progress" {
		dst = fmt.Appendf(dst, `{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":%d},"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":%d},"total_tokens":%d}`,
			a.usage.Prompt, a.usage.Cached, a.usage.Created, a.usage.Completion, a.usage.Reasoning, a.usage.Prompt+a.usage.Completion)
	} else {
		dst = append(dst, "null"...)
	}
	return append(append(dst, a.echo...), '}')
}

// failureCode is one of the codes that the API has for a response that failed.
func failureCode(e *openai.Error) string {
	switch {
	case e.Type == openai.TypeRateLimit:
		return "rate_limit_exceeded"
	case e.Type == openai.TypeInvalid:
		return "invalid_prompt"
	}
	return "server_error"
}

// renamed has an error name the request's field instead of the chat's.
func renamed(e *openai.Error) *openai.Error {
	return chat.OwnFields(chat.OwnTool(e, "parameters"), names)
}

var names = map[string]string{"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
	"response_format": "text.format", "response_format.type": "text.format.type", "response_format.json_schema": "text.format", "response_format.json_schema.schema": "text.format.schema",
	"reasoning_effort": "reasoning.effort", "logprobs": "include"}

// Refusal is an error as the API has it.
func Refusal(e *openai.Error) *openai.Error { return renamed(e) }

// Owns reports whether a path is of this API.
func Owns(path string) bool {
	return path == "/v1/responses" || strings.HasPrefix(path, "/v1/responses/")
}
