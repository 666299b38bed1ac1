package openai_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// TestNullIsAbsent: as with OpenAI, a field that is null is one that is not given.
func TestNullIsAbsent(t *testing.T) {
	both := []string{"model", "user", "n", "seed", "stream", "stream_options", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
		"ignore_eos", "skip_special_tokens", "temperature", "top_p", "min_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty",
		"logit_bias", "prompt_logprobs", "return_token_ids", "cache_salt", "cache_priority", "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "max_tokens", "logprobs",
		"add_special_tokens", "response_format"}
	f := func(parse func(body string) (any, *openai.Error), rest string, fields ...string) {
		t.Helper()
		want, err := parse("{" + rest + "}")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range append(fields, both...) {
			if got, err := parse(fmt.Sprintf(`{%q:null,%s}`, name, rest)); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s null: %+v, %v; absent: %+v", name, got, err, want)
			}
		}
	}
	f(func(body string) (any, *openai.Error) { return openai.ParseCompletion([]byte(body), 0) },
		`"prompt":"x"`, "echo", "best_of", "suffix")
	f(func(body string) (any, *openai.Error) { return openai.ParseChat([]byte(body), 0) },
		`"messages":[{"role":"user","content":"x"}]`, "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "add_generation_prompt",
		"continue_final_message", "chat_template_kwargs", "modalities")
}

// TestEscapes: every escape is read as encoding/json reads it. Lone surrogates are
// refused, which TestBadCompletions has.
func TestEscapes(t *testing.T) {
	list := []string{`\"`, `\\`, `\/`, `\b`, `\f`, `\n`, `\r`, `\t`, `\u0000`, `\u001f`, `\uD83D\uDE00`, `\ud83d\ude00`}
	for _, d := range "019afAF" {
		for at := range 4 {
			list = append(list, `\u`+strings.Repeat("1", at)+string(d)+strings.Repeat("0", 3-at))
		}
	}
	for _, bad := range "/:@Gg`" { // beside each range of hex digits
		for at := range 4 {
			list = append(list, `\u`+strings.Repeat("1", at)+string(bad)+strings.Repeat("0", 3-at))
		}
	}
	for _, e := range list {
		var want struct{ Prompt string }
		bad := json.Unmarshal([]byte(`{"prompt":"a`+e+`z"}`), &want)
		got, err := openai.ParseCompletion([]byte(`{"prompt":"a`+e+`z"}`), 0)
		if (err == nil) != (bad == nil) || err == nil && got.Prompts[0].Text != want.Prompt {
			t.Errorf("%s: %+v, %v; encoding/json has %q, %v", e, got, err, want.Prompt, bad)
		}
	}
}

// TestMostEntries: of lists with a limit, what is at the limit is taken and one more is not.
func TestMostEntries(t *testing.T) {
	const most = 1024
	for _, n := range []int{most, most + 1} {
		ids, biases := make([]string, n), make([]string, n)
		for i := range n {
			ids[i], biases[i] = strconv.Itoa(i), fmt.Sprintf(`"%d":1`, i)
		}
		for _, body := range []string{
			`{"prompt":"x","stop_token_ids":[` + strings.Join(ids, ",") + `]}`,
			`{"prompt":"x","logit_bias":{` + strings.Join(biases, ",") + `}}`,
		} {
			if _, err := openai.ParseCompletion([]byte(body), 0); (err == nil) != (n <= most) {
				t.Errorf("%d entries of %.40s: %v", n, body, err)
			}
		}
	}
}
