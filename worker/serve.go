package worker

import (
	"bufio"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
)

func (w *Worker) serveCompletion(ctx *fasthttp.RequestCtx) {
	j, err := w.completionJob(ctx.PostBody())
	if err != nil {
		writeError(ctx, err)
		return
	}
	w.serveJob(ctx, j)
}

func (w *Worker) serveChat(ctx *fasthttp.RequestCtx) {
	j, err := w.chatJob(ctx)
	if err != nil {
		writeError(ctx, err)
		return
	}
	w.serveJob(ctx, j)
}

// serveJob answers a generation, alone or as one side of a pair.
func (w *Worker) serveJob(ctx *fasthttp.RequestCtx, j *job) {
	params, err := parseTransfer(j.KVTransferParams)
	if err != nil {
		writeError(ctx, err)
		return
	}
	if len(j.items) > 1 {
		// A transfer carries one prompt. For a proxy that sends a batch through both sides,
		// prefill keeps nothing and decode computes it alone, as vLLM's engines do for all
		// prompts but the first.
		params = nil
	}
	seed, err := seedOf(j, ctx.Request.Header.Peek(headerSeed))
	if err != nil {
		writeError(ctx, err)
		return
	}
	unsure := j.MaxTokens == nil
	if err := w.checkAnswer(j, w.answerLimit(ctx.Request.Header.Peek(headerMaxAnswer))); err != nil {
		writeError(ctx, err)
		return
	}
	keep, kind := params != nil && params.DoRemoteDecode, "generate"
	if keep {
		kind = "keep"
	}
	// Clients may reuse an id while it is in use; ours is unique.
	public := requestID(&ctx.Request.Header)
	id := fmt.Sprintf("%s#%d", public, w.sequence.Add(1))
	c := w.begin(ctx, w.requests, kind, id)
	if c == nil {
		return
	}
	j.urgent = string(ctx.Request.Header.Peek(headerProbe)) == "1"
	needs := w.answerNeeds(j, unsure)
	mem, fail := w.reserveAnswer(c, j, needs)
	if fail != nil {
		writeFailure(ctx, fail)
		c.leave()
		return
	}
	leave := c.leave
	c.leave = func() { mem.release(); leave() }
	enc := w.encoder(j, public)
	if keep {
		defer c.leave()
		w.serveKeep(ctx, c, j, params, enc, id, seed)
		return
	}
	from, fail := w.originOf(c, &ctx.Request.Header, params)
	if fail != nil {
		writeFailure(ctx, fail)
		c.leave()
		return
	}
	if from != nil {
		from.requestID = public
	}
	j.requestID, j.peers = public, w.peerHint(&ctx.Request.Header)
	if from != nil && from.leaseID == "" {
		from.peers = j.peers
	}
	g := w.generate(c, j, from, id, seed)
	g.mem, g.needs = mem, needs
	if j.Stream {
		w.stream(ctx, c, g, enc)
		return
	}
	w.whole(ctx, c, g, enc)
}

// encoder makes the encoder of the answer to j.
func (w *Worker) encoder(j *job, id string) *openai.Encoder {
	prefix := "cmpl-"
	if j.chat {
		prefix = "chatcmpl-"
	}
	return openai.NewEncoder(openai.Meta{ID: prefix + id, Model: w.served, Created: time.Now().Unix(),
		Chat: j.chat, IncludeUsage: j.IncludeUsage, ReturnTokenIDs: j.ReturnTokenIDs, Vocab: w.tok})
}

// seedOf returns the client's seed, the router's, or a fresh one.
func seedOf(j *job, header []byte) (uint64, *openai.Error) {
	if j.Seed != nil {
		return uint64(*j.Seed), nil
	}
	if len(header) > 0 {
		n, err := strconv.ParseUint(string(header), 10, 64)
		if err != nil {
			return 0, openai.BadRequest(headerSeed, "%v", err)
		}
		return n, nil
	}
	var b [8]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return binary.LittleEndian.Uint64(b[:]), nil
}

// whole answers a request that does not stream.
func (w *Worker) whole(ctx *fasthttp.RequestCtx, c *call, g *generation, enc *openai.Encoder) {
	leave := c.leave
	defer func() { leave() }()
	defer g.close()
	for first := true; g.nextEvent(c); first = false {
		if first {
			w.requests.answering(c.run)
		}
	}
	if g.err != nil {
		writeFailure(ctx, g.err)
		return
	}
	n := w.encodedSize(g)
	choices := make([]openai.Choice, len(g.choices))
	for i, c := range g.choices {
		choices[i] = c.takeChunk()
	}
	ctx.Response.Header.Set("Server-Timing", g.timings().header())
	if n <= pieceBytes || n <= wholeBytes && g.mem.grow(int64(n)) {
		ctx.SetStatusCode(200)
		ctx.SetContentType("application/json")
		ctx.Response.SetBodyRaw(enc.AppendFull(make([]byte, 0, n), choices, g.usage))
		return
	}
	leave = func() {} // the writer's
	ctx.SetContentType("application/json")
	h1.StreamWriter(ctx, func(out *bufio.Writer) {
		defer c.leave()
		_ = enc.WriteFull(func(piece []byte) error { // fails when the client left: nobody is left to tell
			if _, err := out.Write(piece); err != nil {
				return err
			}
			return out.Flush()
		}, choices, g.usage)
	})
}

const (
	pieceBytes = 64 << 10  // of an answer written at once
	wholeBytes = 256 << 10 // an answer of more is sent as it is encoded
)

// stream answers with server-sent events, one a token as far as its text is whole characters.
// The status waits for the first token, so that an early failure has a status of its own.
func (w *Worker) stream(ctx *fasthttp.RequestCtx, c *call, g *generation, enc *openai.Encoder) {
	var buf []byte
	g.emit = func(c *choice) {
		out := c.takeChunk()
		c.sent = c.done
		if g.j.IncludeUsage && g.j.ContinuousUsage {
			u := c.usage()
			buf = enc.AppendChunk(buf, &out, &u)
			return
		}
		buf = enc.AppendChunk(buf, &out, nil)
	}
	if !g.nextEvent(c) && g.err != nil {
		writeFailure(ctx, g.err)
		g.close()
		c.leave()
		return
	}
	w.requests.answering(c.run)
	ctx.SetContentType("text/event-stream; charset=utf-8")
	ctx.Response.Header.Set("Cache-Control", "no-cache")
	ctx.Response.Header.Set("Server-Timing", g.timings().header())
	h1.StreamWriter(ctx, func(out *bufio.Writer) {
		defer c.leave()
		defer g.close()
		flush := func() error {
			if _, err := out.Write(buf); err != nil {
				return err
			}
			buf = buf[:0]
			return out.Flush()
		}
		for more := true; more; more = g.nextEvent(c) {
			if len(buf) > 0 && (len(g.events) == 0 || len(buf) >= pieceBytes) && flush() != nil {
				return // the client left or takes nothing; close cancels the rest
			}
		}
		switch {
		case g.err != nil:
			buf = openai.AppendErrorEvent(buf, g.err.Error)
		default:
			if g.j.IncludeUsage {
				buf = enc.AppendUsage(buf, g.usage)
			}
			buf = openai.AppendDone(buf)
		}
		_ = flush() // nobody is left to tell
	})
}
