package flight

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
)

// seam is what another pair needs to go on with a stream: the client's body, and which tokens
// the relayed events stand for. Decode says so in a comment, the frame, in front of each event
// that has a choice:
//
//	:t INDEX IDS
//
// Other comments of decode's are events of their own. IDS is as openai.AppendIDs writes it. In front of a choice's last event it is ":f". The first
// frame of a stream has, behind IDS, the response's time and a hash of its prompts.
type seam struct {
	pot     *pot
	taken   int64           // bytes from it
	body    []byte          // the client's
	most    int             // tokens that a choice may have; 0: any number
	name    string          // the response's time and the hash of its prompts
	choices []sent          // nil before the first frame
	n, open int             // choices, and those without a finish
	usage   bool            // the event with the usage was relayed
	lost    bool            // what was sent is not known
	fault   fault           // what decode said instead of an end; "" if nothing
	short   short           // that decode's blocks are short; "" if they are not
	breaks  int             // workers that the stream has lost, and may be the reason for
	broke   time.Time       // when it lost the last of them
	by      *fleet.Instance // the decode whose stream broke last
	replays bool            // it may be a foreign engine's
	held    int             // characters that such an engine holds back for stop strings
	re      *replay         // of a foreign engine's; nil: its decode sends frames
	one     [1]sent
}

// fault is why a decode worker ends a stream that another pair may go on with: not the client's
// fault. It says so in a comment, faultMark and an error's JSON, in place of the error event.
type fault string

func (f fault) Error() string { return string(f) }

// sent is what the client has of a choice.
type sent struct {
	ids   []byte // as in the frames
	n     int
	done  bool // its finish was sent
	begun bool // something was
}

// pot bounds what is kept for all streams together. A stream that it has no room for is relayed
// like any other, but ends if it breaks.
type pot struct{ bytes atomic.Int64 }

const (
	maxKept  = 256 << 20
	sentSize = 40 // of a sent, in bytes
)

func (p *pot) take(n int) bool {
	if p.bytes.Add(int64(n)) <= maxKept {
		return true
	}
	p.bytes.Add(-int64(n))
	return false
}

// newSeam returns one that is lost if there is no room for it.
func newSeam(p *pot, body []byte, top *openai.Top) *seam {
	s := &seam{pot: p, body: body, most: top.MaxTokens, n: top.N * top.Prompts}
	if s.open = s.n; !s.take(len(body) + s.n*sentSize) {
		s.release()
		return s
	}
	if cap(body) > 2*len(body) { // a body of unknown length is read into more
		s.body = bytes.Clone(body)
	}
	return s
}

func (s *seam) take(n int) bool {
	if !s.pot.take(n) {
		return false
	}
	s.taken += int64(n)
	return true
}

// release gives back the memory. The stream cannot be taken over any more.
func (s *seam) release() {
	if s == nil {
		return
	}
	s.pot.bytes.Add(-s.taken)
	s.taken, s.lost, s.body, s.choices, s.one = 0, true, nil, nil, [1]sent{}
	if s.re != nil { // its text is read on
		s.re.prompt = nil
	}
}

// Each frame is a line that begins with one of these marks.
const (
	frameMark  = ":t "
	finishMark = ":f "
	faultMark  = ":e "
	shortMark  = ":s "
)

// strip notes the frames of a run of n events and returns the run without them, in the same
// memory, and its events. A frame that makes no sense only ends the possibility of a takeover.
func (s *seam) strip(run []byte, n int) (rest []byte, events int) {
	if s.re != nil {
		return s.reread(run), n
	}
	from, to := -1, 0 // of what is returned
	events = n
	for at := 0; at < len(run); {
		end := len(run)
		if n > 1 {
			if i := bytes.Index(run[at:], eventEnd); i >= 0 {
				end = at + i + len(eventEnd)
			}
		}
		event := run[at:end]
		switch string(event[:min(len(event), len(frameMark))]) {
		case faultMark:
			s.fault = fault(openai.ErrorMessage(bytes.TrimSpace(event[len(faultMark):])))
			events--
			at = end
			continue
		case shortMark:
			s.short = shortOf(bytes.TrimSpace(event[len(shortMark):]))
			events--
			at = end
			continue
		case frameMark, finishMark:
			if s.short == shortNow { // it goes on
				s.short = shortSoon
			}
			if i := bytes.IndexByte(event, '\n'); i >= len(frameMark) {
				s.note(event[len(frameMark):i], event[1] == finishMark[1])
				at += i + 1
			}
		default:
			s.unframed(event)
		}
		switch {
		case from < 0:
			from, to = at, end
		case to == at:
			to = end
		default:
			to += copy(run[to:], run[at:end])
		}
		at = end
	}
	return run[max(from, 0):to], events
}

