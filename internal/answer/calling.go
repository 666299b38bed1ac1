package answer

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// Calling is how an answer that must call a tool is written in a format:
//
//	Before Begin(name) [Number(n)] ARGUMENTS End Close [Next Begin(name) … ARGUMENTS End Close]… After
type Calling struct {
	Before  string // the first call
	Begin   func(name string) string
	Number  func(n int) string // of a call of the chat, from 0; nil: calls have none
	Space   bool               // a space may stand before the arguments
	Members *Members           // nil: the arguments are a JSON object
	End     string             // text behind the arguments
	Close   string
	Several bool // Next and another call may follow
	Next    string
	After   string // the last call
	// Mark is what shows in a text that a call begins; it begins Before. "": nothing but the whole begin of a call does.
	Mark string
	// List is what Before, Next and After are where one call of several comes.
	List *Calling
}

// Members is how the arguments of a call are written that are no JSON object: keys and values. A
// MayBreak in a mark stands for a line end that may be there.
type Members struct {
	Open, Between string   // before the first, and between two
	Key, KeyEnd   string   // around a key
	StringEnd     string   // instead of KeyEnd before a string; "": that too
	Close         string   // behind a value
	Pad           string   // on both sides of a value
	Stops         []string // texts that end a value
	Entities      []string // texts that stand for others in a string
	Object        bool     // it is a JSON object all the same, but no string in it has one of Stops
	Python        bool     // values are literals of Python; else a string is what stands there, and the rest is JSON
}

// MayBreak is a line end that may be there or not.
const MayBreak = "\v"

// JSON reports whether the arguments are a JSON object.
func (c *Calling) JSON() bool { return c.Members == nil || c.Members.Object }

// Names reports whether a tool of that name can be called.
func (c *Calling) Names(name string) bool {
	return c.Members == nil || !c.Members.Python || !strings.Contains(name, "-")
}

// callings are of the formats whose calls have their arguments as JSON, or in another form that is known.
var callings = map[string]Calling{
	"hermes":         inJSON("<tool_call>\n", "name", "arguments", Calling{Mark: "<tool_call>", Close: "\n</tool_call>", Several: true, Next: "\n"}),
	"json":           inJSON("", "name", "arguments", Calling{Several: true, List: &Calling{Before: "[", Next: ", ", After: "]"}}),
	"llama3_json":    inJSON("", "name", "parameters", Calling{Several: true, Next: "; "}),
	"mistral":        inJSON("", "name", "arguments", inList("[TOOL_CALLS]", "[", "]")),
	"granite":        inJSON("", "name", "arguments", inList("<|tool_call|>", "[", "]")),
	"granite-20b-fc": inJSON("<function_call> ", "name", "arguments", Calling{Mark: "<function_call>", Several: true, Next: " "}),
	"phi4_mini_json": inJSON("", "name", "arguments", inList("", "functools[", "]")),
	"xlam":           inJSON("", "name", "arguments", inList("", "[", "]")),
	"internlm": inJSON("<|action_start|><|plugin|>\n", "name", "parameters", Calling{Mark: "<|action_start|><|plugin|>", Close: "<|action_end|>",
		Several: true, Next: "\n"}),
	"jamba":   inJSON("", "name", "arguments", inList("<tool_calls>", "[", "]</tool_calls>")),
	"minimax": inJSON("", "name", "arguments", Calling{Mark: "<tool_calls>", Before: "<tool_calls>\n", Several: true, Next: "\n", After: "\n</tool_calls>"}),
	"longcat": inJSON("<longcat_tool_call>\n", "name", "arguments", Calling{Mark: "<longcat_tool_call>", Close: "\n</longcat_tool_call>", Several: true, Next: "\n"}),
	"cohere":  inJSON("", "tool_name", "parameters", inList("<|START_ACTION|>", "[", "]<|END_ACTION|>")),
	"deepseek_v3": {Mark: "<｜tool▁calls▁begin｜>", Before: "<｜tool▁calls▁begin｜>", Begin: around("<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n"), End: "\n```",
		Close: "<｜tool▁call▁end｜>", Several: true, Next: "\n", After: "<｜tool▁calls▁end｜>"},
	"deepseek_v31": {Mark: "<｜tool▁calls▁begin｜>", Before: "<｜tool▁calls▁begin｜>", Begin: around("<｜tool▁call▁begin｜>%s<｜tool▁sep｜>"),
		Close: "<｜tool▁call▁end｜>", Several: true, After: "<｜tool▁calls▁end｜>"},
	"kimi_k2": {Mark: "<|tool_calls_section_begin|>", Before: "<|tool_calls_section_begin|>", Begin: around("<|tool_call_begin|>functions.%s:"),
		Number: func(n int) string { return strconv.Itoa(n) + "<|tool_call_argument_begin|>" },
		Close:  "<|tool_call_end|>", Several: true, After: "<|tool_calls_section_end|>"},
	"openai": {Mark: "<|channel|>commentary to=functions.", Begin: around("<|channel|>commentary to=functions.%s <|constrain|>json<|message|>"),
		Members: &Members{Object: true, Stops: []string{markStart, markChannel, markMessage, markEnd, markCall, markReturn}}},

	"qwen3_coder": tags(Calling{Mark: "<tool_call>", Begin: around("<tool_call>\n<function=%s>"), End: "</function>", Close: "\n</tool_call>", Several: true, Next: "\n"},
		Members{Key: "<parameter=", KeyEnd: ">", Close: "</parameter>", Pad: "\n", Stops: []string{"\n<parameter=", "\n</function>"}}),
	"seed_oss": tags(Calling{Mark: "<seed:tool_call>", Begin: around("<seed:tool_call>\n<function=%s>"), End: "</function>", Close: "\n</seed:tool_call>", Several: true, Next: "\n"},
		Members{Key: "<parameter=", KeyEnd: ">", Close: "</parameter>", Stops: []string{"\n<parameter=", "\n</function>"}}),
	"glm45": tags(Calling{Mark: "<tool_call>", Begin: around("<tool_call>%s\n"), Close: "</tool_call>", Several: true, Next: "\n"},
		Members{Key: "<arg_key>", KeyEnd: "</arg_key>" + MayBreak + "<arg_value>", Close: "</arg_value>"}),
	"minimax_m2": tags(Calling{Mark: "<minimax:tool_call>", Before: "<minimax:tool_call>\n", Begin: around(`<invoke name="%s">`), End: "</invoke>", Several: true, Next: "\n", After: "\n</minimax:tool_call>"},
		Members{Key: `<parameter name="`, KeyEnd: `">`, Close: "</parameter>", Entities: []string{"&lt;", "&gt;", "&quot;", "&apos;", "&amp;"}}),
	"step3": tags(Calling{Mark: "<｜tool_calls_begin｜>", Before: "<｜tool_calls_begin｜>\n", Begin: around(`<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="%s">`), End: "</steptml:invoke>",
		Close: "<｜tool_call_end｜>", Several: true, Next: "\n", After: "\n<｜tool_calls_end｜>"},
		Members{Key: `<steptml:parameter name="`, KeyEnd: `">`, Close: "</steptml:parameter>"}),
	"deepseek_v32": dsmlCalls("function_calls"),
	"deepseek_v4":  dsmlCalls("tool_calls"),

	"pythonic":        inPython("[", "]"),
	"llama4_pythonic": inPython("<|python_start|>[", "]<|python_end|>"),
}

