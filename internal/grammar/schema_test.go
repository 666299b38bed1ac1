package grammar

import (
	"math/rand/v2"
	"strings"
	"testing"
)

func TestSchema(t *testing.T) {
	v := small(jsonish...)
	rnd := rand.New(rand.NewPCG(7, 8))
	f := func(schema string, members, others []string) {
		t.Helper()
		g := compile(t, JSONSchema, schema, v)
		for _, text := range members {
			if !matches(g, text) {
				t.Errorf("%s: %s is no member", schema, text)
				continue
			}
			if !feed(t, g.Matcher(), v, text, rnd) {
				t.Errorf("%s: %s is not allowed token by token", schema, text)
			}
		}
		for _, text := range others {
			if matches(g, text) {
				t.Errorf("%s: %s is a member", schema, text)
			}
		}
		if text, whole := walk(t, g, v, rnd, 8); whole && !matches(g, text) {
			t.Errorf("%s: %q ended and is no member", schema, text)
		}
	}
	type L = []string
	// Types.
	f(`true`, L{`1`, `"a"`, `[{}]`}, L{``, ` 1`})
	f(`{}`, L{`null`}, L{`nul`})
	f(`{"type":"null"}`, L{`null`}, L{`0`})
	f(`{"type":"boolean"}`, L{`true`, `false`}, L{`0`, `null`})
	f(`{"type":"integer"}`, L{`0`, `-12`, `-0`}, L{`1.0`, `01`, `1e2`})
	f(`{"type":"number"}`, L{`0`, `-1.5e+3`, `10.01`}, L{`.5`, `1.`, `"1"`})
	f(`{"type":["string","null"]}`, L{`null`, `"x"`}, L{`1`})
	f(`{"const":{"a":[1,"x",null]}}`, L{`{"a":[1,"x",null]}`, `{ "a" : [1, "x",null ] }`}, L{`{"a":[1,"x"]}`, `{}`})
	f(`{"enum":["a","ab","b\n",1,2.5,null]}`, L{`"a"`, `"ab"`, `"b\n"`, `"b\u000a"`, `1`, `2.5`, `null`}, L{`"abc"`, `3`, `2.50`})
	f(`{"type":"string","enum":["a",1]}`, L{`"a"`}, L{`1`})
	// Strings.
	f(`{"type":"string","minLength":2,"maxLength":3}`, L{`"ab"`, `"é\n"`, `"\u0000日x"`}, L{`"a"`, `"abcd"`})
	f(`{"type":"string","pattern":"^a+$"}`, L{`"a"`, `"aaa"`}, L{`""`, `"ab"`})
	f(`{"type":"string","pattern":"b"}`, L{`"b"`, `"abc"`, `"\nb"`}, L{`"a"`})
	f(`{"type":"string","pattern":"^\\\"[^\"]"}`, L{`"\"x"`, `"\"\\"`}, L{`"\"\""`, `"x"`})
	f(`{"type":"string","pattern":"^[ab]+$","maxLength":3}`, L{`"a"`, `"aba"`}, L{`"abab"`, `""`})
	f(`{"type":"string","pattern":"^(abc)*$","minLength":4,"maxLength":8}`, L{`"abcabc"`}, L{`"abc"`, `"abcabcabc"`, `""`})
	f(`{"type":"string","pattern":"^(abc)*$","minLength":4}`, L{`"abcabc"`, `"abcabcabc"`}, L{`"abc"`})
	f(`{"type":"string","pattern":"^[é日]*$","minLength":1,"maxLength":2}`, L{`"é"`, `"日é"`}, L{`""`, `"ééé"`})
	f(`{"allOf":[{"pattern":"a"},{"pattern":"b"}],"type":"string"}`, L{`"ab"`, `"xbya"`}, L{`"a"`, `"b"`})
	f(`{"type":"string","format":"date"}`, L{`"2024-02-29"`, `"1999-12-31"`}, L{`"2024-02-30"`, `"2024-13-01"`, `"2024-1-1"`})
	f(`{"type":"string","format":"date-time"}`, L{`"2024-02-29T23:59:59.5Z"`, `"1999-12-31t00:00:00+01:00"`}, L{`"2024-02-29"`, `"2024-02-29T24:00:00Z"`})
	f(`{"type":"string","format":"time"}`, L{`"10:00:00Z"`}, L{`"10:00:00"`})
	f(`{"type":"string","format":"uuid"}`, L{`"123e4567-e89b-12d3-a456-426614174000"`}, L{`"123e4567e89b12d3a456426614174000"`})
	f(`{"type":"string","format":"ipv4"}`, L{`"0.0.0.0"`, `"255.1.20.199"`}, L{`"256.0.0.1"`, `"1.2.3"`, `"01.2.3.4"`})
	f(`{"type":"string","format":"ipv6"}`, L{`"::"`, `"::1"`, `"1:2:3:4:5:6:7:8"`, `"1::8"`, `"1:2:3:4:5:6:7::"`, `"fe80::1:2"`}, L{`"1:2"`, `"1::2::3"`, `"1:2:3:4:5:6:7:8:9"`, `":::"`})
	f(`{"type":"string","format":"email"}`, L{`"a.b+c@d-e.org"`, `"x@[127.0.0.1]"`}, L{`"a@"`, `"a..b@c"`, `"@c"`, `"a@-c"`})
	f(`{"type":"string","format":"hostname"}`, L{`"a.b-c"`}, L{`"-a"`, `"a..b"`, `""`})
	label := strings.Repeat("a", 62) + "."
	f(`{"type":"string","format":"hostname"}`, L{`"` + label + label + label + label + `b"`}, L{`"` + label + label + label + label + `bc"`, `"` + label + "aa" + label + `b"`})
	f(`{"type":"string","format":"hostname","maxLength":5,"minLength":4}`, L{`"a.bc"`, `"abcde"`}, L{`"a.b"`, `"abcdef"`, `"abcd-"`})
	f(`{"type":"string","format":"uri"}`, L{`"http://u@[::1]:80/a/b?c#d"`, `"mailto:a@b"`, `"a:"`}, L{`"/a"`, `"http://a b"`, `"1:x"`})
	f(`{"type":"string","format":"uri-reference"}`, L{`"/a"`, `""`, `"x/y:z"`, `"http:x"`}, L{`" "`, `"1:x"`})
	f(`{"type":"string","format":"duration"}`, L{`"P1Y2M3DT4H"`, `"PT5S"`, `"P2W"`}, L{`"P"`, `"PT"`, `"P1H"`})
	f(`{"type":"string","format":"json-pointer"}`, L{`""`, `"/a~0/b"`}, L{`"a"`, `"/~2"`})
	f(`{"type":"string","format":"color"}`, L{`"x"`}, nil) // not one of JSON Schema's: means nothing
	f(`{"type":"integer","format":"int64"}`, L{`1`}, nil)
	// Numbers.
	f(`{"type":"integer","minimum":-3,"maximum":12}`, L{`-3`, `0`, `9`, `10`, `12`}, L{`-4`, `13`, `100`, `00`})
	f(`{"type":"integer","exclusiveMinimum":99,"exclusiveMaximum":1001}`, L{`100`, `999`, `1000`}, L{`99`, `1001`, `10`})
	f(`{"type":"integer","minimum":1.5,"maximum":3.5}`, L{`2`, `3`}, L{`1`, `4`})
	f(`{"type":"integer","maximum":-5}`, L{`-5`, `-10`}, L{`-4`, `5`, `0`})
	f(`{"type":"integer","minimum":18}`, L{`18`, `20`, `100`, `99999999999999999999`}, L{`17`, `9`})
	f(`{"type":"number","minimum":0,"maximum":1}`, L{`0`, `0.5`, `1`, `1.00`, `0.0`}, L{`1.01`, `-0.1`, `2`, `-0`})
	f(`{"type":"number","exclusiveMinimum":0,"exclusiveMaximum":1}`, L{`0.5`, `0.001`, `0.999`}, L{`0`, `1`, `0.0`, `1.0`})
	f(`{"type":"number","minimum":-1.25,"maximum":2.5}`, L{`-1.25`, `-1.2`, `-1`, `-0.01`, `0`, `2.5`, `2.50`, `2.499`, `1.9`}, L{`-1.26`, `-1.3`, `2.51`, `3`, `-2`})
	f(`{"type":"number","minimum":1.25,"maximum":1.3}`, L{`1.25`, `1.3`, `1.29`, `1.250`}, L{`1.2`, `1.31`, `1`, `1.24`})
	f(`{"type":"number","minimum":5,"exclusiveMinimum":true}`, L{`5.1`, `6`}, L{`5`, `5.0`})
	f(`{"type":"integer","multipleOf":3,"minimum":4}`, L{`6`, `9`, `300`}, L{`3`, `7`, `301`})
	f(`{"type":"number","multipleOf":0.25}`, L{`1`, `1.5`, `0.25`, `-7.75`}, L{`0.3`, `1.2`})
	f(`{"const":10}`, L{`10`}, L{`10.0`, `1`})
	// Arrays.
	f(`{"type":"array","items":{"type":"integer"}}`, L{`[]`, `[1]`, `[1, 2,3 ]`, `[ ]`}, L{`["a"]`, `[1,]`, `[,1]`})
	f(`{"type":"array","items":{"type":"null"},"minItems":2,"maxItems":3}`, L{`[null,null]`, `[null,null,null]`}, L{`[]`, `[null]`, `[null,null,null,null]`})
	f(`{"type":"array","maxItems":0}`, L{`[]`}, L{`[1]`})
	f(`{"type":"array","prefixItems":[{"const":1},{"const":2}]}`, L{`[]`, `[1]`, `[1,2]`, `[1,2,"x"]`}, L{`[2]`, `[1,3]`})
	f(`{"type":"array","prefixItems":[{"const":1},{"const":2}],"items":false,"minItems":1}`, L{`[1]`, `[1,2]`}, L{`[]`, `[1,2,3]`})
	f(`{"type":"array","items":[{"const":1}],"additionalItems":{"const":2},"maxItems":2}`, L{`[]`, `[1]`, `[1,2]`}, L{`[1,1]`, `[1,2,2]`})
	f(`{"type":"array","items":false}`, L{`[]`}, L{`[1]`})
	f(`{"type":"array","items":{"type":"boolean"},"uniqueItems":false}`, L{`[true,true]`}, nil)
	// Objects.
	f(`{"type":"object","properties":{"a":{"const":1},"b":{"const":2}},"required":["b"],"additionalProperties":false}`,
		L{`{"a":1,"b":2}`, `{"b":2}`, `{ "a" : 1 , "b" : 2 }`}, L{`{}`, `{"a":1}`, `{"b":2,"a":1}`, `{"b":2,"c":3}`, `{"b":2,}`})
	f(`{"type":"object","properties":{"a":{"const":1},"b":{"const":2},"c":{"const":3}},"additionalProperties":false}`,
		L{`{}`, `{"a":1}`, `{"c":3}`, `{"a":1,"c":3}`, `{"b":2,"c":3}`, `{"a":1,"b":2,"c":3}`}, L{`{"c":3,"a":1}`, `{,"a":1}`, `{"a":1,}`, `{"a":1"b":2}`})
	f(`{"type":"object","properties":{"name":{"const":1}},"additionalProperties":{"const":2}}`,
		L{`{}`, `{"name":1}`, `{"name":1,"x":2}`, `{"nam":2,"names":2}`, `{"":2}`, `{"\"":2}`}, L{`{"name":2}`, `{"x":1}`, `{"x":2,"name":1}`})
	f(`{"type":"object","properties":{"ab":{"type":"object","properties":{"x":{"type":"string"}},"additionalProperties":false}}}`,
		L{`{"ab":{}}`, `{"a":"ab"}`, `{"abc":[1]}`}, L{`{"ab":"x"}`, `{"ab":[]}`})
	f(`{"type":"object","required":["x"]}`, L{`{"x":1}`, `{"x":{},"y":[]}`}, L{`{}`, `{"y":1}`, `{"y":1,"x":1}`})
	f(`{"type":"object","patternProperties":{"^n":{"const":1}},"additionalProperties":false}`, L{`{}`, `{"n":1}`, `{"nx":1,"n":1}`}, L{`{"x":1}`, `{"n":2}`})
	f(`{"type":"object","properties":{"na":{"enum":[1,2]}},"patternProperties":{"^n":{"enum":[2,3]}},"additionalProperties":{"const":4}}`,
		L{`{"na":2,"nb":3,"x":4}`, `{"x":4,"n":2}`}, L{`{"na":1}`, `{"na":3}`, `{"nb":4}`, `{"x":2}`})
	f(`{"type":"object","patternProperties":{".*":{"const":1}}}`, L{`{}`, `{"n":1}`, `{"\n":1}`}, L{`{"n":2}`, `{"":2}`})
	f(`{"type":"object","minProperties":1,"maxProperties":2,"additionalProperties":{"const":1}}`, L{`{"a":1}`, `{"a":1,"b":1}`}, L{`{}`, `{"a":1,"b":1,"c":1}`})
	f(`{"type":"object","properties":{"a":{"const":1},"b":{"const":1},"c":{"const":1}},"additionalProperties":false,"minProperties":2}`,
		L{`{"a":1,"b":1}`, `{"b":1,"c":1}`, `{"a":1,"b":1,"c":1}`}, L{`{}`, `{"a":1}`, `{"c":1}`})
	f(`{"type":"object","properties":{"a":{"const":1},"b":{"const":1},"c":{"const":1}},"required":["b"],"maxProperties":2,"additionalProperties":{"const":2}}`,
		L{`{"b":1}`, `{"a":1,"b":1}`, `{"b":1,"c":1}`, `{"b":1,"x":2}`}, L{`{"a":1}`, `{"a":1,"b":1,"c":1}`, `{"a":1,"b":1,"x":2}`, `{}`})
	f(`{"type":"object","properties":{"a":false,"b":true},"additionalProperties":false}`, L{`{}`, `{"b":1}`}, L{`{"a":1}`})
	f(`{"type":"object","properties":{"a\"\n":{"const":1}},"additionalProperties":false}`, L{`{"a\"\n":1}`}, nil)
	// Combinations.
	f(`{"anyOf":[{"type":"integer"},{"type":"string","maxLength":1}]}`, L{`12`, `"a"`}, L{`"ab"`, `1.5`})
	f(`{"oneOf":[{"type":"integer"},{"type":"string"}]}`, L{`12`, `"ab"`}, L{`null`})
	f(`{"oneOf":[{"type":"object","properties":{"k":{"const":"a"},"x":{"const":1}},"required":["k"],"additionalProperties":false},{"type":"object","properties":{"k":{"const":"b"},"y":{"const":2}},"required":["k"],"additionalProperties":false}]}`,
		L{`{"k":"a","x":1}`, `{"k":"b","y":2}`}, L{`{"k":"a","y":2}`, `{"k":"c"}`})
	f(`{"allOf":[{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]},{"properties":{"a":{"minimum":5},"b":{"const":1}},"additionalProperties":false}]}`,
		L{`{"a":5}`, `{"a":77,"b":1}`}, L{`{"a":4}`, `{"b":1}`, `{"a":5,"c":1}`})
	f(`{"type":"object","properties":{"a":{},"b":{}},"anyOf":[{"required":["a"]},{"required":["b"]}],"additionalProperties":false}`, L{`{"a":1}`, `{"b":1}`, `{"a":1,"b":1}`}, L{`{}`})
	f(`{"type":["object","array"],"items":{"const":1},"required":["x"]}`, L{`[1]`, `{"x":1}`}, L{`{}`, `[2]`})
	f(`{"minLength":2}`, L{`1`, `"ab"`, `{}`, `[]`, `null`}, L{`"a"`})
	// References.
	f(`{"$ref":"#/$defs/n","$defs":{"n":{"type":"object","properties":{"v":{"type":"integer"},"next":{"$ref":"#/$defs/n"}},"required":["v"],"additionalProperties":false}}}`,
		L{`{"v":1}`, `{"v":1,"next":{"v":2,"next":{"v":3}}}`}, L{`{}`, `{"v":1,"next":{}}`, `{"next":{"v":1}}`})
	f(`{"type":"object","properties":{"children":{"type":"array","items":{"$ref":"#"}}},"additionalProperties":false}`, L{`{}`, `{"children":[{},{"children":[]}]}`}, L{`{"children":[1]}`})
	f(`{"definitions":{"a/b":{"const":1},"x":{"$ref":"#/definitions/a~1b"}},"items":{"$ref":"#/definitions/x"},"type":"array"}`, L{`[1,1]`}, L{`[2]`})
	f(`{"$defs":{"p":{"$anchor":"pos","type":"integer","minimum":1}},"$ref":"#pos","maximum":3}`, L{`1`, `3`}, L{`0`, `4`})
	f(`{"$id":"http://x.org/a.json","$defs":{"p":{"$id":"b.json","$defs":{"q":{"const":1}},"items":{"$ref":"#/$defs/q"}}},"type":"array","$ref":"b.json"}`, L{`[1]`}, L{`[2]`})
	f(`{"$ref":"#/$defs/e","$defs":{"e":{"anyOf":[{"type":"integer"},{"type":"array","items":{"$ref":"#/$defs/e"}}]}}}`, L{`1`, `[[1],[[]],2]`}, L{`["a"]`})
	f(`{"x-guidance":{"whitespace_flexible":false},"type":"array"}`, L{`[1,2]`}, L{`[1, 2]`, `[ ]`})
	f(`{"x-guidance":{"whitespace_pattern":" {1,2}"},"type":"array"}`, L{`[1,  2]`}, L{`[1,   2]`, "[\n]"})
	f(`{"title":"T","description":"d","default":1,"examples":[],"$comment":"c","x-foo":{},"type":"null"}`, L{`null`}, nil)
}

