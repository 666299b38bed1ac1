package openai

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// MaxTools bounds the tools of a request, as OpenAI does.
const MaxTools = 128

// tools checks a list of tools. It keeps their text, because the order of keys matters to templates.
func (p *parser) tools() json.RawMessage {
	p.Peek()
	from, n := p.Pos(), 0
	if !p.is("tools", jsonscan.Array, "a list") {
		return nil
	}
	seen := map[string]int{}
	for ; p.Item(); n++ {
		name := fmt.Sprintf("tools[%d]", n)
		if n == MaxTools {
			p.Fail(BadRequest("tools", "tools has more than %d entries", MaxTools))
		}
		called := p.tool(name)
		if first, twice := seen[called]; twice && p.Err() == nil {
			p.badTool(name+".function.name", "is %q, as is that of tools[%d]", clip(called, 80), first)
		}
		seen[called] = n
	}
	if n == 0 {
		return nil
	}
	return bytes.Clone(p.Since(from))
}

// tool checks one tool, and returns its function's name.
func (p *parser) tool(name string) (called string) {
	if !p.openTool(name) {
		return ""
	}
	kind, given := "", false
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "type":
			kind = p.toolText(name + ".type")
		case "function":
			given, called = true, p.function(name+".function")
		default:
			p.walk("tools")
		}
	}
	switch {
	case kind == "":
		p.badTool(name+".type", "is required")
	case kind != "function":
		p.badTool(name+".type", "is %q; only function is supported", clip(kind, 40))
	case !given:
		p.badTool(name+".function", "is required")
	}
	return called
}

// function checks a function: its name, and that its schema is an object.
func (p *parser) function(name string) (called string) {
	if !p.openTool(name) {
		return ""
	}
	for p.Next() == jsonscan.Key {
		switch string(p.Decoded()) {
		case "name":
			called = p.toolText(name + ".name")
		case "description":
			if p.Peek() != jsonscan.Null {
				p.toolText(name + ".description")
			} else {
				p.walk("tools")
			}
		case "strict":
			if k := p.Peek(); k != jsonscan.True && k != jsonscan.False && k != jsonscan.Null {
				p.wrongTool(name+".strict", "a boolean")
			}
			p.walk("tools")
		case "parameters":
			if k := p.Peek(); k != jsonscan.Object && k != jsonscan.Null {
				p.wrongTool(name+".parameters", "an object")
			}
			from := p.Pos()
			p.walk("tools")
			if kind := Member(p.Since(from), "type"); len(kind) > 0 && kind[0] == '"' && string(kind) != `"object"` {
				p.badTool(name+".parameters", "must be the schema of an object, not of type %s", clip(string(kind), 40))
			}
		default:
			p.walk("tools")
		}
	}
	if called == "" {
		p.badTool(name+".name", "is required")
	}
	return called
}

// openTool opens an object within tools, where nothing may be null.
func (p *parser) openTool(name string) bool {
	if p.Peek() != jsonscan.Object {
		p.wrongTool(name, "an object")
	}
	p.count("tools")
	return p.Next() == jsonscan.Object
}

func (p *parser) toolText(name string) string {
	if p.Peek() != jsonscan.String {
		p.wrongTool(name, "a string")
	}
	return p.stringOr("tools")
}

// wrongTool is wrong for part of a tool.
func (p *parser) wrongTool(name, want string) {
	depth := p.Depth()
	k := p.Next()
	p.Leave(depth)
	p.badTool(name, "must be %s, not %s", want, kindNames[k])
}

// badTool refuses part of a tool, which it names in full.
func (p *parser) badTool(name, format string, args ...any) {
	if p.Err() == nil { // else what is not there is no part of a tool
		p.Fail(BadRequest(name, name+" "+format, args...))
	}
}
