package openai_test

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// TestLimits: what is just within a limit is taken.
func TestLimits(t *testing.T) {
	for _, body := range []string{
		`{"prompt":"x","n":128}`, `{"prompt":"x","n":1}`, `{"prompt":"x","logprobs":20}`, `{"prompt":"x","logprobs":0}`,
		`{"prompt":"x","stop":"` + strings.Repeat("x", 1024) + `"}`,
		`{"prompt":"x","stop":[` + times(16, `"a"`) + `]}`,
		`{"prompt":[` + times(256, `"a"`) + `]}`, `{"prompt":[` + times(256, `[1]`) + `]}`,
		`{"prompt":[511,0]}`, `{"prompt":"x","logit_bias":{"511":100,"0":-100}}`,
		`{"prompt":"x","a":` + strings.Repeat("[", 63) + strings.Repeat("]", 63) + `}`,
		`{"prompt":"x","temperature":2}`, `{"prompt":"x","temperature":0}`, `{"prompt":"x","top_p":1}`,
		`{"prompt":"x","presence_penalty":2,"frequency_penalty":-2}`, `{"prompt":"x","presence_penalty":-2,"frequency_penalty":2}`,
		`{"prompt":"x","cache_priority":0}`, `{"prompt":"x","cache_priority":100}`, `{"prompt":"x","max_tokens":0,"echo":true}`, `{"prompt":"x","max_tokens":1}`,
		`{"prompt":"x","max_tokens":2147483647,"min_tokens":2147483647,"top_k":2147483647}`, `{"prompt":"x","max_tokens":4,"min_tokens":4}`,
		`{"prompt":"x","prompt_logprobs":20}`, `{"prompt":"x","repetition_penalty":2}`, `{"prompt":"x","seed":9223372036854775807}`, `{"prompt":"x","seed":9007199254740992.0}`,
		`{"prompt":"x","use_beam_search":false,"best_of":1,"suffix":"","bad_words":[],"guided_json":null,"response_format":{"type":"text"}}`,
		`{"prompt":"x","stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`, `{"prompt":"x","stream_options":null}`,
		`{"prompt":"x","min_p":1}`, `{"prompt":"x","min_p":0}`, `{"prompt":"x","top_k":-1}`, `{"prompt":"x","top_k":0}`, `{"prompt":"x","top_k":1}`,
	} {
		if _, err := openai.ParseCompletion([]byte(body), 512); err != nil {
			t.Errorf("%.80s: %v", body, err)
		}
	}
}

// times is a list's items: one, n times.
func times(n int, one string) string { return strings.TrimSuffix(strings.Repeat(one+",", n), ",") }

// TestCutShort: a body that ends anywhere is refused, and nothing behind it is read.
func TestCutShort(t *testing.T) {
	const body = `{"model":"m","prompt":[[1,2],[3]],"stream":true,"echo":false,"stop":["a","\u00e9"],"seed":-1.5e3,"logit_bias":{"1":2},"user":null,"a":[true,false,null]`
	for n := range len(body) + 1 {
		b := slices.Clip([]byte(body[:n]))
		if _, err := openai.ParseCompletion(b, 0); err == nil {
			t.Errorf("%s is parsed", b)
		}
		if _, err := openai.Scan(b); err == nil {
			t.Errorf("%s is scanned", b)
		}
	}
}

