package openai

import (
	"bytes"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// ReadTokens reads the token counts of a whole response, or of the last event with a usage in a
// run of events. It also knows input_tokens and output_tokens, of responses and messages, whose
// streams nest the usage within the response or message. Missing counts are 0.
func ReadTokens(body []byte) (prompt, completion int, ok bool) {
	body, before := withUsage(body)
	members(usageOf(body), func(key, value []byte, _, _ int) {
		n := &prompt
		switch string(key) {
		case "prompt_tokens", "input_tokens":
		case "completion_tokens", "output_tokens":
			n = &completion
		default:
			return
		}
		v, whole := atoi(value)
		*n, ok = v, ok || whole
	})
	if ok && prompt == 0 && len(before) > 0 { // a message's stream has it at its beginning
		prompt, _, _ = ReadTokens(before)
	}
	return prompt, completion, ok
}

// usageOf returns the usage object of a response or event. It parses only that if its name
// occurs once.
func usageOf(body []byte) []byte {
	if i := bytes.Index(body, usageKey[1:]); i > 0 && body[i-1] == '"' && opensUsage(body[i-1:]) {
		if rest := body[i+len(usageKey)-1:]; !bytes.Contains(rest, usageKey[1:]) {
			scan := jsonscan.Scanner{Lenient: true}
			scan.Reset(rest)
			return scan.Raw()
		}
	}
	usage := Member(body, "usage")
	for _, within := range []string{"response", "message"} {
		if usage == nil {
			usage = Member(Member(body, within), "usage")
		}
	}
	return usage
}

// withUsage returns the data of the last event that has a usage and what comes before it,
// or body itself.
func withUsage(body []byte) (event, before []byte) {
	if bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("{")) {
		return body, nil // no events
	}
	for end := len(body); ; {
		i := bytes.LastIndex(body[:end], usageKey)
		if i < 0 {
			return body, nil
		}
		if start := bytes.LastIndex(body[:i], []byte("data:")); start >= 0 && opensUsage(body[i:]) {
			start += len("data:")
			if n := bytes.IndexAny(body[i:], "\r\n"); n >= 0 {
				return body[start : i+n], body[:start]
			}
			return body[start:], body[:start]
		}
		end = i
	}
}

var usageKey = []byte(`"usage":`)

// opensUsage reports whether b, which begins with usageKey, continues as an object.
func opensUsage(b []byte) bool {
	return bytes.HasPrefix(bytes.TrimLeft(b[len(usageKey):], " "), []byte("{"))
}

// HasUsage reports whether a run of server-sent events may hold a usage object.
func HasUsage(run []byte) bool {
	for {
		i := bytes.Index(run, usageKey[1:]) // skip the quote: too common to search for
		if i < 0 {
			return false
		}
		if i > 0 && run[i-1] == '"' && opensUsage(run[i-1:]) {
			return true
		}
		run = run[i+len(usageKey)-1:]
	}
}
