package worker

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/tokenizer"
)

// Values of tool_parser and reasoning_parser beside the formats' names.
const (
	parserAuto = "auto" // what the model's chat template or else its special tokens show
	parserNone = "none"
)

// formats is how the model writes calls of tools and reasoning; nil: not that anybody knows.
type formats struct {
	tool  *answer.Format
	think *answer.Think
	// Special tokens that are part of their marks.
	toolMarks, thinkMarks []int32
}

func formatsOf(c *Compute, tok *tokenizer.Tokenizer) formats {
	var f formats
	f.tool, f.think = answer.Detect(tok.ChatTemplates())
	if tool, think := answer.Detect(specials(tok)); tok.HasChatTemplate() { // the next best sign
		if f.tool == nil {
			f.tool = tool
		}
		if f.think == nil {
			f.think = think
		}
	}
	if c.ToolParser != parserAuto {
		f.tool = answer.ToolFormat(c.ToolParser)
	}
	if c.ReasoningParser != parserAuto {
		f.think = answer.ThinkFormat(c.ReasoningParser)
	}
	for id := range int32(tok.VocabSize()) {
		if !tok.IsSpecial(id) {
			continue
		}
		if answer.Marks(nil, f.think, tok.TokenText(id)) {
			f.thinkMarks = append(f.thinkMarks, id)
		}
		if answer.Marks(f.tool, f.think, tok.TokenText(id)) {
			f.toolMarks = append(f.toolMarks, id)
		}
	}
	return f
}

// specials are the texts of special tokens.
func specials(tok *tokenizer.Tokenizer) (list []string) {
	for id := range int32(tok.VocabSize()) {
		if tok.IsSpecial(id) {
			list = append(list, tok.TokenText(id))
		}
	}
	return list
}

// announced is what members of a fleet must have in common.
func (f *formats) announced() string {
	tool, think := f.names()
	return tool + "/" + think
}

// names are of the log.
func (f *formats) names() (tool, think string) {
	tool, think = parserNone, parserNone
	if f.tool != nil {
		tool = f.tool.Name
	}
	if f.think != nil {
		think = f.think.Name
	}
	return tool, think
}

// reading is how a chat's answers are read; the zero value takes all for text.
type reading struct {
	tool    *answer.Format
	think   *answer.Think
	options answer.Options
	hide    bool // reasoning is not told
	direct  bool // the request wants none
	named   bool // the answer is a call of the tool that the request names
	marks   []int32
	seed    [sha256.Size]byte // of the calls' IDs
}

// active reports whether answers are more than text.
func (r *reading) active() bool { return r.tool != nil || r.think != nil }

// read decides how answers to a chat are read, from its rendered prompt.
func (w *Worker) read(j *job, c *openai.Chat, tools *answer.Tools, prompt string) {
	r := &j.reading
	r.think, r.marks, r.hide = w.formats.think, w.formats.thinkMarks, c.HideReasoning
	for _, name := range []string{"enable_thinking", "thinking"} {
		r.direct = r.direct || string(c.TemplateKwargs[name]) == "false"
	}
	r.options = answer.Options{Whole: !c.Stream, Single: c.OneCall}
	if r.options.Thinking, r.options.Thought = r.think.Prompt(prompt); !r.options.Thinking && c.ContinueFinalMessage {
		r.options.Thought = true // an answer has begun
	}
	if tools != nil {
		r.tool, r.options.Tools, r.marks = w.formats.tool, tools, w.formats.toolMarks
	}
}

// seedCalls makes calls' IDs differ between requests, and be the same where another worker goes on with
// this one.
func (j *job) seedCalls(seed uint64) {
	if j.reading.tool != nil {
		text := fmt.Sprintf("%s %d %d %s", j.requestID, seed, j.created.Unix(), j.promptHash())
		j.reading.seed = sha256.Sum256([]byte(text))
	}
}

const (
	idDigits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	idLength = 24 // as OpenAI's, behind "call_"
)

// callID is of a choice's n-th call.
func (r *reading) callID(choice, n int) string {
	key := binary.LittleEndian.AppendUint32(r.seed[:], uint32(choice))
	sum := sha256.Sum256(binary.LittleEndian.AppendUint32(key, uint32(n)))
	id, length := strings.Builder{}, r.tool.IDLength
	if length == 0 {
		id.WriteString("call_")
		length = idLength
	}
	for _, b := range sum[:length] {
		id.WriteByte(idDigits[int(b)%len(idDigits)])
	}
	return id.String()
}

// callPart is a call, or in a stream a piece of one, not yet taken.
type callPart struct {
	index    int
	id, name string
	args     []byte
}

// emit takes text that a choice's stop strings let through.
func (c *choice) emit(text string) {
	if c.parser == nil {
		c.text = append(c.text, text...)
		return
	}
	c.taken += len(text) // c.text has it too, unless it became a call, whose JSON can be longer
	c.take(c.parser.Feed(text))
}

func (c *choice) take(events []answer.Event) {
	for i := range events {
		switch e := &events[i]; e.Kind {
		case answer.Content:
			c.text = append(c.text, e.Text...)
		case answer.Reasoning:
			if !c.j.reading.hide {
				c.reasoning = append(c.reasoning, e.Text...)
			}
		case answer.Begin:
			id := e.ID
			if id == "" {
				id = c.j.reading.callID(c.index, e.Index)
			}
			c.called = true
			c.calls = append(c.calls, callPart{index: e.Index, id: id, name: e.Text})
		case answer.Arguments:
			if n := len(c.calls); n == 0 || c.calls[n-1].index != e.Index {
				c.calls = append(c.calls, callPart{index: e.Index})
			}
			last := &c.calls[len(c.calls)-1]
			last.args = append(last.args, e.Text...)
		}
	}
}

// takeCalls returns the calls, or pieces of them, for a chunk.
func (c *choice) takeCalls() []openai.ToolCall {
	if len(c.calls) == 0 {
		return nil
	}
	list := make([]openai.ToolCall, len(c.calls))
	for i := range c.calls {
		p := &c.calls[i]
		list[i] = openai.ToolCall{Index: p.index, ID: p.id, Name: p.name, Arguments: string(p.args)}
	}
	c.calls = c.calls[:0]
	return list
}