func TestBadCompletions(t *testing.T) {
	long := strings.Repeat("x", 1025)
	deep := strings.Repeat("[", 65) + strings.Repeat("]", 65)
	for _, c := range []struct{ body, param, message string }{
		{``, "", "unexpected end"},
		{`{`, "", "expected a string"},
		{`[]`, "", "must be a JSON object"},
		{`"x"`, "", "must be a JSON object"},
		{`{"prompt":"x"} {}`, "", "trailing data"},
		{"{\"prompt\":\"x\"}\x00", "", "trailing data"},
		{`{"prompt":"x",}`, "", "expected a string"},
		{`{"prompt" "x"}`, "", "expected ':'"},
		{`{"prompt":"x" "n":1}`, "", "expected ','"},
		{`{'prompt':"x"}`, "", "expected a string"},
		{`{"prompt":"x","a":NaN}`, "", "unexpected character"},
		{`{"prompt":"x","temperature":NaN}`, "", "unexpected character"},
		{`{"prompt":"x","a":Infinity}`, "", "unexpected character"},
		{`{"prompt":"x","a":-Infinity}`, "", "invalid number"},
		{`{"prompt":"x","a":01}`, "", "expected ','"},
		{`{"prompt":"x","a":1.}`, "", "invalid number"},
		{`{"prompt":"x","a":1e}`, "", "invalid number"},
		{`{"prompt":"x","a":tru}`, "", "invalid literal"},
		{`{"prompt":"x","a":` + deep + `}`, "", "nests deeper"},
		{"{\"prompt\":\"\xff\"}", "", "not valid UTF-8"},
		{"{\"prompt\":\"a\nb\"}", "", "control character"},
		{`{"prompt":"\ud800"}`, "", "lone surrogate"},
		{`{"prompt":"\udc00\ud800"}`, "", "lone surrogate"},
		{`{"prompt":"\u12g4"}`, "", "invalid \\u escape"},
		{`{"prompt":"\x"}`, "", "invalid escape"},
		{`{"prompt":"abc`, "", "unterminated"},
		{`{}`, "prompt", "required"},
		{`{"prompt":null}`, "prompt", "required"},
		{`{"prompt":[]}`, "prompt", "empty"},
		{`{"prompt":[[]]}`, "prompt", "empty"},
		{`{"prompt":3}`, "prompt", "not a number"},
		{`{"prompt":{"a":1}}`, "prompt", "not an object"},
		{`{"prompt":["a",1]}`, "prompt", "prompt[1]"},
		{`{"prompt":[1,"a"]}`, "prompt", "prompt[1]"},
		{`{"prompt":[1,2,3,"a"]}`, "prompt", "prompt[3]"},
		{`{"prompt":[1, 2 ,512,3]}`, "prompt", "prompt[2]"},
		{`{"prompt":[1,2,-1]}`, "prompt", "prompt[2]"},
		{`{"prompt":[1,2,03]}`, "", "at byte"},
		{`{"prompt":[1,2,]}`, "", "at byte"},
		{`{"prompt":[1,2`, "", "at byte"},
		{`{"prompt":["a",[1]]}`, "prompt", "prompt[1]"},
		{`{"prompt":[[1],"a"]}`, "prompt", "prompt[1]"},
		{`{"prompt":[[1,"a"]]}`, "prompt", "prompt[0][1]"},
		{`{"prompt":[true]}`, "prompt", "prompt[0]"},
		{`{"prompt":[-1]}`, "prompt", "prompt[0]"},
		{`{"prompt":[1.5]}`, "prompt", "integer"},
		{`{"prompt":[512]}`, "prompt", "between 0 and 511"},
		{`{"prompt":[99999999999999999999]}`, "prompt", "prompt[0]"},
		{`{"prompt":"x","model":3}`, "model", "string"},
		{`{"prompt":"x","stream":"yes"}`, "stream", "boolean"},
		{`{"prompt":"x","stream":1}`, "stream", "boolean"},
		{`{"prompt":"x","n":0}`, "n", "between 1 and 128"},
		{`{"prompt":"x","n":129}`, "n", "between 1 and 128"},
		{`{"prompt":"x","n":"2"}`, "n", "integer"},
		{`{"prompt":"x","n":1.5}`, "n", "integer"},
		{`{"prompt":"x","n":true}`, "n", "integer"},
		{`{"prompt":"x","max_tokens":0}`, "max_tokens", "between 1 and 2147483647, not 0"},
		{`{"prompt":"x","max_tokens":-1}`, "max_tokens", "between 0 and 2147483647, not "},
		{`{"prompt":"x","max_tokens":1e400}`, "max_tokens", "between 0 and 2147483647, not "},
		{`{"prompt":"x","max_tokens":4,"min_tokens":5}`, "min_tokens", "above max_tokens"},
		{`{"prompt":"x","temperature":-0.1}`, "temperature", "between 0 and 2"},
		{`{"prompt":"x","temperature":1e999}`, "temperature", "between 0 and 2"},
		{`{"prompt":"x","temperature":"hot"}`, "temperature", "number"},
		{`{"prompt":"x","top_p":0}`, "top_p", "above 0"},
		{`{"prompt":"x","top_p":1.01}`, "top_p", "between 0 and 1"},
		{`{"prompt":"x","min_p":2}`, "min_p", "between 0 and 1"},
		{`{"prompt":"x","top_k":-2}`, "top_k", "between -1 and 2147483647, not -2"},
		{`{"prompt":"x","presence_penalty":3}`, "presence_penalty", "between -2 and 2"},
		{`{"prompt":"x","frequency_penalty":-3}`, "frequency_penalty", "between -2 and 2"},
		{`{"prompt":"x","repetition_penalty":0}`, "repetition_penalty", "above 0"},
		{`{"prompt":"x","seed":1e300}`, "seed", "between"},
		{`{"prompt":"x","seed":"1"}`, "seed", "integer"},
		{`{"prompt":"x","logprobs":262145}`, "logprobs", "between -1 and 262144"},
		{`{"prompt":"x","logprobs":true}`, "logprobs", "integer"},
		{`{"prompt":"x","stop":1}`, "stop", "a string or a list"},
		{`{"prompt":"x","stop":["a",1]}`, "stop", "stop[1]"},
		{`{"prompt":"x","stop":""}`, "stop", "empty"},
		{`{"prompt":"x","stop":["a",null]}`, "stop", "empty"},
		{`{"prompt":"x","stop":"` + long + `"}`, "stop", "longer than 1024"},
		{`{"prompt":"x","stop":[` + strings.Repeat(`"a",`, 16) + `"a"]}`, "stop", "more than 16"},
		{`{"prompt":"x","stop_token_ids":3}`, "stop_token_ids", "list"},
		{`{"prompt":"x","logit_bias":[]}`, "logit_bias", "object"},
		{`{"prompt":"x","logit_bias":{"a":1}}`, "logit_bias", "no token id"},
		{`{"prompt":"x","logit_bias":{"512":1}}`, "logit_bias", "no token id"},
		{`{"prompt":"x","logit_bias":{"1":101}}`, "logit_bias", "between -100 and 100"},
		{`{"prompt":"x","logit_bias":{"1":null}}`, "logit_bias", "number"},
		{`{"prompt":"x","stream_options":{"include_usage":true}}`, "stream_options", "stream"},
		{`{"prompt":"x","stream_options":3}`, "stream_options", "object"},
		{`{"prompt":"x","stream":true,"stream_options":{"include_usage":1}}`, "stream_options.include_usage", "boolean"},
		{`{"prompt":"x","stream":true,"prompt_logprobs":1}`, "prompt_logprobs", "stream"},
		{`{"prompt":"x","best_of":2}`, "best_of", "not supported"},
		{`{"prompt":"x","suffix":"y"}`, "suffix", "not supported"},
		{`{"prompt":"x","response_format":{"type":5}}`, "response_format.type", "string"},
		{`{"prompt":"x","cache_salt":""}`, "cache_salt", "empty"},
		{`{"prompt":"x","cache_priority":101}`, "cache_priority", "between 0 and 100"},
		{`{"prompt":"x","cache_priority":"high"}`, "cache_priority", "integer"},
		{`{"prompt":"x","kv_transfer_params":[]}`, "kv_transfer_params", "object"},
		{`{"prompt":"x","bootstrap_room":9223372036854775808}`, "bootstrap_room", "between 0 and 9223372036854775807"},
		{`{"prompt":"x","bootstrap_room":-1}`, "bootstrap_room", "between 0"},
		{`{"prompt":"x","bootstrap_room":1.5}`, "bootstrap_room", "an integer"},
		{`{"prompt":"x","bootstrap_room":[1,null]}`, "bootstrap_room", "bootstrap_room[1] must be an integer, not null"},
		{`{"prompt":"x","bootstrap_room":[[1]]}`, "bootstrap_room", "an integer"},
		{`{"prompt":"x","bootstrap_room":{}}`, "bootstrap_room", "an integer"},
		{`{"prompt":"x","bootstrap_room":[` + times(4097, "1") + `]}`, "bootstrap_room", "more than 4096 entries"},
		{`{"prompt":"x","bootstrap_port":0}`, "bootstrap_port", "between 1 and 65535"},
		{`{"prompt":"x","bootstrap_port":[1,65536]}`, "bootstrap_port", "between 1 and 65535"},
		{`{"prompt":"x","bootstrap_host":1}`, "bootstrap_host", "a string"},
		{`{"prompt":"x","bootstrap_host":["a",1]}`, "bootstrap_host", "bootstrap_host[1] must be a string"},
		{`{"prompt":"x","bootstrap_host":"` + strings.Repeat("h", 256) + `"}`, "bootstrap_host", "longer than 255"},
		{`{"prompt":[` + strings.Repeat(`"a",`, 256) + `"a"]}`, "prompt", "more than 256"},
		{`{"prompt":"x","use_beam_search":true}`, "use_beam_search", "not supported"},
		{`{"prompt":"x","allowed_token_ids":[]}`, "allowed_token_ids", "must not be empty"},
		{`{"prompt":"x","allowed_token_ids":[512]}`, "allowed_token_ids", "between 0 and 511"},
		{`{"prompt":"x","allowed_token_ids":7}`, "allowed_token_ids", "a list of token ids"},
		{`{"prompt":"x","logprobs":0,"logprob_token_ids":[]}`, "logprob_token_ids", "must not be empty"},
		{`{"prompt":"x","logprobs":0,"logprob_token_ids":[` + times(1025, "1") + `]}`, "logprob_token_ids", "more than 1024"},
		{`{"prompt":"x","logprob_token_ids":[1]}`, "logprob_token_ids", "needs logprobs"},
		{`{"prompt":"x","logprobs":0,"logprob_token_ids":[1],"echo":true,"max_tokens":0}`, "logprob_token_ids", "max_tokens above 0"},
		{`{"prompt":"x","bad_words":[""]}`, "bad_words", "must not be empty"},
		{`{"prompt":"x","bad_words":[1]}`, "bad_words", "bad_words[0] must be a string"},
		{`{"prompt":"x","bad_words":"a"}`, "bad_words", "a list of strings"},
		{`{"prompt":"x","bad_words":["` + strings.Repeat("a", 1025) + `"]}`, "bad_words", "longer than 1024"},
		{`{"prompt":"x","bad_words":[` + times(1025, `"a"`) + `]}`, "bad_words", "more than 1024"},
		{`{"prompt":"x","stop_regex":"a"}`, "stop_regex", "not supported"},
		{`{"prompt":"x","lora_path":"a"}`, "lora_path", "not supported"},
		{`{"prompt":"x","thinking_token_budget":0}`, "thinking_token_budget", "not supported"},
		{`{"prompt":"x","watermarking":true}`, "watermarking", "not supported"},
		{`{"prompt":"x","stream_options":{}}`, "stream_options", "stream"},
		{`{"prompt":"x","truncate_prompt_tokens":0}`, "truncate_prompt_tokens", "-1 or above 0"},
		{`{"prompt":"x","truncate_prompt_tokens":-2}`, "truncate_prompt_tokens", "between -1 and"},
		{`{"prompt":"x","truncation_side":"top"}`, "truncation_side", "left or right"},
		{`{"prompt":"x","return_tokens_as_token_ids":1}`, "return_tokens_as_token_ids", "boolean"},
		{`{"prompt":"x","logits_processors":["a"]}`, "logits_processors", "not supported"},
		{`{"prompt":"x","prompt_embeds":"a"}`, "prompt_embeds", "not supported"},
		{`{"prompt":"x","stream_options":{"continuous_usage_stats":true}}`, "stream_options", "stream"},
		{`{"prompt":"x","stream":true,"stream_options":{"continuous_usage_stats":1}}`, "stream_options.continuous_usage_stats", "boolean"},
		{`{"prompt":"x","prompt_logprobs":262145}`, "prompt_logprobs", "between -1 and"},
		{`{"prompt":"x","prompt_logprobs":-2}`, "prompt_logprobs", "between -1 and"},
		{`{"prompt":"x","min_tokens":-1}`, "min_tokens", "between 0 and"},
		{`{"prompt":"x","min_tokens":17}`, "min_tokens", "above max_tokens (16)"},
		{`{"prompt":"x","top_k":2147483648}`, "top_k", "between -1 and 2147483647"},
		{`{"prompt":"x","repetition_penalty":2.01}`, "repetition_penalty", "between 0 and 2"},
		{`{"prompt":"x","min_p":-0.01}`, "min_p", "between 0 and 1"},
		{`{"prompt":"x","cache_priority":-1}`, "cache_priority", "between 0 and 100"},
		{`{"prompt":"x","seed":9223372036854775808}`, "seed", "between"},
		{`{"prompt":"x","seed":9007199254740994.0}`, "seed", "between"},
		{`{"prompt":"x","seed":-9007199254740994.0}`, "seed", "between"},
		{`{"prompt":"x","echo":"yes"}`, "echo", "boolean"},
		{`{"prompt":"x","stop":[]` + `,"cache_salt":1}`, "cache_salt", "string"},
		{`{"prompt":"x","logit_bias":{"-1":1}}`, "logit_bias", `the keys "-1", which are no token ids`},
		{`{"prompt":"x","logit_bias":{"a":1,"5":2,"512":{}}}`, "logit_bias", `the keys "a", "512", which are no token ids of this model: it has 512`},
		{`{"prompt":"x","stop":[` + strings.Repeat(`"a",`, 16) + `"a"]}`, "stop", "more than 16"},
		{`{"prompt":"x","max_tokens":1.5}`, "max_tokens", "must be an integer, not 1.5"},
		{`{"prompt":"x","n":129}`, "n", "between 1 and 128, not 129"},
	} {
		got, err := openai.ParseCompletion([]byte(c.body), 512)
		if err == nil || got != nil {
			t.Errorf("%s: accepted", c.body)
			continue
		}
		if err.Status != 400 || err.Param != c.param || !strings.Contains(err.Message, c.message) || strings.Contains(err.Message, "%!") {
			t.Errorf("%s:\n got %v\nwant %q in %q", c.body, err, c.message, c.param)
		}
	}
}

