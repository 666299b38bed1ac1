package flight

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/dialect"
)

// replay is what a seam keeps of a foreign engine's stream, beside its tokens. Such an engine is
// asked to put ids into its events, and knows nothing of takeovers: another one gets the tokens as a
// prompt, and its answer is turned into the rest of the first one's.
//
// An engine keeps a token's text back until its characters are whole. So the client has the text of
// all tokens only behind an event with one token and some text, and that is where another engine goes
// on: tokens behind it, whose text nobody has seen, are drawn again.
type replay struct {
	chat   bool
	head   openai.Head
	prompt []byte // token ids, as sent.ids; they are tokens many
	tokens int
	bare   int    // of the answer's tokens, the last that had no text
	split  bool   // the last text may end before its tokens do
	before int    // tokens that came from other engines
	next   bool   // this engine goes on with another's stream
	reason string // why the possibility was lost
	logged bool   // so was that
}

// rereads has the seam read a foreign engine's stream.
func (s *seam) rereads(chat bool) {
	if s.re == nil {
		s.re = &replay{chat: chat}
	}
}

// why is why what was sent is not known, for people.
func (s *seam) why() string {
	if s.re == nil || s.re.reason == "" {
		return ""
	}
	return " (" + s.re.reason + ")"
}

// loses ends the possibility of a takeover.
func (s *seam) loses(format string, args ...any) {
	if !s.lost {
		s.re.reason = fmt.Sprintf(format, args...)
		s.release()
	}
}

// reread notes what came of reading the last run.
func (s *stream) reread() {
	q := s.q
	if q.seam.fault != "" {
		s.events.breakOff(q.seam.fault)
	}
	if re := q.seam.re; re.reason != "" && !re.logged {
		re.logged = true
		q.s.Log.Warn("another pair could not go on with a stream", "request_id", q.id, "decode", q.attempts[len(q.attempts)-1].d.inst.ID, "err", re.reason)
	}
}

// replay makes the exchange one that asks for ids or, in the middle of a stream, that goes on with it.
func (a *attempt) replay(x *dialect.Exchange) error {
	s := a.q.seam
	if s.re == nil || s.choices == nil {
		x.Body = openai.AskIDs(x.Body, x.Top)
	} else {
		body, err := openai.AppendReplay(nil, x.Body, x.Top, s.re.prompt, s.choices[0].ids)
		if err != nil {
			return err
		}
		x.Path, x.Body = "/v1/completions", body
	}
	top, err := openai.Scan(x.Body)
	if err != nil {
		return err
	}
	top.Model = x.Top.Model
	x.Top = &top
	return nil
}

// back takes the seam back to where the client has the text of all tokens.
func (s *seam) back() *openai.Error {
	re := s.re
	if re == nil || s.open == 0 {
		return nil
	}
	c := &s.choices[0]
	c.n -= re.bare
	c.ids = c.ids[:len(c.ids)-openai.IDBytes*re.bare]
	re.bare = 0
	switch {
	case re.split:
		return openai.Upstream("its last event had several tokens, which may have ended within a character")
	case re.chat && c.n == 0: // a completion's text is no chat's before that has begun
		return openai.Upstream("the client has no text of it")
	}
	re.before, re.next = c.n, true
	return nil
}

// agrees checks that an engine that goes on with a stream has read the tokens that it was sent.
func (s *seam) agrees(first []byte) error {
	var c openai.Chunk
	for line := range bytes.Lines(first) {
		if data, ok := dataLine(line); ok {
			if c, ok = openai.ReadChunk(data); ok {
				break
			}
		}
	}
	got, ok := openai.AppendList(nil, c.Prompt)
	given := s.re.prompt
	if !ok || len(got) != len(given)+len(s.choices[0].ids) || !bytes.HasPrefix(got, given) || !bytes.HasSuffix(got, s.choices[0].ids) {
		return errors.New("it does not say that it has read the tokens that it was sent")
	}
	return nil
}

// dataLine returns the JSON object in a line of an event.
func dataLine(line []byte) ([]byte, bool) {
	data, ok := bytes.CutPrefix(line, []byte("data:"))
	data = bytes.TrimSpace(data)
	return data, ok && len(data) > 0 && data[0] == '{'
}

