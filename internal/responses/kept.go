package responses

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// Output is a response's list of items, for a Turn.
func Output(response []byte) []byte { return openai.Member(response, "output") }

// ResponseOf is the ID of the response that an item's ID comes from; "" if it is none of ours.
func ResponseOf(item string) string {
	_, of, ok := strings.Cut(item, "_")
	if n := len(of) - len("00"); ok && n > 0 {
		return "resp_" + strings.TrimSuffix(of[:n], "in")
	}
	return ""
}

// Item returns an item by its ID, of a response's output or of its input; nil if there is none.
func Item(id string, t Turn) []byte {
	r := openai.NewListReader(t.Output)
	for r.Item() {
		if raw := r.Raw(); raw != nil && text(raw, "id") == id {
			return raw
		}
	}
	for _, it := range listed(t.Input, ResponseOf(id)) {
		if it.id == id {
			return it.raw
		}
	}
	return nil
}

// Page is which items List returns.
type Page struct {
	Limit int    // at most so many, 1 to 100
	Asc   bool   // the first item first
	After string // behind this one; "": from the beginning
}

// List appends the items of an input, each with an ID, that of a response that is kept.
func List(dst, input []byte, id string, page Page) ([]byte, *openai.Error) {
	items := listed(input, id)
	if !page.Asc {
		slices.Reverse(items)
	}
	if page.After != "" {
		i := slices.IndexFunc(items, func(it listedItem) bool { return it.id == page.After })
		if i < 0 {
			return nil, openai.BadRequest("after", "after names no item of this response")
		}
		items = items[i+1:]
	}
	more := len(items) > page.Limit
	items = items[:min(len(items), page.Limit)]
	dst = append(dst, `{"object":"list","data":[`...)
	for i, it := range items {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, it.raw...)
	}
	first, last := "", ""
	if n := len(items); n > 0 {
		first, last = items[0].id, items[n-1].id
	}
	dst = openai.AppendString(append(dst, `],"first_id":`...), first)
	dst = openai.AppendString(append(dst, `,"last_id":`...), last)
	return fmt.Appendf(dst, `,"has_more":%t}`, more), nil
}

type listedItem struct {
	id  string
	raw []byte
}

// prefixes are of the IDs that items get if they have none.
var prefixes = map[string]string{"message": "msg", "": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

func listed(input []byte, id string) (list []listedItem) {
	own := func(kind string) string {
		return fmt.Sprintf("%s_%sin%02x", prefixes[kind], bytes.TrimPrefix([]byte(id), []byte("resp_")), len(list))
	}
	if input[0] == '"' {
		name := own("")
		return []listedItem{{name, said(name, "user", input)}}
	}
	r := openai.NewListReader(input)
	for r.Item() {
		raw := r.Raw()
		if raw == nil {
			break
		}
		kind, name := text(raw, "type"), text(raw, "id")
		if name == "" {
			name = own(kind)
		}
		content := openai.Member(raw, "content")
		if role := text(raw, "role"); (kind == "" || kind == "message") && len(content) > 0 && content[0] == '"' {
			list = append(list, listedItem{name, said(name, role, content)})
			continue
		}
		if kindOf(kind) == "message" && content != nil {
			raw = openai.With(raw, [2]string{"content", string(wholeParts(content))})
		}
		list = append(list, listedItem{name, openai.With(raw, [2]string{"id", string(openai.AppendString(nil, name))},
			[2]string{"type", string(openai.AppendString(nil, kindOf(kind)))}, [2]string{"status", `"completed"`})})
	}
	return list
}

func kindOf(kind string) string {
	if kind == "" {
		return "message"
	}
	return kind
}

// needed are the members that the API's answers have in a part, and its requests need not.
var needed = map[string][][2]string{
	"output_text": {{"annotations", "[]"}, {"logprobs", "[]"}},
	"input_image": {{"detail", `"auto"`}},
}

// wholeParts is a list of parts as answers have them.
func wholeParts(parts []byte) []byte {
	out := []byte{'['}
	r := openai.NewListReader(parts)
	for r.Item() {
		part := r.Raw()
		if part == nil {
			break
		}
		for _, m := range needed[text(part, "type")] {
			if openai.Member(part, m[0]) == nil {
				part = openai.With(part, m)
			}
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(out, part...)
	}
	return append(out, ']')
}

// said is a message with one text, a JSON string.
func said(id, role string, content []byte) []byte {
	if role == "assistant" {
		return fmt.Appendf(nil, `{"id":%s,"type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":%s,"annotations":[],"logprobs":[]}]}`,
			openai.AppendString(nil, id), content)
	}
	return fmt.Appendf(nil, `{"id":%s,"type":"message","status":"completed","role":%s,"content":[{"type":"input_text","text":%s}]}`,
		openai.AppendString(nil, id), openai.AppendString(nil, role), content)
}

// text is a member that is a string; "" for anything else.
func text(object []byte, name string) string {
	raw := openai.Member(object, name)
	if n := len(raw); n >= 2 && raw[0] == '"' {
		return string(jsonscan.AppendDecoded(nil, raw[1:n-1]))
	}
	return ""
}
