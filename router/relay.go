package router

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/xpyd/xpyd/internal/openai"
)

// maxEvent bounds one server-sent event, and with it the memory of a stream.
const maxEvent = 4 << 20

// events cuts a body into runs of whole server-sent events, so that a stream
// that breaks can be ended by an error event: half an event is never relayed.
type events struct {
	body *upBody
	buf  []byte // read and not yet returned: [from:]
	from int
	last []byte // the newest whole event, cut to what end needs
	err  error
}

var eventEnd = []byte("\n\n")

// next returns one or more whole events; they are valid until the next call.
// At the body's end it returns what is left, then io.EOF.
func (e *events) next() ([]byte, error) {
	e.buf = append(e.buf[:0], e.buf[e.from:]...)
	e.from = 0
	scanned := 0
	for {
		if i := bytes.LastIndex(e.buf[scanned:], eventEnd); i >= 0 {
			e.from = scanned + i + len(eventEnd)
			e.remember(e.buf[:e.from])
			return e.buf[:e.from], nil
		}
		if e.err != nil {
			if e.err == io.EOF && len(e.buf) > 0 {
				e.from = len(e.buf)
				return e.buf, nil
			}
			return nil, e.err
		}
		if len(e.buf) >= maxEvent {
			return nil, fmt.Errorf("an event of more than %d bytes", maxEvent)
		}
		scanned = max(len(e.buf)-1, 0) // the end may be split
		if cap(e.buf)-len(e.buf) < 4096 {
			grown := make([]byte, len(e.buf), 2*cap(e.buf)+8192)
			copy(grown, e.buf)
			e.buf = grown
		}
		n, err := e.body.Read(e.buf[len(e.buf):cap(e.buf)])
		e.buf = e.buf[:len(e.buf)+n]
		e.err = err
	}
}

// remember keeps the beginning of the last event in run.
func (e *events) remember(run []byte) {
	run = run[:len(run)-len(eventEnd)]
	if i := bytes.LastIndex(run, eventEnd); i >= 0 {
		run = run[i+len(eventEnd):]
	}
	e.last = append(e.last[:0], run[:min(len(run), 32)]...)
}

// ended says whether the stream told its reader that it is over.
func (e *events) ended() bool {
	return bytes.HasPrefix(e.last, []byte("data: [DONE]")) || bytes.HasPrefix(e.last, []byte(`data: {"error":`)) ||
		bytes.HasPrefix(e.last, []byte("event: error"))
}

// stream relays decode's events to the client. The HTTP server reads it on
// the connection's own goroutine, so a client that does not read stops the
// reading from decode, and nothing piles up in between.
type stream struct {
	q      *request
	events *events
	body   *upBody
	conn   net.Conn
	first  []byte                            // events read before the headers went out
	merge  func() (openai.PromptUsage, bool) // see answer
	rest   []byte                            // of a run that Read could not return whole
	done   bool
	failed string
}

// next returns the next bytes for the client, io.EOF after the last. It turns
// a stream that broke into an error event.
func (s *stream) next() ([]byte, error) {
	if run := s.first; run != nil {
		s.first = nil
		return s.merged(run), nil
	}
	if s.done {
		return nil, io.EOF
	}
	run, err := s.events.next()
	if err == nil {
		return s.merged(run), nil
	}
	s.done = true
	if err == io.EOF {
		if s.events.ended() {
			s.body.finish()
			return nil, io.EOF
		}
		err = errors.New("the stream ended early")
	}
	s.body.abort()
	e := s.q.streamError(err)
	s.failed = e.Message
	if e.Status == statusClientGone {
		return nil, errClientGone
	}
	return openai.AppendErrorEvent(nil, e), nil
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

// SupportsBodyWriteTo lets the server use WriteTo: one chunk a run of events.
func (s *stream) SupportsBodyWriteTo() bool { return true }

// WriteTo relays to the end.
func (s *stream) WriteTo(w io.Writer) (int64, error) {
	var total int64
	for {
		run, err := s.next()
		if err == io.EOF {
			return total, nil
		}
		if err != nil {
			return total, err
		}
		n, err := s.write(w, run)
		if total += int64(n); err != nil {
			return total, err
		}
	}
}

// write gives the client StallTimeout for a run.
func (s *stream) write(w io.Writer, run []byte) (int, error) {
	if err := s.conn.SetWriteDeadline(time.Now().Add(s.q.r.cfg.StallTimeout)); err != nil {
		return 0, err
	}
	n, err := w.Write(run)
	s.q.bytes += int64(n)
	if err != nil {
		s.failed = errClientGone.Error()
		var ne net.Error
		if errors.As(err, &ne) && ne.Timeout() {
			s.failed = errStalled.Error()
		}
	}
	return n, err
}

// Read is for servers that do not use WriteTo.
func (s *stream) Read(p []byte) (int, error) {
	if len(s.rest) == 0 {
		run, err := s.next()
		if err != nil {
			return 0, err
		}
		s.rest = run
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	s.q.bytes += int64(n)
	return n, nil
}

// Close ends the request; the server calls it once it has written the last
// byte or failed to.
func (s *stream) Close() error {
	s.body.abort() // does nothing after finish
	status := 200
	if s.failed == errClientGone.Error() || s.failed == errStalled.Error() || !s.done {
		status = statusClientGone
		if s.failed == "" {
			s.failed = errClientGone.Error()
		}
	}
	s.q.finish(status, s.failed)
	return nil
}

// streamError is what a client is told of a stream that broke.
func (q *request) streamError(err error) *openai.Error {
	if q.ctx.Err() != nil {
		return contextError(q.ctx)
	}
	a := q.attempts[len(q.attempts)-1]
	if cause := a.d.cause(); cause != nil {
		err = cause
	}
	return openai.Upstream("decode worker %s: %v", a.d.inst.ID, err)
}