// reread notes the tokens of a run and returns it as the client gets it. An error that is not the
// client's, or an event that cannot be turned into the client's form, ends the run as a fault.
func (s *seam) reread(run []byte) []byte {
	out := make([]byte, 0, len(run)+64)
	for line := range bytes.Lines(run) {
		data, ok := dataLine(line)
		if !ok {
			out = append(out, line...)
			continue
		}
		if why, ok := engineFault(data); ok && !s.lost {
			s.fault = why
			return out
		} else if isError(line) {
			out = append(out, line...)
			continue
		}
		c, ok := openai.ReadChunk(data)
		if s.reads(&c, ok); s.re.next {
			if !ok || c.Choices > 1 || c.More {
				s.fault = "its event cannot be read as part of the stream"
				return out
			}
			out = append(out, "data: "...)
			out = append(s.re.head.AppendGoingOn(out, &c, s.re.chat, s.re.tokens, s.re.before), '\n')
			continue
		}
		if !ok {
			out = append(out, line...)
			continue
		}
		out = append(out, "data: "...)
		out = append(c.AppendUntold(out, data), '\n')
	}
	return out
}

// reads notes a chunk; ok: it is one.
func (s *seam) reads(c *openai.Chunk, ok bool) {
	if s.lost {
		return
	}
	re := s.re
	switch {
	case !ok:
		s.loses("an event is not JSON")
		return
	case c.Choices > 1 || c.Choices == 1 && c.Index != nil && string(c.Index) != "0":
		s.loses("an event has another choice than the first")
		return
	case c.More:
		s.loses("its answer is more than text")
		return
	case s.open == 0:
		s.usage = s.usage || c.Choices == 0 && c.Usage != nil
		return
	case c.Choices == 0:
		return
	}
	if re.tokens == 0 && c.Prompt != nil && !s.begins(c) {
		return
	}
	var space [16 * openai.IDBytes]byte
	ids := space[:0]
	if c.IDs != nil {
		if ids, ok = openai.AppendList(ids, c.IDs); !ok {
			s.loses("token_ids is no list of ids")
			return
		}
	}
	switch n := len(ids) / openai.IDBytes; {
	case n == 0 && c.HasText():
		s.loses("it did not say which tokens it sent")
	case n > 0 && re.tokens == 0:
		s.loses("it did not say which tokens the prompt has")
	case n > 0:
		s.adds(ids, n, c.HasText())
	}
	if c.Finish != nil && !s.lost && s.choices != nil {
		s.choices[0].done = true
		s.open = 0
	}
}

// begins notes the prompt's tokens, and what all chunks have in common.
func (s *seam) begins(c *openai.Chunk) bool {
	re := s.re
	prompt, ok := openai.AppendList(nil, c.Prompt)
	if !ok || len(prompt) == 0 {
		s.loses("prompt_token_ids is no list of ids")
		return false
	}
	head := openai.NewHead(c)
	if !s.take(len(prompt) + head.Size()) {
		s.loses("too much is kept for other streams")
		return false
	}
	re.head, re.prompt, re.tokens = head, prompt, len(prompt)/openai.IDBytes
	return true
}

// adds notes an event's tokens.
func (s *seam) adds(ids []byte, n int, text bool) {
	if s.choices == nil {
		s.choices = s.one[:]
	}
	c, re := &s.choices[0], s.re
	c.n += n
	switch {
	case s.most > 0 && c.n > s.most:
		s.loses("it sent more tokens than it may")
		return
	case !s.room(c, len(ids)):
		s.loses("too much is kept for other streams")
		return
	}
	c.ids = append(c.ids, ids...)
	if text {
		re.bare, re.split = 0, n > 1
	} else {
		re.bare += n
	}
}

// rest is what the client gets of a stream whose engine died behind its last token: the usage, if it
// asked for it, and the end.
func (s *seam) rest() (events []byte) {
	if string(openai.Member(openai.Member(s.body, "stream_options"), "include_usage")) == "true" {
		events = s.re.head.AppendLastUsage(nil, s.re.tokens, s.choices[0].n)
	}
	return openai.AppendDone(events)
}

// firstPrompt is what prefill has counted, less what the stream's answer was then.
func (s *seam) firstPrompt(u openai.PromptUsage) openai.PromptUsage {
	if s != nil && s.re != nil && s.re.next {
		u.Prompt = s.re.tokens
		u.Cached = min(u.Cached, u.Prompt)
	}
	return u
}

// engineFault returns what an engine's error says, if another one may not have it.
func engineFault(data []byte) (fault, bool) {
	if !bytes.HasPrefix(data, []byte(`{"error":`)) && !bytes.HasPrefix(data, []byte(`{"object":"error"`)) {
		return "", false
	}
	var e struct {
		Error struct {
			Type string
			Code json.RawMessage
		}
		Code json.RawMessage // of older engines
	}
	_ = json.Unmarshal(data, &e) // what cannot be read is empty
	code, _ := strconv.Atoi(string(cmp.Or(string(e.Error.Code), string(e.Code))))
	kind := strings.ReplaceAll(e.Error.Type, " ", "")
	return fault(openai.ErrorMessage(data)), code >= 500 || kind == openai.TypeServer || strings.EqualFold(kind, "InternalServerError")
}
