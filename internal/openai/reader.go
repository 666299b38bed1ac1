package openai

import (
	"math"
	"strings"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// Reader reads another API's request, field by field, as strictly as our own and with the same
// refusals. After the first, which sticks, there are no more tokens and every method returns nothing.
// Null counts as absent.
type Reader struct{ reader }

// NewReader begins a body, a JSON object; its members are next.
func NewReader(body []byte) *Reader {
	r := &Reader{}
	r.begin(body)
	return r
}

// NewListReader begins a JSON array; its items are next.
func NewListReader(list []byte) *Reader {
	r := &Reader{}
	r.Reset(list)
	r.Enter(jsonscan.Array)
	return r
}

// Refuse ends the reading with a 400 that names the field.
func (r *Reader) Refuse(field, format string, args ...any) { r.refuse(field, format, args...) }

// Fault reads to the body's end and returns the first error.
func (r *Reader) Fault() *Error { return r.end() }

// Is reads a token and reports whether it is of kind k, which want names for people. It refuses any
// other kind but null.
func (r *Reader) Is(field string, k jsonscan.Kind, want string) bool { return r.is(field, k, want) }

// Given returns a value's text; nil for null.
func (r *Reader) Given() []byte { return r.raw() }

// Of returns the text of a value of kind k, which want names for people; nil for null.
func (r *Reader) Of(field string, k jsonscan.Kind, want string) []byte {
	if kind := r.Peek(); kind != k && kind != jsonscan.Null {
		r.wrong(field, want)
		return nil
	}
	return r.raw()
}

// Str reads a string; "" for null.
func (r *Reader) Str(field string) string { return r.string(field) }

// Quoted reads a string and returns it as written, without its quotes; nil for null. It aliases the body.
func (r *Reader) Quoted(field string) []byte {
	if !r.is(field, jsonscan.String, "a string") {
		return nil
	}
	return r.Text()[:len(r.Text()):len(r.Text())]
}

// Bool reads a boolean, def for null.
func (r *Reader) Bool(field string, def bool) bool { return r.bool(field, def) }

// Number reads a number and returns its text; nil for null.
func (r *Reader) Number(field string) []byte { return r.number(field, "a number") }

// Count reads an integer of at least lo; given is false for null.
func (r *Reader) Count(field string, lo int64) (n int, given bool) {
	v, given := r.int(field, lo, math.MaxInt32)
	return int(v), given
}

// Refusal makes an engine's error, of an answer with this status or of a stream's event (0), an Error.
func Refusal(status int, body []byte) *Error {
	e := &Error{Status: status, Message: ErrorMessage(body)}
	said := body
	if inner := Member(body, "error"); len(inner) > 0 && inner[0] == '{' {
		said = inner
	}
	e.Type, e.Param, e.Code = word(said, "type"), word(said, "param"), word(said, "code")
	if e.Status == 0 {
		e.Status = statusOf(e)
	}
	switch {
	case e.Type == TypeInvalid || e.Type == TypeAuth || e.Type == TypeRateLimit || e.Type == TypeServer:
	case e.Status == 401:
		e.Type = TypeAuth
	case e.Status == 429:
		e.Type = TypeRateLimit
	case e.Status >= 400 && e.Status < 500:
		e.Type = TypeInvalid
	default:
		e.Type = TypeServer
	}
	return e
}

// statusOf is the status that an error of a stream stands for, whose header was sent long ago.
func statusOf(e *Error) int {
	switch {
	case e.Code == "unavailable" || e.Code == CodeShed:
		return 503
	case e.Code == "deadline_exceeded":
		return 504
	case e.Code == "engine_failed":
		return 502
	case e.Type == TypeAuth:
		return 401
	case e.Type == TypeRateLimit:
		return 429
	case e.Type == TypeInvalid || strings.HasPrefix(e.Code, "4"):
		return 400
	}
	return 500
}

// word is a member that is a short string or a number, as text; else "".
func word(object []byte, name string) string {
	raw := Member(object, name)
	if n := len(raw); n >= 2 && raw[0] == '"' {
		return Clip(string(jsonscan.AppendDecoded(nil, raw[1:n-1])))
	}
	if len(raw) > 0 && len(raw) < 20 && raw[0] >= '0' && raw[0] <= '9' {
		return string(raw)
	}
	return ""
}
