package worker

import (
	"unicode/utf8"

	"github.com/xpyd/xpyd/internal/engine"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/kernels"
)

// choice renders one choice's tokens into text and log probabilities. It holds
// back what may still become part of a character or of a stop string, and the
// log probabilities of held tokens with it.
type choice struct {
	j      *job
	tok    *tokenizer.Tokenizer
	item   *item
	index  int // in the response
	detok  *tokenizer.Detokenizer
	stop   *tokenizer.Stopper
	offset int // characters of token texts so far (completions' text_offset)

	begun    bool // the first chunk is out
	sent     bool // and the last one
	tokens   int  // drawn so far
	done     bool
	text     []byte // not yet taken
	logprobs []openai.TokenLogprob
	ids      []int32
	finish   string
	hit      string // stop string
	stopID   int32  // id + 1
}

func newChoice(w *Worker, j *job, it *item, index int) *choice {
	return &choice{j: j, tok: w.tok, item: it, index: index,
		detok: w.tok.NewDetokenizer(j.SkipSpecial, it.tokens),
		stop:  tokenizer.NewStopper(j.Stop, j.IncludeStop)}
}

// push takes one event. It returns true when the choice hit a stop string and
// the engine should stop it.
func (c *choice) push(e *engine.Event) (stopped bool) {
	if c.done {
		return false
	}
	if e.Prompt != nil && c.j.echo {
		c.echoPrompt(e.Prompt)
	} else if c.tokens == 0 && c.j.echo && e.Prompt == nil && len(c.text) == 0 && !c.begun {
		c.echoPrompt(nil)
	}
	c.tokens++
	id := e.Sampled.Token
	c.ids = append(c.ids, id)
	if c.j.logprobs >= 0 {
		c.addLogprob(e.Sampled.Self, e.Sampled.Top)
	}
	ended := e.Finish == engine.FinishStop
	if !ended || !c.tok.IsSpecial(id) || !c.j.SkipSpecial {
		emit, hit, stop := c.stop.Push(c.detok.Push(id))
		c.text = append(c.text, emit...)
		if stop {
			c.finish, c.hit, c.done = "stop", hit, true
			return e.Finish == engine.FinishNone
		}
	}
	if e.Finish != engine.FinishNone {
		emit, hit, stop := c.stop.Push(c.detok.Flush())
		c.text = append(c.text, emit...)
		c.finish, c.hit, c.done = string(e.Finish), hit, true
		if !stop {
			c.text = append(c.text, c.stop.Flush()...)
		} else {
			c.finish = "stop"
		}
		if ended && c.hit == "" && !isEOS(c.tok, id) {
			c.stopID = id + 1
		}
	}
	return false
}

func isEOS(t *tokenizer.Tokenizer, id int32) bool {
	for _, e := range t.EOS() {
		if e == id {
			return true
		}
	}
	return false
}

// echoPrompt puts the prompt in front of the answer, with its log
// probabilities when the request has them.
func (c *choice) echoPrompt(info *engine.PromptInfo) {
	c.text = append(c.text, c.item.text...)
	if c.j.logprobs < 0 {
		return
	}
	for i, id := range c.item.tokens {
		if i == 0 || info == nil || i > len(info.Logprobs) {
			c.logprobs = append(c.logprobs, openai.TokenLogprob{TopLogprob: c.top(kernels.TokenLogprob{ID: id}), Offset: c.offset, None: true})
			c.offset += utf8.RuneCountInString(c.tok.TokenText(id))
			continue
		}
		c.addLogprob(info.Logprobs[i-1].Self, info.Logprobs[i-1].Top)
	}
}

func (c *choice) addLogprob(self kernels.TokenLogprob, top []kernels.TokenLogprob) {
	lp := openai.TokenLogprob{TopLogprob: c.top(self), Offset: c.offset}
	for _, t := range top {
		lp.Top = append(lp.Top, c.top(t))
	}
	c.offset += utf8.RuneCountInString(lp.Token)
	c.logprobs = append(c.logprobs, lp)
}

func (c *choice) top(t kernels.TokenLogprob) openai.TopLogprob {
	return openai.TopLogprob{ID: t.ID, Token: c.tok.TokenText(t.ID), Bytes: c.tok.TokenBytes(t.ID), Logprob: t.Logprob}
}

// ready says whether there is something to send.
func (c *choice) ready() bool { return !c.sent && (len(c.text) > 0 || c.done) }

// take returns what is ready as one chunk, valid until the next push.
func (c *choice) take() openai.Choice {
	out := openai.Choice{Index: c.index, Text: string(c.text), Role: !c.begun, Finish: c.finish,
		StopString: c.hit, StopToken: c.stopID}
	if c.j.logprobs >= 0 {
		out.Logprobs = c.logprobs
		if out.Logprobs == nil {
			out.Logprobs = []openai.TokenLogprob{}
		}
	}
	if c.j.ReturnTokenIDs {
		out.TokenIDs = c.ids
		if !c.begun {
			out.PromptTokenIDs = c.item.tokens
		}
	}
	c.begun = true
	c.text, c.logprobs, c.ids = c.text[:0], nil, nil
	return out
}
