package openai

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Endpoint is a set of paths of the API whose bodies this package reads.
type Endpoint uint8

// The endpoints.
const (
	OnCompletions Endpoint = 1 << iota
	OnChat
	OnTokenize
	OnDetokenize
	OnEmbeddings
	OnCohereEmbed

	onBoth = OnCompletions | OnChat
	onAll  = onBoth | OnTokenize // /tokenize reads a chat as a chat is read
	onTalk = OnChat | OnTokenize
)

// Endpoints are the paths by endpoint, in order.
var Endpoints = []struct {
	Of   Endpoint
	Path string
}{{OnCompletions, "/v1/completions"}, {OnChat, "/v1/chat/completions"}, {OnTokenize, "/tokenize"}, {OnDetokenize, "/detokenize"}, {OnEmbeddings, "/v1/embeddings"}, {OnCohereEmbed, "/v2/embed"}}

// Fate is what a native worker does with a field.
type Fate string

// The fates. All fields but those that link legs are passed on to foreign engines as they are.
const (
	Served  Fate = "served"  // within the values of its schema; others are a 400
	Off     Fate = "off"     // only what asks for nothing (null, false, an empty list) goes; else a 400 names the field
	Refused Fate = "refused" // any value but null is a 400 that names the field
	Routed  Fate = "router"  // the router reads it, workers do not
	Linked  Fate = "pairs"   // from a client it is a 400; routers and workers use it among themselves
)

// RequestField is one field of requests. The parser reads what has a row here and nothing else
// (TestFieldsHaveRows), with the bounds of the schema (TestFieldBounds).
type RequestField struct {
	Name   string
	On     Endpoint
	Fate   Fate
	Schema string // JSON Schema of the values that are served; null stands for absent, and goes anywhere
	What   string // for people, in Markdown
}

