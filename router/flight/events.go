package flight

import (
	"bytes"
	"errors"
	"io"
	"slices"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/router/h1"
)

// maxEvent bounds one server-sent event, and with it the memory of a stream.
const maxEvent = openai.MaxEvent

// source is an answer's body as it arrives: *h1.Response.
type source interface {
	io.Reader
	Await() error // waits for bytes or the end, without holding a buffer
	Over() bool   // whether it has ended, as far as is known without waiting
	Lend() *[]byte
	GiveBack(*[]byte)
	Finish()
	Abort()
}

// events cuts a body into runs of whole server-sent events, so that a stream
// that breaks can be ended by an error event: half an event is never relayed.
type events struct {
	body source
	raw  bool    // no events: any bytes are a run
	mute bool    // only comments have come; they are kept until there is more
	lent *[]byte // the memory that buf began in
	buf  []byte  // read and not yet returned: [from:]
	from int
	last [32]byte // the beginning of the newest event that is no comment
	size int      // of last
	n    int      // events in the last run
	err  error
}

// lastEnd is where the last whole event ends, 0 without one: after a blank line, with lines
// that end in LF, CRLF or CR. It looks at line ends, which are few.
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

func countEvents(run []byte) int {
	for _, end := range []string{"\n\n", "\n\r\n", "\r\r"} { // a stream has one kind
		if n := bytes.Count(run, []byte(end)); n > 0 {
			return n
		}
	}
	return 0
}

func skipComments(b []byte) []byte {
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

// dataOf is an event from its data on.
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

func isError(event []byte) bool {
	return openai.IsError(dataOf(event)) || bytes.HasPrefix(event, []byte("event: error")) || bytes.HasPrefix(event, []byte("event:error"))
}

// eventBytes is how much one read of events may return.
const eventBytes = 16 << 10

// next returns one or more whole events, valid until the next call; io.EOF at the body's
// end. While it waits it holds no buffer.
func (e *events) next() ([]byte, error) {
	e.used()
	scanned := 0
	for {
		if e.raw && len(e.buf) > 0 {
			e.from = len(e.buf)
			return e.buf, nil
		}
		if i := lastEnd(e.buf[scanned:]); i > 0 {
			if e.mute = e.mute && len(skipComments(e.buf[:scanned+i])) == 0; !e.mute {
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

// rest returns what follows the last whole event when the body has ended: only [DONE],
// which needs no blank line. Half an event is an error.
func (e *events) rest() ([]byte, error) {
	half := skipComments(e.buf)
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

// errHalf is a stream that ended properly, but within an event.
var errHalf = errors.New("the stream ended within an event")

// breakOff ends the reading with err behind what next has returned.
func (e *events) breakOff(err error) {
	e.buf, e.err, e.size = e.buf[:e.from], err, 0
}

// used frees what next has returned.
func (e *events) used() {
	e.buf = append(e.buf[:0], e.buf[e.from:]...)
	e.from = 0
	if len(e.buf) == 0 && e.lent != nil {
		e.body.GiveBack(e.lent)
		e.lent, e.buf = nil, nil
	}
}

// remember counts the events in run and keeps the beginning of the last that is no comment.
func (e *events) remember(run []byte) {
	if e.n = countEvents(run); e.n == 1 && bytes.IndexByte(run, '\r') < 0 { // mostly
		if event := skipComments(run); len(event) > 0 {
			e.size = copy(e.last[:], event)
		}
		return
	}
	for len(run) > 0 {
		run = bytes.TrimRight(run, "\r\n")
		i := lastEnd(run)
		if event := skipComments(run[i:]); len(event) > 0 {
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

// tokens is how many events of the last run stand for tokens.
func (e *events) tokens() int {
	if e.n > 0 && e.size < len(e.last) && bytes.HasPrefix(dataOf(e.last[:e.size]), []byte("[DONE]")) {
		return e.n - 1
	}
	return e.n
}
