package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// serveEmbeddings answers with a vector for each input.
func (w *Worker) serveEmbeddings(ctx *fasthttp.RequestCtx) (any, error) {
	in, err := openai.ParseEmbeddings(ctx.PostBody(), w.vocab())
	if err != nil {
		return nil, err
	}
	return w.embed(ctx, in, 0, func(vectors [][]float32, total int) []byte {
		return openai.AppendEmbeddings(nil, w.served, vectors, in.Base64, total)
	})
}

// serveCohereEmbed does the same in Cohere's API, whose answer repeats the texts.
func (w *Worker) serveCohereEmbed(ctx *fasthttp.RequestCtx) (any, error) {
	in, err := openai.ParseCohereEmbed(ctx.PostBody())
	if err != nil {
		return nil, err
	}
	id := "embd-" + requestID(&ctx.Request.Header)
	return w.embed(ctx, in, int64(6*len(ctx.PostBody())), func(vectors [][]float32, total int) []byte {
		return openai.AppendCohereEmbed(nil, id, in, vectors, total)
	})
}

// embed has a vector for each input written: the model's hidden states behind the final norm, pooled, of
// length 1. Beside them the answer has so many bytes at most.
func (w *Worker) embed(ctx *fasthttp.RequestCtx, in *openai.Embeddings, beside int64, write func(vectors [][]float32, total int) []byte) (any, error) {
	h := &ctx.Request.Header
	inputs, total, err := w.embeddingInputs(in)
	if err != nil {
		return nil, err
	}
	promise, err := promiseOf(h.Peek(ticket.HeaderPromise))
	if err != nil {
		return nil, err
	}
	requestID := requestID(h)
	id := fmt.Sprintf("%s#%d", requestID, w.sequence.Add(1))
	c, err := w.begin(ctx, w.requests, "embed", id)
	if err != nil {
		return nil, err
	}
	defer c.leave()
	width := w.backend.Arch().Hidden
	mem, err := w.reserveVectors(c, beside+int64(len(inputs))*int64(4*width+openai.EmbeddingBytes(width)))
	if err != nil {
		return nil, err
	}
	defer mem.release()
	arrived := time.Now()
	salt := kvevents.CacheSalt(string(h.Peek(ticket.HeaderCacheSalt)), "")
	var handles []*engine.Handle
	defer func() {
		for _, h := range handles {
			h.Cancel()
		}
	}()
	for i, tokens := range inputs {
		r := &engine.Request{ID: id, Owner: fmt.Sprintf("%s/%d", id, i), Prompt: tokens, Pooling: engine.Pooling(w.cfg.EmbeddingPooling),
			Keep: len(inputs) > 1, Promise: promise, Salt: salt, Logprobs: -1, PromptLogprobs: -1}
		h, err := w.submitRequest(c, r, requestID, nil)
		if err != nil {
			return nil, engineFailure(err)
		}
		handles = append(handles, h)
	}
	vectors, cached := make([][]float32, len(inputs)), 0
	for i, h := range handles {
		ev, fail := vectorOf(c, h)
		if fail != nil {
			return nil, fail
		}
		w.vllm.embedded(ev.Prompt, time.Since(arrived))
		vectors[i], cached = normalise(ev.Pooled), cached+ev.Prompt.CachedTokens
	}
	ctx.Response.Header.Set(ticket.HeaderPrompt, fmt.Sprintf("%d %d", total, cached))
	return write(vectors, total), nil
}

// embeddingInputs tokenises and checks what is to be embedded.
func (w *Worker) embeddingInputs(in *openai.Embeddings) (inputs [][]int32, total int, err error) {
	if err := w.checkModel(in.Model); err != nil {
		return nil, 0, err
	}
	if !w.backend.Info().Hidden {
		return nil, 0, openai.BadRequest("model", "the worker's backend gives no hidden states, so it serves no embeddings")
	}
	field, dimensions := "input", "dimensions"
	if in.Cohere {
		field, dimensions = "texts", "output_dimension"
	}
	if width := w.backend.Arch().Hidden; in.Dimensions != nil && *in.Dimensions != width {
		return nil, 0, openai.BadRequest(dimensions, "the model %s makes vectors of %d dimensions, and of no others", w.served, width)
	}
	most := w.engine.MaxModelLen()
	for i, p := range in.Inputs {
		tokens := p.Tokens
		if !p.IsTokens {
			if err := w.checkText(field, p.Text, 0); err != nil {
				return nil, 0, err
			}
			tokens = w.tok.Encode(p.Text, true)
		}
		tokens = cut(tokens, in, most)
		switch n := len(tokens); {
		case n == 0:
			return nil, 0, openai.BadRequest(field, "%s %d is empty", field, i)
		case n > most:
			return nil, 0, openai.ContextExceeded(field, most, n, false)
		default:
			total += n
		}
		inputs = append(inputs, tokens)
	}
	return inputs, total, nil
}

// cut leaves out of an input what is more than fits, or than was asked for, if it may be.
func cut(tokens []int32, in *openai.Embeddings, most int) []int32 {
	if in.MaxTokens != nil {
		most = min(most, *in.MaxTokens)
	}
	switch n := len(tokens); {
	case n <= most || in.Cuts == openai.CutsNothing:
		return tokens
	case in.Cuts == openai.CutsStart:
		return tokens[n-most:]
	}
	return tokens[:most]
}

// reserveVectors waits for the memory of an answer of so many bytes.
func (w *Worker) reserveVectors(c *call, n int64) (*answerShare, error) {
	if n > w.answers.most {
		return nil, openai.AnswerTooLarge("input", "the answer could take %d bytes of memory; this worker has %d for all answers", n, w.answers.most)
	}
	w.requests.note(c.run, stateWaiting, 0)
	s, err := w.answers.reserve(c, n)
	if err != nil {
		return nil, memoryFailure(err)
	}
	w.requests.note(c.run, "started", n)
	return s, nil
}

// vectorOf waits for a request's only event.
func vectorOf(c *call, h *engine.Handle) (*engine.Event, *failure) {
	events, err := h.Next(c)
	switch {
	case c.Err() != nil && errors.Is(context.Cause(c), errClosing):
		return nil, closing()
	case c.Err() != nil:
		return nil, failed(ticket.Cancelled, context.Cause(c))
	case err != nil:
		return nil, engineFailure(err)
	}
	return &events[0], nil
}

// normalise gives a vector the length 1, unless it has none.
func normalise(v []float32) []float32 {
	sum := 0.0
	for _, x := range v {
		sum += float64(x) * float64(x)
	}
	if sum == 0 {
		return v
	}
	for i, x := range v {
		v[i] = float32(float64(x) / math.Sqrt(sum))
	}
	return v
}
