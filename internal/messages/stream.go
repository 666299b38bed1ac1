package messages

import (
	"fmt"
	"strconv"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/openai"
)

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
		if ok {
			a.note()
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
			a.take()
		}
	}
	if !said && len(run) > 0 && a.begun && !a.over { // comments, which keep connections alive
		a.ping()
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

func (a *Answer) fail(e *openai.Error) {
	a.over = true
	_, body := Refusal(e, "")
	a.out = append(append(append(a.out, "event: error\ndata: "...), body...), "\n\n"...)
}

// event begins an event; end ends it.
func (a *Answer) event(name string) {
	a.out = append(append(append(append(append(a.out, "event: "...), name...), "\ndata: {\"type\":\""...), name...), '"')
}

func (a *Answer) end() { a.out = append(a.out, "}\n\n"...) }

func (a *Answer) ping() {
	a.event("ping")
	a.end()
}

func (a *Answer) begin() {
	a.begun = true
	a.event("message_start")
	a.out = append(a.appendHead(append(a.out, `,"message":`...)), `],"stop_reason":null,"stop_sequence":null,`...)
	a.out = append(a.appendUsage(a.out), '}')
	a.end()
	a.ping()
}

// take passes on what an event adds.
func (a *Answer) take() {
	r := &a.read
	a.delta("thinking", "thinking_delta", "thinking", r.Reasoning)
	a.delta("text", "text_delta", "text", r.Content)
	a.delta("text", "text_delta", "text", r.Refusal)
	for i := range r.Calls {
		c := &r.Calls[i]
		if a.open != "tool_use" || a.call != c.Index {
			if len(c.Name) == 0 {
				a.broke(openai.Upstream("the engine went on with a call of a tool that was over"))
				return
			}
			a.start("tool_use", func(dst []byte) []byte { return append(a.appendCall(dst, c), `,"input":{}}`...) })
			a.call, a.called = c.Index, true
		}
		a.delta("tool_use", "input_json_delta", "partial_json", c.Arguments)
	}
}

// starts are blocks as they begin.
var starts = map[string]string{
	"thinking": `{"type":"thinking","thinking":"","signature":""}`,
	"text":     `{"type":"text","text":""}`,
}

// start begins a block.
func (a *Answer) start(kind string, block func([]byte) []byte) {
	a.stopBlock()
	a.open = kind
	a.event("content_block_start")
	a.out = block(fmt.Appendf(a.out, `,"index":%d,"content_block":`, a.blocks))
	a.end()
	a.blocks++
}

// delta adds a text to the open block, or to a new one.
func (a *Answer) delta(kind, delta, name string, t chat.Text) {
	if len(t) == 0 {
		return
	}
	if a.open != kind {
		a.start(kind, func(dst []byte) []byte { return append(dst, starts[kind]...) })
	}
	a.event("content_block_delta")
	a.out = strconv.AppendInt(append(a.out, `,"index":`...), int64(a.blocks-1), 10)
	a.out = append(append(append(a.out, `,"delta":{"type":"`...), delta...), `","`...)
	a.out = append(append(append(append(a.out, name...), `":"`...), t...), `"}`...)
	a.end()
}

// stopBlock ends the open block, if there is one.
func (a *Answer) stopBlock() {
	if a.open == "" {
		return
	}
	if a.open == "thinking" {
		a.event("content_block_delta")
		a.out = fmt.Appendf(a.out, `,"index":%d,"delta":{"type":"signature_delta","signature":"%s"}`, a.blocks-1, signature)
		a.end()
	}
	a.event("content_block_stop")
	a.out = fmt.Appendf(a.out, `,"index":%d`, a.blocks-1)
	a.end()
	a.open = ""
}

func (a *Answer) complete() {
	a.stopBlock()
	a.over = true
	a.event("message_delta")
	a.out = append(a.appendStop(append(a.out, `,"delta":{`...)), "},"...)
	a.out = a.appendUsage(a.out)
	a.end()
	a.event("message_stop")
	a.end()
}