// tags is of calls whose arguments are tags, each of which may stand on a line of its own.
func tags(c Calling, m Members) Calling {
	m.Open = MayBreak
	m.Stops = append(m.Stops, m.Close)
	m.Close += MayBreak
	c.Members = &m
	return c
}

func dsmlCalls(block string) Calling {
	return tags(Calling{Mark: "<｜DSML｜" + block + ">", Before: "<｜DSML｜" + block + ">\n", Begin: around(`<｜DSML｜invoke name="%s">`), End: "</｜DSML｜invoke>", Several: true, Next: "\n",
		After: "\n</｜DSML｜" + block + ">"},
		Members{Key: `<｜DSML｜parameter name="`, KeyEnd: `" string="false">`, StringEnd: `" string="true">`, Close: "</｜DSML｜parameter>"})
}

func inPython(open, end string) Calling {
	return Calling{Mark: strings.TrimSuffix(open, "["), Before: open, Begin: around("%s("), End: ")", Several: true, Next: ", ", After: end,
		Members: &Members{Between: ", ", KeyEnd: "=", Python: true}}
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

func inList(mark, open, end string) Calling {
	return Calling{Mark: mark, Before: mark + open, Several: true, Next: ", ", After: end}
}

// Calling returns how a format's calls are written, of which there may be several or not, or why an answer cannot be
// bound to be one.
func (f *Format) Calling(several bool) (c Calling, why string) {
	if f == nil {
		return c, "the model's format of calls is not known"
	}
	c, ok := callings[f.Name]
	if !ok {
		return c, fmt.Sprintf("there is no grammar of the model's calls (%s)", f.Name)
	}
	if l := c.List; l != nil && several {
		c.Before, c.Next, c.After = l.Before, l.Next, l.After
	}
	c.Several = c.Several && several
	return c, ""
}

// Trigger is a mark that begins a call, and what stands between it and the call's arguments.
type Trigger struct {
	Text  string
	Later bool // it is one only behind another call
	Rest  func(name string) string
}

// Triggers are the marks that begin calls in a format; none: nothing but the begin of a call does.
func (f *Format) Triggers() (list []Trigger) {
	c := callings[f.Name]
	if c.Mark == "" || c.Members != nil && c.Members.Python || f.bare != "" {
		return nil
	}
	if f.kind == kindHarmony {
		for _, at := range []string{markChannel + "commentary", markChannel + "analysis"} {
			list = append(list, Trigger{Text: at + " to=functions.", Rest: around("%s <|constrain|>json" + markMessage)})
		}
		return append(list, Trigger{Text: markStart + "assistant to=functions.", Rest: around("%s" + markChannel + "commentary <|constrain|>json" + markMessage)})
	}
	for _, s := range f.sections {
		t := Trigger{Text: s.open, Later: s.call && !f.loose}
		t.Rest = func(name string) string {
			whole := c.Before + c.Begin(name)
			if s.call {
				_, rest, _ := strings.Cut(whole, f.call)
				return rest
			}
			return strings.TrimPrefix(whole, c.Mark)
		}
		list = append(list, t)
	}
	return list
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
