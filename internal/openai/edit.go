package openai

// Field is a top-level field of a request that an Edit can set or remove.
type Field uint8

// The fields that engines' exchanges touch.
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
	RequestRID
	RoutedDPRank
	PrefillDPRank
	PriorityField
	fields
)

var fieldNames = [fields]string{"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
	"min_completion_tokens", "ignore_eos", "stop", "stop_token_ids", "prompt", "prompt_token_ids", "rid", "routed_dp_rank",
	"disagg_prefill_dp_rank", "priority"}

func (f Field) String() string { return fieldNames[f] }

func fieldOf(key []byte) (Field, bool) {
	f, ok := fieldsByName[string(key)]
	return f, ok
}

var fieldsByName = func() map[string]Field {
	m := make(map[string]Field, len(fieldNames))
	for f, name := range fieldNames {
		m[name] = Field(f)
	}
	return m
}()

// span is where a member is: [key, end) with its value at [val, end); end is
// 0 for a field that is not there.
type span struct{ key, val, end int }

// Has reports whether the field is there, even as null.
func (t *Top) Has(f Field) bool { return t.at[f].end != 0 }

// Edit changes the top level of a request's body by splicing: what it does not touch keeps
// its bytes, including white space, order and the spelling of numbers. A field that the
// body has twice cannot be edited; see Top.Twice.
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
		if i := skipSpace(e.body, end); e.body[i] == ',' { // the comma behind goes along
			end = i + 1
		} else { // the last member: the comma before it, if it is still there
			for i := cut - 1; i >= from; i-- {
				if c := e.body[i]; c == ',' {
					cut = i
					break
				} else if c != ' ' && c != '\t' && c != '\n' && c != '\r' {
					break
				}
			}
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

func skipSpace(b []byte, i int) int {
	for b[i] == ' ' || b[i] == '\t' || b[i] == '\n' || b[i] == '\r' {
		i++
	}
	return i
}

// lastByte returns the last byte that is not white space, and its place counted from the
// beginning of its part; 0 without one.
func lastByte(parts [][]byte) (c byte, part, at int) {
	for i := len(parts) - 1; i >= 0; i-- {
		for j := len(parts[i]) - 1; j >= 0; j-- {
			if c := parts[i][j]; c != ' ' && c != '\t' && c != '\n' && c != '\r' {
				return c, i, j
			}
		}
	}
	return 0, 0, 0
}
