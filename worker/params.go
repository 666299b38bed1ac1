package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// job is a parsed request: one or more prompts under common parameters.
type job struct {
	openai.Sampling
	chat     bool
	batch    bool // of several chats
	echo     bool // of a completion; a chat's item has the text that comes first
	logprobs int  // alternatives listed with each token; -1: none
	urgent   bool
	promise  engine.Promise
	framed   bool          // events say which tokens they stand for
	given    *openai.Given // where another worker left the stream; nil: it begins here
	created  time.Time
	reading  reading        // of a chat's answers
	bound    *handoff.Guide // what binds the answers; nil: nothing does
	guide    engine.Guide   // the same at its begin, to be forked
	callable []function     // the tools, where calls of them are bound
	peers    []ticket.Peer  // have the beginning of the prompt, says the router
	turns    bool           // its answer says where its KV is
	brought  bool           // the KV of the prompt was brought ahead; without it the job is refused

	requestID string // the client's
	items     []item
	badWords  [][]int32        // tokens of BadWords; nil until a request is made
	stops     *tokenizer.Stops // nil until the first choice
}

// source is the request's field with the prompts.
func (j *job) source() string {
	if j.chat {
		return "messages"
	}
	return "prompt"
}

// fronts reports whether answers begin with text of the request.
func (j *job) fronts() bool {
	return j.echo || j.chat && slices.ContainsFunc(j.items, func(it item) bool { return it.text != "" })
}

// echoOnly reports whether the answer is the prompt alone: max_tokens 0 with echo. One token is
// drawn all the same, but not shown.
func (j *job) echoOnly() bool { return j.echo && j.MaxTokens != nil && *j.MaxTokens == 0 }

type item struct {
	tokens []int32
	text   string             // as sent, or decoded for echo
	info   *engine.PromptInfo // nil before its first event
	had    int                // prompt tokens found in this worker's prefix cache
	waited time.Duration      // for blocks, before the engine
	alone  bool               // it is computed here, although another worker was to

	detok          *tokenizer.Detokenizer // has seen the prompt; nil until the first choice
	echoed, listed []openai.TokenLogprob  // for echo and for prompt_logprobs; nil until wanted
}

// jobKind is what a request asks for.
type jobKind uint8

// The kinds.
const (
	completionJob jobKind = iota
	chatJob
	batchJob // of several chats
)

func kindOf(chat bool) jobKind {
	if chat {
		return chatJob
	}
	return completionJob
}

// readJob reads a request; now is the time in a chat's prompt.
func (w *Worker) readJob(ctx *fasthttp.RequestCtx, kind jobKind, now time.Time) (j *job, err error) {
	switch kind {
	case completionJob:
		j, err = w.completionJob(ctx)
	case chatJob:
		c, fail := openai.ParseChat(ctx.PostBody(), w.vocab())
		if fail != nil {
			return nil, fail
		}
		j, err = w.chatJob(ctx, c, [][]json.RawMessage{c.Messages}, now)
	case batchJob:
		c, chats, fail := openai.ParseChatBatch(ctx.PostBody(), w.vocab())
		if fail != nil {
			return nil, fail
		}
		if j, err = w.chatJob(ctx, c, chats, now); j != nil {
			j.batch = true
		}
	}
	if err == nil {
		w.preset(&j.Sampling)
	}
	return j, err
}

// preset sets what the operator has chosen for requests.
func (w *Worker) preset(s *openai.Sampling) {
	if !s.Given.Has(openai.GivenTokensAsIDs) {
		s.TokensAsIDs = w.cfg.TokensAsIDs
	}
	if s.Stream && w.cfg.ForceUsage {
		s.IncludeUsage, s.ContinuousUsage = true, true
	}
}

func (w *Worker) completionJob(ctx *fasthttp.RequestCtx) (*job, error) {
	c, err := openai.ParseCompletion(ctx.PostBody(), w.vocab())
	if err != nil {
		return nil, err
	}
	j := &job{Sampling: c.Sampling, echo: c.Echo, logprobs: -1}
	if err := w.setLogprobs(j, "logprobs", c.Logprobs); err != nil {
		return nil, err
	}
	for i, p := range c.Prompts {
		it := item{tokens: p.Tokens, text: p.Text}
		if !p.IsTokens {
			if err := w.checkText("prompt", p.Text, 0); err != nil {
				return nil, err
			}
			it.tokens = w.tok.Encode(p.Text, c.AddSpecial)
		}
		if len(it.tokens) == 0 {
			return nil, openai.BadRequest("prompt", "prompt %d is empty", i)
		}
		cut := w.truncate(&c.Sampling, &it)
		if c.Echo && (cut || p.IsTokens) {
			it.text, it.detok = w.echoed(it.tokens)
		}
		j.items = append(j.items, it)
	}
	if c.Constraint != nil {
		if err := w.bind(ctx, j, c.Constraint.Field, specOf(c.Constraint)); err != nil {
			return nil, err
		}
	}
	return j, w.checkJob(j)
}

