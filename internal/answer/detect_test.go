package answer_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/xpyd/xpyd/internal/answer"
)

// TestDetect: the formats of models, by what their chat templates show.
func TestDetect(t *testing.T) {
	read := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join("../tokenizer/testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	var qwen struct {
		Template string `json:"chat_template"`
	}
	if err := json.Unmarshal([]byte(read("qwen3.config.json")), &qwen); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, template, tool, think string }{
		{"Qwen3", qwen.Template, "hermes", "qwen3"},
		{"SmolLM2", read("templates/smollm2.jinja"), "", ""},
		{"Llama 3", read("templates/llama3-style.jinja"), "llama3_json", ""},
		{"Granite 3.0", read("templates/granite-3.0-instruct.jinja"), "granite", ""},
		{"Gemma", read("templates/gemma-it.jinja"), "", ""},
		{"Qwen3-Coder", "<tool_call>\n<function=x>", "qwen3_coder", ""},
		{"GLM-4.5", "<tool_call>{function-name}\n<arg_key> <think></think>", "glm45", "qwen3"},
		{"Mistral", "{{ '[TOOL_CALLS] [' }}", "mistral", ""},
		{"Magistral", "[TOOL_CALLS] [THINK]", "mistral", "mistral"},
		{"DeepSeek V3", "<｜tool▁calls▁begin｜> '\n```json' <think></think>", "deepseek_v3", "qwen3"},
		{"DeepSeek V3.1", "<｜tool▁calls▁begin｜> </think>", "deepseek_v31", "qwen3"},
		{"DeepSeek V3.2", "<｜DSML｜function_calls>", "deepseek_v32", ""},
		{"gpt-oss", "<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"},
		{"Kimi K2", "<|tool_calls_section_begin|>", "kimi_k2", ""},
		{"Phi-4-mini", "{{ '<|tool|>' + tools + '<|/tool|>' }}", "phi4_mini_json", ""},
		{"Jamba", "{# jamba #}<tool_calls>", "jamba", ""},
		{"InternLM", "<|action_start|><|plugin|>", "internlm", ""},
		{"xLAM", `[{"name": "func_name1", "arguments": {"argument1": "value1"}}]`, "xlam", ""},
		{"Llama 4", "<|python_start|>", "llama4_pythonic", ""},
		{"Llama 3.2", "[func_name1(params_name1=params_value1)]", "pythonic", ""},
		{"none", "", "", ""},
	} {
		f, th := answer.Detect([]string{"x", c.template})
		if f != answer.ToolFormat(c.tool) || th != answer.ThinkFormat(c.think) {
			t.Errorf("%s: %+v, %+v; want %q, %q", c.name, f, th, c.tool, c.think)
		}
	}
}

// TestPrompt: how a prompt leaves a model.
func TestPrompt(t *testing.T) {
	for text, want := range map[string][2]bool{
		"<|assistant|>":                   {false, false},
		"<|assistant|>\n<think>\n":        {true, false},
		"<think>\n\n</think>\n\n":         {false, true},
		"what is <think>?\n<|assistant|>": {false, false},
	} {
		if thinking, thought := answer.ThinkFormat("qwen3").Prompt(text); thinking != want[0] || thought != want[1] {
			t.Errorf("%q: %t, %t", text, thinking, thought)
		}
	}
	if a, b := answer.ThinkFormat("openai_gptoss").Prompt("x"); a || b {
		t.Error("channels are opened by a prompt")
	}
	var none *answer.Think
	if a, b := none.Prompt("<think>"); a || b {
		t.Error("no format is opened by a prompt")
	}
}

// TestMarks: special tokens that must be seen.
func TestMarks(t *testing.T) {
	for _, c := range []struct {
		tool, think, token string
		want               bool
	}{
		{"hermes", "qwen3", "<tool_call>", true}, {"hermes", "qwen3", "</think>", true}, {"hermes", "qwen3", "<|im_end|>", false}, {"hermes", "", "<think>", false},
		{"mistral", "", "[TOOL_CALLS]", true}, {"mistral", "", "[ARGS]", true}, {"mistral", "", "[CALL_ID]", true}, {"mistral", "", "</s>", false}, {"mistral", "", "", false},
		{"deepseek_v3", "", "<｜tool▁sep｜>", true}, {"deepseek_v3", "", "<｜end▁of▁sentence｜>", false}, {"internlm", "", "<|plugin|>", true},
		{"", "openai_gptoss", "<|message|>", true}, {"openai", "", "<|constrain|>", true}, {"openai", "", "<|endoftext|>", false},
	} {
		if got := answer.Marks(answer.ToolFormat(c.tool), answer.ThinkFormat(c.think), c.token); got != c.want {
			t.Errorf("%+v: %t", c, got)
		}
	}
}
