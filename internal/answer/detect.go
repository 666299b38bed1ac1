package answer

import "strings"

// sign is what in a model's chat templates shows that it has a format: all of these.
type sign struct {
	format string
	texts  []string
}

// The first that fits is it.
var toolSigns = []sign{
	{"openai", []string{markChannel, markMessage}},
	{"deepseek_v4", []string{"<｜DSML｜tool_calls>"}},
	{"deepseek_v32", []string{"<｜DSML｜"}},
	{"deepseek_v3", []string{"<｜tool▁calls▁begin｜>", "```json"}},
	{"deepseek_v31", []string{"<｜tool▁calls▁begin｜>"}},
	{"kimi_k2", []string{"<|tool_calls_section_begin|>"}},
	{"step3", []string{"<steptml:invoke"}},
	{"minimax_m2", []string{"<minimax:tool_call>"}},
	{"seed_oss", []string{"<seed:tool_call>"}},
	{"glm45", []string{"<tool_call>", "<arg_key>"}},
	{"qwen3_coder", []string{"<tool_call>", "<function="}},
	{"xlam", []string{`"arguments": {"argument1"`}},
	{"mistral", []string{"[TOOL_CALLS]"}},
	{"granite", []string{"<|tool_call|>"}},
	{"internlm", []string{"<|action_start|>"}},
	{"jamba", []string{"<tool_calls>", "jamba"}},
	{"minimax", []string{"<tool_calls>"}},
	{"cohere", []string{"<|START_ACTION|>"}},
	{"granite-20b-fc", []string{"<function_call>"}},
	{"longcat", []string{"<longcat_tool_call>"}},
	{"hermes", []string{"<tool_call>"}},
	{"llama4_pythonic", []string{"<|python_start|>"}},
	{"pythonic", []string{"[func_name1(params_name1"}},
	{"phi4_mini_json", []string{"functools"}},
	{"phi4_mini_json", []string{"<|tool|>", "<|/tool|>"}},
	{"llama3_json", []string{"<|python_tag|>"}},
	{"llama3_json", []string{`"parameters": dictionary of argument name`}},
}

var thinkSigns = []sign{
	{"openai_gptoss", []string{markChannel, markMessage}},
	{"seed_oss", []string{"<seed:think>"}},
	{"kimi", []string{"◁think▷"}},
	{"cohere", []string{"<|START_THINKING|>"}},
	{"mistral", []string{"[THINK]"}},
	{"granite", []string{"Here is my thought process:"}},
	{"qwen3", []string{"</think>"}},
}

// Detect returns the formats of a model with these chat templates; nil where no sign of one is found.
// Reasoning of models that begin it themselves and of those whose template does is one format:
// the prompt shows which it is.
func Detect(templates []string) (*Format, *Think) {
	all := strings.Join(templates, "\n")
	return ToolFormat(find(toolSigns, all)), ThinkFormat(find(thinkSigns, all))
}

func find(signs []sign, text string) string {
next:
	for _, s := range signs {
		for _, t := range s.texts {
			if !strings.Contains(text, t) {
				continue next
			}
		}
		return s.format
	}
	return ""
}