var (
	eventEnd = []byte("\n\n")
	space    = []byte(" ")
)

// unframed notes an event without a frame: a comment, the usage, or the end.
func (s *seam) unframed(event []byte) {
	if s.lost {
		return
	}
	event = skipComments(event)
	switch {
	case len(event) == 0 || bytes.HasPrefix(dataOf(event), []byte("[DONE]")) || isError(event):
	case s.open == 0 && !s.usage:
		s.usage = true
	default: // its decode sends no frames
		s.release()
	}
}

// note reads a frame behind its mark.
func (s *seam) note(frame []byte, last bool) {
	if s.lost {
		return
	}
	index, ids, _ := bytes.Cut(frame, space)
	ids, name, named := bytes.Cut(ids, space)
	i, n := number(index), openai.CountIDs(ids)
	if i < 0 || i >= s.n || n < 0 || (named || s.name == "") && !s.names(name) {
		s.release()
		return
	}
	if s.choices == nil {
		if s.choices = s.one[:]; s.n > 1 {
			s.choices = make([]sent, s.n)
		}
	}
	c := &s.choices[i]
	c.n, c.begun = c.n+n, true
	if c.done || s.most > 0 && c.n > s.most || !s.room(c, len(ids)) {
		s.release()
		return
	}
	c.ids = append(c.ids, ids...)
	if last {
		c.done = true
		s.open--
	}
}

// tokens is how many the relayed events stand for; 0 if that is not known.
func (s *seam) tokens() (n int) {
	if s == nil || s.lost || s.re != nil {
		return 0
	}
	for i := range s.choices {
		n += s.choices[i].n
	}
	return n
}

// names notes whose stream it is, as its first frame says; a later pair must say the same.
func (s *seam) names(name []byte) bool {
	if s.name != "" {
		return string(name) == s.name
	}
	created, prompt, _ := bytes.Cut(name, space)
	if number(created) < 0 || len(prompt) != 16 || len(bytes.Trim(prompt, "0123456789abcdef")) > 0 {
		return false
	}
	s.name = string(name)
	return true
}

// room makes room for n more bytes of ids.
func (s *seam) room(c *sent, n int) bool {
	if len(c.ids)+n <= cap(c.ids) {
		return true
	}
	more := max(cap(c.ids)/4, n, 64)
	if !s.take(more) {
		return false
	}
	ids := make([]byte, len(c.ids), cap(c.ids)+more)
	copy(ids, c.ids)
	c.ids = ids
	return true
}

// number reads a decimal number of up to 10 digits, as JSON has it; -1 if b is none.
func number(b []byte) int {
	if len(b) == 0 || len(b) > 10 || b[0] == '0' && len(b) > 1 {
		return -1
	}
	n := 0
	for _, c := range b {
		if c < '0' || c > '9' {
			return -1
		}
		n = n*10 + int(c-'0')
	}
	return n
}

// whole reports whether all that was sent is known.
func (s *seam) whole() bool { return !s.lost && s.choices != nil }

// movable reports whether another pair could go on with the stream of a worker that is not known to
// be dead. The last time is kept for one that is. Foreign engines' streams stay: engines need not
// answer the router within a moment.
func (s *seam) movable() bool { return s != nil && s.re == nil && s.breaks < maxTakeovers && s.whole() }

// given is what a new pair is told; nil at a stream's beginning.
func (s *seam) given() []byte {
	if !s.whole() {
		return nil
	}
	size := 64 + 24*s.n
	for i := range s.choices {
		size += 6 * s.choices[i].n
	}
	created, prompt, _ := strings.Cut(s.name, " ")
	b := slices.Grow([]byte(`{"created":`), size)
	b = append(append(b, created...), `,"prompt":"`...)
	b = append(append(b, prompt...), `","choices":[`...)
	for i := range s.choices {
		c := &s.choices[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"ids":[`...)
		for at := range c.n {
			if at > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, int64(openai.IDAt(c.ids, at)), 10)
		}
		b = append(b, ']')
		switch {
		case c.done:
			b = append(b, `,"done":true`...)
		case c.begun && c.n == 0:
			b = append(b, `,"begun":true`...)
		}
		b = append(b, '}')
	}
	return append(b, "]}"...)
}