// echoed is the text of a prompt of tokens, up to its last whole character. The detokenizer keeps
// the rest, which the answer may complete.
func (w *Worker) echoed(tokens []int32) (string, *tokenizer.Detokenizer) {
	var text []byte
	d := w.tok.NewDetokenizer(false, nil)
	for _, id := range tokens {
		text = append(text, d.Push(id)...)
	}
	return string(text), d
}

// chatJob is of one chat's messages, or of several chats'.
func (w *Worker) chatJob(ctx *fasthttp.RequestCtx, c *openai.Chat, chats [][]json.RawMessage, now time.Time) (*job, error) {
	ids, fail := reusedPrompt(c)
	if fail != nil {
		return nil, fail
	}
	if ids != nil && len(chats) > 1 {
		return nil, openai.BadRequest(fieldTransfer, "kv_transfer_params.prompt_token_ids is one chat's, and there are %d", len(chats))
	}
	j := &job{Sampling: c.Sampling, chat: true, logprobs: -1}
	for i, messages := range chats {
		c.Messages = messages
		p, err := w.renderChat(ctx, c, ids, now)
		if err != nil {
			return nil, err
		}
		it := item{tokens: p.tokens}
		if w.truncate(&c.Sampling, &it) {
			p.text = w.tok.Decode(it.tokens, false)
		}
		if c.Echo {
			it.text = c.Opening()
		}
		before := j.reading.options
		w.read(j, c, p.tools, p.text)
		if now := j.reading.options; i > 0 && (now.Thinking != before.Thinking || now.Thought != before.Thought) {
			return nil, openai.BadRequest("messages", "messages[%d] ends within the model's reasoning, or behind it, and those before do not: ask for it apart", i)
		}
		j.items = append(j.items, it)
	}
	if err := w.bindChat(ctx, j, c); err != nil {
		return nil, err
	}
	var top *int
	if c.Logprobs {
		top = &c.TopLogprobs
	}
	if err := w.setLogprobs(j, "top_logprobs", top); err != nil {
		return nil, err
	}
	return j, w.checkJob(j)
}

// truncate cuts a prompt to the length that the request asks for, and reports whether it had to.
func (w *Worker) truncate(s *openai.Sampling, it *item) bool {
	if s.Truncate == nil {
		return false
	}
	n := *s.Truncate
	if n < 0 {
		most, room := w.engine.MaxModelLen(), 1
		if s.MaxTokens != nil {
			room = min(max(*s.MaxTokens, 1), most-1)
		}
		n = max(most-room, 1)
	}
	if n >= len(it.tokens) {
		return false
	}
	if s.KeepHead {
		it.tokens = it.tokens[:n]
	} else {
		it.tokens = it.tokens[len(it.tokens)-n:]
	}
	return true
}

// setLogprobs bounds the log probabilities that a request asks for with each token (nil: none) and of
// its prompt, and says how many all of them are.
func (w *Worker) setLogprobs(j *job, field string, asked *int) error {
	check := func(field string, asked *int) (int, error) {
		if asked == nil {
			return -1, nil
		}
		n, most := *asked, w.cfg.MaxLogprobs
		if n == openai.All {
			n = w.vocab()
		}
		if most != openai.All && n > most {
			return 0, openai.BadRequest(field, "%s must be between 0 and %d, not %d", field, most, *asked)
		}
		return min(n, w.vocab()), nil
	}
	var err error
	if j.logprobs, err = check(field, asked); err != nil {
		return err
	}
	n, err := check("prompt_logprobs", j.PromptLogprobs)
	if j.PromptLogprobs != nil {
		j.PromptLogprobs = &n
	}
	if ids := len(j.LogprobIDs); ids > 0 && j.logprobs >= 0 {
		j.logprobs = ids + 1 // and the token itself
	}
	return err
}

// prompt is a rendered chat.
type prompt struct {
	text   string
	tokens []int32
	tools  *answer.Tools // that the model was told of; nil: none
}

