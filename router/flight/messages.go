package flight

import (
	"strconv"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/messages"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
)

// Headers of Anthropic's API.
const (
	headerAPIKey    = "x-api-key"
	headerVersion   = "anthropic-version"
	headerRequestID = "request-id"
)

// Messages serves /v1/messages by a chat.
func (s *Service) Messages(ctx *fasthttp.RequestCtx, id string) {
	q := s.clientRequest(ctx, id)
	ans, err := q.messages(ctx)
	q.reply(ctx, ans, err)
}

func (q *request) messages(ctx *fasthttp.RequestCtx) (*answer, *openai.Error) {
	asked, err := q.readMessages(ctx, false)
	if err != nil {
		return nil, err
	}
	q.translated(asked.Chat(), asked.Answer(newID("msg_")))
	return q.generate(ctx)
}

// readMessages reads a request of Anthropic's API.
func (q *request) readMessages(ctx *fasthttp.RequestCtx, counts bool) (*messages.Request, *openai.Error) {
	bringsKey(ctx)
	ctx.Response.Header.Set(headerRequestID, q.id)
	if v := ctx.Request.Header.Peek(headerVersion); len(v) > 0 && !isDate(v) {
		return nil, openai.BadRequest(headerVersion, "the header anthropic-version must be a date such as 2023-06-01, not %q", openai.Clip(string(v)))
	}
	return messages.Parse(ctx.PostBody(), counts)
}

// isDate reports whether v looks like 2023-06-01.
func isDate(v []byte) bool {
	if len(v) != len("2023-06-01") {
		return false
	}
	for i, c := range v {
		if dash := i == 4 || i == 7; dash != (c == '-') || !dash && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// bringsKey takes the key of a request of Anthropic's API from where that API has it. It reports whether
// there is one.
func bringsKey(ctx *fasthttp.RequestCtx) bool {
	h := &ctx.Request.Header
	key := h.Peek(headerAPIKey)
	if len(key) == 0 || len(h.Peek("Authorization")) > 0 || !messages.Owns(string(ctx.Path())) {
		return false
	}
	h.Set("Authorization", "Bearer "+string(key))
	return true
}

// CountTokens serves /v1/messages/count_tokens, by a worker's tokenizer.
func (s *Service) CountTokens(ctx *fasthttp.RequestCtx, id string) {
	q := s.clientRequest(ctx, id)
	n, err := q.countTokens(ctx)
	if err != nil {
		q.refuse(ctx, err)
		return
	}
	body := strconv.AppendInt([]byte(`{"input_tokens":`), int64(n), 10)
	h1.WriteJSON(ctx, 200, append(body, '}'))
	q.bytes = int64(len(body))
	q.finish(200, "")
}

func (q *request) countTokens(ctx *fasthttp.RequestCtx) (int, *openai.Error) {
	asked, err := q.readMessages(ctx, true)
	if err != nil {
		return 0, err
	}
	q.body, q.asks = asked.Tokenize(), "/tokenize"
	q.deadline(min(q.s.gate.get().RequestTimeout, q.s.AskTimeout))
	said, err := q.ask(ctx)
	switch {
	case err != nil:
		return 0, err
	case said.Status >= 400:
		return 0, openai.Refusal(said.Status, said.Body)
	}
	n, bad := strconv.ParseUint(string(openai.Member(said.Body, "count")), 10, 31)
	if bad != nil {
		return 0, openai.Upstream("a worker did not say how many tokens there are")
	}
	return int(n), nil
}
