package worker

import (
	"encoding/binary"
	"fmt"
	"strconv"

	"github.com/cespare/xxhash/v2"
	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// A stream outlives its decode worker: the router notes which tokens each event stood for, from a
// comment line in front of it (ticket.HeaderTokens), and has another worker go on behind them
// (ticket.HeaderGiven). That one renders and reads the tokens again and drops what comes of it, so that its
// text, calls, offsets and counts are as if it had drawn them.

// takeGiven cuts what follows the client's body off the request; nil: nothing does.
func takeGiven(ctx *fasthttp.RequestCtx, vocab int) (*openai.Given, error) {
	header := string(ctx.Request.Header.Peek(ticket.HeaderGiven))
	if header == "" {
		return nil, nil
	}
	body := ctx.PostBody()
	n, err := strconv.Atoi(header)
	if err != nil || n < 1 || n >= len(body) {
		return nil, badGiven("%q is not the length of a request within these %d bytes", header, len(body))
	}
	given, bad := openai.ParseGiven(body[n:], vocab, maxChoices)
	if bad != nil {
		return nil, badGiven("after the request: %s", bad.Message)
	}
	ctx.Request.SetBodyRaw(body[:n])
	return given, nil
}

func badGiven(format string, args ...any) *openai.Error {
	return openai.BadRequest(ticket.HeaderGiven, ticket.HeaderGiven+": "+format, args...)
}

// checkGiven refuses what does not fit the request. The engine refuses the rest (Worker.replay).
func (j *job) checkGiven() error {
	if j.given == nil {
		return nil
	}
	switch n := len(j.given.Choices); {
	case !j.Stream:
		return badGiven("is for streams")
	case n != j.N*len(j.items):
		return badGiven("choices has %d entries for %d choices", n, j.N*len(j.items))
	case j.given.Prompt != j.promptHash():
		return (&openai.Error{Type: openai.TypeInvalid, Param: ticket.HeaderGiven,
			Message: "the prompt has other tokens here than where the stream began"}).WithStatus(409, "other_prompt")
	}
	for i, c := range j.given.Choices {
		if j.MaxTokens != nil && len(c.IDs) > *j.MaxTokens {
			return badGiven("choice %d: %d tokens, max_tokens is %d", i, len(c.IDs), *j.MaxTokens)
		}
	}
	return nil
}

// promptHash is the same for the same tokens of all prompts.
func (j *job) promptHash() string {
	var h xxhash.Digest
	h.Reset()
	var buf []byte
	for i := range j.items {
		buf = binary.LittleEndian.AppendUint32(buf[:0], uint32(len(j.items[i].tokens)))
		for _, id := range j.items[i].tokens {
			buf = binary.LittleEndian.AppendUint32(buf, uint32(id))
		}
		_, _ = h.Write(buf) // never fails
	}
	return fmt.Sprintf("%016x", h.Sum64())
}

// givenTo is the engine's part of what prompt i was given.
func (j *job) givenTo(i int) []engine.Given {
	if j.given == nil {
		return nil
	}
	list := make([]engine.Given, j.N)
	for n, c := range j.given.Choices[i*j.N : (i+1)*j.N] {
		list[n] = engine.Given{Tokens: c.IDs, Done: c.Done}
	}
	return list
}

// replay brings a generation's choices to where another worker left them.
func (g *generation) replay() error {
	if g.j.given == nil {
		return nil
	}
	for i, c := range g.choices {
		given := &g.j.given.Choices[i]
		g.usage.Completion += len(given.IDs)
		r := g.w.request(g.j, i/g.j.N, g.id, g.seed)
		n, ok := c.replay(given, func(id int32, n int) engine.Finish { return g.w.engine.Ends(r, id, n) })
		if !ok {
			return badGiven("choice %d: its token %d of %d ends it (%s)", i, n, len(given.IDs), c.finish)
		}
		g.usage.Reasoning += c.thought
		given.Done = c.done // also if the client only lacks that it is
	}
	for i := range g.j.items {
		if err := g.w.engine.Check(g.w.request(g.j, i, g.id, g.seed)); err != nil {
			f := engineFailure(err)
			if f.api.Param == "given" {
				f.api = badGiven("prompt %d, %s", i, f.api.Message)
			}
			return f
		}
	}
	return nil
}

// replay renders tokens whose events the client has. It returns false if the n-th of more ends the
// choice. If the last does, all that a chat's client lacks is the event that says so.
func (c *choice) replay(given *openai.GivenChoice, ends func(id int32, n int) engine.Finish) (n int, ok bool) {
	ids := given.IDs
	if given.Done {
		c.countThought(ids)
		c.done, c.sent = true, true
		return 0, true
	}
	if len(ids) > 0 && c.j.echo && c.j.logprobs >= 0 {
		for _, id := range c.item.tokens {
			c.offset += c.runes(id)
		}
	}
	for i, id := range ids {
		e := &engine.Event{Sampled: kernels.Sampled{Token: id}, Finish: ends(id, i+1)}
		if c.parser == nil {
			c.addDrawn(e)
		} else {
			c.addRead(e)
		}
		c.drop()
		if c.done && (i < len(ids)-1 || !c.j.chat) {
			return i + 1, false
		}
	}
	c.begun, c.given = given.Begun, len(ids)
	return 0, true
}

// countThought counts the tokens of reasoning of a choice that has ended, for the usage.
func (c *choice) countThought(ids []int32) {
	if c.parser == nil {
		return
	}
	for _, id := range ids {
		before := c.parser.Thinking()
		if c.parser.Feed(c.detok.Push(id)); before || c.parser.Thinking() {
			c.thought++
		}
	}
}

// frames writes the comment line in front of each event of a stream that says which tokens it
// stands for.
type frames struct {
	created int64
	prompt  string // "": said already
}

// newFrames returns nil, which writes none, if nobody has asked for them or ids can be too high.
func (j *job) newFrames(vocab int) *frames {
	if !j.framed || vocab > openai.MaxSentID+1 {
		return nil
	}
	return &frames{created: j.created.Unix(), prompt: j.promptHash()}
}

// append is given which tokens a choice's next event stands for, and whether it is its last.
func (f *frames) append(dst []byte, index int, ids []int32, last bool) []byte {
	if f == nil {
		return dst
	}
	mark := ":t "
	if last {
		mark = ":f "
	}
	dst = append(strconv.AppendInt(append(dst, mark...), int64(index), 10), ' ')
	dst = openai.AppendIDs(dst, ids)
	if f.prompt != "" {
		dst = append(strconv.AppendInt(append(dst, ' '), f.created, 10), ' ')
		dst = append(dst, f.prompt...)
		f.prompt = ""
	}
	return append(dst, '\n')
}

// appendOffer has the router know, between two events, that blocks are short here.
func (f *frames) appendOffer(dst []byte, o engine.Offer) []byte {
	switch {
	case f == nil:
		return dst
	case o == engine.OfferNow:
		return append(dst, ":s now\n\n"...)
	}
	return append(dst, ":s soon\n\n"...)
}

// appendError ends a stream. What another worker may do better than this one is not told to the
// client but, as a comment, to the router.
func (f *frames) appendError(dst []byte, err *failure) []byte {
	if f == nil || !err.elsewhere() {
		return openai.AppendErrorEvent(dst, err.api)
	}
	return append(err.api.Append(append(dst, ":e "...)), "\n\n"...)
}
