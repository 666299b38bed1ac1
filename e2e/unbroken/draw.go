package unbroken

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
)

// Request is a random one. Fields lack the braces.
type Request struct {
	Path, Fields string
	Bound        bool // its answer must be something
}

// bounds say what an answer must be: fields of OpenAI, vLLM and SGLang.
var bounds = []string{
	`"structured_outputs":{"regex":"([a-z]{2,9} ){15,300}end"}`,
	`"structured_outputs":{"regex":"(Lily|Tom)( (said|saw|ran|and|the|big|dog|park|[0-9]+)){5,}\\."}`,
	`"structured_outputs":{"choice":["yes","no","Once upon a time there was a little dog named Max","Once upon a time there was a cat"]}`,
	`"guided_regex":"[A-Z][^A-Z]*"`,
	`"guided_choice":["red","green","a big red ball"]`,
	`"regex":"(\\([0-9]{3}\\) [0-9]{3}-[0-9]{4}\\n)+"`,
	`"response_format":{"type":"json_object"}`,
	`"response_format":{"type":"json_schema","json_schema":{"name":"tale","strict":true,"schema":{"type":"object","additionalProperties":false,
		"properties":{"title":{"type":"string","maxLength":40},"pages":{"type":"array","items":{"type":"integer"},"minItems":10},"kind":{"enum":["sad","happy"]}},
		"required":["title","pages","kind"]}}}`,
	`"guided_json":{"type":"array","items":{"type":"string"},"minItems":3}`,
}

// calls have a chat's answer be calls of tools.
var calls = []string{`"tool_choice":"required"`, `"tool_choice":"required","parallel_tool_calls":false`, `"tool_choice":{"type":"function","function":{"name":"paint"}}`}

const tools = `"tools":[{"type":"function","function":{"name":"paint","parameters":{"type":"object","properties":{"colour":{"enum":["red","green"]},"words":{"type":"array","items":{"type":"string"}}},"required":["colour","words"]}}},
	{"type":"function","function":{"name":"paint_all"}}],`

// Bind has a request's answer be something; a chat's, if its model has a format of calls, perhaps calls.
func (d *Request) Bind(r *rand.Rand, callable bool) {
	bound := bounds[r.IntN(len(bounds))]
	if callable && d.Path == "/v1/chat/completions" && r.IntN(2) == 0 {
		if bound = tools + calls[r.IntN(len(calls))]; r.IntN(4) == 0 { // bound only once the model begins a call
			bound = strings.Replace(tools, `"name":"paint",`, `"name":"paint","strict":true,`, 1) + `"tool_choice":"auto"`
		}
	}
	d.Fields, d.Bound = d.Fields+","+bound, true
}

// Draw makes a request of the model "tiny", with tokens from 3 to 502; a whole one does not stream.
func Draw(r *rand.Rand, whole bool) Request {
	d := Request{Path: "/v1/completions"}
	chat, most := r.IntN(3) == 0, 30+r.IntN(500)
	f := []string{`"model":"tiny"`, fmt.Sprintf(`"stream":%t,"seed":%d,"max_tokens":%d`, !whole, r.IntN(1<<30), most)}
	add := func(one int, format string, args ...any) bool { // once in so many requests
		if r.IntN(one) > 0 {
			return false
		}
		f = append(f, fmt.Sprintf(format, args...))
		return true
	}
	if !add(4, `"temperature":0`) {
		add(1, `"temperature":%.1f`, 0.3+1.3*r.Float64())
	}
	add(4, `"n":%d`, 2+r.IntN(2))
	words := strings.Fields("Once upon a time there was a little dog who liked to play in the park with Lily and her mom They said hello big red ball happy sad tree")
	text := func(n int) string {
		out := make([]string, n)
		for i := range out {
			out[i] = words[r.IntN(len(words))]
		}
		return strings.Join(out, " ")
	}
	if chat {
		d.Path = "/v1/chat/completions"
		add(1, `"messages":[{"role":"system","content":%q},{"role":"user","content":%q}]`, text(r.IntN(6)), text(1+r.IntN(30)))
		add(3, `"logprobs":true,"top_logprobs":%d`, r.IntN(4))
	} else {
		switch r.IntN(4) {
		case 0:
			ids := make([]string, 1+r.IntN(60))
			for i := range ids {
				ids[i] = strconv.Itoa(3 + r.IntN(500))
			}
			add(1, `"prompt":[%s]`, strings.Join(ids, ","))
		case 1:
			add(1, `"prompt":[%q,%q]`, text(1+r.IntN(10)), text(1+r.IntN(10)))
		default:
			add(1, `"prompt":%q`, text(1+r.IntN(40)))
		}
		add(4, `"echo":true`)
		add(3, `"logprobs":%d`, r.IntN(4))
	}
	add(2, `"ignore_eos":true`)
	if add(3, `"stop":[%q,%q]`, text(1), text(2)) {
		add(2, `"min_tokens":%d`, most/2)
	}
	add(3, `"frequency_penalty":%.1f,"presence_penalty":%.1f`, r.Float64(), r.Float64())
	add(4, `"repetition_penalty":%.2f`, 1+r.Float64()/2)
	add(4, `"top_k":%d`, 1+r.IntN(60))
	add(4, `"top_p":%.2f`, 0.5+r.Float64()/2)
	add(5, `"logit_bias":{"%d":%d}`, 3+r.IntN(500), r.IntN(5)-2)
	add(3, `"return_token_ids":true`)
	if !whole {
		add(2, `"stream_options":{"include_usage":true,"continuous_usage_stats":%t}`, r.IntN(2) == 0)
	}
	d.Fields = strings.Join(f, ",")
	if r.IntN(4) == 0 {
		d.Bind(r, false)
	}
	return d
}
