package answer

import (
	"encoding/json"
	"strconv"
	"strings"
)

// Tools are the tools that may be called, and their parameters' types.
type Tools struct {
	byName map[string]params
}

// params are the types of a tool's parameters.
type params struct {
	named  map[string]types
	others types // of those that the schema does not name
}

// types is a set of JSON types.
type types uint8

const (
	typeString types = 1 << iota
	typeInteger
	typeNumber
	typeBool
	typeNull
	typeObject
	typeArray
	typeQuoted // text in quotes: no schema asks for it
)

var typeNames = map[string]types{"string": typeString, "str": typeString, "integer": typeInteger, "int": typeInteger,
	"number": typeNumber | typeInteger, "float": typeNumber | typeInteger, "boolean": typeBool, "bool": typeBool, "null": typeNull,
	"object": typeObject, "dict": typeObject, "array": typeArray, "list": typeArray}

// schema is as much of a JSON schema as says which types a value may have.
type schema struct {
	Type                 json.RawMessage
	Enum                 []json.RawMessage
	Const                json.RawMessage
	Ref                  string `json:"$ref"`
	AnyOf                []json.RawMessage
	OneOf                []json.RawMessage
	AllOf                []json.RawMessage
	Properties           map[string]json.RawMessage
	AdditionalProperties json.RawMessage
}

// maxRefs bounds the schemas that are read within each other to know a value's types.
const maxRefs = 16

// ReadTools reads a request's list of tools. What is no function, or no schema, says nothing.
func ReadTools(list []json.RawMessage) *Tools {
	t := &Tools{byName: map[string]params{}}
	for _, raw := range list {
		var tool struct {
			Function struct {
				Name       string
				Parameters json.RawMessage
			}
		}
		if json.Unmarshal(raw, &tool) != nil || tool.Function.Name == "" {
			continue
		}
		r := schemas{root: tool.Function.Parameters, left: maxSchemas}
		p := params{named: map[string]types{}}
		r.params(&p, r.root, 0)
		t.byName[tool.Function.Name] = p
	}
	return t
}

// maxSchemas bounds the schemas of a tool that are read: references may lead to the same again and again.
const maxSchemas = 1 << 14

// schemas reads those of a tool.
type schemas struct {
	root json.RawMessage
	left int
}

// read reads a schema, and where it refers to another, that.
func (r *schemas) read(raw json.RawMessage, depth int) (s schema, ok bool) {
	for ; depth < maxRefs && r.left > 0; depth++ {
		r.left--
		if s = (schema{}); json.Unmarshal(raw, &s) != nil {
			return s, false
		}
		if s.Ref == "" {
			return s, true
		}
		if raw = at(r.root, s.Ref); raw == nil {
			return s, false
		}
	}
	return s, false
}

// params adds the types of the parameters that a schema has.
func (r *schemas) params(p *params, raw json.RawMessage, depth int) {
	s, ok := r.read(raw, depth)
	if !ok {
		return
	}
	for name, raw := range s.Properties {
		p.named[name] |= r.types(raw, depth+1)
	}
	if s.AdditionalProperties != nil {
		p.others |= r.types(s.AdditionalProperties, depth+1)
	}
	for _, of := range [][]json.RawMessage{s.AnyOf, s.OneOf, s.AllOf} {
		for _, raw := range of {
			r.params(p, raw, depth+1)
		}
	}
}

// at is what a reference within a schema points at; nil: nothing.
func at(root json.RawMessage, ref string) json.RawMessage {
	path, ok := strings.CutPrefix(ref, "#")
	if !ok || path != "" && path[0] != '/' {
		return nil
	}
	for _, part := range strings.Split(path, "/")[1:] {
		part = strings.ReplaceAll(strings.ReplaceAll(part, "~1", "/"), "~0", "~")
		var object map[string]json.RawMessage
		var list []json.RawMessage
		switch i, err := strconv.Atoi(part); {
		case json.Unmarshal(root, &object) == nil:
			root = object[part]
		case err == nil && json.Unmarshal(root, &list) == nil && i >= 0 && i < len(list):
			root = list[i]
		default:
			return nil
		}
	}
	return root
}

// types are those that a schema allows; 0: any, as far as it is known.
func (r *schemas) types(raw json.RawMessage, depth int) (t types) {
	s, ok := r.read(raw, depth)
	if !ok {
		return 0
	}
	var one string
	var several []string
	if json.Unmarshal(s.Type, &one) == nil {
		t |= typeNames[one]
	} else if json.Unmarshal(s.Type, &several) == nil {
		for _, name := range several {
			t |= typeNames[name]
		}
	}
	for _, of := range [][]json.RawMessage{s.AnyOf, s.OneOf} {
		any := false
		var union types
		for _, raw := range of {
			kind := r.types(raw, depth+1)
			any, union = any || kind == 0, union|kind
		}
		if !any {
			t |= union
		}
	}
	for _, raw := range s.AllOf {
		switch kind := r.types(raw, depth+1); {
		case t&kind != 0:
			t &= kind
		case t == 0:
			t = kind
		}
	}
	if t != 0 {
		return t
	}
	if s.Const != nil {
		s.Enum = append(s.Enum, s.Const)
	}
	for _, v := range s.Enum {
		switch kind := jsonType(v); kind {
		case typeQuoted:
			t |= typeString
		case typeInteger, typeNumber:
			t |= typeInteger | typeNumber
		default:
			t |= kind
		}
	}
	return t
}

// Has reports whether a tool of that name may be called.
func (t *Tools) Has(name string) bool {
	if t == nil {
		return true
	}
	_, ok := t.byName[name]
	return ok
}

func (t *Tools) typesOf(name, key string) types {
	if t == nil {
		return 0
	}
	p := t.byName[name]
	if kind, ok := p.named[key]; ok {
		return kind
	}
	return p.others
}
