package chat

import (
	"regexp"
	"strings"

	"github.com/xpyd/xpyd/internal/openai"
)

// ToolNames are the names of a request's tools, as JSON strings.
type ToolNames map[string]string

// Add notes the tool at a place such as tools[3]. It refuses a name that another has, and more tools than
// a chat may have.
func (n ToolNames) Add(r *openai.Reader, at, name string) {
	switch first, twice := n[name]; {
	case r.Err() != nil:
	case twice:
		r.Refuse(at+".name", "%s.name is %s, as is that of %s", at, openai.Clip(name), first)
	case len(n) == openai.MaxTools:
		r.Refuse("tools", "tools has more than %d entries", openai.MaxTools)
	}
	n[name] = at
}

// OwnTool returns an error about a part of a chat's tool as one about an API's, whose tools are no more than
// functions; schema is its name for their parameters. Other errors are returned as they are.
func OwnTool(e *openai.Error, schema string) *openai.Error {
	at, part, ok := strings.Cut(e.Param, ".function.")
	if !ok || !strings.HasPrefix(at, "tools[") {
		return e
	}
	if part == "parameters" {
		part = schema
	}
	own := *e
	own.Param = at + "." + part
	own.Message = strings.Replace(e.Message, e.Param, own.Param, 1)
	return &own
}

// OwnFields returns an error about a chat's fields as one about an API's, by its names for them: its parameter, and where its
// message has a field's name for certain: one with an underscore, or the parameter at its beginning.
func OwnFields(e *openai.Error, names map[string]string) *openai.Error {
	own := *e
	if name, ok := names[e.Param]; ok {
		own.Param = name
		if rest, ok := strings.CutPrefix(e.Message, e.Param+" "); ok {
			own.Message = name + " " + rest
		} else if strings.Contains(e.Param, ".") {
			own.Message = strings.ReplaceAll(e.Message, e.Param, name)
		}
	}
	own.Message = fieldName.ReplaceAllStringFunc(own.Message, func(word string) string {
		if name, ok := names[word]; ok {
			return name
		}
		return word
	})
	return &own
}

// fieldName is a word that only a field's name can be.
var fieldName = regexp.MustCompile(`\b[a-z]+(?:_[a-z]+)+\b`)
