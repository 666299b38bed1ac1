package openai_test

import (
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// TestConstraint: the fields of OpenAI, vLLM and SGLang, in completions and chats alike.
func TestConstraint(t *testing.T) {
	const schema = openai.ConstraintSchema
	for fields, want := range map[string]*openai.Constraint{
		`"x":1`:                                    {},
		`"response_format":null`:                   {},
		`"response_format":{"type":"text"}`:        {},
		`"guided_json":null,"regex":null`:          {},
		`"guided_json_object":false`:               {},
		`"guided_decoding_backend":"xgrammar"`:     {},
		`"structured_outputs":null`:                {},
		`"response_format":{"type":"json_object"}`: {Field: "response_format", Kind: openai.ConstraintObject},
		`"response_format":{"type":"json_schema","json_schema":{"name":"a","strict":true,"description":"d","schema":{"type": "string"}}}`: {
			Field: "response_format.json_schema.schema", Kind: schema, Text: `{"type": "string"}`},
		`"response_format":{"json_schema":{"schema":true},"type":"json_schema"}`: {
			Field: "response_format.json_schema.schema", Kind: schema, Text: `true`},
		`"structured_outputs":{"json":{"type":"string"},"regex":null}`: {Field: "structured_outputs.json", Kind: schema, Text: `{"type":"string"}`},
		`"structured_outputs":{"json":"{\"a\":1}","disable_fallback":true,"_backend":"x","disable_any_whitespace":true}`: {
			Field: "structured_outputs.json", Kind: schema, Text: `{"a":1}`, Compact: true},
		`"structured_outputs":{"regex":"a+\\d"}`:                          {Field: "structured_outputs.regex", Kind: openai.ConstraintRegex, Text: `a+\d`},
		`"structured_outputs":{"choice":["a","\u00e4\""]}`:                {Field: "structured_outputs.choice", Kind: openai.ConstraintChoice, Text: `["a","ä\""]`},
		`"structured_outputs":{"grammar":"root ::= \"a\""}`:               {Field: "structured_outputs.grammar", Kind: openai.ConstraintEBNF, Text: `root ::= "a"`},
		`"structured_outputs":{"grammar":"start: \"a\""}`:                 {Field: "structured_outputs.grammar", Kind: openai.ConstraintLark, Text: `start: "a"`},
		`"structured_outputs":{"json_object":true,"structural_tag":null}`: {Field: "structured_outputs.json_object", Kind: openai.ConstraintObject},
		`"guided_json":{"a":1}`:                                           {Field: "guided_json", Kind: schema, Text: `{"a":1}`},
		`"guided_json":"{}"`:                                              {Field: "guided_json", Kind: schema, Text: `{}`},
		`"guided_regex":"a"`:                                              {Field: "guided_regex", Kind: openai.ConstraintRegex, Text: "a"},
		`"guided_choice":["yes","no"]`:                                    {Field: "guided_choice", Kind: openai.ConstraintChoice, Text: `["yes","no"]`},
		`"guided_grammar":"start: \"a\""`:                                 {Field: "guided_grammar", Kind: openai.ConstraintLark, Text: `start: "a"`},
		`"guided_json_object":true`:                                       {Field: "guided_json_object", Kind: openai.ConstraintObject},
		`"regex":"a"`:                                                     {Field: "regex", Kind: openai.ConstraintRegex, Text: "a"},
		`"ebnf":"root ::= \"a\""`:                                         {Field: "ebnf", Kind: openai.ConstraintEBNF, Text: `root ::= "a"`},
		`"grammar":"root ::= \"a\""`:                                      {Field: "grammar", Kind: openai.ConstraintEBNF, Text: `root ::= "a"`},
		`"json_schema":"{\"type\":\"string\"}"`:                           {Field: "json_schema", Kind: schema, Text: `{"type":"string"}`},
		`"regex":"a","regex":"b"`:                                         {Field: "regex", Kind: openai.ConstraintRegex, Text: "b"},
		`"regex":"a","response_format":{"type":"text"}`:                   {Field: "regex", Kind: openai.ConstraintRegex, Text: "a"},
	} {
		c, err := openai.ParseCompletion([]byte(`{"prompt":"x",`+fields+`}`), 0)
		if err != nil {
			t.Errorf("%s: %v", fields, err)
			continue
		}
		h, err := openai.ParseChat([]byte(`{"messages":[{"role":"user","content":"x"}],`+fields+`}`), 0)
		if err != nil {
			t.Errorf("chat, %s: %v", fields, err)
			continue
		}
		for _, got := range []*openai.Constraint{c.Constraint, h.Constraint} {
			if got == nil {
				got = &openai.Constraint{}
			}
			if *got != *want {
				t.Errorf("%s: %+v, want %+v", fields, *got, *want)
			}
		}
	}
	long := strings.Repeat("a", openai.MaxConstraint+1)
	for fields, want := range map[string][2]string{
		`"response_format":"json"`:                    {"response_format", "object"},
		`"response_format":{}`:                        {"response_format", "type is required"},
		`"response_format":{"type":"structural_tag"}`: {"response_format", "structural_tag"},
		`"response_format":{"type":5}`:                {"response_format.type", "string"},
		`"response_format":{"type":"json_schema"}`:    {"response_format.json_schema.schema", "required"},
		`"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":null}}`: {"response_format.json_schema.schema", "required"},
		`"response_format":{"type":"json_schema","json_schema":{"schema":"{}"}}`:            {"response_format.json_schema.schema", "JSON schema"},
		`"response_format":{"type":"json_schema","json_schema":[]}`:                         {"response_format.json_schema", "object"},
		`"response_format":{"type":"json_schema","json_schema":{"schema":{},"strict":1}}`:   {"response_format.json_schema.strict", "boolean"},
		`"structured_outputs":{}`:                                                     {"structured_outputs", "none of"},
		`"structured_outputs":{"json_object":false}`:                                  {"structured_outputs", "none of"},
		`"structured_outputs":[]`:                                                     {"structured_outputs", "object"},
		`"structured_outputs":{"json":5}`:                                             {"structured_outputs.json", "JSON schema"},
		`"structured_outputs":{"regex":""}`:                                           {"structured_outputs.regex", "empty"},
		`"structured_outputs":{"regex":["a"]}`:                                        {"structured_outputs.regex", "string"},
		`"structured_outputs":{"choice":[]}`:                                          {"structured_outputs.choice", "empty"},
		`"structured_outputs":{"choice":["a",1]}`:                                     {"structured_outputs.choice", "strings"},
		`"structured_outputs":{"choice":"a"}`:                                         {"structured_outputs.choice", "strings"},
		`"structured_outputs":{"structural_tag":"x"}`:                                 {"structured_outputs.structural_tag", "not supported"},
		`"structured_outputs":{"regex":"a","whitespace_pattern":" "}`:                 {"structured_outputs.whitespace_pattern", "not supported"},
		`"structured_outputs":{"regex":"a","json":{}}`:                                {"structured_outputs.json", "structured_outputs.regex and structured_outputs.json"},
		`"guided_choice":["a"],"guided_json":{}`:                                      {"guided_json", "guided_choice and guided_json"},
		`"response_format":{"type":"json_object"},"structured_outputs":{"regex":"a"}`: {"structured_outputs.regex", "response_format and structured_outputs.regex"},
		`"guided_whitespace_pattern":"x"`:                                             {"guided_whitespace_pattern", "not supported"},
		`"structural_tag":"x"`:                                                        {"structural_tag", "not supported"},
		`"regex":"` + long + `"`:                                                      {"regex", "limit"},
	} {
		_, err := openai.ParseCompletion([]byte(`{"prompt":"x",`+fields+`}`), 0)
		if err == nil || err.Param != want[0] || !strings.Contains(err.Message, want[1]) {
			t.Errorf("%.100s: %v, want %q of %s", fields, err, want[1], want[0])
		}
	}
}

// TestScanBound: a router sees whether a field says what the answer must be.
func TestScanBound(t *testing.T) {
	for field, want := range map[string]bool{
		`"x":1`: false, `"response_format":null`: false, `"response_format":{"type":"text"}`: false, `"response_format":{"type":"json_object"}`: true,
		`"response_format":5`: true, `"tool_choice":"auto"`: false, `"tool_choice":"none"`: false, `"tool_choice":null`: false, `"tool_choice":"required"`: true,
		`"tool_choice":{"type":"function"}`: true, `"structured_outputs":{}`: true, `"structured_outputs":null`: false, `"guided_regex":"a"`: true,
		`"guided_json_object":false`: false, `"regex":"a"`: true, `"ebnf":"a"`: true, `"grammar":"a"`: true, `"json_schema":"{}"`: true, `"guided_choice":["a"],"guided_json":null`: true,
		`"tool_choice":"required","response_format":{"type":"text"}`: true, `"regex":"a","guided_json":null`: true,
	} {
		top, err := openai.Scan([]byte(`{"prompt":"x",` + field + `}`))
		if err != nil || top.Bound != want {
			t.Errorf("%s: %t, %v; want %t", field, top.Bound, err, want)
		}
	}
}
