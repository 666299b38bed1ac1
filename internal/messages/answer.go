package messages

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// Answer makes a chat's answer a message: Whole, or with each run of its events Append. One goroutine
// uses it. It keeps nothing of what it has passed on.
type Answer struct {
	id    string // msg_…
	model []byte
	stops []string
	usage chat.Usage // the prompt's part is a guess until the answer reports

	blocks int
	open   string // the type of the open block; "" for none
	call   int    // the open block's, in the chat
	called bool   // a tool was
	begun  bool
	over   bool
	failed *openai.Error
	finish []byte
	stop   string // stop sequence that was met
	read   chat.Answer
	out    []byte // of the Append under way
}

// Answer prepares the answer to q, of which it keeps nothing, under an ID.
func (q *Request) Answer(id string) *Answer {
	a := &Answer{id: id, model: bytes.Clone(q.model)}
	for _, s := range q.stops {
		a.stops = append(a.stops, decoded(s))
	}
	return a
}

func decoded(t chat.Text) string { return string(jsonscan.AppendDecoded(nil, t)) }

// Prompt tells how many tokens the prompt has, and how many of them were cached, before the stream begins.
func (a *Answer) Prompt(tokens, cached int) {
	a.usage.Prompt, a.usage.Cached = tokens, max(min(cached, tokens), 0)
}

// Over reports whether nothing follows.
func (a *Answer) Over() bool { return a.over }

// Failed is why the answer could not be made a message, of its own doing; nil if it could, or if its events
// said themselves that something failed.
func (a *Answer) Failed() *openai.Error { return a.failed }

// Whole appends the message for a chat's whole answer.
func (a *Answer) Whole(dst, body []byte) ([]byte, *openai.Error) {
	r := &a.read
	if !chat.Read(body, r) {
		return nil, openai.Upstream("the engine's answer is no chat completion")
	}
	if r.Error != nil {
		return nil, r.Error
	}
	a.note()
	dst = a.appendHead(dst)
	n := 0
	add := func(kind, name string, t chat.Text, more string) {
		if len(t) == 0 {
			return
		}
		if n++; n > 1 {
			dst = append(dst, ',')
		}
		dst = fmt.Appendf(dst, `{"type":"%s","%s":"`, kind, name)
		dst = append(append(append(append(dst, t...), '"'), more...), '}')
	}
	add("thinking", "thinking", r.Reasoning, `,"signature":"`+signature+`"`)
	add("text", "text", r.Content, "")
	add("text", "text", r.Refusal, "")
	for i := range r.Calls {
		a.called = true
		if n++; n > 1 {
			dst = append(dst, ',')
		}
		c := &r.Calls[i]
		dst = append(a.appendCall(dst, c), `,"input":`...)
		dst = append(appendInput(dst, c.Arguments), '}')
	}
	dst = append(dst, ']')
	dst = a.appendStop(append(dst, ','))
	return append(a.appendUsage(append(dst, ',')), '}'), nil
}

// signature stands in thinking blocks, which need one: nothing here is signed.
const signature = "unsigned"

// note keeps what a whole answer or an event says besides its texts.
func (a *Answer) note() {
	r := &a.read
	if len(a.model) == 0 {
		a.model = append(a.model, r.Model...)
	}
	if len(r.Finish) > 0 {
		a.finish = append(a.finish[:0], r.Finish...)
	}
	if r.Stop != nil {
		if met := decoded(r.Stop); slices.Contains(a.stops, met) {
			a.stop = met
		}
	}
	if r.Told {
		a.usage = r.Usage
	}
}

// appendHead appends a message up to its content.
func (a *Answer) appendHead(dst []byte) []byte {
	dst = append(append(dst, `{"id":"`...), a.id...)
	dst = append(append(dst, `","type":"message","role":"assistant","model":"`...), a.model...)
	return append(dst, `","content":[`...)
}

// appendInput appends a call's arguments as the object that they are. What is none goes under the name that
// Anthropic's documents have for it.
func appendInput(dst []byte, arguments chat.Text) []byte {
	text := jsonscan.AppendDecoded(nil, arguments)
	if len(bytes.TrimSpace(text)) == 0 {
		return append(dst, "{}"...)
	}
	var s jsonscan.Scanner
	s.Reset(text)
	if s.Enter(jsonscan.Object) {
		s.Leave(0)
		if s.End() == nil {
			return append(dst, text...)
		}
	}
	return append(append(append(dst, `{"INVALID_JSON":"`...), arguments...), `"}`...)
}

// appendCall appends the beginning of a block for a call.
func (a *Answer) appendCall(dst []byte, c *chat.Piece) []byte {
	dst = append(dst, `{"type":"tool_use","id":"`...)
	if len(c.ID) > 0 {
		dst = append(dst, c.ID...)
	} else {
		dst = fmt.Appendf(dst, "toolu_%s%02x", bytes.TrimPrefix([]byte(a.id), []byte("msg_")), c.Index)
	}
	return append(append(append(dst, `","name":"`...), c.Name...), '"')
}

// appendStop appends why the answer has ended.
func (a *Answer) appendStop(dst []byte) []byte {
	reason := "end_turn"
	switch finish := string(a.finish); {
	case finish == "length":
		reason = "max_tokens"
	case finish == "content_filter":
		reason = "refusal"
	case a.called:
		reason = "tool_use"
	case a.stop != "":
		reason = "stop_sequence"
	}
	dst = append(append(append(dst, `"stop_reason":"`...), reason...), `","stop_sequence":`...)
	if reason == "stop_sequence" {
		return openai.AppendString(dst, a.stop)
	}
	return append(dst, "null"...)
}

// appendUsage appends the usage. What was read from a cache, or put into one, is not part of input_tokens.
func (a *Answer) appendUsage(dst []byte) []byte {
	return fmt.Appendf(dst, `"usage":{"input_tokens":%d,"cache_creation_input_tokens":%d,"cache_read_input_tokens":%d,"output_tokens":%d}`,
		a.usage.Prompt-a.usage.Cached-a.usage.Created, a.usage.Created, a.usage.Cached, a.usage.Completion)
}
