package openai

import "bytes"

// ReadTokens reads the tokens that an answer says it has used: a whole answer,
// or a run of events, of which the last with a usage counts. A usage without
// completion_tokens, as of embeddings, has none.
func ReadTokens(body []byte) (prompt, completion int, ok bool) {
	if bytes.HasPrefix(body, []byte("data:")) {
		i := bytes.LastIndex(body, []byte(`"usage":{`))
		if i < 0 {
			return 0, 0, false
		}
		start := bytes.LastIndex(body[:i], []byte("data:")) + len("data:")
		body, _, _ = bytes.Cut(body[start:], []byte("\n"))
	}
	usage := Member(body, "usage")
	prompt, ok = atoi(Member(usage, "prompt_tokens"))
	completion, _ = atoi(Member(usage, "completion_tokens"))
	return prompt, completion, ok
}
