package workload

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// Encoder writes request bodies.
type Encoder struct {
	Chat   bool // messages; else prompt
	Stream bool
	IDs    bool   // prompts are token ids
	extra  []byte // members, each with a comma before it
	model  []byte // as JSON
}

// reserved are members that an Encoder writes itself.
var reserved = []string{"model", "messages", "prompt", "max_tokens", "stream", "stream_options"}

// NewEncoder prepares the members that all bodies share. extra is a JSON object of further
// members, or "".
func NewEncoder(model, extra string) (*Encoder, error) {
	name, err := json.Marshal(model)
	e := &Encoder{model: name}
	if err != nil || extra == "" {
		return e, err
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal([]byte(extra), &members); err != nil || members == nil {
		return nil, errors.Join(errors.New("extra fields: want a JSON object"), err)
	}
	for _, name := range slices.Sorted(maps.Keys(members)) {
		if slices.Contains(reserved, name) {
			return nil, fmt.Errorf("extra fields: %q is set by the benchmark itself", name)
		}
		key, err := json.Marshal(name)
		if err != nil {
			return nil, err
		}
		e.extra = append(append(append(append(e.extra, ','), key...), ':'), members[name]...)
	}
	return e, nil
}

// Append appends the item's body.
func (e *Encoder) Append(dst []byte, it *Item) []byte {
	dst = append(dst, `{"model":`...)
	dst = append(dst, e.model...)
	if e.Chat {
		dst = append(dst, `,"messages":[`...)
		for i, m := range it.Messages {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(dst, `{"role":"`...)
			dst = append(dst, m.Role...)
			dst = append(dst, `","content":"`...)
			dst = append(dst, m.Content...)
			dst = append(dst, `"}`...)
		}
		dst = append(dst, ']')
	} else {
		open, end := byte('"'), byte('"')
		if e.IDs {
			open, end = '[', ']'
		}
		dst = append(append(dst, `,"prompt":`...), open)
		for _, m := range it.Messages {
			dst = append(dst, m.Content...)
		}
		dst = append(dst, end)
	}
	dst = append(dst, `,"max_tokens":`...)
	dst = strconv.AppendInt(dst, int64(it.Out), 10)
	if e.Stream {
		dst = append(dst, `,"stream":true,"stream_options":{"include_usage":true}`...)
	}
	dst = append(dst, e.extra...)
	return append(dst, '}')
}