// RequestFields returns what requests may have, in the order of the documentation.
func RequestFields() []RequestField {
	const positive = math.MaxInt32
	ids := func(most int) string { return list(integer(0, positive), 0, most) }
	rows := []RequestField{
		{"model", onAll | OnDetokenize | OnEmbeddings | OnCohereEmbed, Served, `{"type":"string"}`, "Default: the only one. An unknown one is a 404."},
		{"prompt", OnCompletions, Served, oneOf(`{"type":"string"}`, list(`{"type":"string"}`, 1, maxPrompts), list(integer(0, positive), 1, 0), list(list(integer(0, positive), 1, 0), 1, maxPrompts)), "Required. Text, tokens, or a list of either."},
		{"prompt", OnTokenize, Served, `{"type":"string"}`, "This or `messages`."},
		{"tokens", OnDetokenize, Served, list(integer(0, positive), 0, 0), "Required."},
		{"input", OnEmbeddings, Served, oneOf(`{"type":"string","minLength":1}`, list(`{"type":"string","minLength":1}`, 1, maxPrompts), list(integer(0, positive), 1, 0), list(list(integer(0, positive), 1, 0), 1, maxPrompts)), "Required. Text, tokens, or a list of either; each within the context."},
		{"encoding_format", OnEmbeddings, Served, enum("float", "base64"), "Default `float`; `base64` is of little-endian float32."},
		{"dimensions", OnEmbeddings, Served, integer(1, positive), "Only the model's own width; others are a 400."},
		{"texts", OnCohereEmbed, Served, list(`{"type":"string","minLength":1}`, 1, maxPrompts), "Required. Cohere's."},
		{"embedding_types", OnCohereEmbed, Served, list(enum("float", "base64"), 0, 1), "Default `float`; other types are a 400."},
		{"output_dimension", OnCohereEmbed, Served, integer(1, positive), "Only the model's own width; others are a 400."},
		{"truncate", OnCohereEmbed, Served, enum("NONE", "START", "END"), "Which end of a text is left out that is longer than fits, or than `max_tokens`; `END` is the default. With `NONE` it is a 400."},
		{"max_tokens", OnCohereEmbed, Served, integer(1, positive), "Of each text."},
		{"input_type", OnCohereEmbed, Served, `{"type":"string"}`, "Changes no answer: a model's prompts for it are not known here."},
		{"messages", onTalk, Served, `{"type":"array","minItems":1,"items":{"type":"object","required":["role"],"properties":{"role":{"type":"string"},"content":{"anyOf":[{"type":"string"},{"type":"array","items":{"type":"object"}},{"type":"null"}]}}}}`,
			"Required. Parts of a content are text; others are a 400. At most " + strconv.Itoa(maxValues) + " JSON values. Of an assistant a `content` of null or none is empty."},

		{"max_tokens", OnCompletions, Served, integer(0, positive), "Default 16; 0 with `echo` only. An answer ends with the context at the latest."},
		{"max_tokens", OnChat, Served, integer(1, positive), "Default: the rest of the context, at which an answer ends at the latest."},
		{"max_completion_tokens", OnChat, Served, integer(1, positive), "Wins over `max_tokens`."},
		{"min_tokens", onBoth, Served, integer(0, positive), "Before that many, no end and no stop string. At most `max_tokens`."},
		{"n", onBoth, Served, integer(1, maxN), "Choices of each prompt; with `prompt`s 4096 in all."},
		{"seed", onBoth, Served, `{"type":"integer","minimum":-9223372036854775808,"maximum":9223372036854775807}`, "The same request with the same seed has the same answer."},
		{"temperature", onBoth, Served, number(0, 2), "Default: the model's, or 1. 0 takes the most likely token."},
		{"top_p", onBoth, Served, `{"type":"number","exclusiveMinimum":0,"maximum":1}`, "Default: the model's, or 1."},
		{"top_k", onBoth, Served, integer(-1, positive), "Default: the model's, or all, as are -1 and 0."},
		{"min_p", onBoth, Served, number(0, 1), "Default: the model's, or 0."},
		{"presence_penalty", onBoth, Served, number(-2, 2), ""},
		{"frequency_penalty", onBoth, Served, number(-2, 2), ""},
		{"repetition_penalty", onBoth, Served, `{"type":"number","exclusiveMinimum":0,"maximum":2}`, "Default: the model's, or 1. Of prompt and answer."},
		{"logit_bias", onBoth, Served, fmt.Sprintf(`{"type":"object","maxProperties":%d,"propertyNames":{"pattern":"^[0-9]+$"},"additionalProperties":%s}`, maxBias, number(-100, 100)), "By token id."},
		{"allowed_token_ids", onBoth, Served, list(integer(0, positive), 1, maxAllowed), "Nothing else is drawn, not even an end. Of an answer that is bound to a form it is what may come of both; it ends where nothing else of both may come."},
		{"bad_words", onBoth, Served, list(text(1, maxStopBytes), 0, maxBias), "None is drawn, at the answer's beginning or behind a space. Tokenised as vLLM does."},
		{"stop", onBoth, Served, oneOf(text(1, maxStopBytes), list(text(1, maxStopBytes), 0, maxStops)), ""},
		{"stop_token_ids", onBoth, Served, ids(maxBias), ""},
		{"include_stop_str_in_output", onBoth, Served, boolean, ""},
		{"ignore_eos", onBoth, Served, boolean, ""},
		{"skip_special_tokens", onBoth, Served, boolean, "Default true."},

		{"stream", onBoth, Served, boolean, ""},
		{"stream_options", onBoth, Served, `{"type":"object","properties":{"include_usage":{"type":["boolean","null"]},"continuous_usage_stats":{"type":["boolean","null"]}}}`, "With `stream` only."},
		{"echo", OnCompletions, Served, boolean, "The prompt comes first."},
		{"echo", OnChat, Served, boolean, "The final message comes first, if it is the assistant's."},
		{"logprobs", OnCompletions, Served, integer(All, maxListed), "At most `max_logprobs` of the configuration, 20 by default; -1 is the whole vocabulary."},
		{"logprobs", OnChat, Served, boolean, ""},
		{"top_logprobs", OnChat, Served, integer(All, maxListed), "With `logprobs` only; bounded as those of completions."},
		{"prompt_logprobs", onBoth, Served, integer(All, maxListed), "Bounded as `logprobs`, and 524288 for a prompt together, so that `-1` is for short prompts or small vocabularies; not with `stream`. In each choice of a completion, beside the choices of a chat."},
		{"logprob_token_ids", onBoth, Served, list(integer(0, positive), 1, maxBias), "With `logprobs`: these tokens are listed, and the one that was drawn, instead of the most likely."},
		{"return_token_ids", onBoth, Served, boolean, "`token_ids` in each choice; `prompt_token_ids` in each choice of a completion, beside the choices of a chat, in the first chunk of a stream."},
		{"return_tokens_as_token_ids", onBoth, Served, boolean, "Log probabilities name tokens `token_id:N`. Default: the configuration's, false."},
		{"return_token_strs", OnTokenize, Served, boolean, ""},
		{"truncate_prompt_tokens", onBoth, Served, `{"type":"integer","minimum":-1,"maximum":2147483647,"not":{"const":0}}`, "So many tokens of a longer prompt remain; -1: as many as fit."},
		{"truncation_side", onBoth, Served, enum("left", "right"), "`left`, the default, keeps the last tokens, `right` the first."},
		{"add_special_tokens", onAll, Served, boolean, "Default true for a prompt, false for a chat, whose template writes them."},

		{"tools", onTalk, Served, `{"type":"array","items":{"type":"object","required":["type","function"],"properties":{"type":{"enum":["function"]},"function":{"type":"object","required":["name"],"properties":{"name":{"type":"string","minLength":1},"description":{"type":["string","null"]},"parameters":{"type":["object","null"]},"strict":{"type":["boolean","null"]}}}}}}`, "128 at most; [tools and reasoning](../tools.md)."},
		{"tool_choice", onTalk, Served, oneOf(enum("none", "auto", "required"), `{"type":"object"}`), ""},
		{"parallel_tool_calls", onTalk, Served, boolean, "Default true; false gives the first call only."},
		{"include_reasoning", onTalk, Served, boolean, "Default true."},
		{"reasoning_effort", onTalk, Served, enum(efforts...), "For the template; `none` also turns thinking off."},
		{"response_format", onBoth, Served, `{"type":"object","required":["type"],"properties":{"type":` + enum("text", "json_object", "json_schema") + `,"json_schema":{"type":"object"}}}`, "[Structured output](../structured-output.md). Of `json_schema`: `schema`, `name` and `strict`."},
		{"structured_outputs", onBoth, Served, `{"type":"object","properties":{"json_object":{"const":true}}}`, "vLLM's: one of `json`, `regex`, `choice`, `grammar` and `json_object`, and `disable_any_whitespace`."},
		{"guided_json", onBoth, Served, jsonSchema, "A JSON schema, or a string that holds one, as are `json_schema`s."},
		{"guided_json_object", onBoth, Served, boolean, ""},
		{"guided_regex", onBoth, Served, text(1, MaxConstraint), ""},
		{"guided_choice", onBoth, Served, list(`{"type":"string"}`, 1, 0), "The answers that there may be."},
		{"guided_grammar", onBoth, Served, text(1, MaxConstraint), "Lark, or EBNF if it has `::=`, as are `grammar`s."},
		{"json_schema", onBoth, Served, jsonSchema, "SGLang's."},
		{"regex", onBoth, Served, text(1, MaxConstraint), "SGLang's."},
		{"grammar", onBoth, Served, text(1, MaxConstraint), ""},
		{"ebnf", onBoth, Served, text(1, MaxConstraint), "SGLang's."},
		{"add_generation_prompt", onTalk, Served, boolean, "Default true."},
		{"continue_final_message", onTalk, Served, boolean, "Instead of `add_generation_prompt`."},
		{"chat_template_kwargs", onTalk, Served, `{"type":"object"}`, "Variables of the template, but `messages`, `tools` and `add_generation_prompt`."},
		{"documents", onTalk, Served, list(`{"type":"object"}`, 0, 0), "For templates that know them."},
		{"chat_template", onTalk, Served, text(0, maxTemplate), "Instead of the model's, if `trust_request_chat_template` is set; else a 400. Bounded in steps and memory, more tightly than the model's."},

		{"cache_salt", onBoth, Served, text(1, maxSalt), "Prefixes are shared only among requests with the same one."},
		{"cache_priority", onBoth, Served, integer(0, 100), "Default 50: what is lower leaves the cache first."},
		{"user", onBoth | OnEmbeddings, Served, `{"type":"string"}`, "Changes no answer."},
		{"priority", onBoth, Routed, `{"type":"integer"}`, "The lower goes first; up to what the key may."},
		{"service_tier", onBoth, Routed, `{"type":"string"}`, "`priority` and `flex` are before and behind others; up to what the key may."},

		{"best_of", OnCompletions, Off, integer(1, 1), "Use `n`."},
		{"suffix", OnCompletions, Off, `{"const":""}`, ""},
		{"modalities", onTalk, Served, `{"type":"array","items":{"const":"text"}}`, "Not `audio`."},
		{"use_beam_search", onBoth, Off, `{"const":false}`, ""},
	}
	for _, name := range []string{"guided_whitespace_pattern", "structural_tag"} {
		rows = append(rows, RequestField{name, onBoth, Refused, "", ""})
	}
	for _, name := range []string{"functions", "function_call", "audio", "media_io_kwargs", "mm_processor_kwargs"} {
		rows = append(rows, RequestField{name, onTalk, Refused, "", ""})
	}
	for _, name := range []string{"images", "inputs"} {
		rows = append(rows, RequestField{name, OnCohereEmbed, Refused, "", ""})
	}
	for _, name := range []string{"logits_processors", "prompt_embeds"} {
		rows = append(rows, RequestField{name, onBoth, Off, `{"maxItems":0,"type":"array"}`, ""})
	}
	for _, name := range []string{"stop_regex", "lora_path", "thinking_token_budget", "watermarking", "repetition_detection", "return_weight_versions", "return_prompt_text", "ec_transfer_params"} {
		rows = append(rows, RequestField{name, onBoth, Off, `{"const":false}`, ""})
	}
	rows = append(rows, RequestField{"kv_transfer_params", onBoth, Linked, "", "Links the legs of a pair: from a client's request it is a 400, as is `disaggregated_params`. A worker takes it from its router, or from a foreign one."})
	for _, name := range []string{"bootstrap_host", "bootstrap_port", "bootstrap_room"} {
		rows = append(rows, RequestField{name, onBoth, Linked, "", "As `kv_transfer_params`, of SGLang's routers: prefill's address, and the room of each prompt."})
	}
	return rows
}

const (
	boolean    = `{"type":"boolean"}`
	jsonSchema = `{"anyOf":[{"type":"object"},{"type":"string"},{"type":"boolean"}]}`
)

func integer(lo, hi int) string {
	return fmt.Sprintf(`{"type":"integer","minimum":%d,"maximum":%d}`, lo, hi)
}

func number(lo, hi float64) string {
	return fmt.Sprintf(`{"type":"number","minimum":%v,"maximum":%v}`, lo, hi)
}

// text is a string of so many bytes.
func text(least, most int) string {
	return fmt.Sprintf(`{"type":"string","minLength":%d,"maxLength":%d}`, least, most)
}

// list has at most so many items; 0: any number.
func list(item string, least, most int) string {
	s := `{"type":"array","items":` + item
	if least > 0 {
		s += fmt.Sprintf(`,"minItems":%d`, least)
	}
	if most > 0 {
		s += fmt.Sprintf(`,"maxItems":%d`, most)
	}
	return s + "}"
}

func enum(values ...string) string { return `{"enum":["` + strings.Join(values, `","`) + `"]}` }

func oneOf(schemas ...string) string { return `{"anyOf":[` + strings.Join(schemas, ",") + `]}` }