// renderChat turns messages into the model's prompt. A template may run for seconds; it is
// cancelled when the client leaves. It is not run if ids, not nil, are the prompt.
func (w *Worker) renderChat(ctx *fasthttp.RequestCtx, c *openai.Chat, ids []int32, now time.Time) (*prompt, error) {
	in := tokenizer.ChatInput{Messages: c.Messages, AddGenerationPrompt: c.AddGenerationPrompt,
		ContinueFinalMessage: c.ContinueFinalMessage, Kwargs: c.TemplateKwargs, Now: now}
	if c.UsesTools() {
		if err := json.Unmarshal(c.Tools, &in.Tools); err != nil {
			return nil, openai.BadRequest("tools", "%v", err)
		}
	}
	p := &prompt{}
	if in.Tools != nil {
		p.tools = answer.ReadTools(in.Tools)
	}
	if ids != nil {
		p.tokens, p.text = ids, w.tok.Decode(ids, false)
		return p, nil
	}
	tok, err := w.templated(c)
	if err != nil {
		return nil, err
	}
	waits, cancel := context.WithCancelCause(w.ctx)
	defer cancel(nil)
	defer w.clients.Watch(ctx.Conn(), func() { cancel(errClientLeft) })()
	p.text, err = tok.RenderChat(waits, in)
	switch {
	case waits.Err() != nil:
		return nil, openai.Unavailable("%v", context.Cause(waits))
	case errors.Is(err, tokenizer.ErrKwargs):
		return nil, openai.BadRequest("chat_template_kwargs", "%v", err)
	case err != nil && c.Template != "":
		return nil, openai.BadRequest("chat_template", "%v", err)
	case err != nil:
		field := "messages"
		if in.Kwargs != nil { // are they at fault?
			in.Kwargs = nil
			if _, plain := tok.RenderChat(waits, in); plain == nil {
				field = "chat_template_kwargs"
			}
		}
		return nil, openai.BadRequest(field, "chat template: %v", err)
	}
	if err := w.checkText("messages", p.text, 0); err != nil {
		return nil, err
	}
	if p.tokens = w.tok.Encode(p.text, c.AddSpecial); len(p.tokens) == 0 {
		return nil, openai.BadRequest("messages", "the chat template renders nothing")
	}
	return p, nil
}

// templated returns the tokenizer with the request's template, or the model's own.
func (w *Worker) templated(c *openai.Chat) (*tokenizer.Tokenizer, error) {
	switch {
	case c.Template == "" && !w.tok.HasChatTemplate():
		return nil, openai.BadRequest("messages", "model %s has no chat template; use /v1/completions", w.served)
	case c.Template == "":
		return w.tok, nil
	case !w.cfg.TrustTemplates:
		return nil, openai.BadRequest("chat_template", "chat_template is not allowed here; the operator can allow it by trust_request_chat_template")
	}
	tok, err := w.tok.WithRequestTemplate(c.Template)
	if err != nil {
		return nil, openai.BadRequest("chat_template", "%v", err)
	}
	return tok, nil
}

func (w *Worker) vocab() int { return w.backend.Arch().Vocab }

// shrink is how many times shorter than a text its normalised form can be: NFC makes one
// syllable of three jamo.
const shrink = 4

// checkText refuses text that is too long for the model however it is tokenised: tokenising takes a
// hundred times its size. least bytes are always accepted.
func (w *Worker) checkText(field, text string, least int) error {
	most := w.engine.MaxModelLen()
	if limit := max(shrink*w.longest*most, least); len(text) > limit {
		if least == 0 {
			return openai.ContextExceeded(field, most, most, true)
		}
		return openai.BadRequest(field, "%s has %d bytes of text; %d is the limit where %d tokens are", field, len(text), limit, most)
	}
	return nil
}

const (
	maxSalt    = 1024    // bytes: it travels with every ticket
	maxChoices = 4096    // of all prompts
	maxListed  = 1 << 19 // log probabilities of a prompt: prefill sends them in one piece, and as JSON of some 100 bytes each they are most of what an answer may have
)

// checkJob refuses a job that cannot run here.
func (w *Worker) checkJob(j *job) error {
	if err := w.checkModel(j.Model); err != nil {
		return err
	}
	if len(j.CacheSalt) > maxSalt {
		return openai.BadRequest("cache_salt", "cache_salt has %d bytes; %d is the limit", len(j.CacheSalt), maxSalt)
	}
	if n := j.N * len(j.items); n > maxChoices {
		return openai.BadRequest("n", "n is %d for each of %d prompts: %d choices; %d is the limit", j.N, len(j.items), n, maxChoices)
	}
	if err := j.checkListed(); err != nil {
		return err
	}
	j.badWords = w.badWords(j.BadWords)
	most, room := w.engine.MaxModelLen(), 0
	for i := range j.items {
		n := len(j.items[i].tokens)
		room = max(room, most-n)
		if n >= most {
			err := openai.ContextExceeded(j.source(), most, n, false)
			if most == w.backend.Blocks()*w.cfg.BlockTokens {
				err.Message += fmt.Sprintf(" That is all that the KV pool holds: %d blocks of %d tokens.", w.backend.Blocks(), w.cfg.BlockTokens)
			}
			return err
		}
		for _, id := range j.items[i].tokens {
			if id < 0 || int(id) >= w.backend.Arch().Vocab {
				return openai.BadRequest(j.source(), "token id %d is outside the vocabulary of %d", id, w.backend.Arch().Vocab)
			}
		}
	}
	if j.MaxTokens != nil && *j.MaxTokens > room { // an answer ends with the context, as in vLLM
		j.MaxTokens = &room
	}
	return nil
}

