package answer

import (
	"encoding/json"
	"fmt"
)

// Calling is how an answer that must call a tool is written in a format:
//
//	Before Begin(name) ARGUMENTS End Close [Next Begin(name) ARGUMENTS End Close]… After
type Calling struct {
	Before  string // the first call
	Begin   func(name string) string
	Space   bool   // a space may stand before the arguments
	End     string // text behind the arguments
	Close   string
	Several bool // Next and another call may follow
	Next    string
	After   string // the last call
}

// callings are of the formats whose calls have their arguments as JSON.
var callings = map[string]Calling{
	"hermes":         inJSON("<tool_call>\n", "name", "arguments", Calling{Close: "\n</tool_call>", Several: true, Next: "\n"}),
	"json":           inJSON("", "name", "arguments", Calling{}),
	"llama3_json":    inJSON("", "name", "parameters", Calling{Several: true, Next: "; "}),
	"mistral":        inJSON("", "name", "arguments", inList("[TOOL_CALLS][", "]")),
	"granite":        inJSON("", "name", "arguments", inList("<|tool_call|>[", "]")),
	"granite-20b-fc": inJSON("<function_call> ", "name", "arguments", Calling{Several: true, Next: " "}),
	"phi4_mini_json": inJSON("", "name", "arguments", inList("functools[", "]")),
	"xlam":           inJSON("", "name", "arguments", inList("[", "]")),
	"internlm":       inJSON("", "name", "parameters", Calling{Before: "<|action_start|><|plugin|>\n", After: "<|action_end|>"}),
	"jamba":          inJSON("", "name", "arguments", inList("<tool_calls>[", "]</tool_calls>")),
	"minimax":        inJSON("", "name", "arguments", Calling{Before: "<tool_calls>\n", Several: true, Next: "\n", After: "\n</tool_calls>"}),
	"longcat":        inJSON("<longcat_tool_call>\n", "name", "arguments", Calling{Close: "\n</longcat_tool_call>", Several: true, Next: "\n"}),
	"cohere":         inJSON("", "tool_name", "parameters", inList("<|START_ACTION|>[", "]<|END_ACTION|>")),
	"deepseek_v3": {Before: "<｜tool▁calls▁begin｜>", Begin: around("<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n"), End: "\n```",
		Close: "<｜tool▁call▁end｜>", Several: true, Next: "\n", After: "<｜tool▁calls▁end｜>"},
	"deepseek_v31": {Before: "<｜tool▁calls▁begin｜>", Begin: around("<｜tool▁call▁begin｜>%s<｜tool▁sep｜>"),
		Close: "<｜tool▁call▁end｜>", Several: true, After: "<｜tool▁calls▁end｜>"},
	"kimi_k2": {Before: "<|tool_calls_section_begin|>", Begin: around("<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>"),
		Close: "<|tool_call_end|>", After: "<|tool_calls_section_end|>"},
	"openai": {Begin: around("<|channel|>commentary to=functions.%s <|constrain|>json<|message|>")},
}

func around(format string) func(string) string {
	return func(name string) string { return fmt.Sprintf(format, name) }
}

// inJSON is of calls that are objects with a name and arguments.
func inJSON(mark, name, arguments string, c Calling) Calling {
	c.Begin = func(tool string) string {
		quoted, _ := json.Marshal(tool) // a string: never fails
		return fmt.Sprintf(`%s{"%s": %s, "%s":`, mark, name, quoted, arguments)
	}
	c.Space, c.End = true, "}"
	return c
}

func inList(open, end string) Calling {
	return Calling{Before: open, Several: true, Next: ", ", After: end}
}

// Calling returns how a format's calls are written, or why an answer cannot be bound to be one.
func (f *Format) Calling() (c Calling, why string) {
	if f == nil {
		return c, "the model's format of calls is not known"
	}
	c, ok := callings[f.Name]
	if !ok {
		return c, fmt.Sprintf("the model's calls (%s) are not JSON, and there is no grammar of them", f.Name)
	}
	return c, ""
}

// Around returns the marks around reasoning: what begins it, and what ends it.
func (t *Think) Around() (open, end string) {
	if t.harmony {
		return markChannel + "analysis" + markMessage, markEnd + markStart + "assistant"
	}
	return t.start, t.end
}

// Before is the mark of the text that follows the reasoning; "": it needs none.
func (t *Think) Before() string {
	if t == nil || !t.harmony {
		return ""
	}
	return markChannel + "final" + markMessage
}

// Opened reports whether the model thinks from its first word on, though no mark says so.
func (t *Think) Opened() bool { return t.opened }
