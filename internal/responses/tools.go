package responses

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/chat"
	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// tools reads the functions that may be called, and refuses tools that a provider runs itself.
func (p *parser) tools() {
	if !p.Is("tools", jsonscan.Array, "a list") {
		return
	}
	p.q.spaced, p.named = nil, map[string]bool{}
	l := toolList{asked: []byte{'['}, names: chat.ToolNames{}}
	said := []byte{'['}
	n := 0
	for ; p.Item(); n++ {
		if n > 0 {
			said = append(said, ',')
		}
		name := fmt.Sprintf("tools[%d]", n)
		t := tool{}
		if t.read(p.Reader, name); t.kind == "namespace" {
			said = p.namespace(&l, said, name, &t)
			continue
		}
		l.add(p.Reader, name, &t, t.name)
		p.named[unquoted(t.name)] = true
		said = t.appendSaid(said)
	}
	if n > 0 {
		p.said("tools", append(said, ']'))
	}
	if len(l.asked) > 1 {
		p.q.chat.Set("tools", append(l.asked, ']'))
	}
}

// toolList is a chat's list of tools.
type toolList struct {
	asked []byte
	names chat.ToolNames
}

// add adds a function under a name, or refuses what is none.
func (l *toolList) add(r *openai.Reader, at string, t *tool, name []byte) {
	if t.check(r, at); r.Err() != nil {
		return
	}
	l.names.Add(r, at, string(name))
	if len(l.asked) > 1 {
		l.asked = append(l.asked, ',')
	}
	l.asked = append(append(append(l.asked, `{"type":"function","function":{"name":`...), name...), t.rest()...)
	l.asked = append(l.asked, "}}"...)
}

// spacedName is a function's name in its namespace, as JSON strings have them.
type spacedName struct{ space, name []byte }

// namespace adds a namespace's functions, and appends what a response says of it. Models know no namespaces: to them
// it is part of the name.
func (p *parser) namespace(l *toolList, said []byte, at string, t *tool) []byte {
	switch {
	case p.Err() != nil:
		return said
	case len(t.name) <= len(`""`):
		p.Refuse(at+".name", "%s.name is required", at)
		return said
	case t.tools == nil:
		p.Refuse(at+".tools", "%s.tools is required", at)
		return said
	}
	said = fmt.Appendf(said, `{"type":"namespace","name":%s,"description":%s,"tools":[`, t.name, orNull(t.description))
	r := openai.NewListReader(t.tools)
	for n := 0; r.Item(); n++ {
		if n > 0 {
			said = append(said, ',')
		}
		at := fmt.Sprintf("%s.tools[%d]", at, n)
		f := tool{}
		if f.read(r, at); r.Err() != nil {
			break
		}
		flat := flatName(t.name, f.name)
		l.add(r, at, &f, flat)
		if p.q.spaced == nil {
			p.q.spaced = map[string]spacedName{}
		}
		p.q.spaced[unquoted(flat)] = spacedName{space: bytes.Clone(inside(t.name)), name: bytes.Clone(inside(f.name))}
		said = f.appendSaid(said)
	}
	if err := r.Fault(); err != nil {
		p.Fail(err)
	}
	return append(said, "]}"...)
}

// flatName is a function's name with its namespace, as other servers make it too. All are JSON strings.
func flatName(space, name []byte) []byte {
	return slices.Concat([]byte{'"'}, flatText(inside(space), inside(name)), []byte{'"'})
}

func flatText(space, name []byte) []byte { return slices.Concat(space, []byte("__"), name) }

// inside is a JSON string without its quotes; of nothing nothing.
func inside(raw []byte) []byte {
	if len(raw) < len(`""`) {
		return nil
	}
	return raw[1 : len(raw)-1]
}

func unquoted(raw []byte) string { return string(jsonscan.AppendDecoded(nil, inside(raw))) }

// tool is a tool's type, and its members as JSON. A function has no tools, a namespace no parameters.
type tool struct {
	kind                                  string
	name, description, parameters, strict []byte
	tools                                 []byte
}

func (t *tool) read(r *openai.Reader, name string) {
	if !object(r, "tools", name) {
		return
	}
	for r.Next() == jsonscan.Key {
		switch string(r.Decoded()) {
		case "type":
			t.kind = r.Str(name + ".type")
		case "name":
			t.name = r.Of(name+".name", jsonscan.String, "a string")
		case "description":
			t.description = r.Of(name+".description", jsonscan.String, "a string")
		case "parameters":
			t.parameters = r.Of(name+".parameters", jsonscan.Object, "an object")
		case "tools":
			t.tools = r.Of(name+".tools", jsonscan.Array, "a list")
		case "strict":
			if t.strict = r.Given(); t.strict != nil && !isBool(t.strict) {
				r.Refuse(name+".strict", "%s.strict must be a boolean", name)
			}
		default:
			r.Skip()
		}
	}
}

// check refuses what is no function.
func (t *tool) check(r *openai.Reader, name string) {
	switch {
	case r.Err() != nil:
	case t.kind != "function":
		r.Refuse(name+".type", "%s.type is %q; only tools of the type function are supported, and namespaces of them: the application runs them", name, openai.Clip(t.kind))
	case len(t.name) <= len(`""`):
		r.Refuse(name+".name", "%s.name is required", name)
	}
}

// appendSaid appends what a response says of a function.
func (t *tool) appendSaid(dst []byte) []byte {
	return fmt.Appendf(dst, `{"type":"function","name":%s,"description":%s,"parameters":%s,"strict":%s}`,
		t.name, orNull(t.description), orNull(t.parameters), orNull(t.strict))
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
	p.choice = nil
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
		p.choice = name
		p.said(field, fmt.Appendf(nil, `{"type":"function","name":%s}`, name))
	}
}

// choose has the chat call the function that was named. That of a namespace may be named with it or without.
func (p *parser) choose() *openai.Error {
	if p.choice == nil {
		return nil
	}
	name, of := p.choice, []string{}
	if !p.named[unquoted(name)] {
		for flat, s := range p.q.spaced {
			if unquoted(name) == string(jsonscan.AppendDecoded(nil, s.name)) {
				of = append(of, flat)
			}
		}
	}
	switch len(of) {
	case 0:
	case 1:
		name = openai.AppendString(nil, of[0])
	default:
		slices.Sort(of)
		return openai.BadRequest("tool_choice", "tool_choice.name is that of several functions: name one of %s", openai.Clip(strings.Join(of, ", ")))
	}
	p.q.chat.Set("tool_choice", fmt.Appendf(nil, `{"type":"function","function":{"name":%s}}`, name))
	return nil
}
