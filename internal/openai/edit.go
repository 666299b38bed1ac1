package openai

import "bytes"

// Field is a top-level field of a request that an Edit can set or remove.
type Field uint8

// The fields that dialects change.
const (
	Stream Field = iota
	StreamOptions
	MaxTokens
	MaxCompletionTokens
	MinTokens
	MinCompletionTokens
	IgnoreEOS
	Stop
	StopTokenIDs
	PromptField
	PromptTokenIDs
	RoutedDPRank
	PrefillDPRank
	PriorityField
	ReturnTokenIDs
	fields
)

var fieldNames = [fields]string{"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
	"min_completion_tokens", "ignore_eos", "stop", "stop_token_ids", "prompt", "prompt_token_ids", "routed_dp_rank",
	"disagg_prefill_dp_rank", "priority", "return_token_ids"}

func (f Field) String() string { return fieldNames[f] }

var fieldsByName = func() map[string]Field {
	m := make(map[string]Field, len(fieldNames))
	for f, name := range fieldNames {
		m[name] = Field(f)
	}
	return m
}()

// span is a member's place, [key, end), and its value's, [val, end); end is 0 for an absent
// field.
type span struct{ key, val, end int }

// Has reports whether the field is there, even as null.
func (t *Top) Has(f Field) bool { return t.at[f].end != 0 }

// Edit changes the top level of a request's body. What it does not touch keeps its bytes, white
// space, order and spelling of numbers included. It cannot edit a field that the body has twice;
// see Top.Twice.
type Edit struct {
	body  []byte
	top   *Top
	ops   [fields]op
	added []byte // members to append, each with a leading comma
}

type op struct {
	kind opKind
	raw  string
}

type opKind uint8

const (
	keep opKind = iota
	set
	remove
)

// NewEdit starts an edit of the body that Scan read as top.
func NewEdit(body []byte, top *Top) *Edit { return &Edit{body: body, top: top} }

// Set replaces the field's value by raw JSON, or adds the field.
func (e *Edit) Set(f Field, raw string) {
	if !e.top.Has(f) {
		e.Add(f.String(), raw)
		return
	}
	e.ops[f] = op{set, raw}
}

// Replace is Set for a field that is there, and nothing for others.
func (e *Edit) Replace(f Field, raw string) {
	if e.top.Has(f) {
		e.ops[f] = op{set, raw}
	}
}

// Remove takes the field out.
func (e *Edit) Remove(f Field) {
	if e.top.Has(f) {
		e.ops[f] = op{kind: remove}
	}
}

// Add appends a member that the body does not have.
func (e *Edit) Add(key, raw string) {
	e.added = append(e.added, ',')
	e.added = AppendString(e.added, key)
	e.added = append(e.added, ':')
	e.added = append(e.added, raw...)
}

// jsonSpace is the white space between JSON tokens.
const jsonSpace = " \t\r\n"

// Parts returns the edited body as pieces to be written one after the other; those of the
// original alias it.
func (e *Edit) Parts() [][]byte {
	parts := make([][]byte, 0, 8)
	from, left := 0, 0
	for { // the ops in order of their place
		next, at := fields, len(e.body)
		for f := range e.ops {
			if s := e.top.at[f]; e.ops[f].kind != keep && s.key >= left && s.key < at {
				next, at = Field(f), s.key
			}
		}
		if next == fields {
			break
		}
		s := e.top.at[next]
		left = s.end
		if e.ops[next].kind == set {
			parts = append(parts, e.body[from:s.val], []byte(e.ops[next].raw))
			from = s.end
			continue
		}
		cut, end := s.key, s.end
		if rest := bytes.TrimLeft(e.body[end:], jsonSpace); rest[0] == ',' { // the comma behind goes along
			end = len(e.body) - len(rest) + 1
		} else if before := bytes.TrimRight(e.body[from:cut], jsonSpace); bytes.HasSuffix(before, []byte{','}) { // or the one before
			cut = from + len(before) - 1
		}
		parts = append(parts, e.body[from:cut])
		from = end
	}
	parts = append(parts, e.body[from:e.top.close])
	added := e.added
	last, part, at := lastByte(parts)
	switch {
	case last == '{' && len(added) > 0:
		added = added[1:]
	case last == ',': // what stood behind it was removed
		parts = append(parts[:part], parts[part][:at])
	}
	return append(parts, added, e.body[e.top.close:])
}

// lastByte returns the last byte that is not white space, its part and its place in that; 0
// without one.
func lastByte(parts [][]byte) (c byte, part, at int) {
	for i := len(parts) - 1; i >= 0; i-- {
		if p := bytes.TrimRight(parts[i], jsonSpace); len(p) > 0 {
			return p[len(p)-1], i, len(p) - 1
		}
	}
	return 0, 0, 0
}