func TestCompletion(t *testing.T) {
	got, err := openai.ParseCompletion([]byte(`{
		"model":"m\u00e9\ud83d\ude00","prompt":[[1,2],[3.0]],"n":1,"n":2,"stream":true,"max_tokens":1e2,
		"stream_options":{"include_usage":true,"x":[1]},"stop":"\n","stop_token_ids":[7],"echo":true,
		"temperature":0.5,"top_p":null,"top_k":-1,"seed":-9223372036854775808,"logprobs":0,
		"logit_bias":{"5":-100,"6":1,"5":2},"unknown":{"deep":[{}]},"best_of":1,"suffix":null,
		"kv_transfer_params":{"a":1},"skip_special_tokens":false,"cache_priority":80}`), 0)
	if err != nil {
		t.Fatal(err)
	}
	if got.Model != "mé😀" || got.N != 2 || *got.MaxTokens != 100 || !got.Stream || !got.IncludeUsage ||
		!got.Echo || *got.Logprobs != 0 || *got.Seed != -1<<63 || got.Temperature != 0.5 || got.TopP != 1 ||
		got.TopK != 0 || got.SkipSpecial || !got.AddSpecial || got.CachePriority != 30 {
		t.Errorf("got %+v", got)
	}
	if got.Given != openai.GivenTemperature|openai.GivenTopK {
		t.Errorf("given %b", got.Given)
	}
	want := []openai.Prompt{{Tokens: []int32{1, 2}, IsTokens: true}, {Tokens: []int32{3}, IsTokens: true}}
	if !reflect.DeepEqual(got.Prompts, want) {
		t.Errorf("prompts %+v", got.Prompts)
	}
	if !reflect.DeepEqual(got.LogitBias, []openai.Bias{{5, 2}, {6, 1}}) || string(got.KVTransferParams) != `{"a":1}` {
		t.Errorf("bias %v, kv %s", got.LogitBias, got.KVTransferParams)
	}
}