func (j *job) checkListed() error {
	field, listed := "logprobs", 0
	if j.echo && j.logprobs >= 0 {
		listed = j.logprobs + 1
	}
	if p := j.PromptLogprobs; p != nil && *p+1 > listed {
		field, listed = "prompt_logprobs", *p+1
	}
	for i := range j.items {
		if n := len(j.items[i].tokens); n*listed > maxListed {
			return openai.BadRequest(field, "a prompt of %d tokens with %d log probabilities each has %d; %d is the limit", n, listed, n*listed, maxListed)
		}
	}
	return nil
}

// sampling maps the request's parameters to the engine's. Those that the client left out come from
// the model's generation_config.json.
func (w *Worker) sampling(s *openai.Sampling, seed uint64) engine.Sampling {
	out := engine.Sampling{
		Seed: seed, Temperature: s.Temperature, TopK: s.TopK, TopP: s.TopP, MinP: s.MinP,
		Repetition: s.Repetition, Presence: s.Presence, Frequency: s.Frequency,
	}
	gen := &w.model.Generation
	fill(&out.Temperature, gen.Temperature, s.Given.Has(openai.GivenTemperature))
	fill(&out.TopP, gen.TopP, s.Given.Has(openai.GivenTopP))
	fill(&out.TopK, gen.TopK, s.Given.Has(openai.GivenTopK))
	fill(&out.MinP, gen.MinP, s.Given.Has(openai.GivenMinP))
	fill(&out.Repetition, gen.RepetitionPenalty, s.Given.Has(openai.GivenRepetition))
	out.Allowed = s.AllowedIDs
	for _, b := range s.LogitBias {
		out.Bias = append(out.Bias, kernels.Bias{ID: b.ID, Value: b.Value})
	}
	return out
}

// badWords are the tokens of each word, and those behind a space if that makes other ones of as many:
// as vLLM has it.
func (w *Worker) badWords(words []string) [][]int32 {
	if len(words) == 0 {
		return nil
	}
	list := make([][]int32, 0, 2*len(words))
	for _, word := range words {
		word = cmp.Or(strings.TrimLeft(word, " "), word)
		alone := w.tok.Encode(word, false)
		if len(alone) == 0 { // the tokenizer makes nothing of it: nor does the model
			continue
		}
		list = append(list, alone)
		if behind := w.tok.Encode(" "+word, false); len(behind) == len(alone) && behind[0] != alone[0] {
			list = append(list, behind)
		}
	}
	return list
}

func fill[T any](dst *T, def *T, given bool) {
	if def != nil && !given {
		*dst = *def
	}
}

// seedStride separates the seeds of a list's prompts (2^64 over the golden ratio).
const seedStride = 0x9e3779b97f4a7c15

// request builds the engine's request for one prompt.
func (w *Worker) request(j *job, i int, id string, seed uint64) *engine.Request {
	r := &engine.Request{
		ID: id, Owner: fmt.Sprintf("%s/%d", id, i), Prompt: j.items[i].tokens, N: j.N, Urgent: j.urgent, Keep: len(j.items) > 1, Promise: j.promise,
		Sampling: w.sampling(&j.Sampling, seed), MinTokens: j.MinTokens,
		StopTokens: j.StopTokenIDs, IgnoreEOS: j.IgnoreEOS, Salt: j.CacheSalt, Priority: int8(j.CachePriority),
		Logprobs: j.logprobs, PromptLogprobs: -1, Given: j.givenTo(i), Offers: j.framed,
	}
	if j.guide != nil {
		r.Guide = j.guide.Fork()
	}
	r.BadWords, r.LogprobIDs = j.badWords, j.LogprobIDs
	if j.Seed == nil { // the same prompt twice in a list should get two answers
		r.Seed += uint64(i) * seedStride
	}
	if j.MaxTokens != nil {
		r.MaxTokens = max(*j.MaxTokens, 1)
	}
	if j.echo && j.logprobs >= 0 {
		r.PromptLogprobs = j.logprobs
	}
	if j.PromptLogprobs != nil {
		r.PromptLogprobs = max(r.PromptLogprobs, *j.PromptLogprobs)
	}
	return r
}
