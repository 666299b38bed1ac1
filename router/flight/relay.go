package flight

import (
	"bytes"
	"errors"
	"io"
	"net"
	"slices"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
)

// maxEvent bounds one server-sent event, and with it the memory of a stream.
const maxEvent = openai.MaxEvent

// source is an answer's body as it arrives: *h1.Response.
type source interface {
	io.Reader
	Await() error // waits for bytes, or the end, without holding a buffer
	Over() bool   // it has ended, as far as is known without waiting
	Lend() *[]byte
	GiveBack(*[]byte)
	Finish()
	Abort()
}

// events cuts a body into runs of whole server-sent events, so that a stream
// that breaks can be ended by an error event: half an event is never relayed.
type events struct {
	body source
	raw  bool    // no events: whatever has come is a run
	mute bool    // nothing but comments has come, which are kept until there is more
	lent *[]byte // what buf began as, to be given back
	buf  []byte  // read and not yet returned: [from:]
	from int
	last [32]byte // the newest whole event that says something, cut to what ended needs
	size int      // of last
	n    int      // events that next has returned
	err  error
}

// lastEnd is where the last whole event ends, 0 without one: behind a blank
// line, with lines that end in LF, CRLF or CR. Ends of lines are few, which a
// search for two of them does not know.
func lastEnd(b []byte) int {
	for i := bytes.LastIndexByte(b, '\n'); i > 0; i = bytes.LastIndexByte(b[:i], '\n') {
		if b[i-1] == '\n' || i > 1 && b[i-1] == '\r' && b[i-2] == '\n' {
			return i + 1
		}
	}
	if bytes.IndexByte(b, '\r') >= 0 {
		if i := bytes.LastIndex(b, []byte("\r\r")); i >= 0 {
			return i + 2
		}
	}
	return 0
}

// countEvents is how many events end in a run.
func countEvents(run []byte) int {
	for _, end := range []string{"\n\n", "\n\r\n", "\r\r"} { // a stream has one kind
		if n := bytes.Count(run, []byte(end)); n > 0 {
			return n
		}
	}
	return 0
}

// said is what comes behind blank lines and comments.
func said(b []byte) []byte {
	for len(b) > 0 {
		switch b[0] {
		case '\r', '\n':
			b = b[1:]
		case ':':
			i := bytes.IndexAny(b, "\r\n")
			if i < 0 {
				return nil
			}
			b = b[i:]
		default:
			return b
		}
	}
	return nil
}

// dataOf is where the data of an event begin.
func dataOf(event []byte) []byte {
	for len(event) > 0 {
		if data, ok := bytes.CutPrefix(event, []byte("data:")); ok {
			return bytes.TrimPrefix(data, []byte(" "))
		}
		i := bytes.IndexByte(event, '\n')
		if i < 0 {
			i = bytes.IndexByte(event, '\r')
		}
		if i < 0 {
			return nil
		}
		event = event[i+1:]
	}
	return nil
}

// isError reports whether an event tells of an error.
func isError(event []byte) bool {
	data := dataOf(event)
	return bytes.HasPrefix(data, []byte(`{"error":`)) || bytes.HasPrefix(data, []byte(`{"object":"error"`)) ||
		bytes.HasPrefix(event, []byte("event: error")) || bytes.HasPrefix(event, []byte("event:error"))
}

// eventBytes is what one read of events may return.
const eventBytes = 16 << 10

// next returns one or more whole events; they are valid until the next call.
// At the body's end it returns io.EOF. While it waits for a new event it holds no
// buffer.
func (e *events) next() ([]byte, error) {
	e.used()
	scanned := 0
	for {
		if e.raw && len(e.buf) > 0 {
			e.from = len(e.buf)
			return e.buf, nil
		}
		if i := lastEnd(e.buf[scanned:]); i > 0 {
			if e.mute = e.mute && len(said(e.buf[:scanned+i])) == 0; !e.mute {
				e.from = scanned + i
				e.remember(e.buf[:e.from])
				return e.buf[:e.from], nil
			}
		}
		if e.err != nil {
			return e.rest()
		}
		if len(e.buf) >= maxEvent {
			return nil, &h1.LargeError{What: "an event", Limit: maxEvent}
		}
		scanned = max(len(e.buf)-2, 0) // the end may be split
		if e.lent == nil {
			if e.err = e.body.Await(); e.err != nil {
				continue
			}
			e.lent = e.body.Lend()
			e.buf = *e.lent
		}
		if cap(e.buf)-len(e.buf) < eventBytes/4 {
			e.buf = slices.Grow(e.buf, len(e.buf)+eventBytes)
		}
		n, err := e.body.Read(e.buf[len(e.buf):cap(e.buf)])
		e.buf = e.buf[:len(e.buf)+n]
		e.err = err
	}
}

// rest is what next returns of what is left behind the last whole event when the
// body is over: that the stream is done, if it is, which wants no blank line. Half
// an event is none.
func (e *events) rest() ([]byte, error) {
	half := said(e.buf)
	if e.err != io.EOF || len(half) == 0 {
		return nil, e.err
	}
	if string(bytes.TrimRight(dataOf(half), "\r\n")) != "[DONE]" {
		return nil, errHalf
	}
	e.remember(e.buf)
	e.buf = append(bytes.TrimRight(e.buf, "\r\n"), "\n\n"...)
	e.from = len(e.buf)
	return e.buf, nil
}

// errHalf is a stream that ended in good order, but not behind an event.
var errHalf = errors.New("the stream ended within an event")

