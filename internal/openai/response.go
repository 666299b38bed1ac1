package openai

import (
	"bytes"
	"slices"
	"strconv"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// Member returns a top-level member's raw value, which aliases body; nil if body is not a valid
// object or the member is absent or null.
func Member(body []byte, name string) []byte {
	var found []byte
	if !members(body, func(key, value []byte, _, _ int) {
		if string(key) == name {
			found = value
		}
	}) || string(found) == "null" {
		return nil
	}
	return found
}

// members calls f with each top-level member of a JSON object and its value's place. It reports
// whether body is a valid object.
func members(body []byte, f func(key, value []byte, from, to int)) bool {
	var r reader
	r.begin(body)
	for r.Next() == jsonscan.Key {
		key := r.Decoded()
		value := r.Raw()
		if value == nil {
			return false
		}
		f(key, value, r.Pos()-len(value), r.Pos())
	}
	return r.End() == nil
}

// With returns the JSON object with members set to raw JSON values, in place or appended. The
// rest keeps its bytes. An invalid object is returned as it is.
func With(object []byte, set ...[2]string) []byte {
	type cut struct {
		from, to int
		raw      string
	}
	var few [4]cut // enough for most calls, without allocating
	var doneFew [len(few)]bool
	cuts, done := few[:0], doneFew[:]
	if len(set) > len(few) {
		done = make([]bool, len(set))
	}
	n := 0
	if !members(object, func(key, _ []byte, from, to int) {
		n++
		for i, s := range set {
			if string(key) == s[0] {
				cuts = append(cuts, cut{from, to, s[1]})
				done[i] = true
			}
		}
	}) {
		return object
	}
	out := make([]byte, 0, len(object)+64)
	at := 0
	for _, c := range cuts {
		out = append(append(out, object[at:c.from]...), c.raw...)
		at = c.to
	}
	end := bytes.LastIndexByte(object, '}')
	out = append(out, object[at:end]...)
	for i, s := range set {
		if done[i] {
			continue
		}
		if n > 0 {
			out = append(out, ',')
		}
		n++
		out = append(append(AppendString(out, s[0]), ':'), s[1]...)
	}
	return append(out, object[end:]...)
}

// PromptUsage is the part of a usage that prefill knows. Cached is -1 if not given.
type PromptUsage struct {
	Prompt, Cached int
}

// ReadUsage reads the prompt's part of the usage of a response, whole or an event stream, and,
// in the same pass, Member(body, name). counted reports whether there is a usage.
func ReadUsage(body []byte, name string) (u PromptUsage, counted bool, value []byte) {
	body, _ = withUsage(body)
	var usage, details []byte
	if !members(body, func(key, v []byte, _, _ int) {
		switch string(key) {
		case "usage":
			usage = v
		case name:
			value = v
		}
	}) {
		return PromptUsage{}, false, nil
	}
	if string(value) == "null" {
		value = nil
	}
	if !members(usage, func(key, v []byte, _, _ int) {
		switch string(key) {
		case "prompt_tokens":
			u.Prompt, counted = atoi(v)
		case "prompt_tokens_details":
			details = v
		}
	}) || !counted {
		return PromptUsage{}, false, value
	}
	u.Cached = -1
	if n, ok := atoi(Member(details, "cached_tokens")); ok {
		u.Cached = n
	}
	return u, true, value
}

// atoi reads a count; 0 and false for anything else.
func atoi(raw []byte) (int, bool) {
	n, err := strconv.Atoi(string(raw))
	if err != nil || n < 0 {
		return 0, false
	}
	return n, true
}

// MergeUsage puts prefill's part of the usage into decode's response: a whole one, or one
// event's JSON. A response without a usage object is returned as it is.
func MergeUsage(body []byte, u PromptUsage) []byte {
	from, to := 0, 0
	if !members(body, func(key, _ []byte, f, t int) {
		if string(key) == "usage" {
			from, to = f, t
		}
	}) || to == 0 || body[from] != '{' {
		return body
	}
	usage, completion, details := body[from:to], 0, "null"
	var old []byte
	members(usage, func(key, value []byte, _, _ int) {
		switch string(key) {
		case "completion_tokens":
			completion, _ = atoi(value)
		case "prompt_tokens_details":
			old = value
		}
	})
	if u.Cached >= 0 {
		if details = `{"cached_tokens":` + strconv.Itoa(u.Cached) + `}`; len(old) > 0 && old[0] == '{' {
			details = string(With(old, [2]string{"cached_tokens", strconv.Itoa(u.Cached)}))
		}
	}
	merged := With(usage,
		[2]string{"prompt_tokens", strconv.Itoa(u.Prompt)},
		[2]string{"total_tokens", strconv.Itoa(u.Prompt + completion)},
		[2]string{"prompt_tokens_details", details})
	return slices.Concat(body[:from], merged, body[to:])
}

// MergeUsageEvents is MergeUsage for a run of server-sent events.
func MergeUsageEvents(run []byte, u PromptUsage) []byte {
	if !HasUsage(run) {
		return run
	}
	var out []byte
	for line := range bytes.Lines(run) {
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if text := bytes.TrimSpace(data); ok && bytes.HasPrefix(text, []byte("{")) {
			before, behind, _ := bytes.Cut(line, text)
			out = append(append(append(out, before...), MergeUsage(text, u)...), behind...)
			continue
		}
		out = append(out, line...)
	}
	return out
}
