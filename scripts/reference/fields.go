package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/xpyd/xpyd/internal/openai"
)

// fields is a table of each endpoint: what native workers do with each field.
func fields() (string, error) {
	var b strings.Builder
	b.WriteString("# Request fields" + made + `
What xpyd's own workers do with each field of a request. The parser has a case for each row and for nothing else,
and a test tries each bound.

- **served**: values within the bounds are; others are a 400 that names the field. null is as good as absent.
- **off**: only a value that asks for nothing goes, such as null; others are a 400 that names the field.
- **refused**: any value but null is a 400 that names the field.
- **router**: the router reads it.
- **pairs**: routers and workers use it among themselves; from a client it is a 400.

A field that is not here is valid JSON and else ignored. Foreign engines get all fields as they are, but for those of
pairs, and judge them themselves. Values from the configuration, the model and the context bound more than the
tables say: an error names the field.
`)
	for _, e := range openai.Endpoints {
		fmt.Fprintf(&b, "\n## `POST %s`\n\n| field | | values | |\n|---|---|---|---|\n", e.Path)
		for _, f := range openai.RequestFields() {
			if f.On&e.Of == 0 || e.Of == openai.OnTokenize && f.On&openai.OnChat != 0 && f.On&openai.OnCompletions != 0 && f.Name != "add_special_tokens" && f.Name != "model" {
				continue
			}
			values := ""
			if f.Schema != "" && (f.Fate == openai.Served || f.Fate == openai.Routed) {
				var s map[string]any
				d := json.NewDecoder(strings.NewReader(f.Schema))
				d.UseNumber()
				if err := d.Decode(&s); err != nil {
					return "", fmt.Errorf("field %s: %w", f.Name, err)
				}
				values = words(s)
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.Name, f.Fate, values, f.What)
		}
	}
	return b.String(), nil
}

// words says in a few words what a JSON Schema allows.
func words(s map[string]any) string {
	if some, ok := s["anyOf"].([]any); ok {
		var list []string
		for _, one := range some {
			list = append(list, words(one.(map[string]any)))
		}
		return strings.Join(list, "; or ")
	}
	if values, ok := s["enum"].([]any); ok {
		var list []string
		for _, v := range values {
			list = append(list, fmt.Sprintf("`%v`", v))
		}
		return strings.Join(list, ", ")
	}
	if v, ok := s["const"]; ok {
		return fmt.Sprintf("`%v`", v)
	}
	between := func(lo, hi, unit string) string {
		least, has := s[lo]
		most, ends := s[hi]
		switch {
		case has && ends && fmt.Sprint(most) != "2147483647" && unit == "":
			return fmt.Sprintf(", %v to %v", least, most)
		case has && ends && unit != "" && fmt.Sprint(least) != "0":
			return fmt.Sprintf(", %v to %v%s", least, most, unit)
		case ends && fmt.Sprint(most) != "2147483647":
			return fmt.Sprintf(", at most %v%s", most, unit)
		case has:
			return fmt.Sprintf(", at least %v%s", least, unit)
		}
		return ""
	}
	switch s["type"] {
	case "integer":
		return "integer" + between("minimum", "maximum", "")
	case "number":
		if least, ok := s["exclusiveMinimum"]; ok {
			return fmt.Sprintf("number, above %v, at most %v", least, s["maximum"])
		}
		return "number" + between("minimum", "maximum", "")
	case "string":
		return "text" + between("minLength", "maxLength", " bytes")
	case "boolean":
		return "boolean"
	case "object":
		if inner, ok := s["additionalProperties"].(map[string]any); ok {
			return "object" + between("minProperties", "maxProperties", " members") + ": " + words(inner)
		}
		return "object"
	case "array":
		item, ok := s["items"].(map[string]any)
		if !ok {
			return "list"
		}
		return "list" + between("minItems", "maxItems", "") + ": " + words(item)
	}
	return ""
}