func TestPromptForms(t *testing.T) {
	f := func(prompt string, want ...openai.Prompt) {
		t.Helper()
		got, err := openai.ParseCompletion([]byte(`{"prompt":`+prompt+`}`), 0)
		if err != nil || !reflect.DeepEqual(got.Prompts, want) {
			t.Errorf("%s: %+v, %v", prompt, got, err)
		}
	}
	f(`""`, openai.Prompt{})
	f(`"a\"b"`, openai.Prompt{Text: `a"b`})
	f(`["a",""]`, openai.Prompt{Text: "a"}, openai.Prompt{})
	f(`[ 0 , 5 ]`, openai.Prompt{Tokens: []int32{0, 5}, IsTokens: true})
	f(`[1,2, 3 ,4.0,1e2,0,511]`, openai.Prompt{Tokens: []int32{1, 2, 3, 4, 100, 0, 511}, IsTokens: true})
}

// manyTools are n tools.
func manyTools(n int) string {
	list := make([]string, n)
	for i := range list {
		list[i] = fmt.Sprintf(`{"type":"function","function":{"name":"f%d"}}`, i)
	}
	return strings.Join(list, ",")
}

func TestBadChats(t *testing.T) {
	hi := `"messages":[{"role":"user","content":"hi"}]`
	for _, c := range []struct{ body, param, message string }{
		{`{}`, "messages", "required"},
		{`{"messages":[]}`, "messages", "required"},
		{`{"messages":"hi"}`, "messages", "list"},
		{`{"messages":[1]}`, "messages", "messages[0]"},
		{`{"messages":[{"content":"x"}]}`, "messages", "role"},
		{`{"messages":[{"role":3,"content":"x"}]}`, "messages", "role"},
		{`{"messages":[{"role":"user"}]}`, "messages", "content"},
		{`{"messages":[{"role":"user","content":3}]}`, "messages", "content"},
		{`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`, "messages", "only text"},
		{`{"messages":[{"role":"user","content":[{"type":"text"}]}]}`, "messages", "text must be a string"},
		{`{"messages":[{"role":"user","content":[{"type":"text","text":"x","text":null}]}]}`, "messages", "text must be a string"},
		{`{` + hi + `,"logprobs":1}`, "logprobs", "boolean"},
		{`{` + hi + `,"top_logprobs":3}`, "top_logprobs", "logprobs"},
		{`{` + hi + `,"logprobs":true,"top_logprobs":262145}`, "top_logprobs", "between -1 and"},
		{`{` + hi + `,"max_tokens":0}`, "max_tokens", "between 1 and 2147483647, not 0"},
		{`{` + hi + `,"tools":{}}`, "tools", "list"},
		{`{` + hi + `,"tools":[{}]}`, "tools[0].type", "is required"},
		{`{` + hi + `,"tool_choice":3}`, "tool_choice", "string or an object"},
		{`{` + hi + `,"tool_choice":"AUTO"}`, "tool_choice", `must be none, auto, required or an object that names a function, not "AUTO"`},
		{`{` + hi + `,"modalities":["text","audio"]}`, "modalities", "only text"},
		{`{` + hi + `,"response_format":"json"}`, "response_format", "object"},
		{`{` + hi + `,"response_format":{}}`, "response_format", "type"},
		{`{` + hi + `,"functions":[]}`, "functions", "not supported"},
		{`{` + hi + `,"chat_template_kwargs":1}`, "chat_template_kwargs", "object"},
		{`{` + hi + `,"add_generation_prompt":true,"continue_final_message":true}`, "continue_final_message", "both"},
		{`{` + hi + `,"tools":[null]}`, "tools[0]", "object"},
		{`{` + hi + `,"tools":[{"type":"function","function":{"name":"e"}},{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":3}}]}`, "tools[2].function.name", "must be a string, not a number"},
		{`{` + hi + `,"tools":[{"type":"function","function":{"description":"d"}}]}`, "tools[0].function.name", "is required"},
		{`{` + hi + `,"tools":[{"type":"function","function":{"name":""}}]}`, "tools[0].function.name", "is required"},
		{`{` + hi + `,"tools":[{"type":"function","function":[]}]}`, "tools[0].function", "must be an object, not an array"},
		{`{` + hi + `,"tools":[{"type":"web_search","function":{"name":"f"}}]}`, "tools[0].type", "\"web_search\"; only function"},
		{`{` + hi + `,"tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"f"}}]}`, "tools[1].function.name", "is \"f\", as is that of tools[0]"},
		{`{` + hi + `,"tools":[{"type":"function","function":{"name":"f","strict":"yes"}}]}`, "tools[0].function.strict", "must be a boolean"},
		{`{` + hi + `,"tools":[` + manyTools(129) + `]}`, "tools", "more than 128"},
		{`{` + hi + `,"tools":[` + manyTools(128) + `]}`, "ok", ""},
		{`{` + hi + `,"tools":[{"type":7}]}`, "tools[0].type", "must be a string, not a number"},
		{`{` + hi + `,"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"string"}}}]}`, "tools[0].function.parameters", "must be the schema of an object"},
		{`{` + hi + `,"tools":[{"type":"function","function":{"name":"f","parameters":"{}"}}]}`, "tools[0].function.parameters", "must be an object, not a string"},
		{`{` + hi + `,"tools":[{"type":"function","function":{"name":"f","description":7}}]}`, "tools[0].function.description", "must be a string, not a number"},
		{`{` + hi + `,"reasoning_effort":"Hmm"}`, "reasoning_effort", `must be one of none, minimal, low, medium, high, xhigh, max, not "Hmm"`},
		{`{` + hi + `,"documents":[{},1]}`, "documents", "documents[1] must be an object"},
		{`{` + hi + `,"documents":"x"}`, "documents", "a list"},
		{`{` + hi + `,"logprob_token_ids":[1]}`, "logprob_token_ids", "logprobs"},
		{`{` + hi + `,"mm_processor_kwargs":{"a":1}}`, "mm_processor_kwargs", "not supported"},
		{`{` + hi + `,"echo":"x"}`, "echo", "boolean"},
		{`{` + hi + `,"tools":[{"type":"function"},{"type":""}]}`, "tools[0].function", "is required"},
		{`{` + hi + `,"reasoning_effort":3}`, "reasoning_effort", "string"},
		{`{` + hi + `,"parallel_tool_calls":"no"}`, "parallel_tool_calls", "boolean"},
		{`{` + hi + `,"audio":{}}`, "audio", "not supported"},
		{`{` + hi + `,"max_tokens":4,"min_tokens":5}`, "min_tokens", "above max_tokens (4)"},
		{`{` + hi + `,"stream_options":{"include_usage":true}}`, "stream_options", "stream"},
		{`{` + hi + `,"stream":true,"prompt_logprobs":1}`, "prompt_logprobs", "stream"},
		{`{` + hi + `,"n":0}`, "n", "between 1 and 128"},
		{`{` + hi + `,"min_tokens":5}`, "ok", ""},
		{`{` + hi + `,"chat_template":"` + strings.Repeat("x", 64<<10+1) + `"}`, "chat_template", "is the limit"},
		{`{` + hi + `,"function_call":"auto"}`, "function_call", "not supported"},
		{`{` + hi + `,"modalities":["text","audio"]}`, "modalities", "only text"},
		{`{` + hi + `,"modalities":["text"],"functions":null,"tools":[],"tool_choice":"auto","response_format":null}`, "ok", ""},
		{`{` + hi + `,"max_tokens":1,"max_completion_tokens":1,"top_logprobs":0}`, "ok", ""},
		{`{` + hi + `,"max_completion_tokens":0}`, "max_completion_tokens", "between 1 and"},
		{`{` + hi + `,"continue_final_message":true}`, "ok", ""},
		{`{` + hi + `,"add_generation_prompt":false,"continue_final_message":true}`, "ok", ""},
		{`{"messages":[null]}`, "messages", "object"},
		{`{"messages":[{"role":"user","content":null}]}`, "messages", "content is required"},
		{`{"messages":[{"role":"user","content":[3]}]}`, "messages", "messages[0].content[0] must be an object"},
		{`{"messages":[{"role":"user","content":["a",null]}]}`, "messages", "messages[0].content[1]"},
		{`{"messages":[{"role":"assistant","tool_calls":{}}]}`, "messages", "list"},
		{`{"messages":[{"role":"assistant","tool_calls":[1]}]}`, "messages", "messages[0].tool_calls[0] must be an object"},
		{`{"messages":[{"role":"assistant","tool_calls":[{"function":{}},{"function":null}]}]}`, "messages", "messages[0].tool_calls[1].function must be an object"},
		{`{"messages":[{"role":"assistant","tool_calls":[{"id":"1"}]}]}`, "messages", "messages[0].tool_calls[0].function must be an object"},
		{`{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":""}}]}]}`, "ok", ""},
		{`{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":{"a":1}}}]}]}`, "ok", ""},
		{`{"messages":[{"role":"assistant","tool_calls":null}]}`, "ok", ""},
		{`{` + hi + `,"x":1e999999999999}`, "ok", ""},
		{`{"messages":[{"role":"user","content":"x","n":1e999}]}`, "", "out of range"},
	} {
		got, err := openai.ParseChat([]byte(c.body), 0)
		if c.param == "ok" {
			if err != nil {
				t.Errorf("%s: %v", c.body, err)
			}
			continue
		}
		if err == nil || got != nil || err.Param != c.param || !strings.Contains(err.Message, c.message) || strings.Contains(err.Message, "%!") {
			t.Errorf("%s:\n got %v\nwant %q in %q", c.body, err, c.message, c.param)
		}
	}
}

