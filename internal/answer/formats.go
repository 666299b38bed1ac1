package answer

import (
	"maps"
	"slices"
	"strings"
	"unicode"
)

// Format is a tool format: how a model writes calls.
type Format struct {
	Name string

	sections []section // marks that begin calls; what comes before is content
	bare     string    // bytes that may begin a call without a mark
	kind     kind
	known    bool     // a call of a tool that was not offered is none; without a mark it never is one
	drop     []string // marks that are no text either
	trim     bool     // whitespace before a call is none of the text before
	eos      string   // ends a value that has no other end
	IDLength int      // of a call's ID, of letters and digits alone; 0: OpenAI's

	// Of kindJSON.
	needArgs bool // an object without arguments is no call
	several  bool // calls may follow each other, with a semicolon between them

	// Of names and tags.
	call    string                         // begins each call of a section; "": the section's own mark does
	noise   []string                       // marks between calls that say nothing
	nameEnd []string                       //
	stay    []string                       // of nameEnd, that belong to what follows
	notName func(rune) bool                //
	id      func(string) (id, name string) // splits what stands for the name; nil: it is the name
	fence   []string                       // around a call's JSON
	callEnd string
	named   step // kindJSON: what no JSON is, is this

	keyOpen, valueOpen, valueEnd string
	valueStop                    []string // what also ends a value, whose own end is missing
	keyEnd                       []string
	newlines                     bool // one stands at each end of a string
	flat                         bool // without a schema, a value is a number, a word, or text as it stands
	entities                     bool // values have XML's
	loose                        bool // a call's mark needs no section's

	// Made by prepare.
	start, behindName step
	valueEnds         []string // valueEnd, eos and valueStop
	first             [256]bool
}

// section is what a mark begins. call: it is a call's own mark, which needs no other before it.
type section struct {
	open, close string
	call        bool
}

type kind uint8

const (
	kindJSON   kind = iota // objects with a name and arguments, alone or in a list
	kindNamed              // a name, a mark, JSON
	kindTagged             // a name, tags
	kindPython             // [f(a=1)]
	kindHarmony
)

