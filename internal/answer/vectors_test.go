package answer_test

// vector is a text that a model may write, and what is in it.
type vector struct {
	name, format, think string
	text                string
	tools               string // JSON; "": any may be called
	thinking, thought   bool
	single              bool

	content, reasoning string
	calls              []called
	stream             *got // of a stream, where that differs
}

func calls(list ...string) (out []called) {
	for i := 0; i < len(list); i += 2 {
		out = append(out, called{Name: list[i], Args: list[i+1]})
	}
	return out
}

const oneTool = `[{"type":"function","function":{"name":"look","parameters":{"type":"object","properties":{
	"id":{"type":"string"},"n":{"type":"integer"},"x":{"type":"number"},"on":{"type":"boolean"},"list":{"type":"array"},"map":{"type":"object"},
	"may":{"anyOf":[{"type":"integer"},{"type":"null"}]},"word":{"type":["string","null"]},"pick":{"enum":["a","b"]}}}}}]`

var vectors = []vector{
	// hermes
	{name: "one", format: "hermes", text: "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 2}}\n</tool_call>",
		calls: calls("weather", `{"city": "Oslo", "days": 2}`)},
	{name: "text before", format: "hermes", text: "I will look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>", content: "I will look.\n", calls: calls("weather", `{}`)},
	{name: "space before", format: "hermes", text: "\n\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n", calls: calls("f", `{}`)},
	{name: "two", format: "hermes", text: "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>\n<tool_call>\n{\"name\":\"g\",\"arguments\":{\"b\":[2,{\"c\":null}]}}\n</tool_call>",
		calls: calls("f", `{"a":1}`, "g", `{"b":[2,{"c":null}]}`)},
	{name: "text between and behind", format: "hermes", text: "A <tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call> B\n<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>\nC",
		content: "A  B\n\nC", calls: calls("f", `{}`, "g", `{}`)},
	{name: "the mark within a string", format: "hermes", text: `<tool_call>{"name":"log","arguments":{"html":"<b></tool_call></b>","q":"\"}{"}}</tool_call>`,
		calls: calls("log", `{"html":"<b></tool_call></b>","q":"\"}{"}`)},
	{name: "arguments first", format: "hermes", text: `<tool_call>{"arguments": {"name": "x"}, "name": "f"}</tool_call>`, calls: calls("f", `{"name": "x"}`)},
	{name: "no arguments", format: "hermes", text: `<tool_call>{"name": "ping"}</tool_call>`, calls: calls("ping", `{}`)},
	{name: "a list", format: "hermes", text: `<tool_call>[{"name":"f","arguments":{}},{"name":"g","arguments":{}}]</tool_call>`, calls: calls("f", `{}`, "g", `{}`)},
	{name: "none", format: "hermes", text: "Just text, with < and <tool and {\"name\": \"x\"}.", content: "Just text, with < and <tool and {\"name\": \"x\"}."},
	{name: "no JSON", format: "hermes", text: "<tool_call>\nnot JSON</tool_call>", content: "<tool_call>\nnot JSON</tool_call>"},
	{name: "bad arguments", format: "hermes", text: "<tool_call>{\"name\": \"f\", \"arguments\": oops}</tool_call>", content: "<tool_call>{\"name\": \"f\", \"arguments\": oops}</tool_call>"},
	{name: "a comma too many", format: "hermes", text: `<tool_call>{"name":"f","arguments":{"a":1,}}</tool_call>!`, content: `<tool_call>{"name":"f","arguments":{"a":1,}}</tool_call>!`,
		stream: &got{Content: "!", Calls: calls("f", `{"a":1,}}`)}},
	{name: "cut off", format: "hermes", text: `<tool_call>{"name":"f","arguments":{"a":"b`, content: `<tool_call>{"name":"f","arguments":{"a":"b`,
		stream: &got{Calls: calls("f", `{"a":"b`)}},
	{name: "cut off in the name", format: "hermes", text: `x<tool_call>{"name":"f`, content: `x<tool_call>{"name":"f`},
	{name: "no end mark", format: "hermes", text: "<tool_call>\n{\"name\":\"f\",\"arguments\":{}}", content: "<tool_call>\n{\"name\":\"f\",\"arguments\":{}}",
		stream: &got{Calls: calls("f", `{}`)}},
	{name: "a good one behind a bad one", format: "hermes", text: "<tool_call>{oops}</tool_call><tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>", content: "<tool_call>{oops}</tool_call>", calls: calls("g", `{}`)},
	{name: "a tool that was not offered", format: "hermes", tools: oneTool, text: `<tool_call>{"name":"gone","arguments":{}}</tool_call>`, calls: calls("gone", `{}`)},
	{name: "a known tool", format: "hermes", tools: oneTool, text: `<tool_call>{"name":"look","arguments":{}}</tool_call>`, calls: calls("look", `{}`)},
	{name: "unicode", format: "hermes", text: `<tool_call>{"name":"s\u00e9ance","arguments":{"ö":"世界 🌍"}}</tool_call>`, calls: calls("séance", `{"ö":"世界 🌍"}`)},
	{name: "only the first", format: "hermes", single: true, text: `<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"g","arguments":{}}</tool_call>`, calls: calls("f", `{}`)},
	{name: "serialized arguments", format: "hermes", text: `<tool_call>{"name":"f","arguments":"{\"a\": \"b\\n\\\"c\\\" \u00e9\ud83c\udf0d\"}"}</tool_call><tool_call>{"arguments":" {\n}","name":"g"}</tool_call>`,
		calls: calls("f", `{"a": "b\n\"c\" é\ud83c\udf0d"}`, "g", "{}")},
	{name: "a string", format: "hermes", text: `<tool_call>{"name":"f","arguments":"hello"}</tool_call><tool_call>{"name":"g","arguments":"{x}"}</tool_call>`, calls: calls("f", `"hello"`, "g", `"{x}"`)},
	{name: "badly serialized arguments", format: "hermes", text: `<tool_call>{"name":"f","arguments":"{\"a\": x}"}</tool_call>.`, content: `<tool_call>{"name":"f","arguments":"{\"a\": x}"}</tool_call>.`,
		stream: &got{Content: ".", Calls: calls("f", `{"a": x}"}`)}},
	{name: "other members", format: "hermes", text: `<tool_call>{"id":"7","name":"f","arguments":{"a":[1]},"why":{"x":[null]}}</tool_call>`, calls: calls("f", `{"a":[1]}`)},

	// json
	{name: "one", format: "json", text: `{"name": "f", "arguments": {"a": 1.5e3, "b": -0}}`, calls: calls("f", `{"a": 1.5e3, "b": -0}`)},
	{name: "parameters", format: "json", text: `{"name": "f", "parameters": {"x": true}}`, calls: calls("f", `{"x": true}`)},
	{name: "within text", format: "json", text: `Sure. {"name": "f", "arguments": {}} Done.`, content: "Sure.  Done.", calls: calls("f", `{}`)},
	{name: "a list", format: "json", text: "Here: [\n {\"name\": \"f\", \"arguments\": {}},\n {\"name\": \"g\", \"arguments\": {\"q\": \"]\"}}\n]", content: "Here: ", calls: calls("f", `{}`, "g", `{"q": "]"}`)},
	{name: "text behind a list", format: "json", text: `[{"name":"f","parameters":{"c":"P"}}] arr[0]`, content: " arr[0]", calls: calls("f", `{"c":"P"}`)},
	{name: "a bracket behind", format: "json", text: `{"name":"f","parameters":{}}] x`, content: "] x", calls: calls("f", `{}`)},
	{name: "two in text", format: "json", text: `A {"name":"f","arguments":{}} B {"name":"g","arguments":{}}`, content: "A  B ", calls: calls("f", `{}`, "g", `{}`)},
	{name: "other JSON", format: "json", text: `{"title": "x", "name": "y"} and [1, {"a": 2}] and {} and {x} and [`, content: `{"title": "x", "name": "y"} and [1, {"a": 2}] and {} and {x} and [`},
	{name: "name is no string", format: "json", text: `{"name": 5, "arguments": {}}`, content: `{"name": 5, "arguments": {}}`},
	{name: "no name", format: "json", text: `{"arguments": {"x": 1}}`, content: `{"arguments": {"x": 1}}`},
	{name: "other tools", format: "json", tools: oneTool, text: `{"name":"gone","arguments":{"x":1}}`, content: `{"name":"gone","arguments":{"x":1}}`},
	{name: "another tool behind the mark", format: "llama3_json", tools: oneTool, text: `<|python_tag|>{"name":"gone","parameters":{}}`, calls: calls("gone", `{}`)},
	{name: "another tool without it", format: "llama3_json", tools: oneTool, text: `{"name":"gone","parameters":{}}`, content: `{"name":"gone","parameters":{}}`},
	{name: "another tool", format: "internlm", tools: oneTool, text: `<|action_start|><|plugin|>{"name":"gone","parameters":{}}<|action_end|>`, content: `<|action_start|><|plugin|>{"name":"gone","parameters":{}}<|action_end|>`},

	{name: "no object", format: "json", text: `{"name":"f","arguments":"{\"a\":1}"}{"name":"g","arguments":42}{"name":"h","arguments":null}`,
		calls: calls("f", `{"a":1}`, "g", `42`, "h", `null`)},
	{name: "function", format: "json", text: `{"function": "f", "arguments": {}}[{"name":"g","function":"no","arguments":{}}]`, calls: calls("f", `{}`, "g", `{}`)},
	{name: "OpenAI's form", format: "json", text: `{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}} {"function": {"arguments": {}, "name": "g"}, "y": 1}`, calls: calls("f", `{"a": 1}`, "g", `{}`)},
	{name: "the last name counts", format: "json", text: `{"name":"f","name":"g","arguments":{"x":1,"x":2}}`, calls: calls("g", `{"x":1,"x":2}`)},
	{name: "others in a list", format: "json", text: `[{"name":"f","arguments":{}},{"not":"one"},{"name":"g","parameters":{"x":1}},{"key":[1]}]`, calls: calls("f", `{}`, "g", `{"x":1}`),
		stream: &got{Content: `{"not":"one"},,{"key":[1]}]`, Calls: calls("f", `{}`, "g", `{"x":1}`)}},
	{name: "cut off", format: "json", text: `{"name":"f","arguments":{"k":"v"`, content: `{"name":"f","arguments":{"k":"v"`, stream: &got{Calls: calls("f", `{"k":"v"`)}},

	// llama3_json
	{name: "tag", format: "llama3_json", text: `Results: <|python_tag|>{"name": "f", "parameters": {"q": "w"}}`, content: "Results: ", calls: calls("f", `{"q": "w"}`)},
	{name: "two", format: "llama3_json", text: `<|python_tag|>{"name":"f","parameters":{}};{"name":"g","parameters":{"y":2}}`, calls: calls("f", `{}`, "g", `{"y":2}`)},
	{name: "three", format: "llama3_json", text: `{"name":"f","parameters":{}} ; {"name":"g","parameters":{}}` + "\n" + `{"name":"h","parameters":{}}`, calls: calls("f", `{}`, "g", `{}`, "h", `{}`)},
	{name: "type", format: "llama3_json", text: `{"type": "function", "name": "f", "parameters": {"a": "1"}}`, calls: calls("f", `{"a": "1"}`)},
	{name: "no parameters", format: "llama3_json", text: `{"name": "f"}`, content: `{"name": "f"}`},
	{name: "invalid", format: "llama3_json", text: `<|python_tag|>{"name": invalid}`, content: `<|python_tag|>{"name": invalid}`},
	{name: "code", format: "llama3_json", text: `<|python_tag|>print(1)`, content: `<|python_tag|>print(1)`},
	{name: "text behind", format: "llama3_json", text: `{"name":"f","parameters":{}} I used {f}; see`, content: " I used {f}; see", calls: calls("f", `{}`)},

	// mistral
	{name: "list", format: "mistral", text: "Wait.\n[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": \"arr[0]\"}}, {\"name\": \"g\", \"arguments\": {}}]", content: "Wait.\n", calls: calls("f", `{"a": "arr[0]"}`, "g", `{}`)},
	{name: "arguments first", format: "mistral", text: `[TOOL_CALLS][{"arguments":{"name":"J"}, "name":"age"}]`, calls: calls("age", `{"name":"J"}`)},
	{name: "text behind", format: "mistral", text: `[TOOL_CALLS] [{"name":"f","arguments":{}}] arr[0]`, content: " arr[0]", calls: calls("f", `{}`)},
	{name: "names", format: "mistral", text: `Hi[TOOL_CALLS]add_it{"a": 3.5}[TOOL_CALLS]mul{"b": {"c": "}"}}`, content: "Hi", calls: calls("add_it", `{"a": 3.5}`, "mul", `{"b": {"c": "}"}}`)},
	{name: "args", format: "mistral", text: `[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123xyz[ARGS]{}`, calls: []called{{Name: "f", Args: `{"a": 1}`}, {Name: "g", Args: `{}`, ID: "abc123xyz"}}},
	{name: "prose", format: "mistral", text: "[TOOL_CALLS] But then nothing follows...", content: "[TOOL_CALLS] But then nothing follows..."},
	{name: "cut off", format: "mistral", text: `[TOOL_CALLS] [{"name": "f", "arguments": {}`, content: `[TOOL_CALLS] [{"name": "f", "arguments": {}`, stream: &got{Calls: calls("f", `{}`)}},
	{name: "nothing", format: "mistral", text: `[TOOL_CALLS]`, content: `[TOOL_CALLS]`},
	{name: "JSON without the mark", format: "mistral", text: `[{"name": "f", "arguments": {}}]`, content: `[{"name": "f", "arguments": {}}]`},

	// granite, phi, xlam, internlm, jamba and their like
	{name: "token", format: "granite", text: `<|tool_call|> [{"name": "f", "arguments": {"c": "T"}}]`, calls: calls("f", `{"c": "T"}`)},
	{name: "text", format: "granite", text: "So.\n<tool_call>[{\"arguments\":{\"c\":\"T\"},\"name\":\"f\"},{\"arguments\":{},\"name\":\"g\"}]\nMore.", content: "So.\n\nMore.", calls: calls("f", `{"c":"T"}`, "g", `{}`)},
	{name: "one", format: "granite-20b-fc", text: `<function_call> {"name": "f", "arguments": {"a": 1}}<function_call> {"name": "g", "arguments": {}}`, calls: calls("f", `{"a": 1}`, "g", `{}`)},
	{name: "two", format: "phi4_mini_json", text: `functools[{"name":"f","arguments":{"c":"T"}},{"name":"g","arguments":{}}]`, calls: calls("f", `{"c":"T"}`, "g", `{}`)},
	{name: "no calls", format: "phi4_mini_json", text: "functools[] is Python's, functools[ x ], functools.", content: "functools[] is Python's, functools[ x ], functools."},
	{name: "plain", format: "xlam", text: `[{"name":"f","arguments":{"a":1}}, {"name":"f","arguments":{"a":2}}]`, calls: calls("f", `{"a":1}`, "f", `{"a":2}`)},
	{name: "fenced", format: "xlam", text: "Yes.\n```json\n[{\"name\":\"f\",\"arguments\":{}}]\n```", content: "Yes.\n", calls: calls("f", `{}`)},
	{name: "other JSON in a fence", format: "xlam", text: "```json\n{\"a\": 1}\n```", content: "```json\n{\"a\": 1}\n```"},
	{name: "marks", format: "xlam", text: `A[TOOL_CALLS][{"name":"f","arguments":{}}]B<tool_call>[{"name":"g","arguments":{}}]</tool_call>`, content: "AB", calls: calls("f", `{}`, "g", `{}`)},
	{name: "thought", format: "xlam", think: "qwen3", text: `<think>hm</think>[{"name":"f","arguments":{}}]`, reasoning: "hm", calls: calls("f", `{}`)},
	{name: "one", format: "internlm", text: "Let me see. <|action_start|><|plugin|>{\"name\": \"f\", \"parameters\": {\"c\": \"T\"}}<|action_end|>", content: "Let me see. ", calls: calls("f", `{"c": "T"}`)},
	{name: "spaced", format: "internlm", text: "<|action_start|> <|plugin|>\n{\"name\": \"f\", \"parameters\": {}}<|action_end|>\n", calls: calls("f", `{}`)},
	{name: "interpreter", format: "internlm", text: "<|action_start|><|interpreter|>print(1)<|action_end|>", content: "<|action_start|><|interpreter|>print(1)<|action_end|>"},
	{name: "two", format: "jamba", text: " Here.\n<tool_calls>[\n    {\"name\": \"f\", \"arguments\": {\"c\": \"T\"}},\n    {\"name\": \"g\", \"arguments\": {}}\n]</tool_calls>", content: " Here.\n", calls: calls("f", `{"c": "T"}`, "g", `{}`)},
	{name: "lines", format: "minimax", text: "<tool_calls>\n{\"name\":\"f\",\"arguments\":{}}\n{\"name\":\"g\",\"arguments\":{\"a\":1}}\n</tool_calls>", calls: calls("f", `{}`, "g", `{"a":1}`)},
	{name: "one", format: "longcat", text: "<longcat_tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</longcat_tool_call>", calls: calls("f", `{}`)},
	{name: "own names", format: "cohere", text: "<|START_ACTION|>\n[\n {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"c\": \"T\"}},\n {\"tool_name\": \"ping\"}\n]<|END_ACTION|>", calls: calls("f", `{"c": "T"}`, "ping", `{}`)},

	// deepseek, kimi
	{name: "one", format: "deepseek_v3", text: "Wait.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"c\": \"T\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>\nIt is", content: "Wait.\n\nIt is", calls: calls("f", `{"c": "T"}`)},
	{name: "two", format: "deepseek_v3", text: "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"c\": \"```\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>",
		calls: calls("f", "{\"c\": \"```\"}", "g", `{}`)},
	{name: "another kind", format: "deepseek_v3", text: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>code<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
		content: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>code<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
	{name: "a bad one and a good one", format: "deepseek_v31", text: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{bad}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{\"t\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
		content: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{bad}<｜tool▁call▁end｜>", calls: calls("g", `{"t": 1}`),
		stream: &got{Calls: calls("f", `{bad}`, "g", `{"t": 1}`)}},
	{name: "two", format: "deepseek_v31", text: "Hm<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", content: "Hm", calls: calls("f", `{"a": 1}`, "g", `{}`)},
	{name: "two", format: "kimi_k2", text: "So.\n<|tool_calls_section_begin|>\n<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|>\n<|tool_call_begin|> functions.g:1 <|tool_call_argument_begin|> {\n\"b\": 2} <|tool_call_end|>\n<|tool_calls_section_end|>",
		content: "So.\n", calls: []called{{"f", `{"a": 1}`, "functions.f:0"}, {"g", `{"b": 2}`, "functions.g:1"}}},
	{name: "another space", format: "kimi_k2", text: "<|tool_calls_section_begin|><|tool_call_begin|>api.tools.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", calls: calls("api.tools.f", `{}`)},

	// tags
	{name: "one", format: "qwen3_coder", text: "Sure!<tool_call>\n<function=f>\n<parameter=city>\nOslo\n</parameter>\n<parameter=n>\n42\n</parameter>\n</function>\n</tool_call>", content: "Sure!", calls: calls("f", `{"city": "Oslo", "n": 42}`)},
	{name: "on a line", format: "qwen3_coder", text: "<tool_call><function=f><parameter=a>{\"n\": {\"v\": [1, 2]}}</parameter><parameter=b>true</parameter></function></tool_call><tool_call><function=g></function></tool_call>",
		calls: calls("f", `{"a": {"n": {"v": [1, 2]}}, "b": true}`, "g", `{}`)},
	{name: "what a value is", format: "qwen3_coder", text: "<tool_call><function=f><parameter=a>  two words  </parameter><parameter=b></parameter><parameter=c>   </parameter><parameter=d>None</parameter><parameter=e>True</parameter><parameter=f>\"a\" or 'b'</parameter><parameter=g>1.5</parameter><parameter=h>Tom &amp; <b>x</b></parameter></function></tool_call>",
		calls: calls("f", `{"a":"two words","b":"","c":"","d":null,"e":true,"f":"\"a\" or 'b'","g":1.5,"h":"Tom &amp; <b>x</b>"}`)},
	{name: "by the schema", format: "qwen3_coder", tools: oneTool, text: "<tool_call>\n<function=look>\n<parameter=id>\n 007\n\n</parameter>\n<parameter=n>\n7\n</parameter>\n<parameter=x>\n-1e3\n</parameter>\n<parameter=on>\nFalse\n</parameter>\n<parameter=list>\n['a', 2]\n</parameter>\n<parameter=map>\n{\"k\": \n1}\n</parameter>\n<parameter=may>\nnull\n</parameter>\n<parameter=word>\n12\n</parameter>\n<parameter=pick>\na\n</parameter>\n<parameter=else>\n[1]\n</parameter>\n</function>\n</tool_call>",
		calls: calls("look", `{"id":" 007\n","n":7,"x":-1e3,"on":false,"list":["a",2],"map":{"k":1},"may":null,"word":"12","pick":"a","else":[1]}`)},
	{name: "not by the schema", format: "qwen3_coder", tools: oneTool, text: "<tool_call><function=look><parameter=n>many</parameter><parameter=list>[a</parameter><parameter=on>1</parameter></function></tool_call>",
		calls: calls("look", `{"n":"many","list":"[a","on":"1"}`)},
	{name: "unknown", format: "qwen3_coder", tools: oneTool, text: "<tool_call><function=no><parameter=x>1</parameter></function></tool_call><tool_call><function=look></function></tool_call>",
		content: "<tool_call><function=no><parameter=x>1</parameter></function></tool_call>", calls: calls("look", `{}`)},
	{name: "cut off", format: "qwen3_coder", text: "<tool_call>\n<function=f>\n<parameter=city>Oslo</parameter>", content: "<tool_call>\n<function=f>\n<parameter=city>Oslo</parameter>", stream: &got{Calls: calls("f", `{"city": "Oslo"`)}},
	{name: "no parameter's end", format: "qwen3_coder", text: "<tool_call>\n<function=f>\n<parameter=a>\nDallas\n<parameter=b>\nTX\n</function>\n</tool_call>", calls: calls("f", `{"a": "Dallas", "b": "TX"}`)},
	{name: "no function's end", format: "qwen3_coder", text: "<tool_call>\n<function=f>\n<parameter=city>Oslo</parameter>\n</tool_call>", calls: calls("f", `{"city": "Oslo"}`)},
	{name: "no name", format: "qwen3_coder", text: "<tool_call>\n<function>\n<parameter=city>Oslo</parameter>\n</function>\n</tool_call>", content: "<tool_call>\n<function>\n<parameter=city>Oslo</parameter>\n</function>\n</tool_call>"},
	{name: "no first mark", format: "qwen3_coder", text: "<parameter=city>Oslo</parameter>\n</function>\n</tool_call>", content: "<parameter=city>Oslo</parameter>\n</function>\n</tool_call>"},
	{name: "no section", format: "qwen3_coder", text: "<function=f>\n<parameter=city>\nOslo\n</parameter>\n</function>", calls: calls("f", `{"city": "Oslo"}`)},
	{name: "unicode", format: "qwen3_coder", text: "<tool_call><function=天气><parameter=城市>北京</parameter></function></tool_call>", calls: calls("天气", `{"城市": "北京"}`)},
	{name: "one", format: "seed_oss", text: "<seed:tool_call>\n<function=f>\n<parameter=a>x</parameter>\n</function>\n</seed:tool_call>", calls: calls("f", `{"a": "x"}`)},
	{name: "lines", format: "glm45", text: "Wait.\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>n</arg_key>\n<arg_value>42</arg_value>\n</tool_call>\nIt", content: "Wait.\n\nIt", calls: calls("f", `{"city": "Oslo", "n": 42}`)},
	{name: "on a line", format: "glm45", text: "<tool_call>f<arg_key>a</arg_key><arg_value>None</arg_value><arg_key>b</arg_key><arg_value>[1, 2]</arg_value></tool_call><tool_call>g</tool_call>", calls: calls("f", `{"a": null, "b": [1, 2]}`, "g", `{}`)},
	{name: "two", format: "minimax_m2", text: "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">Oslo</parameter>\n<parameter name=\"b\">{\"x\": 1}</parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>", calls: calls("f", `{"a": "Oslo", "b": "{\"x\": 1}"}`, "g", `{}`)},
	{name: "as it stands", format: "minimax_m2", tools: oneTool, text: "<minimax:tool_call><invoke name=\"g\"><parameter name=\"t\">\ta &lt;b&gt; &amp;amp; &x; & </parameter><parameter name=\"n\"> 5 </parameter></invoke><invoke name=\"look\"><parameter name=\"id\">5 &gt; 4 &</parameter></invoke></minimax:tool_call>",
		calls: calls("g", `{"t": "\ta <b> &amp; &x; & ", "n": 5}`, "look", `{"id": "5 > 4 &"}`)},
	{name: "two", format: "step3", text: "T.\n<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"f\">\n<steptml:parameter name=\"q\">a < b && b > c</steptml:parameter>\n<steptml:parameter name=\"n\">10</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"g\"></steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
		content: "T.\n", calls: calls("f", `{"q": "a < b && b > c", "n": 10}`, "g", `{}`)},
	{name: "no name", format: "step3", text: "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"\"></steptml:invoke>", content: "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"\"></steptml:invoke>"},
	{name: "types", format: "deepseek_v32", text: "C.<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">42</｜DSML｜parameter>\n<｜DSML｜parameter name=\"b\" string=\"false\">{\"x\": [1]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n{\"d\": \"2\"}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
		content: "C.", calls: calls("f", `{"a": "42", "b": {"x": [1]}}`, "g", `{"d": "2"}`)},

	{name: "space before", format: "deepseek_v32", text: "Let me  check. \n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\"></｜DSML｜invoke></｜DSML｜function_calls>\n", content: "Let me  check.", calls: calls("f", `{}`)},
	{name: "text alone", format: "deepseek_v32", text: " No\n\ncalls. \n", content: " No\n\ncalls. \n"},
	{name: "a bad one first", format: "deepseek_v32", text: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"\">junk</｜DSML｜invoke>\n<｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"q\" string=\"true\">x</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
		content: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"\">junk</｜DSML｜invoke>", calls: calls("f", `{"q": "x"}`)},
	{name: "cut off", format: "deepseek_v32", text: "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"q\" string=\"true\">Tokyo<｜end▁of▁sentence｜>",
		content: "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"q\" string=\"true\">Tokyo<｜end▁of▁sentence｜>", stream: &got{Calls: calls("f", `{"q": "Tokyo`)}},
	{name: "its own block", format: "deepseek_v4", text: "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>", calls: calls("f", `{}`)},
	{name: "another's block", format: "deepseek_v4", text: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>", content: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"},
	{name: "an end alone", format: "deepseek_v31", text: "So.<｜tool▁calls▁end｜><｜end▁of▁sentence｜>", content: "So."},
	{name: "marks of text", format: "cohere", text: "<|START_RESPONSE|>I look.<|END_RESPONSE|>\n<|START_ACTION|>{\"tool_name\": \"f\", \"parameters\": {\"t\": \"<|END_ACTION|>\"}}<|END_ACTION|>\n<|START_TEXT|>Done.<|END_TEXT|>",
		content: "I look.\nDone.", calls: calls("f", `{"t": "<|END_ACTION|>"}`)},
	{name: "no calls", format: "cohere", text: "<|START_RESPONSE|>Hi <|x|>.<|END_RESPONSE|>", content: "Hi <|x|>."},

	// Python
	{name: "two", format: "pythonic", text: `[f(city="Oslo", n=5), g.h(z='UTC')]`, calls: calls("f", `{"city": "Oslo", "n": 5}`, "g.h", `{"z": "UTC"}`)},
	{name: "words", format: "pythonic", text: `[f(a=True, b=False, c=None, d=-1.5, e=1_000, f=0x1F, g=.5, h=1e3, i=[], j={}, k=())]`, calls: calls("f", `{"a":true,"b":false,"c":null,"d":-1.5,"e":1000,"f":31,"g":0.5,"h":1e3,"i":[],"j":{},"k":[]}`)},
	{name: "nested", format: "pythonic", text: "[f(\n a=[[1, 2], (3,),], b={'k': {\"x\": True, 2: [None]}},\n)]", calls: calls("f", `{"a": [[1, 2], [3]], "b": {"k": {"x": true, "2": [null]}}}`)},
	{name: "strings", format: "pythonic", text: `[f(a='Martha\'s \"x\"', b="It's [a] (b)\n\x41\u00e9\U0001F30D\q", c='', d='''q'q"''', e="")]`, calls: calls("f", `{"a": "Martha's \"x\"", "b": "It's [a] (b)\nAé🌍\\q", "c": "", "d": "q'q\"", "e": ""}`)},
	{name: "marks and text", format: "pythonic", text: "Hm. <|python_start|>[f(x=1)]<|python_end|> So.", content: "Hm.  So.", calls: calls("f", `{"x": 1}`)},
	{name: "in text", format: "pythonic", text: "Do it: [f()]\nOK", content: "Do it: \nOK", calls: calls("f", `{}`)},
	{name: "brackets", format: "pythonic", text: "[1](x) and [a, b] and [f", content: "[1](x) and [a, b] and [f"},
	{name: "cut off", format: "pythonic", text: `[f(a="v`, content: `[f(a="v`, stream: &got{Calls: calls("f", `{"a": "v`)}},
	{name: "bare words", format: "pythonic", text: `[f(a=b)] x`, content: `[f(a=b)] x`, stream: &got{Calls: calls("f", `{"a": b)] x`)}},
	{name: "not offered", format: "llama4_pythonic", tools: oneTool, text: "<|python_start|>[gone(x=1)]<|python_end|>[no(n=1)][look(n=1)]", content: "[no(n=1)]", calls: calls("gone", `{"x": 1}`, "look", `{"n": 1}`)},

	// harmony
	{name: "all", format: "openai", think: "openai_gptoss", text: "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"c\": \"T\"}",
		reasoning: "Need the weather.", calls: calls("f", `{"c": "T"}`)},
	{name: "final", format: "openai", think: "openai_gptoss", text: "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>The answer.<|return|>", reasoning: "a", content: "The answer."},
	{name: "preamble", format: "openai", think: "openai_gptoss", text: "<|channel|>commentary<|message|>Plan: 1<|end|>\n<|channel|>commentary to=functions.f<|constrain|>json<|message|>{\"x\": 1}<|call|>\n<|channel|>final<|message|>Done.<|return|>",
		content: "Plan: 1Done.", calls: calls("f", `{"x": 1}`)},
	{name: "recipient before the channel", format: "openai", text: "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", calls: calls("f", `{}`)},
	{name: "other spaces", format: "openai", text: "<|channel|>commentary to=api.users.create<|constrain|>json<|message|>{}<|call|>commentary\n<|channel|>commentary to=tools.add<|message|>{\"x\": 10}<|call|>", content: "commentary\n", calls: calls("create", `{}`, "add", `{"x": 10}`)},
	{name: "text first", format: "openai", text: "So.\n<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>", content: "So.\n", calls: calls("f", `{}`)},
	{name: "not offered", format: "openai", tools: oneTool, text: "<|channel|>commentary to=functions.no<|message|>{}<|call|><|channel|>commentary to=browser.look<|message|>{}<|call|>", calls: calls("no", `{}`, "look", `{}`)},
	{name: "no function", format: "openai", tools: oneTool, text: "<|channel|>commentary to=python<|message|>1+1<|call|>", content: "1+1"},
	{name: "reasoning alone", think: "openai_gptoss", text: "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>", reasoning: "a", content: "{}"},

	// reasoning
	{name: "both", think: "qwen3", text: "<think>\nHm.\n</think>\n\nYes.", reasoning: "\nHm.\n", content: "\n\nYes."},
	{name: "none", think: "qwen3", text: "No <think> here</think>.", content: "No <think> here</think>."},
	{name: "opened by the prompt", think: "qwen3", thinking: true, text: "Hm.</think>Yes.", reasoning: "Hm.", content: "Yes."},
	{name: "opened twice", think: "qwen3", thinking: true, text: "\n<think>Hm.</think>Yes.", reasoning: "Hm.", content: "Yes."},
	{name: "closed by the prompt", think: "deepseek_r1", thought: true, text: "Yes.", content: "Yes."},
	{name: "no mark", think: "deepseek_r1", text: "Hm.</think>Yes.", reasoning: "Hm.", content: "Yes."},
	{name: "no end", think: "deepseek_r1", text: "no marks at all </thin", reasoning: "no marks at all </thin"},
	{name: "half a mark", think: "qwen3", text: "</answer", content: "</answer"},
	{name: "cut off", think: "qwen3", text: "<think>trunc", reasoning: "trunc"},
	{name: "and a call", think: "qwen3", format: "hermes", text: "<think>I may <tool_call>.</think>\n\n<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>", reasoning: "I may <tool_call>.", calls: calls("f", `{}`)},
	{name: "a call ends it", think: "qwen3", format: "hermes", thinking: true, text: "I <tool_call> now.\n<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>\nSo", reasoning: "I <tool_call> now.\n", content: "\nSo", calls: calls("f", `{}`)},
	{name: "no call ends it", think: "deepseek_v3", format: "hermes", thinking: true, text: "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call></think>x", reasoning: "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>", content: "x"},
	{name: "a thought of a call at the end", think: "qwen3", format: "qwen3_coder", thinking: true, text: "<tool_call>\n<function=f>\n<param", reasoning: "<tool_call>\n<function=f>\n<param",
		stream: &got{Content: "<param", Calls: calls("f", "")}},
	{name: "v3", think: "deepseek_v3", text: "<think>a</think>b", reasoning: "a", content: "b"},
	{name: "glm", think: "glm45", text: "\n<think>a</think>\nb", reasoning: "a", content: "\nb"},
	{name: "kimi k2", think: "kimi_k2", text: "<think>a</think>b", reasoning: "a", content: "b"},
	{name: "a call within", think: "kimi_k2", format: "kimi_k2", text: "<think>a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", reasoning: "a", calls: calls("f", `{}`)},
	{name: "kimi", think: "kimi", text: "◁think▷a◁/think▷b", reasoning: "a", content: "b"},
	{name: "step3", think: "step3", text: "a</think>b", reasoning: "a", content: "b"},
	{name: "minimax", think: "minimax_m2", text: "a</think>b", reasoning: "a", content: "b"},
	{name: "nemotron", think: "nemotron", text: "<think>a</think>b", reasoning: "a", content: "b"},
	{name: "mistral", think: "mistral", text: "[THINK]a[/THINK]b", reasoning: "a", content: "b"},
	{name: "granite", think: "granite", text: "Here is my thought process: a Here is my response: b", reasoning: " a ", content: " b"},
	{name: "cohere", think: "cohere", text: "<|START_THINKING|>a<|END_THINKING|>b", reasoning: "a", content: "b"},
	{name: "seed", think: "seed_oss", text: "<seed:think>a</seed:think>b", reasoning: "a", content: "b"},
	{name: "nothing to do", text: "a <think>b</think>", content: "a <think>b</think>"},
	{name: "empty", format: "hermes", think: "qwen3"},
}
