package flight

import (
	"math"

	"github.com/xpyd/xpyd/internal/openai"
)

// usage is what a request has used, as its answer reports.
type usage struct {
	events    int   // relayed, except the one that ends a stream
	answer    *skim // of a whole forwarded answer, else nil
	told      bool  // the answer reported prompt and generated
	prompt    int   // tokens
	generated int
	guess     int // the prompt's tokens, estimated from the request
}

// maxTold bounds what an engine may report.
const maxTold = 1 << 26

// tally notes the usage that a whole answer reports, or a run of n events of a stream.
func (u *usage) tally(body []byte, n int) {
	if u.events += n; n > 0 && !openai.HasUsage(body) {
		return
	}
	if p, c, ok := openai.ReadTokens(body); ok {
		u.tell(p, c)
	}
}

// tell notes a reported usage. A stream may report several times, each from its beginning,
// and only a part.
func (u *usage) tell(prompt, completion int) {
	u.told, u.prompt, u.generated = true, max(u.prompt, min(prompt, maxTold)), max(u.generated, min(completion, maxTold))
}

// skimmed looks for the usage in the next piece of a whole forwarded answer.
func (u *usage) skimmed(piece []byte) {
	if u.answer == nil {
		return
	}
	u.answer.read(piece)
	u.answer.urls = nil
	num, told := u.answer.num, false
	most := func(names ...string) (n int) {
		for _, name := range names {
			v, ok := num[name]
			n, told = max(n, int(min(v, math.MaxInt32))), told || ok
		}
		return n
	}
	prompt, completion := most("prompt_tokens", "input_tokens"), most("completion_tokens", "output_tokens")
	if told {
		u.tell(prompt, completion)
	}
}

// tokens is what the request read and generated: as the answer reported, or else one token
// per event, and the prompt as prefill counted it or as guessed.
func (q *request) tokens() (prompt, generated int) {
	u := &q.usage
	if u.told || q.forwarded {
		return u.prompt, u.generated
	}
	if u.events == 0 {
		return 0, 0
	}
	a := q.attempts[len(q.attempts)-1]
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.counted {
		return a.usage.Prompt, u.events
	}
	return u.guess, u.events
}
