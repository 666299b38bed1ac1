package flight

import (
	"math"

	"github.com/xpyd/xpyd/internal/openai"
)

// usage is what a request has used, as its answer tells.
type usage struct {
	events    int   // relayed, but for the one that ends a stream
	answer    *skim // of a whole answer that is passed on, nil for others
	told      bool
	prompt    int // tokens, as the answer told
	generated int
	guess     int // the prompt's tokens, as far as the request shows
}

// maxTold bounds what an engine may say that it used.
const maxTold = 1 << 26

// tally notes what a whole answer, or a run of n of a stream's events, says that was
// used.
func (u *usage) tally(body []byte, n int) {
	if u.events += n; n > 0 && !openai.HasUsage(body) {
		return
	}
	if p, c, ok := openai.ReadTokens(body); ok {
		u.tell(p, c)
	}
}

// tell notes a usage. Of a stream's several each counts from its beginning, and
// may tell only a part.
func (u *usage) tell(prompt, completion int) {
	u.told, u.prompt, u.generated = true, max(u.prompt, min(prompt, maxTold)), max(u.generated, min(completion, maxTold))
}

// pass notes what a whole answer, a piece of which passes, says that was used.
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

// tokens are those that the request read and generated: as the answer told, else
// an event of a stream stands for one, and prefill has counted the prompt or it is
// guessed.
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
