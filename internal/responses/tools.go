package responses

import (
	"fmt"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// tools reads the functions that may be called, and refuses tools that a provider runs itself.
func (p *parser) tools() {
	if !p.Is("tools", jsonscan.Array, "a list") {
		return
	}
	asked, said := []byte{'['}, []byte{'['}
	n := 0
	names := chat.ToolNames{}
	for ; p.Item(); n++ {
		if n > 0 {
			asked, said = append(asked, ','), append(said, ',')
		}
		name := fmt.Sprintf("tools[%d]", n)
		t := p.tool(name)
		names.Add(p.Reader, name, string(t.name))
		asked = append(append(append(asked, `{"type":"function","function":{"name":`...), t.name...), t.rest()...)
		asked = append(asked, "}}"...)
		said = fmt.Appendf(said, `{"type":"function","name":%s,"description":%s,"parameters":%s,"strict":%s}`,
			t.name, orNull(t.description), orNull(t.parameters), orNull(t.strict))
	}
	if n > 0 {
		p.q.chat.Set("tools", append(asked, ']'))
		p.said("tools", append(said, ']'))
	}
}

// tool is a function's members, as JSON.
type tool struct{ name, description, parameters, strict []byte }

func (p *parser) tool(name string) (t tool) {
	kind := ""
	if !p.object("tools", name) {
		return t
	}
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			kind = p.Str(name + ".type")
		case "name":
			t.name = p.Of(name+".name", jsonscan.String, "a string")
		case "description":
			t.description = p.Of(name+".description", jsonscan.String, "a string")
		case "parameters":
			t.parameters = p.Of(name+".parameters", jsonscan.Object, "an object")
		case "strict":
			if t.strict = p.Given(); t.strict != nil && !isBool(t.strict) {
				p.Refuse(name+".strict", "%s.strict must be a boolean", name)
			}
		default:
			p.Skip()
		}
	}
	switch {
	case kind != "function":
		p.Refuse(name+".type", "%s.type is %q; only tools of the type function are supported: the application runs them", name, openai.Clip(kind))
	case len(t.name) <= len(`""`):
		p.Refuse(name+".name", "%s.name is required", name)
	}
	return t
}

// rest is what follows the name in a chat's function.
func (t *tool) rest() (b []byte) {
	for _, m := range []struct {
		name string
		raw  []byte
	}{{"description", t.description}, {"parameters", t.parameters}, {"strict", t.strict}} {
		if m.raw != nil {
			b = fmt.Appendf(b, `,"%s":%s`, m.name, m.raw)
		}
	}
	return b
}

func orNull(raw []byte) []byte {
	if raw == nil {
		return []byte("null")
	}
	return raw
}

// object opens an object in a list, where nothing may be null.
func (p *parser) object(field, name string) bool { return object(p.Reader, field, name) }

func object(r *openai.Reader, field, name string) bool {
	if r.Peek() == jsonscan.Object {
		r.Next()
		return true
	}
	if r.Err() == nil {
		r.Refuse(field, "%s must be an object", name)
	}
	return false
}

func (p *parser) toolChoice() {
	const field = "tool_choice"
	switch p.Peek() {
	case jsonscan.String:
		raw := p.Given()
		switch string(raw) {
		case `"none"`, `"auto"`, `"required"`:
			p.q.chat.Set(field, p.said(field, raw))
		default:
			p.Refuse(field, "tool_choice must be none, auto, required, or an object that names a function, not %s", openai.Clip(string(raw)))
		}
		return
	case jsonscan.Null:
		p.Skip()
		return
	}
	if !p.object(field, field) {
		return
	}
	kind, name := "", []byte(nil)
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			kind = p.Str(field)
		case "name":
			name = p.Of(field, jsonscan.String, "a string")
		default:
			p.Skip()
		}
	}
	switch {
	case kind != "function":
		p.Refuse(field, "tool_choice has the type %q; only function is supported", openai.Clip(kind))
	case len(name) <= len(`""`):
		p.Refuse(field, "tool_choice.name is required")
	default:
		p.q.chat.Set(field, fmt.Appendf(nil, `{"type":"function","function":{"name":%s}}`, name))
		p.said(field, fmt.Appendf(nil, `{"type":"function","name":%s}`, name))
	}
}