// used gives up what next has returned.
func (e *events) used() {
	e.buf = append(e.buf[:0], e.buf[e.from:]...)
	e.from = 0
	if len(e.buf) == 0 && e.lent != nil {
		e.body.GiveBack(e.lent)
		e.lent, e.buf = nil, nil
	}
}

// remember counts the events in run, and keeps the beginning of the last that is
// no comment.
func (e *events) remember(run []byte) {
	if e.n = countEvents(run); e.n == 1 && bytes.IndexByte(run, '\r') < 0 { // mostly
		if event := said(run); len(event) > 0 {
			e.size = copy(e.last[:], event)
		}
		return
	}
	for len(run) > 0 {
		run = bytes.TrimRight(run, "\r\n")
		i := lastEnd(run)
		if event := said(run[i:]); len(event) > 0 {
			e.size = copy(e.last[:], event)
			return
		}
		run = run[:i]
	}
}

// ended reports whether the stream told its reader that it is over.
func (e *events) ended() bool {
	if e.raw {
		return true
	}
	last := e.last[:e.size]
	return bytes.HasPrefix(dataOf(last), []byte("[DONE]")) || isError(last)
}

// stream relays decode's events to the client, on the goroutine of the client's
// connection: a client that does not read stops the reading from decode, and
// nothing piles up in between.
type stream struct {
	q         *request
	events    *events
	body      source
	first     []byte                            // events read before the headers went out
	merge     func() (openai.PromptUsage, bool) // see answer
	status    int
	forwarded bool // another API's, with ends of its own
	pace      *pacer
	pulse     pulse

	done   bool // nothing more is to be read
	failed string
}

// next returns the next bytes for the client, io.EOF after the last. It turns
// a stream that broke into an error event.
func (s *stream) next() ([]byte, error) {
	if run := s.first; run != nil {
		s.first = nil
		return s.counted(run), nil
	}
	if s.done {
		return nil, io.EOF
	}
	run, err := s.pace.next(s.events)
	if err == nil {
		return s.counted(run), nil
	}
	s.done = true
	if err == io.EOF {
		if s.forwarded || s.events.ended() {
			s.body.Finish()
			return nil, io.EOF
		}
		err = errors.New("the stream ended early")
	}
	s.body.Abort()
	e := s.q.streamError(err)
	s.failed = e.Message
	if e.Status == statusClientGone {
		return nil, errClientGone
	}
	if s.events.raw { // there is no saying it: the body is not whole
		s.status = e.Status
		return nil, errCut
	}
	return openai.AppendErrorEvent(nil, e), nil
}

// counted is merged, and what it says noted.
func (s *stream) counted(run []byte) []byte {
	run = s.merged(run)
	if s.events.raw {
		s.q.usage.skimmed(run)
		return run
	}
	n := s.events.tokens()
	s.q.usage.tally(run, n)
	if !s.forwarded {
		s.pulse.beat(time.Since(s.q.start), n, s.q.top.N)
	}
	return run
}

// merged puts the prompt's usage into a run of events, if there is any.
func (s *stream) merged(run []byte) []byte {
	if s.merge == nil || !openai.HasUsage(run) {
		return run
	}
	u, ok := s.merge()
	if !ok {
		return run
	}
	return openai.MergeUsageEvents(run, u)
}

// Stream implements Streamer: it writes the answer to its end and ends the request.
func (s *stream) Stream(c *h1.Conn) error {
	var err error
	for err == nil {
		var run []byte
		if run, err = s.next(); err == nil {
			err = s.write(c, run, s.last())
		}
	}
	if err == io.EOF {
		err = s.write(c, nil, true)
	}
	s.end(err)
	return err
}

// write sends a run.
func (s *stream) write(c *h1.Conn, run []byte, last bool) error {
	err := c.Send(run, last)
	if err == nil {
		s.q.bytes += int64(len(run))
		return nil
	}
	s.failed = errClientGone.Error()
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		s.failed = errStalled.Error()
	}
	return err
}

// last reports whether nothing comes behind the run that is being written, as far
// as that is known without waiting for more.
func (s *stream) last() bool {
	if s.forwarded {
		return s.done || len(s.events.buf) == s.events.from && s.body.Over()
	}
	return s.done || len(s.events.buf) == s.events.from && s.events.ended() && s.body.Over()
}

// errCut is a body that ends too early.
var errCut = errors.New("the answer broke")

// end ends the request.
func (s *stream) end(err error) {
	s.events.from = len(s.events.buf)
	s.events.used()
	s.body.Abort() // does nothing after finish
	s.pace.tell()
	status := s.status
	if err != nil && err != errCut { //nolint:errorlint // our own, never wrapped
		status = statusClientGone
		if s.failed == "" {
			s.failed = errClientGone.Error()
		}
	}
	s.q.pulse = &s.pulse
	s.q.finish(status, s.failed)
}

// streamError is what a client is told of a stream that broke.
func (q *request) streamError(err error) *openai.Error {
	if q.ctx.Err() != nil {
		return contextError(&q.ctx)
	}
	a := q.attempts[len(q.attempts)-1]
	if large := (*h1.LargeError)(nil); errors.As(err, &large) {
		return tooLarge(large, &q.top)
	}
	if cause := a.d.Cause(); cause != nil {
		err = cause
	} else {
		a.brokeOff(err)
	}
	return openai.Upstream("decode worker %s: %v", a.d.inst.ID, err)
}
