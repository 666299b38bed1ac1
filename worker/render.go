package worker

import (
	"slices"
	"time"
	"unicode/utf8"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/kernels"
)

// choice renders one choice's tokens into text and log probabilities. It holds back text that may
// still become part of a character or of a stop string, with the log probabilities of its tokens.
type choice struct {
	j      *job
	tok    *tokenizer.Tokenizer
	eos    []int32
	item   *item
	index  int // in the response
	detok  *tokenizer.Detokenizer
	stop   *tokenizer.Stopper
	offset int32 // characters of token texts so far (completions' text_offset)

	promise engine.Promise // the request's own

	parser    *answer.Parser // nil: all is text
	reasoning []byte         // not yet taken
	calls     []callPart
	called    bool
	thought   int // tokens of reasoning so far
	taken     int // bytes that have come out of detok, and what they may become

	begun    bool          // the first chunk was sent
	sent     bool          // and the last one
	first    time.Time     // its first token
	last     time.Time     // its latest
	longest  time.Duration // between two of them
	tokens   int           // drawn so far
	given    int           // of them, by another worker
	done     bool
	text     []byte // not yet taken
	logprobs []openai.TokenLogprob
	echo     []openai.TokenLogprob // the prompt's, sent before logprobs
	ids      []int32
	finish   string
	hit      string // stop string
	stopID   int32  // id + 1
}

func newChoice(w *Worker, j *job, it *item, index int) *choice {
	if j.stops == nil {
		j.stops = tokenizer.NewStops(j.Stop, j.IncludeStop)
	}
	if it.detok == nil {
		it.detok = w.tok.NewDetokenizer(j.SkipSpecial, it.tokens)
	}
	c := &choice{j: j, tok: w.tok, eos: w.eos, item: it, index: index, promise: j.promise,
		detok: it.detok.Continue(j.SkipSpecial), stop: j.stops.Stopper()}
	if r := &j.reading; r.active() {
		c.parser = answer.New(r.tool, r.think, r.options)
		c.detok.Show(r.marks)
	}
	return c
}

// addToken renders one event. It reports whether the choice hit a stop string, so that the engine
// should stop it.
func (c *choice) addToken(e *engine.Event) (stopped bool) {
	if c.done {
		return false
	}
	if c.tokens == 0 && c.j.fronts() {
		c.echoPrompt()
	}
	if c.j.echoOnly() {
		c.text = append(c.text, c.detok.Flush()...)
		c.end(engine.FinishLength)
		return false
	}
	if c.parser == nil {
		return c.addDrawn(e)
	}
	return c.addRead(e)
}

// addRead is addDrawn that counts tokens of reasoning: those before which the model thinks, or after.
func (c *choice) addRead(e *engine.Event) (stopped bool) {
	before := c.parser.Thinking()
	stopped = c.addDrawn(e)
	if before || c.parser.Thinking() {
		c.thought++
	}
	return stopped
}

// end ends the choice.
func (c *choice) end(why engine.Finish) {
	if c.parser != nil {
		c.take(c.parser.Flush())
	}
	c.finish, c.done = string(why), true
}

func (c *choice) addDrawn(e *engine.Event) (stopped bool) {
	c.tokens++
	id := e.Sampled.Token
	if c.j.ReturnTokenIDs || c.j.framed {
		c.ids = append(c.ids, id)
	}
	if c.j.logprobs >= 0 {
		lp := logprob(e.Sampled.Self, e.Sampled.Top)
		lp.Offset = c.offset
		c.offset += c.runes(id)
		c.logprobs = append(c.logprobs, lp)
	}
	ended := e.Finish == engine.FinishStop
	if !ended || c.j.IncludeStop { // the stop token is not text
		if c.addText(c.detok.Push(id)) {
			return e.Finish == engine.FinishNone
		}
	}
	if e.Finish == engine.FinishNone || c.addText(c.detok.Flush()) {
		return false
	}
	c.emit(c.stop.Flush())
	c.end(e.Finish)
	if ended && slices.Contains(c.j.StopTokenIDs, id) && (c.j.IgnoreEOS || !slices.Contains(c.eos, id)) {
		c.stopID = id + 1
	}
	return false
}

// addText adds text, and reports whether a stop string in it ends the choice. None does before
// min_tokens.
func (c *choice) addText(text string) (stopped bool) {
	if c.tokens <= c.j.MinTokens {
		c.emit(c.stop.Skip(text))
		return false
	}
	emit, hit, stopped := c.stop.Push(text)
	c.emit(emit)
	if stopped {
		c.hit = hit
		c.end(engine.FinishStop)
	}
	return stopped
}

// echoPrompt puts the prompt in front of the answer, with log probabilities if asked for.
func (c *choice) echoPrompt() {
	c.text = append(c.text, c.item.text...)
	if c.j.logprobs >= 0 && c.j.echo {
		c.echo = c.item.logprobs(c.tok, &c.item.echoed, c.j.logprobs)
		if n := len(c.echo); n > 0 {
			last := &c.echo[n-1]
			c.offset = last.Offset + c.runes(last.ID)
		}
	}
}