func TestChat(t *testing.T) {
	got, err := openai.ParseChat([]byte(`{"model":"m","messages":[
		{"role":"system","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
		{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"x\":[1,2.5]}"}}]},
		{"role":"user","content":"hi"}],
		"max_completion_tokens":5,"max_tokens":9,"logprobs":true,"top_logprobs":2,
		"tools":[{"type":"function","function":{"name":"f"}}],"response_format":{"type":"text"},
		"chat_template_kwargs":{"enable_thinking":false},"continue_final_message":true}`), 0)
	if err != nil {
		t.Fatal(err)
	}
	if *got.MaxTokens != 5 || got.TopLogprobs != 2 || got.Constraint != nil ||
		got.AddGenerationPrompt || string(got.TemplateKwargs["enable_thinking"]) != "false" || len(got.Tools) == 0 {
		t.Errorf("got %+v", got)
	}
	for i, want := range []string{
		`{"role":"system","content":"a\nb"}`,
		`{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"x\":[1,2.5]}"}}],"content":""}`,
		`{"role":"user","content":"hi"}`,
	} {
		if string(got.Messages[i]) != want {
			t.Errorf("message %d: have %s, want %s", i, got.Messages[i], want)
		}
	}
}

// TestMessages: what templates are given is what was sent, but for the content.
func TestMessages(t *testing.T) {
	f := func(message, want string) {
		t.Helper()
		got, err := openai.ParseChat([]byte(`{"messages":[ `+message+` ]}`), 0)
		if err != nil || string(got.Messages[0]) != want {
			t.Errorf("%s: have %v, %v, want %s", message, got, err, want)
		}
	}
	same := `{"role":"user", "z":1.0,"a":[12345678901234567890, -1e2,{"y":null,"b":""}],"content":"\u00e9"}`
	f(same, same)
	f(`{"content":["a",{"text":"b\"","type":"text","x":1},{"type":"refusal","refusal":"c"}],"role":"user"}`, `{"content":"a\nb\"\nc","role":"user"}`)
	f(`{"content":[],"role":1,"role":"user"}`, `{"content":"","role":1,"role":"user"}`)
	f(`{"role":"assistant","content":null}`, `{"role":"assistant","content":""}`)
	f(`{"role":"assistant","content" : null ,"x":[1]}`, `{"role":"assistant","content" : "" ,"x":[1]}`)
	f(`{"role":"assistant"}`, `{"role":"assistant","content":""}`)
	f(`{"role":"assistant","content":["x"],"content":"y"}`, `{"role":"assistant","content":["x"],"content":"y"}`)
}

