package chat

import (
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