var formats = prepare([]*Format{
	{Name: "hermes", sections: []section{{open: "<tool_call>", close: "</tool_call>"}}, several: true},
	{Name: "json", bare: "{[", several: true},
	{Name: "llama3_json", sections: []section{{open: "<|python_tag|>"}}, bare: "{", needArgs: true, several: true},
	{Name: "mistral", sections: []section{{open: "[TOOL_CALLS]"}}, IDLength: 9, named: (*Parser).name, nameEnd: []string{"[ARGS]", "{"}, stay: []string{"{"},
		id: mistralID},
	{Name: "granite", sections: []section{{open: "<|tool_call|>"}, {open: "<tool_call>"}}},
	{Name: "granite-20b-fc", sections: []section{{open: "<function_call>"}}},
	{Name: "phi4_mini_json", sections: []section{{open: "functools"}}},
	{Name: "xlam", sections: []section{{open: "```json", close: "```"}, {open: "[TOOL_CALLS]"}, {open: "<tool_call>", close: "</tool_call>"}}, bare: "["},
	{Name: "internlm", known: true, sections: []section{{open: "<|action_start|><|plugin|>", close: "<|action_end|>"}, {open: "<|action_start|> <|plugin|>", close: "<|action_end|>"}}},
	{Name: "jamba", sections: []section{{open: "<tool_calls>", close: "</tool_calls>"}}},
	{Name: "minimax", sections: []section{{open: "<tool_calls>", close: "</tool_calls>"}}, several: true},
	{Name: "longcat", sections: []section{{open: "<longcat_tool_call>", close: "</longcat_tool_call>"}}},
	{Name: "cohere", sections: []section{{open: "<|START_ACTION|>", close: "<|END_ACTION|>"}},
		drop: []string{"<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"}},

	{Name: "deepseek_v3", kind: kindNamed, sections: []section{{open: "<｜tool▁calls▁begin｜>", close: "<｜tool▁calls▁end｜>"}},
		call: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", nameEnd: []string{"\n"}, fence: []string{"```json", "```"}, callEnd: "<｜tool▁call▁end｜>",
		drop: deepseekEnds},
	{Name: "deepseek_v31", kind: kindNamed, sections: []section{{open: "<｜tool▁calls▁begin｜>", close: "<｜tool▁calls▁end｜>"}},
		call: "<｜tool▁call▁begin｜>", nameEnd: []string{"<｜tool▁sep｜>"}, callEnd: "<｜tool▁call▁end｜>", drop: deepseekEnds},
	{Name: "kimi_k2", kind: kindNamed, sections: []section{{open: "<|tool_calls_section_begin|>", close: "<|tool_calls_section_end|>"}},
		call: "<|tool_call_begin|>", nameEnd: []string{"<|tool_call_argument_begin|>"}, callEnd: "<|tool_call_end|>", id: kimiID, notName: func(r rune) bool { return r != ' ' && notName(r) }},

	{Name: "qwen3_coder", kind: kindTagged, known: true, loose: true, sections: []section{{open: "<tool_call>", close: "</tool_call>"}}, call: "<function=", nameEnd: []string{">"}, callEnd: "</function>",
		keyOpen: "<parameter=", keyEnd: []string{">"}, valueEnd: "</parameter>", valueStop: []string{"\n<parameter=", "\n</function>"}, newlines: true},
	{Name: "seed_oss", kind: kindTagged, sections: []section{{open: "<seed:tool_call>", close: "</seed:tool_call>"}}, call: "<function=", nameEnd: []string{">"}, callEnd: "</function>",
		keyOpen: "<parameter=", keyEnd: []string{">"}, valueEnd: "</parameter>", valueStop: []string{"\n<parameter=", "\n</function>"}},
	{Name: "glm45", kind: kindTagged, sections: []section{{open: "<tool_call>", close: "</tool_call>"}}, nameEnd: []string{"\n", "<arg_key>", "</tool_call>"}, stay: []string{"<arg_key>", "</tool_call>"},
		callEnd: "</tool_call>", keyOpen: "<arg_key>", keyEnd: []string{"</arg_key>"}, valueOpen: "<arg_value>", valueEnd: "</arg_value>"},
	{Name: "minimax_m2", kind: kindTagged, sections: []section{{open: "<minimax:tool_call>", close: "</minimax:tool_call>"}}, call: `<invoke name="`, nameEnd: []string{`">`}, callEnd: "</invoke>",
		keyOpen: `<parameter name="`, keyEnd: []string{`">`}, valueEnd: "</parameter>", flat: true, entities: true},
	{Name: "step3", kind: kindTagged, sections: []section{{open: "<｜tool_calls_begin｜>", close: "<｜tool_calls_end｜>"}}, call: `<steptml:invoke name="`,
		noise: []string{"<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"}, nameEnd: []string{`">`}, callEnd: "</steptml:invoke>",
		keyOpen: `<steptml:parameter name="`, keyEnd: []string{`">`}, valueEnd: "</steptml:parameter>"},
	dsml("deepseek_v32", "function_calls"),
	dsml("deepseek_v4", "tool_calls"),

	{Name: "pythonic", kind: kindPython, sections: []section{{open: "<|python_start|>", close: "<|python_end|>"}}, bare: "["},
	{Name: "llama4_pythonic", kind: kindPython, sections: []section{{open: "<|python_start|>", close: "<|python_end|>"}}, bare: "["},

	{Name: "openai", kind: kindHarmony},
})

// deepseekEnds may stand alone.
var deepseekEnds = []string{"<｜tool▁calls▁end｜>", deepseekEOS}

const deepseekEOS = "<｜end▁of▁sentence｜>"

