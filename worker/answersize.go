package worker

import (
	"strconv"

	"github.com/xpyd/xpyd/internal/answer"
	"github.com/xpyd/xpyd/internal/openai"
)

const (
	// unsaid is how many tokens a stream holds back while their text is incomplete. Then it
	// sends their log probabilities and ids in a chunk without text.
	unsaid = 64
	// leastAnswer is the lowest max_tokens that the worker chooses to bound an answer when the
	// client set none.
	leastAnswer = 1024
)

// answerLimit bounds an answer that does not stream, in bytes: this worker's setting, or the
// router's header if that is lower.
func (w *Worker) answerLimit(header []byte) int {
	limit := int(w.cfg.MaxAnswer)
	if n, err := strconv.Atoi(string(header)); err == nil && n > 0 {
		limit = min(limit, n)
	}
	return limit
}

// answerShape is what the size of a choice depends on.
func (w *Worker) answerShape(j *job, it *item) openai.Shape {
	s := openai.Shape{Chat: j.chat, IDs: j.ReturnTokenIDs, Logprobs: j.logprobs,
		Prompt: len(it.tokens), Echo: j.echo, PromptLogprobs: -1}
	if j.MaxTokens != nil {
		s.Tokens = *j.MaxTokens
	} else {
		s.Tokens = w.engine.MaxModelLen() - len(it.tokens)
	}
	if j.fronts() {
		s.Text = it.text
	}
	if r := &j.reading; r.active() {
		s.Reasons = r.think != nil
		if r.tool != nil {
			s.Calls, s.Held = answer.MaxCalls, answer.MaxHeld
		}
	}
	if j.PromptLogprobs != nil {
		s.PromptLogprobs = *j.PromptLogprobs
	}
	for _, stop := range j.Stop {
		if len(stop) > len(s.Stop) {
			s.Stop = stop
		}
	}
	return s
}

// checkAnswer refuses, before anything is computed, an answer that could become too large. Without
// max_tokens the client gets as many tokens as fit.
func (w *Worker) checkAnswer(j *job, limit int) error {
	around := openai.MaxHead + 6*len(w.served)
	total, largest, which := around, 0, openai.Shape{}
	for i := range j.items {
		s := w.answerShape(j, &j.items[i])
		size := 0
		if j.Stream {
			size = s.EventSize(&w.sizes, unsaid)
			total = max(total, around+size)
		} else {
			size = s.Size(&w.sizes)
			total += j.N * size
		}
		if size > largest {
			largest, which = size, s
		}
	}
	if j.Stream {
		limit = openai.MaxEvent
	}
	if total <= limit {
		return nil
	}
	if j.MaxTokens == nil && !j.Stream { // of chats: each has as much
		if n := which.Fits(&w.sizes, (limit-around)/(j.N*len(j.items))); n >= max(leastAnswer, j.MinTokens) {
			j.MaxTokens = &n
			return nil
		}
	}
	return j.tooLarge(&which, total, limit)
}

// tooLarge is the error for an answer of that shape; it names the field to lower.
func (j *job) tooLarge(s *openai.Shape, size, limit int) error {
	what, instead := "the answer", ", or ask for a stream"
	if j.Stream {
		what, instead = "an event of the stream", ""
	}
	field := j.field(s)
	return openai.AnswerTooLarge(field, "%s could have %d bytes, with %d prompts x n %d, each of %d tokens and %d log probabilities; "+
		"%d is the limit: lower %s or one of these%s", what, size, len(j.items), j.N, s.Tokens, s.Entries(), limit, field, instead)
}

// field names the request's field that adds most to an answer's size.
func (j *job) field(s *openai.Shape) string {
	switch prompt := s.Prompt > s.Tokens || j.Stream; {
	case s.PromptLogprobs >= 0 && s.Prompt*(s.PromptLogprobs+1) > s.Tokens*(s.Logprobs+1):
		return "prompt_logprobs"
	case s.Logprobs > 0 && j.chat:
		return "top_logprobs"
	case s.Logprobs >= 0:
		return "logprobs"
	case s.Echo && prompt:
		return "echo"
	case s.IDs && prompt:
		return "return_token_ids"
	case j.N > 1:
		return "n"
	case len(j.items) > 1:
		return j.source()
	}
	return "max_tokens"
}