// logprobs lists the prompt's tokens, once for all choices. The first has no distribution, nor do
// those that were not computed here.
func (it *item) logprobs(tok *tokenizer.Tokenizer, made *[]openai.TokenLogprob, most int) []openai.TokenLogprob {
	if *made != nil {
		return *made
	}
	list := make([]openai.TokenLogprob, 0, len(it.tokens))
	offset := int32(0)
	for i, id := range it.tokens {
		var lp openai.TokenLogprob
		if info := it.info; i > 0 && info != nil && i <= len(info.Logprobs) {
			p := &info.Logprobs[i-1]
			lp = logprob(p.Self, p.Top[:min(most, len(p.Top))])
		} else {
			lp = logprob(kernels.TokenLogprob{ID: id}, nil)
			lp.None = true
		}
		lp.Offset = offset
		offset += int32(utf8.RuneCountInString(tok.TokenText(id)))
		list = append(list, lp)
	}
	*made = list
	return list
}

func (c *choice) runes(id int32) int32 { return int32(utf8.RuneCountInString(c.tok.TokenText(id))) }

func logprob(self kernels.TokenLogprob, top []kernels.TokenLogprob) openai.TokenLogprob {
	lp := openai.TokenLogprob{TopLogprob: openai.TopLogprob{ID: self.ID, Logprob: self.Logprob}}
	if len(top) > 0 {
		lp.Top = make([]openai.TopLogprob, len(top))
	}
	for i, t := range top {
		lp.Top[i] = openai.TopLogprob{ID: t.ID, Logprob: t.Logprob}
	}
	return lp
}

// usage is the choice's own count, for continuous_usage_stats.
func (c *choice) usage() openai.Usage {
	u := openai.Usage{Prompt: len(c.item.tokens), Completion: c.tokens, Reasoning: c.thought, Reasons: c.j.reading.think != nil}
	if c.item.info != nil {
		u.Cached = c.item.info.CachedTokens
	}
	return u
}

// size is how many bytes of text there are, or may become of what was read.
func (c *choice) size() int { return len(c.text) + c.taken }

// ready reports whether there is something to send: text, the end, or unsaid tokens held back.
func (c *choice) ready() bool {
	return !c.sent && (len(c.text)+len(c.reasoning)+len(c.calls) > 0 || c.done || max(len(c.logprobs), len(c.ids)) >= unsaid)
}

// keptText is the capacity for text that a choice keeps between chunks.
const keptText = 1 << 10

// finishCalls is the reason of an answer that ends with calls of tools. One that is cut off keeps its
// own: its last call may not be whole.
const finishCalls = "tool_calls"

// drop forgets what is not yet taken.
func (c *choice) drop() {
	c.text, c.reasoning, c.calls, c.logprobs, c.ids = c.text[:0], c.reasoning[:0], c.calls[:0], c.logprobs[:0], c.ids[:0]
}

// opens reports whether a chunk without tokens comes before all others, as OpenAI's chats have it: the
// role, unless the answer begins with a call.
func (c *choice) opens() bool { return c.j.chat && !c.begun && len(c.calls) == 0 }

// takeOpening returns that chunk. Its content is null where the answer may become calls alone.
func (c *choice) takeOpening() openai.Choice {
	out := openai.Choice{Index: c.index, Role: true, NoText: len(c.text) == 0 && !c.done, PromptTokenIDs: c.promptIDs()}
	c.begun = true
	return out
}

// closes reports whether the choice's end comes in a chunk of its own behind what is ready, as OpenAI's
// chats have it. Where each chunk has the usage so far, which is vLLM's, it does not: there is no more to count.
func (c *choice) closes() bool {
	return c.j.chat && !(c.j.IncludeUsage && c.j.ContinuousUsage) && c.done && (len(c.text)+len(c.reasoning)+len(c.calls) > 0 || c.empty())
}

// empty reports whether nothing is ready.
func (c *choice) empty() bool {
	return len(c.text)+len(c.reasoning)+len(c.calls)+len(c.logprobs)+len(c.ids) == 0
}

// takeEnd returns that chunk.
func (c *choice) takeEnd() openai.Choice {
	return openai.Choice{Index: c.index, End: true, Finish: c.reason(), StopString: c.hit, StopToken: c.stopID}
}

// reason is why it ended.
func (c *choice) reason() string {
	if c.called && c.finish == string(engine.FinishStop) && !c.j.reading.named { // as OpenAI has it
		return finishCalls
	}
	return c.finish
}

// promptIDs are told with a choice's first chunk, if they were asked for.
func (c *choice) promptIDs() []int32 {
	if c.begun || !c.j.ReturnTokenIDs {
		return nil
	}
	return c.item.tokens
}

// takeChunk returns what is ready as one chunk, valid until the next addToken.
func (c *choice) takeChunk() openai.Choice {
	out := openai.Choice{Index: c.index, Text: string(c.text), Reasoning: string(c.reasoning), Calls: c.takeCalls(), Role: !c.begun, Finish: c.reason(),
		End: c.done, PromptTokenIDs: c.promptIDs(),
		StopString: c.hit, StopToken: c.stopID}
	if c.j.logprobs >= 0 {
		out.Echo, out.Logprobs = c.echo, c.logprobs
		if out.Logprobs == nil {
			out.Logprobs = []openai.TokenLogprob{}
		}
	}
	if c.j.ReturnTokenIDs {
		out.TokenIDs = c.ids
	}
	if !c.begun && c.j.PromptLogprobs != nil {
		out.PromptLogprobs = c.item.logprobs(c.tok, &c.item.listed, *c.j.PromptLogprobs)
	}
	c.begun, c.echo = true, nil
	c.drop()
	if cap(c.text) > keptText { // after echo it had the prompt
		c.text = nil
	}
	return out
}