// TestValues bounds what a small body can make of memory.
func TestValues(t *testing.T) {
	list := func(n int) string { return "[" + strings.Repeat("0,", n-1) + "{}]" } // with n items
	f := func(body, param string) {
		t.Helper()
		_, err := openai.ParseChat([]byte(body), 0)
		have := "none"
		if err != nil {
			have = err.Param
		}
		if have != param || err != nil && !strings.Contains(err.Message, "more than 100000") {
			t.Errorf("%.80s: have %v, want an error of %s", body, err, param)
		}
	}
	const most, user = 100_000, `{"role":"user","content":"x"`
	f(`{"messages":[`+user+`,"x":`+list(most-4)+`}]}`, "none")
	f(`{"messages":[`+user+`,"x":`+list(most-3)+`}]}`, "messages")
	f(`{"messages":[`+user+`}`+strings.Repeat(`,`+user+`}`, most/3)+`]}`, "messages")
	f(`{"messages":[{"role":"user","content":[`+strings.Repeat(`"",`, most)+`""]}]}`, "messages")
	f(`{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":"`+list(most)+`"}}]}]}`, "messages")
	f(`{"messages":[`+user+`}],"chat_template_kwargs":{"a":`+list(most-1)+`}}`, "none")
	f(`{"messages":[`+user+`}],"chat_template_kwargs":{"a":1,"b":`+list(most-1)+`}}`, "chat_template_kwargs")
	f(`{"messages":[`+user+`}],"tools":[{"type":"x","y":`+list(most)+`}]}`, "tools")
}

