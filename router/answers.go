package router

import "encoding/json"

// answers are the schemas of whole answers, by path: the members that OpenAI's and Anthropic's specifications require, which
// are also those of the engines that the router passes requests to. Answers have more.
var answers = map[string]json.RawMessage{
	"/v1/chat/completions": json.RawMessage(`{"type":"object","required":["id","object","created","model","choices"],"properties":{` + made + `"object":{"const":"chat.completion"},` +
		`"choices":{"type":"array","minItems":1,"items":{"type":"object","required":["index","message","finish_reason","logprobs"],"properties":{"index":{"type":"integer"},"finish_reason":{"type":"string"},` +
		`"logprobs":{"type":["object","null"]},"message":{"type":"object","required":["role","content","refusal"],"properties":{"role":{"const":"assistant"},"content":{"type":["string","null"]},` +
		`"refusal":{"type":["string","null"]},"tool_calls":{"type":["array","null"],"items":{"type":"object","required":["id","type","function"],"properties":{"id":{"type":"string"},"type":{"const":"function"},` +
		`"function":{"type":"object","required":["name","arguments"],"properties":{"name":{"type":"string"},"arguments":{"type":"string"}}}}}}}}}}},"usage":` + used + `}}`),
	"/v1/completions": json.RawMessage(`{"type":"object","required":["id","object","created","model","choices"],"properties":{` + made + `"object":{"const":"text_completion"},` +
		`"choices":{"type":"array","minItems":1,"items":{"type":"object","required":["index","text","finish_reason","logprobs"],"properties":{"index":{"type":"integer"},"text":{"type":"string"},` +
		`"finish_reason":{"type":"string"},"logprobs":{"type":["object","null"]}}}},"usage":` + used + `}}`),
	"/v1/embeddings": json.RawMessage(`{"type":"object","required":["object","data","model","usage"],"properties":{"object":{"const":"list"},"model":{"type":"string"},"data":{"type":"array","items":` +
		`{"type":"object","required":["object","index","embedding"],"properties":{"object":{"const":"embedding"},"index":{"type":"integer"},"embedding":{"type":["array","string"]}}}}}}`),
	"/v1/models": json.RawMessage(`{"type":"object","required":["object","data"],"properties":{"object":{"const":"list"},"data":{"type":"array","items":` +
		`{"type":"object","required":["id","object","created","owned_by"],"properties":{"id":{"type":"string"},"object":{"const":"model"},"created":{"type":"integer"},"owned_by":{"type":"string"}}}}}}`),
	"/v1/responses": json.RawMessage(`{"type":"object","required":["id","object","created_at","status","error","incomplete_details","instructions","model","tools","output","parallel_tool_calls","metadata","tool_choice",` +
		`"temperature","top_p"],"properties":{"id":{"type":"string"},"object":{"const":"response"},"created_at":{"type":"integer"},"model":{"type":"string"},"status":{"enum":["queued","in_progress","completed","incomplete","failed","cancelled"]},` +
		`"output":{"type":"array","items":{"type":"object","required":["id","type","status"],"properties":{"type":{"enum":["message","reasoning","function_call"]}}}}}}`),
	"/v1/messages": json.RawMessage(`{"type":"object","required":["id","type","role","content","model","stop_reason","stop_sequence","usage"],"properties":{"id":{"type":"string"},"type":{"const":"message"},` +
		`"role":{"const":"assistant"},"model":{"type":"string"},"content":{"type":"array","items":{"type":"object","required":["type"],"properties":{"type":{"enum":["text","thinking","tool_use"]}}}},` +
		`"usage":{"type":"object","required":["input_tokens","output_tokens"],"properties":{"input_tokens":{"type":"integer"},"output_tokens":{"type":"integer"}}}}}`),
	"/v1/messages/count_tokens": json.RawMessage(`{"type":"object","required":["input_tokens"],"properties":{"input_tokens":{"type":"integer","minimum":0}}}`),
}

const (
	made = `"id":{"type":"string"},"created":{"type":"integer"},"model":{"type":"string"},`
	used = `{"type":"object","required":["prompt_tokens","completion_tokens","total_tokens"],"properties":{"prompt_tokens":{"type":"integer"},"completion_tokens":{"type":"integer"},"total_tokens":{"type":"integer"}}}`
)
