package bind

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/grammar"
)

// toolName is what OpenAI allows, and no format's mark has part of.
var toolName = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)

// calls reads a spec's text, which may be a peer's.
func (b *Binder) calls(text string) (*Calls, error) {
	var c Calls
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return nil, fmt.Errorf("read calls: %w", err)
	}
	if _, why := answer.ToolFormat(c.Format).Calling(); why != "" {
		return nil, &Error{Reason: why}
	}
	if n := len(c.Tools); n < 1 || n > maxTools {
		return nil, &Error{Reason: fmt.Sprintf("there are %d tools to call one of; at most %d", n, maxTools)}
	}
	seen := map[string]bool{}
	for _, t := range c.Tools {
		switch {
		case !toolName.MatchString(t.Name):
			return nil, &Error{Reason: fmt.Sprintf("the name %.80q is not letters, digits, _, . and -, 64 at most", t.Name)}
		case seen[t.Name]:
			return nil, &Error{Reason: fmt.Sprintf("there are two tools %q", t.Name)}
		}
		seen[t.Name] = true
	}
	return &c, nil
}

// Encode is the Text of a spec.
func (c *Calls) Encode() (string, error) {
	text, err := json.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("encode calls: %w", err)
	}
	return string(text), nil
}

// argsSpec is the grammar of a call's arguments and what closes its object.
func argsSpec(how answer.Calling, t Tool) grammar.Spec {
	space := ""
	if how.Space {
		space = `" "? `
	}
	end := ""
	if how.End != "" {
		end = " " + literal(how.End)
	}
	return grammar.Spec{Kind: grammar.Lark, Text: "start: " + space + "args" + end + "\nargs: %json " + string(arguments(t.Parameters)) + "\n"}
}

// arguments is a schema that only objects match. A tool without parameters has none.
func arguments(schema json.RawMessage) json.RawMessage {
	if s := strings.TrimSpace(string(schema)); s == "" || s == "null" {
		return json.RawMessage(`{"type":"object","properties":{},"additionalProperties":false}`)
	}
	var members map[string]json.RawMessage
	if json.Unmarshal(schema, &members) != nil {
		return schema // no object: the grammar says what is wrong
	}
	for _, says := range []string{"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"} {
		if members[says] != nil {
			return schema
		}
	}
	rest := strings.TrimLeft(string(schema), " \t\r\n")[1:]
	if len(members) > 0 {
		rest = "," + rest
	}
	return json.RawMessage(`{"type":"object"` + rest)
}

// literal is a string of Lark, which is as one of JSON.
func literal(s string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // a string: never fails
	return strings.TrimSuffix(b.String(), "\n")
}

// callScript has the model call one of the tools, and more if it may.
func (b *Binder) callScript(spec *handoff.Guide) (*script, error) {
	calls, err := b.calls(spec.Text)
	if err != nil {
		return nil, err
	}
	b.once.Do(b.prepare)
	how, _ := answer.ToolFormat(calls.Format).Calling()
	s := &script{ends: b.cfg.Ends, most: answer.MaxCalls}
	text := func(t Tool) func() (matcher, error) {
		return func() (matcher, error) {
			g, err := b.grammar(context.Background(), argsSpec(how, t)) // it was compiled with the request, or is within Limits.Time
			if err != nil {
				return nil, err
			}
			return matching{g.Matcher()}, nil
		}
	}
	end := b.encode(how.Close + how.After)
	if s.last = len(end) == 0; !s.last {
		s.closing = []option{{tokens: end}}
		s.next = slices.Clone(s.closing)
	}
	for _, t := range calls.Tools {
		begin := how.Begin(t.Name)
		s.first = append(s.first, option{tokens: b.encode(spec.Begin + how.Before + begin), begin: text(t)})
		if calls.Several && how.Several {
			s.next = append(s.next, option{tokens: b.encode(how.Close + how.Next + begin), begin: text(t)})
		}
	}
	for _, list := range [][]option{s.first, s.next} {
		for _, o := range list {
			if len(o.tokens) == 0 {
				return nil, &Error{Reason: "the tokenizer has no tokens for the begin of a call"}
			}
		}
	}
	return s, nil
}