func TestScan(t *testing.T) {
	body := `{"mod\u0065l":"m","stream":true,"seed":4,"n":3,"max_tokens":7,"prompt": ["ab", "c"] ,"x":{"kv_transfer_params":1}}`
	got, err := openai.Scan([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	if got.Model != "m" || !got.Stream || !got.HasSeed || got.N != 3 || got.MaxTokens != 7 ||
		string(got.Prompt) != `["ab", "c"]` || got.Messages || got.Link != "" {
		t.Errorf("got %+v", got)
	}
	link := func(body, want string) {
		t.Helper()
		if got, err := openai.Scan([]byte(body)); err != nil || got.Link != want {
			t.Errorf("%s: %q, %v", body, got.Link, err)
		}
	}
	link(`{"kv_transfer_params":{}}`, "kv_transfer_params")
	link(`{"kv_transfer_params":null}`, "")
	link(`{"bootstrap_room":1}`, "bootstrap_room")
	link(`{"bootstrap_new":1}`, "bootstrap_*")
	link(`{"disaggregated_params":{}}`, "disaggregated_params")
	tokens := func(body string, want int) {
		t.Helper()
		if got, _ := openai.Scan([]byte(body)); got.PromptTokens() != want {
			t.Errorf("%s: %d tokens, want %d", body, got.PromptTokens(), want)
		}
	}
	tokens(`{"prompt":[1,2,3]}`, 3)
	tokens(`{"prompt":[[1,2],[3]]}`, 3)
	tokens(`{"prompt":"0123456789"}`, 4)
	tokens(`{"prompt":"01234567"}`, 3)
	tokens(`{"prompt":[ 9 ]}`, 1)
	tokens(`{"prompt":[]}`, 1)
	tokens(`{"prompt":["012345"]}`, 3)
	tokens(`{"model":"m"}`, 1)
	tokens(`{"messages":[1,2],"tools":[{"type":1}]}`, 5)
	bad := func(body, param string) {
		t.Helper()
		if got, err := openai.Scan([]byte(body)); err == nil || err.Status != 400 || err.Param != param {
			t.Errorf("%s: %+v, %v, want an error of %q", body, got, err, param)
		}
	}
	for _, n := range []int{0, 129} {
		bad(fmt.Sprintf(`{"n":%d}`, n), "n")
	}
	bad(`{"max_tokens":-1}`, "max_tokens")
	bad(`{"max_tokens":2147483648}`, "max_tokens")
	bad(`{"max_completion_tokens":-1}`, "max_completion_tokens")
	bad(`{"model":1}`, "model")
	bad(`{"stream":1}`, "stream")
	bad(`{"seed":"a"}`, "seed")
	bad(`[]`, "")
	bad(`{"prompt":[1}`, "")
	got, err = openai.Scan([]byte(`{"n":128,"max_tokens":2147483647,"seed":null,"cache_salt":"s","top_logprobs":21,"logprobs":true,"tools":[1],"priority":9223372036854775807}`))
	if err != nil || got.N != 128 || got.MaxTokens != 2147483647 || got.HasSeed || string(got.Salt) != `"s"` || got.TopLogprobs != 20 || !got.Logprobs ||
		string(got.Tools) != `[1]` || got.Priority != 1<<63-1 || got.Prompts != 1 || got.Twice != "" {
		t.Errorf("got %+v, %v", got, err)
	}
	got, err = openai.Scan([]byte(`{"n":null,"max_completion_tokens":5,"cache_salt":null,"logprobs":3,"top_logprobs":-1,"seed":0,"messages":null}`))
	if err != nil || got.N != 1 || got.MaxTokens != 0 || got.Salt != nil || got.TopLogprobs != 3 || !got.HasSeed || got.Messages {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestTokenize(t *testing.T) {
	const chat = `"messages":[{"role":"user","content":"x"}]`
	f := func(body, prompt string, isChat, special, strs bool) {
		t.Helper()
		got, err := openai.ParseTokenize([]byte(body), 0)
		if err != nil {
			t.Errorf("%s: %v", body, err)
			return
		}
		if got.Prompt != prompt || (got.Chat != nil) != isChat || got.AddSpecial != special || got.ReturnStrs != strs || got.Model != "m" ||
			isChat && got.Chat.AddSpecial != special {
			t.Errorf("%s: %+v", body, got)
		}
	}
	f(`{"model":"m","prompt":"x","return_token_strs":true}`, "x", false, true, true)
	f(`{"model":"m","prompt":"x","add_special_tokens":false}`, "x", false, false, false)
	f(`{"model":"m","prompt":"","add_special_tokens":null}`, "", false, true, false)
	f(`{"model":"m",`+chat+`}`, "", true, false, false)
	f(`{"model":"m",`+chat+`,"add_special_tokens":true,"prompt":null}`, "", true, true, false)
	for body, param := range map[string]string{
		`{}`: "prompt", `{"prompt":null}`: "prompt", `{"prompt":"x",` + chat + `}`: "prompt", `{"messages":[]}`: "messages", `{"prompt":3}`: "prompt",
		`{` + chat + `,"top_logprobs":2}`: "top_logprobs", `{"prompt":"x"`: "",
	} {
		if got, err := openai.ParseTokenize([]byte(body), 0); err == nil || got != nil || err.Param != param {
			t.Errorf("%s: %+v, %v", body, got, err)
		}
	}

	d, err := openai.ParseDetokenize([]byte(`{"model":"m","x":[1],"tokens":[511,0]}`), 512)
	if err != nil || d.Model != "m" || !slices.Equal(d.Tokens, []int32{511, 0}) {
		t.Errorf("%+v, %v", d, err)
	}
	if d, err := openai.ParseDetokenize([]byte(`{"tokens":[]}`), 512); err != nil || len(d.Tokens) != 0 {
		t.Errorf("%+v, %v", d, err)
	}
	for body, param := range map[string]string{`{"tokens":["a"]}`: "tokens", `{"tokens":[512]}`: "tokens", `{}`: "tokens", `{"tokens":null}`: "tokens", `{"tokens":[1]`: ""} {
		if got, err := openai.ParseDetokenize([]byte(body), 512); err == nil || got != nil || err.Param != param {
			t.Errorf("%s: %+v, %v", body, got, err)
		}
	}
}

// TestEveryField: each field is read into its own place, and into no other.
func TestEveryField(t *testing.T) {
	three, five := 3, int64(5)
	sampling := map[string]func(*openai.Sampling){
		`"model":"m"`: func(s *openai.Sampling) { s.Model = "m" }, `"user":"u"`: func(s *openai.Sampling) { s.User = "u" },
		`"n":3`: func(s *openai.Sampling) { s.N = 3 }, `"seed":5`: func(s *openai.Sampling) { s.Seed = &five },
		`"stream":true`: func(s *openai.Sampling) { s.Stream = true },
		`"stream":true,"stream_options":{"include_usage":true}`:          func(s *openai.Sampling) { s.Stream, s.IncludeUsage = true, true },
		`"stream":true,"stream_options":{"continuous_usage_stats":true}`: func(s *openai.Sampling) { s.Stream, s.ContinuousUsage = true, true },
		`"min_tokens":3`: func(s *openai.Sampling) { s.MinTokens = 3 }, `"stop":"x"`: func(s *openai.Sampling) { s.Stop = []string{"x"} },
		`"stop_token_ids":[3]`:              func(s *openai.Sampling) { s.StopTokenIDs = []int32{3} },
		`"include_stop_str_in_output":true`: func(s *openai.Sampling) { s.IncludeStop = true },
		`"ignore_eos":true`:                 func(s *openai.Sampling) { s.IgnoreEOS = true }, `"skip_special_tokens":false`: func(s *openai.Sampling) { s.SkipSpecial = false },
		`"temperature":0.5`: func(s *openai.Sampling) { s.Temperature, s.Given = 0.5, openai.GivenTemperature },
		`"top_p":0.5`:       func(s *openai.Sampling) { s.TopP, s.Given = 0.5, openai.GivenTopP }, `"min_p":0.5`: func(s *openai.Sampling) { s.MinP, s.Given = 0.5, openai.GivenMinP },
		`"top_k":3`: func(s *openai.Sampling) { s.TopK, s.Given = 3, openai.GivenTopK }, `"top_k":-1`: func(s *openai.Sampling) { s.Given = openai.GivenTopK },
		`"top_k":3,"top_k":null`: func(*openai.Sampling) {}, `"temperature":0.5,"temperature":null`: func(*openai.Sampling) {},
		`"presence_penalty":0.5`: func(s *openai.Sampling) { s.Presence = 0.5 }, `"frequency_penalty":0.5`: func(s *openai.Sampling) { s.Frequency = 0.5 },
		`"repetition_penalty":0.5`: func(s *openai.Sampling) { s.Repetition, s.Given = 0.5, openai.GivenRepetition },
		`"logit_bias":{"3":0.5}`:   func(s *openai.Sampling) { s.LogitBias = []openai.Bias{{ID: 3, Value: 0.5}} },
		`"prompt_logprobs":3`:      func(s *openai.Sampling) { s.PromptLogprobs = &three }, `"return_token_ids":true`: func(s *openai.Sampling) { s.ReturnTokenIDs = true },
		`"cache_salt":"s"`: func(s *openai.Sampling) { s.CacheSalt = "s" }, `"cache_priority":53`: func(s *openai.Sampling) { s.CachePriority = 3 },
		`"kv_transfer_params":{"a":[1]}`: func(s *openai.Sampling) { s.KVTransferParams = []byte(`{"a":[1]}`) }, `"max_tokens":3`: func(s *openai.Sampling) { s.MaxTokens = &three },
		`"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":9223372036854775807`: func(s *openai.Sampling) {
			s.Bootstrap = &openai.Bootstrap{Hosts: []string{"h"}, Ports: []int{1}, Rooms: []int64{math.MaxInt64}}
		},
		`"bootstrap_host":["h","i"],"bootstrap_port":[1,null],"bootstrap_room":[0,2]`: func(s *openai.Sampling) {
			s.Bootstrap = &openai.Bootstrap{Hosts: []string{"h", "i"}, Ports: []int{1, 0}, Rooms: []int64{0, 2}}
		},
		`"bootstrap_room":1,"bootstrap_room":2,"bootstrap_host":"h","bootstrap_host":null`: func(s *openai.Sampling) { s.Bootstrap = &openai.Bootstrap{Rooms: []int64{2}} },
		`"bootstrap_room":1,"bootstrap_room":null`:                                         func(*openai.Sampling) {},
		`"unknown":[{"n":3}]`: func(*openai.Sampling) {},
	}
	same := func(got, want any, err *openai.Error, body string) {
		t.Helper()
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v\n got %+v\nwant %+v", body, err, got, want)
		}
	}
	completion := func(field string, change func(*openai.Completion)) {
		t.Helper()
		want, _ := openai.ParseCompletion([]byte(`{"prompt":"x"}`), 0)
		change(want)
		got, err := openai.ParseCompletion([]byte(`{"prompt":"x",`+field+`}`), 0)
		same(got, want, err, field)
	}
	chat := func(field string, change func(*openai.Chat)) {
		t.Helper()
		const messages = `"messages":[{"role":"user","content":"x"}]`
		want, _ := openai.ParseChat([]byte(`{`+messages+`}`), 0)
		change(want)
		got, err := openai.ParseChat([]byte(`{`+messages+`,`+field+`}`), 0)
		same(got, want, err, field)
	}
	for field, change := range sampling {
		completion(field, func(c *openai.Completion) { change(&c.Sampling) })
		chat(field, func(c *openai.Chat) { change(&c.Sampling) })
	}
	completion(`"echo":true`, func(c *openai.Completion) { c.Echo = true })
	completion(`"logprobs":3`, func(c *openai.Completion) { c.Logprobs = &three })
	completion(`"add_special_tokens":false`, func(c *openai.Completion) { c.AddSpecial = false })
	chat(`"max_completion_tokens":3,"max_tokens":9`, func(c *openai.Chat) { c.MaxTokens = &three })
	chat(`"max_tokens":9,"max_completion_tokens":3`, func(c *openai.Chat) { c.MaxTokens = &three })
	chat(`"logprobs":true`, func(c *openai.Chat) { c.Logprobs = true })
	chat(`"logprobs":true,"top_logprobs":3`, func(c *openai.Chat) { c.Logprobs, c.TopLogprobs = true, 3 })
	const tools = `[ {"type":"function","function":{"strict":null,"name":"x"}} ]`
	chat(`"tools":`+tools, func(c *openai.Chat) { c.Tools = []byte(tools) })
	chat(`"tools":[]`, func(*openai.Chat) {})
	chat(`"tool_choice":{"a":1}`, func(c *openai.Chat) { c.ToolChoice = []byte(`{"a":1}`) })
	chat(`"parallel_tool_calls":false`, func(c *openai.Chat) { c.OneCall = true })
	chat(`"parallel_tool_calls":true`, func(*openai.Chat) {})
	chat(`"include_reasoning":false`, func(c *openai.Chat) { c.HideReasoning = true })
	effort := func(kwargs ...string) func(c *openai.Chat) {
		return func(c *openai.Chat) {
			c.TemplateKwargs = map[string]json.RawMessage{}
			for i := 0; i < len(kwargs); i += 2 {
				c.TemplateKwargs[kwargs[i]] = json.RawMessage(kwargs[i+1])
			}
		}
	}
	chat(`"reasoning_effort":"low"`, effort("reasoning_effort", `"low"`))
	chat(`"reasoning_effort":null`, func(*openai.Chat) {})
	chat(`"reasoning_effort":"none"`, effort("reasoning_effort", `"none"`, "enable_thinking", "false", "thinking", "false"))
	chat(`"reasoning_effort":"none","chat_template_kwargs":{"thinking":true,"x":1}`, effort("reasoning_effort", `"none"`, "enable_thinking", "false", "thinking", "true", "x", "1"))
	chat(`"response_format":{"type":"json_object"}`, func(c *openai.Chat) {
		c.Constraint = &openai.Constraint{Field: "response_format", Kind: openai.ConstraintObject}
	})
	chat(`"add_generation_prompt":false`, func(c *openai.Chat) { c.AddGenerationPrompt = false })
	chat(`"continue_final_message":true`, func(c *openai.Chat) { c.ContinueFinalMessage, c.AddGenerationPrompt = true, false })
	chat(`"add_special_tokens":true`, func(c *openai.Chat) { c.AddSpecial = true })
	chat(`"chat_template_kwargs":{"a":[1],"b":null}`, func(c *openai.Chat) {
		c.TemplateKwargs = map[string]json.RawMessage{"a": []byte("[1]"), "b": []byte("null")}
	})
}

// TestOutOfBounds: a number that is out of bounds has a code, which says on which side.
func TestOutOfBounds(t *testing.T) {
	for number, want := range map[string]string{
		`"seed":9223372036854775808`: "less_than_equal", `"seed":-9223372036854775809`: "greater_than_equal",
		`"seed":1e300`: "less_than_equal", `"seed":-1e300`: "greater_than_equal",
		`"max_tokens":-1`: "greater_than_equal", `"n":0`: "greater_than_equal", `"n":1000000`: "less_than_equal",
		`"temperature":-1`: "greater_than_equal", `"top_p":1.5`: "less_than_equal",
		`"seed":1.5`: "", `"seed":"1"`: "",
	} {
		_, err := openai.ParseCompletion([]byte(`{"prompt":"x",`+number+`}`), 512)
		if err == nil || err.Code != want {
			t.Errorf("%s: %+v, want the code %q", number, err, want)
		}
	}
}
