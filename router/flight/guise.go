package flight

import (
	crand "crypto/rand"
	"encoding/hex"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/messages"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/responses"
	"github.com/xpyd/xpyd/router/h1"
)

// guise is another API in which a client gets a chat's answer. It comes last, where bytes leave for the
// client: all else of a request in flight sees a chat.
type guise interface {
	// Whole appends the client's answer for a chat's.
	Whole(dst, body []byte) ([]byte, *openai.Error)
	// Append appends what the client gets for a run of a chat's whole events, and Close what it still needs
	// when there are no more.
	Append(dst, run []byte) []byte
	Close(dst []byte) []byte
	// Over reports whether nothing follows, and Failed why it ended the stream itself; nil if it did not.
	Over() bool
	Failed() *openai.Error
}

// prompted is a guise whose stream begins with the number of the prompt's tokens.
type prompted interface{ Prompt(tokens, cached int) }

// translated makes q a chat whose answer is given in a guise.
func (q *request) translated(chat []byte, g guise) {
	q.body, q.asks, q.guise = chat, chatPath, g
}

// disguise makes a whole answer the client's API's, and an engine's error an error. A stream follows piece by
// piece.
func (q *request) disguise(ans *answer) (*answer, *openai.Error) {
	switch {
	case ans.events != nil:
		if g, ok := q.guise.(prompted); ok {
			tokens, cached := q.prompt()
			g.Prompt(tokens, cached)
		}
		return ans, nil
	case ans.status >= 400:
		return nil, openai.Refusal(ans.status, ans.body)
	}
	body, err := q.guise.Whole(nil, ans.body)
	if err != nil {
		return nil, err
	}
	dressed := *ans
	dressed.body, dressed.contentType = body, "application/json"
	return &dressed, nil
}

// prompt is how many tokens the prompt has, and how many of them were cached, as a worker has counted or as far
// as can be told without a tokenizer.
func (q *request) prompt() (tokens, cached int) {
	a := q.attempts[len(q.attempts)-1]
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.counted {
		return a.usage.Prompt, a.usage.Cached
	}
	return q.top.PromptTokens(), 0
}

// guiseBytes is memory for most runs in a guise.
const guiseBytes = 4 << 10

func (s *Service) lendGuise() *[]byte {
	if b, _ := s.guises.Get().(*[]byte); b != nil && cap(*b) <= eventBytes {
		return b
	}
	b := make([]byte, 0, guiseBytes)
	return &b
}

// disguised appends a run in the client's API. If the guise ends the stream, nothing more is read.
func (s *stream) disguised(dst, run []byte, last bool) ([]byte, bool) {
	g := s.q.guise
	if len(run) > 0 {
		dst = g.Append(dst, run)
	}
	if len(run) == 0 && last || s.done {
		if !g.Over() {
			dst = g.Close(dst)
		}
	}
	if why := g.Failed(); why != nil && s.failed == "" {
		s.done, s.failed, last = true, why.Message, true
	}
	return dst, last
}

// WriteError answers with an error as the API that the path is of has it, and returns its status there.
func WriteError(ctx *fasthttp.RequestCtx, id string, e *openai.Error) int {
	switch path := string(ctx.Path()); {
	case messages.Owns(path):
		h1.WriteError(ctx, e) // and when to come again
		status, body := messages.Refusal(e, id)
		ctx.SetStatusCode(status)
		ctx.Response.SetBodyRaw(body)
		return status
	case responses.Owns(path):
		e = responses.Refusal(e)
	}
	h1.WriteError(ctx, e)
	return e.Status
}

// newID makes an ID that nobody guesses.
func newID(prefix string) string {
	var b [24]byte
	crand.Read(b[:]) // never fails
	return prefix + hex.EncodeToString(b[:])
}
