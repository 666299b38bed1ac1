package openai

import (
	"encoding/json"
	"strings"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// Constraint is what an answer's text must be.
type Constraint struct {
	Field   string // of the request, where errors say that it is
	Kind    ConstraintKind
	Text    string // JSON of a schema, or of a list of strings; else as written; "" for any object
	Compact bool   // JSON without white space
}

// ConstraintKind is the language of a constraint.
type ConstraintKind string

// The kinds of constraints.
const (
	ConstraintSchema ConstraintKind = "json_schema"
	ConstraintObject ConstraintKind = "json_object"
	ConstraintRegex  ConstraintKind = "regex"
	ConstraintChoice ConstraintKind = "choice"
	ConstraintEBNF   ConstraintKind = "ebnf"
	ConstraintLark   ConstraintKind = "lark"
)

// MaxConstraint bounds a constraint's text in bytes: it travels with every ticket.
const MaxConstraint = 512 << 10

// bind takes a constraint. There can be one.
func (p *parser) bind(s *Sampling, c Constraint) {
	switch old := s.Constraint; {
	case p.Err() != nil:
		return
	case old != nil && old.Field != c.Field:
		p.refuse(c.Field, "%s and %s both say what the answer must be; give one of them", old.Field, c.Field)
	case len(c.Text) > MaxConstraint:
		p.refuse(c.Field, "%s has %d bytes; %d is the limit", c.Field, len(c.Text), MaxConstraint)
	}
	s.Constraint = &c
}

// constraint reads a field that says what the answer must be. It reports whether the next one is.
func (p *parser) constraint(s *Sampling, key []byte) bool {
	name := string(key)
	switch string(key) {
	case "structured_outputs":
		p.structured(s)
	case "guided_json", "json_schema":
		p.bindSchema(s, name)
	case "guided_regex", "regex":
		p.bindText(s, name, ConstraintRegex)
	case "guided_choice":
		p.bindChoice(s, name)
	case "guided_grammar", "grammar":
		p.bindGrammar(s, name)
	case "ebnf":
		p.bindText(s, name, ConstraintEBNF)
	case "guided_json_object":
		p.bindObject(s, name)
	case "guided_whitespace_pattern", "structural_tag":
		if p.raw() != nil {
			p.refuse(name, "%s is not supported", name)
		}
	default:
		return false
	}
	return true
}

// structured reads vLLM's structured_outputs.
func (p *parser) structured(s *Sampling) {
	const field = "structured_outputs"
	if !p.is(field, jsonscan.Object, "an object") {
		return
	}
	before, compact := s.Constraint, false
	for p.Next() == jsonscan.Key {
		member := string(p.Decoded())
		switch name := field + "." + member; member {
		case "json":
			p.bindSchema(s, name)
		case "regex":
			p.bindText(s, name, ConstraintRegex)
		case "choice":
			p.bindChoice(s, name)
		case "grammar":
			p.bindGrammar(s, name)
		case "json_object":
			p.bindObject(s, name)
		case "disable_any_whitespace":
			compact = p.bool(name, false)
		case "disable_fallback", "_backend", "_backend_was_auto": // of vLLM's engines
			p.Skip()
		default:
			if raw := p.raw(); raw != nil && string(raw) != "false" {
				p.refuse(name, "%s is not supported", name)
			}
		}
	}
	switch {
	case p.Err() != nil:
	case s.Constraint == nil || s.Constraint == before:
		p.refuse(field, "%s has none of json, regex, choice, grammar and json_object", field)
	default:
		s.Constraint.Compact = compact
	}
}

// bindText reads a grammar that is a string.
func (p *parser) bindText(s *Sampling, field string, kind ConstraintKind) {
	given := p.Peek() != jsonscan.Null
	text := p.string(field)
	switch {
	case !given:
	case text == "":
		p.refuse(field, "%s must not be empty", field)
	default:
		p.bind(s, Constraint{Field: field, Kind: kind, Text: text})
	}
}

// bindGrammar reads a grammar, whose rules show what it is written in.
func (p *parser) bindGrammar(s *Sampling, field string) {
	before := s.Constraint
	if p.bindText(s, field, ConstraintLark); s.Constraint != before && strings.Contains(s.Constraint.Text, "::=") {
		s.Constraint.Kind = ConstraintEBNF
	}
}

// bindSchema reads a schema, or a string that holds one.
func (p *parser) bindSchema(s *Sampling, field string) {
	switch p.Peek() {
	case jsonscan.String:
		p.bindText(s, field, ConstraintSchema)
	case jsonscan.Object, jsonscan.True, jsonscan.False:
		p.bind(s, Constraint{Field: field, Kind: ConstraintSchema, Text: string(p.raw())})
	case jsonscan.Null:
		p.Skip()
	default:
		p.wrong(field, "a JSON schema")
	}
}

func (p *parser) bindObject(s *Sampling, field string) {
	if p.bool(field, false) {
		p.bind(s, Constraint{Field: field, Kind: ConstraintObject})
	}
}

// bindChoice reads the answers that there may be.
func (p *parser) bindChoice(s *Sampling, field string) {
	if !p.is(field, jsonscan.Array, "a list of strings") {
		return
	}
	list := []string{}
	for p.Item() {
		if p.Peek() != jsonscan.String {
			p.wrong(field, "a list of strings")
			return
		}
		list = append(list, p.string(field))
	}
	if len(list) == 0 {
		p.refuse(field, "%s must not be empty", field)
		return
	}
	text, _ := json.Marshal(list) // of strings: never fails
	p.bind(s, Constraint{Field: field, Kind: ConstraintChoice, Text: string(text)})
}

// responseFormat reads OpenAI's response_format.
func (p *parser) responseFormat(s *Sampling) {
	const field, schema = "response_format", "response_format.json_schema"
	if !p.is(field, jsonscan.Object, "an object") {
		return
	}
	kind, found := "", Constraint{Field: schema + ".schema", Kind: ConstraintSchema}
	have := false
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			kind = p.string(field + ".type")
		case "json_schema":
			if !p.is(schema, jsonscan.Object, "an object") {
				continue
			}
			for p.Next() == jsonscan.Key {
				switch string(p.Decoded()) {
				case "schema":
					if have = p.Peek() != jsonscan.Null; have {
						if k := p.Peek(); k != jsonscan.Object && k != jsonscan.True && k != jsonscan.False {
							p.wrong(schema+".schema", "a JSON schema")
						}
					}
					found.Text = string(p.raw())
				case "name":
					p.string(schema + ".name")
				case "strict":
					p.bool(schema+".strict", false)
				default:
					p.Skip()
				}
			}
		default:
			p.Skip()
		}
	}
	switch {
	case p.Err() != nil:
	case kind == "text":
	case kind == "json_object":
		p.bind(s, Constraint{Field: field, Kind: ConstraintObject})
	case kind == "json_schema" && !have:
		p.refuse(found.Field, "%s is required", found.Field)
	case kind == "json_schema":
		p.bind(s, found)
	case kind == "":
		p.refuse(field, "response_format.type is required")
	default:
		p.refuse(field, "response_format.type %q is not supported; text, json_object and json_schema are", clip(kind, 40))
	}
}
