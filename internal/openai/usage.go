package openai

import "bytes"

// ReadTokens reads the tokens that an answer says it has used: a whole answer,
// or a run of events, of which the last with a usage counts. The usage of
// responses and messages, input_tokens and output_tokens, is read too, and in their
// streams where it is within the response or the message. What a usage does not
// tell is 0.
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
	if ok && prompt == 0 && len(before) > 0 { // a message's stream tells it at its beginning
		prompt, _, _ = ReadTokens(before)
	}
	return prompt, completion, ok
}

// usageOf is the usage object of an answer or of an event. If its name stands once,
// the answer is not read from the beginning to find it.
func usageOf(body []byte) []byte {
	if i := bytes.Index(body, usageKey[1:]); i > 0 && body[i-1] == '"' && opensUsage(body[i-1:]) {
		if rest := body[i+len(usageKey)-1:]; !bytes.Contains(rest, usageKey[1:]) {
			return braced(rest)
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

// braced is b up to the brace that closes its first. A usage has no texts, so that
// each brace in it counts.
func braced(b []byte) []byte {
	depth := 0
	for i, c := range b {
		switch c {
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return b[:i+1]
			}
		}
	}
	return nil
}

// withUsage is the data of the last event that has a usage, and what comes before
// it, or body as it is.
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

// opensUsage says whether b, which begins with usageKey, goes on as an object.
func opensUsage(b []byte) bool {
	return bytes.HasPrefix(bytes.TrimLeft(b[len(usageKey):], " "), []byte("{"))
}

// HasUsage says whether a run of server-sent events may hold a usage object.
func HasUsage(run []byte) bool {
	for {
		i := bytes.Index(run, usageKey[1:]) // a quote is nothing to look for first
		if i < 0 {
			return false
		}
		if i > 0 && run[i-1] == '"' && opensUsage(run[i-1:]) {
			return true
		}
		run = run[i+len(usageKey)-1:]
	}
}