// dsml is the format of DeepSeek's newer models, which differ by a word.
func dsml(name, block string) *Format {
	return &Format{Name: name, kind: kindTagged, sections: []section{{open: "<｜DSML｜" + block + ">", close: "</｜DSML｜" + block + ">"}},
		call: `<｜DSML｜invoke name="`, nameEnd: []string{`">`}, callEnd: "</｜DSML｜invoke>", keyOpen: `<｜DSML｜parameter name="`,
		keyEnd: []string{`" string="true">`, `" string="false">`, `">`}, valueEnd: "</｜DSML｜parameter>", trim: true,
		eos: deepseekEOS, drop: []string{"</｜DSML｜" + block + ">", deepseekEOS}}
}

func prepare(list []*Format) []*Format {
	for _, f := range list {
		if f.call != "" {
			f.sections = append(f.sections, section{f.call, f.sections[0].close, true})
		}
		f.valueEnds = append([]string{f.valueEnd, f.eos}, f.valueStop...)
		for _, m := range f.drop {
			f.first[m[0]] = true
		}
		for _, s := range f.sections {
			f.first[s.open[0]] = true
		}
		for i := range len(f.bare) {
			f.first[f.bare[i]] = true
		}
		if f.notName == nil {
			f.notName = notName
		}
		switch f.kind {
		case kindJSON:
			f.start, f.behindName = (*Parser).startJSON, (*Parser).namedArgs
		case kindNamed:
			f.start, f.behindName = (*Parser).nextCall, (*Parser).namedArgs
		case kindTagged:
			f.start, f.behindName = (*Parser).nextCall, (*Parser).taggedBegin
			if f.call == "" {
				f.start = (*Parser).name
			}
		case kindPython:
			f.start = (*Parser).pyCall
		}
	}
	return list
}

// notName reports whether no name has that character.
func notName(r rune) bool {
	return unicode.IsSpace(r) || unicode.IsControl(r) || strings.ContainsRune("<>{}()\"'`,;", r)
}

// kimiID splits functions.NAME:INDEX, which its template wants back as the call's ID.
func kimiID(s string) (id, name string) {
	s = strings.TrimSpace(s)
	name, _, _ = strings.Cut(s, ":")
	return s, strings.TrimPrefix(name, "functions.")
}

// mistralID splits NAME[CALL_ID]ID.
func mistralID(s string) (id, name string) {
	name, id, _ = strings.Cut(s, "[CALL_ID]")
	return id, name
}

// aliases are other names that vLLM has for some of them.
var aliases = map[string]string{"qwen3_xml": "qwen3_coder", "glm47": "glm45", "granite4": "hermes", "llama4_json": "llama3_json", "hunyuan_a13b": "jamba"}

// ToolFormat returns the tool format of that name; nil: there is none.
func ToolFormat(name string) *Format {
	if real, ok := aliases[name]; ok {
		name = real
	}
	for _, f := range formats {
		if f.Name == name {
			return f
		}
	}
	return nil
}

// ToolNames lists the tool formats.
func ToolNames() (list []string) {
	for _, f := range formats {
		list = append(list, f.Name)
	}
	return append(list, slices.Sorted(maps.Keys(aliases))...)
}

// marks are all marks of a tool format.
func (f *Format) marks() []string {
	if f == nil {
		return nil
	}
	if f.kind == kindHarmony {
		return harmonyMarks
	}
	list := append([]string{f.call, f.callEnd, f.keyOpen, f.valueOpen, f.valueEnd}, f.nameEnd...)
	list = append(append(append(list, f.noise...), f.keyEnd...), f.fence...)
	for _, s := range f.sections {
		list = append(list, s.open, s.close)
	}
	if f.id != nil {
		list = append(list, "[CALL_ID]")
	}
	return list
}

var harmonyMarks = []string{markStart, markChannel, markMessage, markEnd, markCall, markReturn, "<|constrain|>"}

// Marks reports whether a special token's text is part of a mark of either format, so that it must be
// seen in the text.
func Marks(f *Format, t *Think, token string) bool {
	list := f.marks()
	if t != nil {
		if list = append(list, t.start, t.end); t.harmony {
			list = append(list, harmonyMarks...)
		}
	}
	for _, m := range list {
		if token != "" && strings.Contains(m, token) {
			return true
		}
	}
	return false
}
