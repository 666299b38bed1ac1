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
func (b *Binder) calls(text string) (c *Calls, how *answer.Calling, err error) {
	c = &Calls{}
	if err := json.Unmarshal([]byte(text), c); err != nil {
		return nil, nil, fmt.Errorf("read calls: %w", err)
	}
	calling, why := answer.ToolFormat(c.Format).Calling(c.Several)
	if why != "" {
		return nil, nil, &Error{Reason: why}
	}
	if n := len(c.Tools); n < 1 || n > maxTools {
		return nil, nil, &Error{Reason: fmt.Sprintf("there are %d tools to call one of; at most %d", n, maxTools)}
	}
	seen := map[string]bool{}
	for _, t := range c.Tools {
		switch {
		case !toolName.MatchString(t.Name):
			return nil, nil, &Error{Reason: fmt.Sprintf("the name %.80q is not letters, digits, _, . and -, 64 at most", t.Name)}
		case !calling.Names(t.Name) && !t.Free:
			return nil, nil, &Error{Reason: fmt.Sprintf("the name %q is none that this model's calls (%s) can have", t.Name, c.Format)}
		case seen[t.Name]:
			return nil, nil, &Error{Reason: fmt.Sprintf("there are two tools %q", t.Name)}
		}
		seen[t.Name] = true
	}
	c.Tools = slices.DeleteFunc(c.Tools, func(t Tool) bool { return !calling.Names(t.Name) }) // it cannot be called
	return c, &calling, nil
}

// Encode is the Text of a spec.
func (c *Calls) Encode() (string, error) {
	text, err := json.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("encode calls: %w", err)
	}
	return string(text), nil
}

// argsSpec is the grammar of a call's arguments and what closes it.
func (b *Binder) argsSpec(how *answer.Calling, t Tool) grammar.Spec {
	schema := string(arguments(t.Parameters))
	if t.Free {
		schema = `{"type":"object"}`
	}
	if m := how.Members; m != nil {
		form := grammar.Form{Open: b.pieces(m.Open), Between: b.pieces(m.Between), Key: b.pieces(m.Key), KeyEnd: b.pieces(m.KeyEnd), StringEnd: b.pieces(m.StringEnd),
			Close: b.pieces(m.Close), End: b.pieces(how.End), Pad: m.Pad, Stops: m.Stops, Entities: m.Entities, Python: m.Python, Object: m.Object}
		if how.End == "" { // what closes the call begins as a key might
			form.End = b.pieces(how.Close)
		}
		return grammar.Spec{Kind: grammar.Arguments, Text: grammar.ArgumentsText(form, schema)}
	}
	space := ""
	if how.Space {
		space = `" "? `
	}
	end := ""
	if how.End != "" {
		end = " " + literal(how.End)
	}
	return grammar.Spec{Kind: grammar.Lark, Text: "start: " + space + "args" + end + "\nargs: %json " + schema + "\n"}
}

// pieces parts a mark into text and special tokens.
func (b *Binder) pieces(mark string) (list []grammar.Piece) {
	for mark != "" {
		if rest, ok := strings.CutPrefix(mark, answer.MayBreak); ok {
			list, mark = append(list, grammar.Piece{Text: "\n", May: true}), rest
			continue
		}
		id, n, text := int32(-1), 0, strings.IndexAny(mark, answer.MayBreak)
		if text < 0 {
			text = len(mark)
		}
		for name, token := range b.special { // the first one, and of those that begin there the longest
			if i := strings.Index(mark, name); i >= 0 && (i < text || i == text && id >= 0 && len(name) > n) {
				id, n, text = token, len(name), i
			}
		}
		if text > 0 {
			list = append(list, grammar.Piece{Text: mark[:text]})
		}
		if mark = mark[text+n:]; id >= 0 {
			list = append(list, grammar.Piece{Token: id})
		}
	}
	return list
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

// option is the way to go on with text and a call's arguments.
func (b *Binder) option(how *answer.Calling, first int, text string, begin func() (matcher, error)) option {
	o := option{tokens: b.encode(text), begin: begin}
	if how.Number != nil {
		o.number = func(n int) []int32 { return b.encode(how.Number(first + n)) }
	}
	return o
}

// callScript has the model call one of the tools, and more if it may.
func (b *Binder) callScript(spec *handoff.Guide) (*script, error) {
	b.once.Do(b.prepare)
	calls, how, err := b.calls(spec.Text)
	if err != nil {
		return nil, err
	}
	s := &script{ends: b.cfg.Ends, most: answer.MaxCalls}
	text := func(t Tool) func() (matcher, error) {
		return func() (matcher, error) {
			g, err := b.grammar(context.Background(), b.argsSpec(how, t)) // it was compiled with the request, or is within Limits.Time
			if err != nil {
				return nil, err
			}
			return matching{g.Matcher()}, nil
		}
	}
	closed := how.Close
	if how.Members != nil && how.End == "" { // which argsSpec has
		closed = ""
	}
	may := spec.Kind == KindMayCall
	if may {
		list, apart := b.triggers(calls, how, text)
		if len(list) == 0 {
			return nil, &Error{Reason: "nothing begins a call of one of the tools"}
		}
		if s.free = newFinder(list, b.texts); apart {
			return s, nil
		}
		if how.Members != nil && how.Members.Python {
			how.After = "]"
		}
	}
	end := b.encode(closed + how.After)
	if s.last = len(end) == 0; !s.last {
		s.closing = []option{{tokens: end}}
		s.next = slices.Clone(s.closing)
	}
	s.lastOnly = may && s.last && how.End == "" && how.JSON()
	for _, t := range calls.Tools {
		begin := how.Begin(t.Name)
		if !may {
			s.first = append(s.first, b.option(how, calls.First, spec.Begin+how.Before+begin, text(t)))
		}
		if calls.Several && how.Several && (!may || how.After != "") {
			s.next = append(s.next, b.option(how, calls.First, closed+how.Next+begin, text(t)))
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
