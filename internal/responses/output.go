package responses

import (
	"bytes"
	"fmt"
	"strconv"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// Kinds of items.
const (
	reasoning    = "reasoning"
	message      = "message"
	functionCall = "function_call"
)

// Kinds of parts of an item. A call's only part is its arguments.
const (
	outputText    = "output_text"
	refusal       = "refusal"
	reasoningText = "reasoning_text"
	summaryText   = "summary_text"
	arguments     = "arguments"
)

// output is an item of a response. Only the last one can be open.
type output struct {
	kind, id, status string
	parts            []part // the last one is open if the item is
	callID, name     []byte
	index            int    // of a call, in the chat
	namespace        []byte // that the name is in; nil for none
}

// part is a text of an item, as a JSON string has it.
type part struct {
	kind     string
	text     []byte
	logprobs []byte // items of a JSON list
}

// itemBytes is what an item or a part takes beside its text.
const itemBytes = 256

func (a *Answer) open() *output {
	if n := len(a.items); n > 0 && a.items[n-1].status == "in_progress" {
		return &a.items[n-1]
	}
	return nil
}

// openPart returns the open item's part of a kind, or a new one, in a new item where it must be.
func (a *Answer) openPart(kind string) (*output, *part) {
	of := map[string]string{outputText: message, refusal: message, reasoningText: reasoning, summaryText: reasoning}[kind]
	it := a.open()
	if it != nil && it.kind == of {
		if p := it.last(); p.kind == kind {
			return it, p
		}
		a.closePart(it)
	} else {
		a.close(false)
		prefix := "msg"
		if of == reasoning {
			prefix = "rs"
		}
		it = a.add(output{kind: of, id: a.itemID(prefix)})
	}
	a.grow(itemBytes)
	it.parts = append(it.parts, part{kind: kind})
	p := it.last()
	if !a.quiet {
		name := "response.content_part.added"
		if kind == summaryText {
			name = "response.reasoning_summary_part.added"
		}
		a.at(name, it)
		a.out = p.append(append(a.out, `,"part":`...))
		a.end()
	}
	return it, p
}

func (it *output) last() *part { return &it.parts[len(it.parts)-1] }

// itemID makes an ID from the response's, so that no two are alike and a retold stream has the same.
func (a *Answer) itemID(prefix string) string {
	return fmt.Sprintf("%s_%s%02x", prefix, bytes.TrimPrefix([]byte(a.ID), []byte("resp_")), len(a.items))
}

func (a *Answer) add(it output) *output {
	a.grow(itemBytes + len(it.name) + len(it.namespace) + len(it.callID))
	it.status = "in_progress"
	a.items = append(a.items, it)
	last := &a.items[len(a.items)-1]
	if !a.quiet {
		a.item("response.output_item.added", last)
	}
	return last
}

// item writes an event with an item.
func (a *Answer) item(name string, it *output) {
	a.event(name)
	a.out = fmt.Appendf(a.out, `,"output_index":%d,"item":`, len(a.items)-1)
	a.out = it.append(a.out)
	a.end()
}

// at begins an event about the last part of an item.
func (a *Answer) at(name string, it *output) {
	a.event(name)
	a.out = append(append(append(a.out, `,"item_id":"`...), it.id...), `","output_index":`...)
	a.out = strconv.AppendInt(a.out, int64(len(a.items)-1), 10)
	switch p := it.last(); p.kind {
	case arguments:
		return
	case summaryText:
		a.out = append(a.out, `,"summary_index":`...)
	default:
		a.out = append(a.out, `,"content_index":`...)
	}
	a.out = strconv.AppendInt(a.out, int64(len(it.parts)-1), 10)
}

// events are the names of a part's delta and of its end, and of the member that has its whole text.
var events = map[string][3]string{
	outputText:    {"response.output_text.delta", "response.output_text.done", "text"},
	refusal:       {"response.refusal.delta", "response.refusal.done", "refusal"},
	reasoningText: {"response.reasoning_text.delta", "response.reasoning_text.done", "text"},
	summaryText:   {"response.reasoning_summary_text.delta", "response.reasoning_summary_text.done", "text"},
	arguments:     {"response.function_call_arguments.delta", "response.function_call_arguments.done", "arguments"},
}

// write adds a text to an open part.
func (a *Answer) write(it *output, p *part, t, logprobs []byte) {
	if !a.grow(len(t) + len(logprobs)) {
		return
	}
	p.text = append(p.text, t...)
	if len(logprobs) > 0 {
		if len(p.logprobs) > 0 {
			p.logprobs = append(p.logprobs, ',')
		}
		p.logprobs = append(p.logprobs, logprobs...)
	}
	if a.quiet || len(t) == 0 {
		return
	}
	a.delta(it, p, t, logprobs)
}

// delta writes a piece of a part.
func (a *Answer) delta(it *output, p *part, t, logprobs []byte) {
	a.at(events[p.kind][0], it)
	a.out = append(append(append(a.out, `,"delta":"`...), t...), '"')
	if p.kind == outputText {
		a.out = append(append(append(a.out, `,"logprobs":[`...), logprobs...), ']')
	}
	a.end()
}

func (a *Answer) reason(t chat.Text) {
	if len(t) == 0 || a.failed != nil {
		return
	}
	kind := reasoningText
	if a.summary {
		kind = summaryText
	}
	it, p := a.openPart(kind)
	a.write(it, p, t, nil)
}

func (a *Answer) say(t chat.Text, logprobs []byte) {
	if a.failed != nil {
		return
	}
	if len(t) == 0 { // the first event's, or the log probabilities of a token without text
		if it := a.open(); len(logprobs) > 0 && it != nil && it.kind == message && it.last().kind == outputText {
			a.write(it, it.last(), nil, logprobs)
		}
		return
	}
	it, p := a.openPart(outputText)
	a.write(it, p, t, logprobs)
}

func (a *Answer) refuse(t chat.Text) {
	if len(t) > 0 && a.failed == nil {
		it, p := a.openPart(refusal)
		a.write(it, p, t, nil)
	}
}

// call adds a call, or more of its arguments.
func (a *Answer) call(c *chat.Piece) {
	if a.failed != nil {
		return
	}
	it := a.open()
	if it == nil || it.kind != functionCall || it.index != c.Index {
		for i := range a.items {
			if a.items[i].kind == functionCall && a.items[i].index == c.Index {
				a.failed = openai.Upstream("the engine went on with a call of a tool that was over")
				return
			}
		}
		a.close(false)
		next := output{kind: functionCall, id: a.itemID("fc"), name: bytes.Clone(c.Name), callID: bytes.Clone(c.ID), index: c.Index, parts: []part{{kind: arguments}}}
		if s, ok := a.spaced[string(jsonscan.AppendDecoded(nil, c.Name))]; ok {
			next.name, next.namespace = s.name, s.space
		}
		if len(next.callID) == 0 {
			next.callID = []byte(a.itemID("call"))
		}
		it = a.add(next)
	}
	if len(c.Arguments) > 0 {
		a.write(it, it.last(), c.Arguments, nil)
	}
}

// closePart ends an item's last part.
func (a *Answer) closePart(it *output) {
	if a.quiet || a.failed != nil {
		return
	}
	p := it.last()
	if len(p.text) == 0 { // clients expect a piece before the end
		a.delta(it, p, nil, nil)
	}
	names := events[p.kind]
	a.at(names[1], it)
	if p.kind == arguments {
		a.out = append(append(append(a.out, `,"name":"`...), it.name...), '"')
	}
	a.out = append(append(append(append(append(a.out, `,"`...), names[2]...), `":"`...), p.text...), '"')
	if p.kind == outputText {
		a.out = append(append(append(a.out, `,"logprobs":[`...), p.logprobs...), ']')
	}
	a.end()
	switch p.kind {
	case arguments:
		return
	case summaryText:
		a.at("response.reasoning_summary_part.done", it)
	default:
		a.at("response.content_part.done", it)
	}
	a.out = p.append(append(a.out, `,"part":`...))
	a.end()
}

// close ends the open item, if there is one. cut: it is not whole.
func (a *Answer) close(cut bool) {
	it := a.open()
	if it == nil || a.failed != nil {
		return
	}
	a.closePart(it)
	it.status = "completed"
	if cut {
		it.status = "incomplete"
	}
	if !a.quiet {
		a.item("response.output_item.done", it)
	}
}

// append appends the item as JSON.
func (it *output) append(dst []byte) []byte {
	dst = fmt.Appendf(dst, `{"id":"%s","type":"%s","status":"%s"`, it.id, it.kind, it.status)
	switch it.kind {
	case functionCall:
		dst = append(append(append(dst, `,"call_id":"`...), it.callID...), `","name":"`...)
		dst = append(dst, it.name...)
		if it.namespace != nil {
			dst = append(append(dst, `","namespace":"`...), it.namespace...)
		}
		dst = append(dst, `","arguments":"`...)
		return append(append(dst, it.last().text...), `"}`...)
	case reasoning:
		dst = append(it.appendParts(append(dst, `,"summary":[`...), true), `],"content":[`...)
		return append(it.appendParts(dst, false), `]}`...)
	}
	return append(it.appendParts(append(dst, `,"role":"assistant","content":[`...), false), `]}`...)
}

// appendParts appends the parts that are a summary, or the others.
func (it *output) appendParts(dst []byte, summary bool) []byte {
	n := 0
	for i := range it.parts {
		if (it.parts[i].kind == summaryText) != summary {
			continue
		}
		if n++; n > 1 {
			dst = append(dst, ',')
		}
		dst = it.parts[i].append(dst)
	}
	return dst
}

func (p *part) append(dst []byte) []byte {
	switch p.kind {
	case outputText:
		dst = append(append(append(dst, `{"type":"output_text","text":"`...), p.text...), `","annotations":[],"logprobs":[`...)
		return append(append(dst, p.logprobs...), `]}`...)
	case refusal:
		return append(append(append(dst, `{"type":"refusal","refusal":"`...), p.text...), `"}`...)
	}
	return append(append(fmt.Appendf(dst, `{"type":"%s","text":"`, p.kind), p.text...), `"}`...)
}
