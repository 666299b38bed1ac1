package flight

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/dialect"
)

// replay is what a seam keeps of a foreign engine's stream, beside its tokens. Such an engine is
// asked to put ids into its events, and knows nothing of takeovers: another one gets the tokens as a
// prompt, and its answer is turned into the rest of the first one's.
//
// An engine holds text back: of a token until its characters are whole, and as much as may become a
// stop string. So where it died the client has less text than tokens. Another engine goes on behind the
// last token whose whole text the client is known to have, or from the beginning, with the client's own
// request: tokens behind that are drawn again, and what the client has of their text must come again, and
// is not sent twice.
type replay struct {
	chat   bool
	head   openai.Head
	prompt []byte // token ids, as sent.ids; they are tokens many
	tokens int
	before int    // tokens that came from other engines
	next   bool   // this engine goes on with another's stream
	reason string // why the possibility was lost
	drew   bool   // it drew other text than the client has, which is nobody's fault
	logged bool   // so was that

	// Text is counted in characters from the answer's beginning.
	marks []mark // the first is where another engine would go on
	tail  []byte // what the client has behind the first mark
	sent  int    // what the client has
	heard int    // what this engine and those before it have sent
}

// mark is a number of tokens whose text ends at a character.
type mark struct{ n, at int }

// maxTail bounds what may have to be drawn again, in bytes.
const maxTail = 4 << 10

// rereads has the seam read a foreign engine's stream.
func (s *seam) rereads(chat bool) {
	if s.re == nil {
		s.re = &replay{chat: chat, marks: []mark{{}}}
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
	if s.re == nil || s.choices[0].n == 0 {
		x.Body = openai.AskIDs(x.Body, x.Top)
	} else {
		body, err := openai.AppendReplay(nil, x.Body, x.Top, s.re.prompt, s.choices[0].ids, a.d.inst.MaxModelLen)
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

// back takes the seam back to the last token whose text the client has.
func (s *seam) back() {
	re := s.re
	if re == nil || s.open == 0 {
		return
	}
	from := re.marks[0]
	c := &s.choices[0]
	c.n, c.ids = from.n, c.ids[:openai.IDBytes*from.n]
	re.marks, re.heard = re.marks[:1], from.at
	re.before, re.next = c.n, true
}

// passes notes a text of the engine and returns what of it the client lacks; false if it is another
// than what the client has.
func (re *replay) passes(text []byte) ([]byte, bool) {
	has := re.tail[len(re.tail)-lastChars(re.tail, re.sent-re.heard):]
	n := min(len(has), len(text))
	if !bytes.Equal(has[:n], text[:n]) {
		return nil, false
	}
	re.heard += utf8.RuneCount(text)
	text = text[n:]
	re.sent = max(re.sent, re.heard)
	re.tail = append(re.tail, text...)
	return text, true
}

// ends notes that the text heard, with what is held back, is that of so many tokens: clean, if it
// ends with the last of them. Of the marks those stay from the last on behind which as much was heard as may be
// held back: a stop string that begins in front of it would have shown.
func (re *replay) ends(n, held int, clean bool) {
	if clean {
		re.marks = append(re.marks, mark{n, re.heard + held})
	}
	last := 0
	for i, m := range re.marks {
		if m.n == 0 || m.at+held <= re.heard {
			last = i
		}
	}
	re.marks = append(re.marks[:0], re.marks[last:]...)
	re.tail = append(re.tail[:0], re.tail[len(re.tail)-lastChars(re.tail, re.sent-re.marks[0].at):]...)
}

// lastChars is how many bytes the last n characters of a text have.
func lastChars(text []byte, n int) (size int) {
	for ; n > 0 && size < len(text); n-- {
		_, w := utf8.DecodeLastRune(text[:len(text)-size])
		size += w
	}
	return size
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
	dropped := false // the last line, and so is the blank one behind it
	for line := range bytes.Lines(run) {
		data, ok := dataLine(line)
		if !ok {
			if !dropped || len(bytes.TrimSpace(line)) > 0 {
				out = append(out, line...)
			}
			dropped = false
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
		text, fits := c.AppendText(nil), true
		if !s.lost || s.re.heard < s.re.sent {
			text, fits = s.re.passes(text)
		}
		if fits = fits && (c.Finish == nil || s.re.heard == s.re.sent); !fits {
			s.re.drew = true
			s.loses("other text was drawn than the client has")
		}
		s.reads(&c, ok, len(c.Text) > len(`""`))
		switch {
		case s.re.next && (!ok || !fits || c.Choices > 1 || c.More):
			s.loses("an event cannot be part of the stream")
			s.fault = fault(s.re.reason)
			return out
		case s.re.next && c.Choices > 0 && len(text) == 0 && (len(c.Text) > len(`""`) || c.IDs == nil) && c.Finish == nil: // the client has it
			dropped = true
		case s.re.next:
			out = append(out, "data: "...)
			out = append(s.re.head.AppendGoingOn(out, &c, text, s.re.chat, s.re.tokens, s.re.before), '\n')
		case !ok:
			out = append(out, line...)
		default:
			out = append(out, "data: "...)
			out = append(c.AppendUntold(out, data), '\n')
		}
	}
	return out
}

// reads notes a chunk; ok: it is one, and text: it has some.
func (s *seam) reads(c *openai.Chunk, ok, text bool) {
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
	case n == 0 && text:
		s.loses("it did not say which tokens it sent")
	case n > 0 && re.tokens == 0:
		s.loses("it did not say which tokens the prompt has")
	case n > 0:
		s.adds(ids, n, text)
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
	s.choices = s.one[:]
	return true
}

// adds notes an event's tokens.
func (s *seam) adds(ids []byte, n int, text bool) {
	c := &s.choices[0]
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
	// Text that comes with one token ends with it, as nothing else lets text come. With several, it may
	// end within a character of the last.
	if s.re.ends(c.n, s.held, text && n == 1); len(s.re.tail) > maxTail {
		s.loses("its events have had several tokens for too long")
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
	if !openai.IsError(data) {
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
