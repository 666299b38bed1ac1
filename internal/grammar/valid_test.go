package grammar

import (
	"encoding/json"
	"fmt"
	"math/big"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// valid says whether v is valid against schema: a validator of its own, of the keywords that
// randomSchema uses.
func valid(root, schema any, v any) bool {
	s, ok := schema.(map[string]any)
	if !ok {
		return schema.(bool)
	}
	if ref, ok := s["$ref"].(string); ok {
		at := root
		for _, part := range strings.Split(strings.TrimPrefix(ref, "#/"), "/") {
			at = at.(map[string]any)[part]
		}
		return valid(root, at, v)
	}
	if t, ok := s["type"].(string); ok && !hasType(t, v) {
		return false
	}
	if list, ok := s["enum"].([]any); ok {
		in := false
		for _, e := range list {
			in = in || fmt.Sprint(e) == fmt.Sprint(v)
		}
		if !in {
			return false
		}
	}
	if list, ok := s["anyOf"].([]any); ok {
		in := false
		for _, o := range list {
			in = in || valid(root, o, v)
		}
		if !in {
			return false
		}
	}
	num := func(key string, missing int) int {
		if n, ok := s[key].(json.Number); ok {
			i, _ := n.Int64()
			return int(i)
		}
		return missing
	}
	switch v := v.(type) {
	case string:
		n := utf8.RuneCountInString(v)
		if n < num("minLength", 0) || n > num("maxLength", n) {
			return false
		}
		if p, ok := s["pattern"].(string); ok && !regexp.MustCompile(p).MatchString(v) {
			return false
		}
	case json.Number:
		x, _ := new(big.Rat).SetString(v.String())
		for _, key := range []string{"minimum", "maximum"} {
			if b, ok := s[key].(json.Number); ok {
				y, _ := new(big.Rat).SetString(b.String())
				if c := x.Cmp(y); key == "minimum" && c < 0 || key == "maximum" && c > 0 {
					return false
				}
			}
		}
	case []any:
		if len(v) < num("minItems", 0) || len(v) > num("maxItems", len(v)) {
			return false
		}
		if items, ok := s["items"]; ok {
			for _, e := range v {
				if !valid(root, items, e) {
					return false
				}
			}
		}
	case map[string]any:
		props, _ := s["properties"].(map[string]any)
		required, _ := s["required"].([]any)
		for _, r := range required {
			if _, ok := v[r.(string)]; !ok {
				return false
			}
		}
		for k, e := range v {
			if p, ok := props[k]; ok {
				if !valid(root, p, e) {
					return false
				}
			} else if more, ok := s["additionalProperties"]; ok && !valid(root, more, e) {
				return false
			}
		}
		if len(v) < num("minProperties", 0) || len(v) > num("maxProperties", len(v)) {
			return false
		}
	}
	return true
}

func hasType(t string, v any) bool {
	switch v := v.(type) {
	case nil:
		return t == "null"
	case bool:
		return t == "boolean"
	case string:
		return t == "string"
	case json.Number:
		return t == "number" || t == "integer" && !strings.ContainsAny(v.String(), ".eE")
	case []any:
		return t == "array"
	}
	return t == "object"
}

// randomSchema writes a schema with references to itself.
func randomSchema(rnd *rand.Rand, depth int) string {
	n := rnd.IntN(12)
	if depth == 0 {
		n = rnd.IntN(6)
	}
	sub := func() string { return randomSchema(rnd, depth-1) }
	switch n {
	case 0:
		return `{"type":"boolean"}`
	case 1:
		lo := rnd.IntN(40) - 20
		return fmt.Sprintf(`{"type":"integer","minimum":%d,"maximum":%d}`, lo, lo+rnd.IntN(200))
	case 2:
		lo := float64(rnd.IntN(400)-200) / 8
		return fmt.Sprintf(`{"type":"number","minimum":%v,"maximum":%v}`, lo, lo+float64(1+rnd.IntN(100))/16)
	case 3:
		lo := rnd.IntN(3)
		return fmt.Sprintf(`{"type":"string","minLength":%d,"maxLength":%d}`, lo, lo+rnd.IntN(90))
	case 4:
		return []string{`{"type":"string","pattern":"^[a-c]+(x|é)?$"}`, `{"type":"string","pattern":"ab","maxLength":6}`, `{"type":"string"}`}[rnd.IntN(3)]
	case 5:
		return `{"enum":["name","ab",1,null,-2]}`
	case 6, 7:
		lo := rnd.IntN(3)
		return fmt.Sprintf(`{"type":"array","items":%s,"minItems":%d,"maxItems":%d}`, sub(), lo, lo+rnd.IntN(3))
	case 8:
		return fmt.Sprintf(`{"anyOf":[%s,%s]}`, sub(), sub())
	case 9:
		return `{"anyOf":[{"type":"null"},{"$ref":"#/$defs/x"}]}`
	case 10:
		return fmt.Sprintf(`{"type":"object","properties":{"name":%s,"ab":%s},"minProperties":1,"maxProperties":2,"additionalProperties":%s}`, sub(), sub(), sub())
	default:
		more := []string{`false`, `true`, sub()}[rnd.IntN(3)]
		return fmt.Sprintf(`{"type":"object","properties":{"name":%s,"ab":%s,"abc":%s},"required":["ab"],"additionalProperties":%s}`, sub(), sub(), sub(), more)
	}
}

// TestSchemaWalks walks random schemas by their masks, each of which is compared with what
// Accept says of every token, and asks a validator about the texts.
func TestSchemaWalks(t *testing.T) {
	rnd := rand.New(rand.NewPCG(11, 12))
	v := small(jsonish...)
	ended := 0
	for range 120 {
		text := strings.TrimSuffix(randomSchema(rnd, 3), "}") + `,"$defs":{"x":` + randomSchema(rnd, 1) + `}}`
		g := compile(t, JSONSchema, text, v)
		said, whole := walk(t, g, v, rnd, 10)
		if !whole {
			continue
		}
		ended++
		if !valid(decode(t, text), decode(t, text), decode(t, said)) {
			t.Fatalf("%s: %s is not valid", text, said)
		}
		for range 3 {
			if !feed(t, g.Matcher(), v, said, rnd) {
				t.Fatalf("%s: %s is not allowed token by token", text, said)
			}
		}
	}
	if ended < 40 {
		t.Errorf("only %d of 120 walks ended", ended)
	}
}

func decode(t *testing.T, text string) any {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return v
}