func TestWhitespace(t *testing.T) {
	v := small(jsonish...)
	f := func(space Whitespace, text string, want bool) {
		t.Helper()
		g, err := Compile(Spec{Kind: JSONSchema, Text: `{"type":"object"}`, Space: space}, v, Limits{})
		if err != nil {
			t.Fatal(err)
		}
		if matches(g, text) != want {
			t.Errorf("%v: %q: %v", space, text, !want)
		}
	}
	run := strings.Repeat(" ", maxSpace)
	f(Compact, `{"a":[1,2]}`, true)
	f(Compact, `{"a": 1}`, false)
	f(Flexible, `{"a":[1,2]}`, true)
	f(Flexible, "{\n\t\"a\" : [ 1 , 2 ]\r\n}", true)
	f(Flexible, "{"+run+"}", true)
	f(Flexible, "{"+run+" }", false)
	f(Flexible, ` {}`, false)
	f(Flexible, `{} `, false)
}

func TestSchemaRefused(t *testing.T) {
	v := small()
	f := func(schema, where, reason string) {
		t.Helper()
		_, err := Compile(Spec{Kind: JSONSchema, Text: schema}, v, Limits{})
		e, ok := err.(*Error)
		if !ok || !strings.Contains(e.Reason, reason) || e.Where != where {
			t.Errorf("%s: %v, want %s at %s", schema, err, reason, where)
		}
	}
	f(`{"type":"object","properties":{"a/b":{"not":{}}}}`, "#/properties/a~1b/not", "not supported")
	f(`{"type":"array","uniqueItems":true}`, "#/uniqueItems", "not supported")
	f(`{"items":{"if":{}}}`, "#/items/if", "not supported")
	f(`{"type":"strin"}`, "#/type", "no type is named")
	f(`{"$ref":"http://elsewhere/x"}`, "#/$ref", "leads out of")
	f(`{"$ref":"#/$defs/nope"}`, "#/$ref", "points at nothing")
	f(`{"type":"string","pattern":"(?=a)"}`, "#", "look-around")
	f(`{"type":"string","format":"regex"}`, "#/format", "format")
	f(`{"oneOf":[{"type":"string"},{"type":"string","maxLength":2}]}`, "#/oneOf", "oneOf")
	f(`{"type":"string","minLength":-1}`, "#/minLength", "whole number")
	f(`{"type":"number","multipleOf":0}`, "#/multipleOf", "zero")
	f(`{"type":"number","multipleOf":0.123456789123}`, "#", "few digits")
	f(`{"type":"object","properties":[]}`, "#/properties", "must be an object")
	f(`{"type":"object","patternProperties":{"^a":{},"b$":{}}}`, "#/patternProperties", "can match both")
	f(`{"type":"object","properties":{"a":{}},"required":["b"],"additionalProperties":false}`, "", "no text")
	f(`{"$ref":"#"}`, "", "no text")
	f(`false`, "", "no text")
	f(`{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}`, "", "no text")
	f(`{"type":"object"`, "offset 16", "not valid JSON")
	f(`[]`, "#", "a schema must be an object")
	f(`{"minimum":1e999}`, "#/minimum", "digits")
}