// Memory of an answer while it is made, in bytes. A growing slice briefly takes three times its
// elements; text is copied once more.
const (
	answerBytes   = 160 << 10 // its buffers
	choiceBytes   = 1 << 10
	textTimes     = 3
	textBytes     = 5 * textTimes // a token, on average; more is reserved as it comes
	idBytes       = 3 * 4
	positionBytes = 3*40 + 16 // of a log probability,
	entryBytes    = 9         // and of each alternative
	promptBytes   = 2*40 + 32 // the same, of the prompt's
	listedBytes   = 12 + 9
	// fewTokens is what is reserved for a choice without max_tokens: most have fewer.
	fewTokens = 4096
)

// need is the memory of an answer, in bytes.
type need struct {
	fixed  int64 // buffers and prompts
	tokens int64 // what its tokens add as they come
	each   int64 // a token, without its text
}

// answerNeeds estimates the memory of an answer; a stream needs it only for the tokens it holds
// back. unsure: the client set no max_tokens.
func (w *Worker) answerNeeds(j *job, unsure bool) need {
	n, event := need{fixed: answerBytes}, 0
	for i := range j.items {
		s := w.answerShape(j, &j.items[i])
		n.each = 0
		if s.IDs || j.framed {
			n.each += idBytes
		}
		if s.Logprobs >= 0 {
			n.each += positionBytes + int64(s.Logprobs)*entryBytes
		}
		tokens := s.Tokens
		if unsure {
			tokens = min(tokens, fewTokens)
		}
		if j.Stream {
			tokens = min(tokens, unsaid)
			n.fixed += int64(j.N) * choiceBytes
		} else {
			n.fixed += int64(j.N) * (choiceBytes + textTimes*int64(len(s.Text)))
		}
		n.tokens += int64(j.N*tokens) * (textBytes + n.each)
		each := 16 // ids, here and in the engine
		if s.Echo && s.Logprobs >= 0 {
			each += promptBytes + s.Logprobs*listedBytes
		}
		if s.PromptLogprobs >= 0 {
			each += promptBytes + s.PromptLogprobs*listedBytes
		}
		n.fixed += int64(s.Prompt*each + textTimes*len(s.Text))
		if j.Stream {
			event = max(event, s.EventSize(&w.sizes, unsaid))
		}
	}
	if j.given != nil {
		for _, c := range j.given.Choices {
			n.fixed += 16 * int64(len(c.IDs)) // as of a prompt
		}
	}
	n.fixed += 3 * int64(event) // as it grows
	return n
}

// reserveAnswer waits for the memory of an answer. A router's probe does not wait: it is small, and
// shows that the worker lives.
func (w *Worker) reserveAnswer(c *call, j *job, n need) (*answerShare, error) {
	all := n.fixed + n.tokens
	switch {
	case j.urgent && all < 1<<20:
		return nil, nil
	case all > w.answers.most:
		s := w.answerShape(j, &j.items[0])
		return nil, openai.AnswerTooLarge(j.field(&s), "the answer could take %d bytes of memory; this worker has %d for all answers", all, w.answers.most)
	}
	w.requests.note(c.run, stateWaiting, 0)
	s, err := w.answers.reserve(c, all)
	if err != nil {
		return nil, memoryFailure(err)
	}
	w.requests.note(c.run, "started", all)
	return s, nil
}

// encodedSize bounds the encoded size of a complete answer.
func (w *Worker) encodedSize(g *generation) int {
	sizes := w.sizes
	sizes.Text = 0 // its size is known
	n := openai.MaxHead + 6*len(w.served)
	for i := range g.j.items {
		s := w.answerShape(g.j, &g.j.items[i])
		s.Tokens, s.Text = 0, ""
		for _, c := range g.choices[i*g.j.N : (i+1)*g.j.N] {
			s.Tokens = max(s.Tokens, c.tokens)
			n += openai.StringSize(c.text) + 2*openai.StringSize(c.reasoning)
			for i := range c.calls {
				n += openai.StringSize(c.calls[i].name) + openai.StringSize(c.calls[i].args)
			}
		}
		n += g.j.N * s.Size(&sizes)
	}
	return n
}
