package worker

import (
	"bufio"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"strconv"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// serveJobs makes the handler of one kind of generation.
func (w *Worker) serveJobs(kind jobKind) handler {
	return func(ctx *fasthttp.RequestCtx) (any, error) {
		j, err := w.takeJob(ctx, kind)
		if err != nil {
			return nil, err
		}
		return w.serveJob(ctx, j)
	}
}

// takeJob reads a request, and what follows it where another worker has begun to answer it.
func (w *Worker) takeJob(ctx *fasthttp.RequestCtx, kind jobKind) (*job, error) {
	given, err := takeGiven(ctx, w.vocab())
	if err != nil {
		return nil, err
	}
	created := time.Now()
	if given != nil {
		created = time.Unix(given.Created, 0)
	}
	j, err := w.readJob(ctx, kind, created)
	if err != nil {
		return nil, err
	}
	j.given, j.created = given, created
	j.CacheSalt = kvevents.CacheSalt(string(ctx.Request.Header.Peek(ticket.HeaderCacheSalt)), j.CacheSalt)
	return j, nil
}

// serveJob answers a generation, alone or as one side of a pair.
func (w *Worker) serveJob(ctx *fasthttp.RequestCtx, j *job) (any, error) {
	h := &ctx.Request.Header
	params, err := parseTransfer(j.KVTransferParams)
	if err != nil {
		return nil, err
	}
	m, err := j.meeting()
	if err != nil {
		return nil, err
	}
	if len(j.items) > 1 {
		// A transfer carries one prompt. When a proxy sends a batch through both sides, prefill
		// keeps nothing and decode computes it alone. vLLM does so for all prompts but the first.
		params = nil
	}
	seed, err := seedOf(j, h.Peek(ticket.HeaderSeed))
	if err != nil {
		return nil, err
	}
	if err := j.checkGiven(); err != nil {
		return nil, err
	}
	if j.promise, err = promiseOf(h.Peek(ticket.HeaderPromise)); err != nil {
		return nil, err
	}
	runs := m != nil && len(h.Peek(ticket.HeaderLink)) == 0 && w.Role() == fleet.Prefill
	if runs {
		j.firstOnly()
	}
	j.framed = j.Stream && string(h.Peek(ticket.HeaderTokens)) == "1"
	unsure := j.MaxTokens == nil
	if err := w.checkAnswer(j, w.answerLimit(h.Peek(ticket.HeaderMaxAnswer))); err != nil {
		return nil, err
	}
	keep, kind := params != nil && params.DoRemoteDecode, "generate"
	if keep || runs {
		kind = "keep"
	}
	j.requestID = requestID(h)
	j.seedCalls(seed)
	// Clients may reuse an id while it is in use; ours is unique.
	id := fmt.Sprintf("%s#%d", j.requestID, w.sequence.Add(1))
	c, err := w.begin(ctx, w.requests, kind, id)
	if err != nil {
		return nil, err
	}
	defer c.leave()
	j.urgent = string(h.Peek(ticket.HeaderProbe)) == "1"
	needs := w.answerNeeds(j, unsure)
	mem, err := w.reserveAnswer(c, j, needs)
	if err != nil {
		return nil, err
	}
	end := c.end
	c.end = func() { mem.release(); end() }
	enc := w.encoder(j)
	if keep {
		return w.serveKeep(c, j, params, enc, id, seed)
	}
	if runs {
		return w.serveRooms(ctx, c, j, m, enc, id, seed)
	}
	from, err := w.originOf(c, h, params, m)
	if err != nil {
		return nil, err
	}
	j.turns = w.tellsTurn(j, params)
	j.peers, j.brought = w.peerHint(h), string(h.Peek(ticket.HeaderBrought)) == "1"
	if from != nil {
		from.requestID = j.requestID
		if from.leaseID == "" && from.rooms == nil {
			from.peers = j.peers
		}
	}
	g, err := w.generate(c, j, from, id, seed)
	if err != nil {
		return nil, err
	}
	g.mem, g.needs = mem, needs
	if j.Stream {
		return nil, w.answerStream(ctx, c, g, enc)
	}
	return nil, w.answerWhole(ctx, c, g, enc)
}

func (w *Worker) encoder(j *job) *openai.Encoder {
	prefix := "cmpl-"
	if j.chat {
		prefix = "chatcmpl-"
	}
	return openai.NewEncoder(openai.Meta{ID: prefix + j.requestID, Model: w.served, Created: j.created.Unix(),
		Chat: j.chat, Batch: j.batch, IncludeUsage: j.IncludeUsage, ReturnTokenIDs: j.ReturnTokenIDs, TokensAsIDs: j.TokensAsIDs, Vocab: w.tok})
}

// seedOf returns the client's seed, the router's, or a fresh one.
func seedOf(j *job, header []byte) (uint64, error) {
	if j.Seed != nil {
		return uint64(*j.Seed), nil
	}
	if len(header) > 0 {
		n, err := strconv.ParseUint(string(header), 10, 64)
		if err != nil {
			err = openai.BadRequest(ticket.HeaderSeed, "%v", err)
		}
		return n, err
	}
	var b [8]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return binary.LittleEndian.Uint64(b[:]), nil
}

func (w *Worker) answerWhole(ctx *fasthttp.RequestCtx, c *call, g *generation, enc *openai.Encoder) error {
	defer g.close()
	for first := true; g.nextEvent(c); first = false {
		if first {
			w.requests.answering(c.run)
		}
	}
	if g.err != nil {
		return g.err
	}
	n := w.encodedSize(g)
	g.usage.Timing = g.timed()
	choices := make([]openai.Choice, len(g.choices))
	for i, c := range g.choices {
		choices[i] = c.takeChunk()
	}
	if g.j.turns {
		enc.Transfer(w.turnParams(g.choices[0]))
	}
	ctx.SetContentType("application/json")
	g.describe(&ctx.Response.Header)
	if n <= pieceBytes || n <= wholeBytes && g.mem.grow(int64(n)) {
		ctx.Response.SetBodyRaw(enc.AppendFull(make([]byte, 0, n), choices, g.usage))
		return nil
	}
	c.stream(ctx, func(out *bufio.Writer) {
		_ = enc.WriteFull(func(piece []byte) error { // fails when the client left: nobody is left to tell
			if _, err := out.Write(piece); err != nil {
				return err
			}
			return out.Flush()
		}, choices, g.usage)
	})
	return nil
}

const (
	pieceBytes = 64 << 10  // of an answer written at once
	wholeBytes = 256 << 10 // an answer of more is sent as it is encoded
)

// answerStream answers with server-sent events: one a token, if its text is whole characters. The
// status waits for the first token, so that an early failure has a status of its own.
func (w *Worker) answerStream(ctx *fasthttp.RequestCtx, c *call, g *generation, enc *openai.Encoder) error {
	var buf []byte
	frames := g.j.newFrames(w.vocab())
	event := func(c *choice, out openai.Choice, tokens int) {
		var usage *openai.Usage
		if g.j.IncludeUsage && g.j.ContinuousUsage {
			u := c.usage()
			u.Completion = tokens
			usage = &u
		}
		if g.j.turns && out.Finish != "" {
			enc.Transfer(w.turnParams(c))
		}
		buf = enc.AppendChunk(buf, &out, usage)
	}
	g.emit = func(c *choice) {
		if c.opens() {
			buf = frames.append(buf, c.index, nil, false)
			event(c, c.takeOpening(), 0)
		}
		closes := c.closes()
		if !closes || !c.empty() {
			buf = frames.append(buf, c.index, c.ids, c.done && !closes)
			out := c.takeChunk()
			if closes {
				out.Finish, out.StopString, out.StopToken, out.End = "", "", 0, false
			}
			event(c, out, c.tokens)
		}
		if closes {
			buf = frames.append(buf, c.index, nil, true)
			event(c, c.takeEnd(), c.tokens)
		}
		c.sent = c.done
	}
	g.offer = func(c *choice, o engine.Offer) {
		if c.begun { // else the router knows nothing of it yet
			buf = frames.appendOffer(buf, o)
		}
	}
	for _, c := range g.choices { // the client has all of it but its end
		if c.done && !c.sent {
			g.emit(c)
		}
	}
	if !g.nextEvent(c) && g.err != nil {
		g.close()
		return g.err
	}
	w.requests.answering(c.run)
	ctx.SetContentType("text/event-stream; charset=utf-8")
	ctx.Response.Header.Set("Cache-Control", "no-cache")
	g.describe(&ctx.Response.Header)
	c.stream(ctx, func(out *bufio.Writer) {
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
		if g.err != nil {
			buf = frames.appendError(buf, g.err)
		} else {
			if g.j.IncludeUsage {
				g.usage.Timing = g.timed()
				buf = enc.AppendUsage(buf, g.usage)
			}
			buf = openai.AppendDone(buf)
		}
		_ = flush() // nobody is left to tell
	})
	return nil
}
