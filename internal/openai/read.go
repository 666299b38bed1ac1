package openai

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// reader reads the fields of a body, a JSON object. After its first error, which sticks, there
// are no more tokens and every method returns nothing. Null counts as absent.
type reader struct{ jsonscan.Scanner }

// begin starts a body; the members are next.
func (r *reader) begin(body []byte) {
	r.Reset(body)
	if !r.Enter(jsonscan.Object) && r.End() == nil {
		r.refuse("", "the body must be a JSON object")
	}
}

// refuse ends the reading with an error about field, or about the body if that is "".
func (r *reader) refuse(field, format string, args ...any) {
	if !strings.HasPrefix(field, "tools[") { // of which clients are told the part
		field, _, _ = strings.Cut(field, "[") // the index is in the message
	}
	r.Fail(BadRequest(field, format, args...))
}

// Codes of numbers that are out of bounds, which are pydantic's, as clients know them of servers in Python.
const (
	codeTooLow  = "greater_than_equal"
	codeTooHigh = "less_than_equal"
)

// refuseOutside refuses a number that is below lo, or else above hi.
func (r *reader) refuseOutside(low bool, field, lo, hi string, text []byte) {
	code := codeTooHigh
	if low {
		code = codeTooLow
	}
	r.refuse(field, "%s must be between %s and %s, not %s", field, lo, hi, clip(string(text), 40))
	var e *Error
	if errors.As(r.Err(), &e) && e.Code == "" {
		e.Code = code
	}
}

// fault returns the first error so far.
func (r *reader) fault() *Error {
	var refused *Error
	switch err := r.Err(); {
	case err == nil:
		return nil
	case errors.As(err, &refused):
		return refused
	case err == jsonscan.ErrUTF8:
		return BadRequest("", "the body is not valid UTF-8")
	case err == jsonscan.ErrDepth:
		return BadRequest("", "the body nests deeper than %d levels", jsonscan.MaxDepth)
	default:
		return BadRequest("", "the body is not valid JSON: %v", err)
	}
}

// end returns the body's error, now that all of it has been read.
func (r *reader) end() *Error {
	_ = r.End() // fault reports it
	return r.fault()
}

// kindNames are the kinds of values, as messages name them.
var kindNames = map[jsonscan.Kind]string{
	jsonscan.String: "a string", jsonscan.Object: "an object", jsonscan.Array: "an array", jsonscan.True: "a boolean",
	jsonscan.False: "a boolean", jsonscan.Null: "null", jsonscan.Number: "a number",
}

// wrong refuses the next value as not what field wants, or as invalid JSON.
func (r *reader) wrong(field, want string) {
	depth := r.Depth()
	k := r.Next()
	r.Leave(depth)
	r.refuse(field, "%s must be %s, not %s", field, want, kindNames[k])
}

// is reads a token and reports whether it is of kind k. It refuses other kinds but null.
func (r *reader) is(field string, k jsonscan.Kind, want string) bool {
	switch r.Peek() {
	case k, jsonscan.Null:
		return r.Next() == k
	}
	r.wrong(field, want)
	return false
}

// raw reads a value and returns its text, nil for null.
func (r *reader) raw() []byte {
	raw := r.Raw()
	if string(raw) == "null" {
		return nil
	}
	return raw
}

func (r *reader) string(field string) string {
	if !r.is(field, jsonscan.String, "a string") {
		return ""
	}
	return string(r.Decoded())
}

// bool reads a boolean, def for null.
func (r *reader) bool(field string, def bool) bool {
	switch k := r.Peek(); k {
	case jsonscan.True, jsonscan.False:
		r.Next()
		return k == jsonscan.True
	case jsonscan.Null:
		r.Next()
		return def
	}
	r.wrong(field, "a boolean")
	return def
}

// number reads the text of a number; nil for null.
func (r *reader) number(field, want string) []byte {
	if !r.is(field, jsonscan.Number, want) {
		return nil
	}
	return r.Text()
}

// int reads an integer; given is false for null.
func (r *reader) int(field string, lo, hi int64) (v int64, given bool) {
	text := r.number(field, "an integer")
	if text == nil {
		return 0, false
	}
	v, err := strconv.ParseInt(string(text), 10, 64)
	outside := false
	if err != nil {
		// 1.0 and 1e3 are integers too (JSON Schema); 1.5 is not.
		f, _ := strconv.ParseFloat(string(text), 64)
		if f != math.Trunc(f) {
			r.refuse(field, "%s must be an integer, not %s", field, clip(string(text), 40))
			return 0, false
		}
		v = int64(f)
		outside = f < -(1<<53) || f > 1<<53
	}
	if outside || v < lo || v > hi {
		// What does not fit 64 bits is too low if it is negative, whatever ParseFloat makes of it.
		r.refuseOutside(outside && text[0] == '-' || !outside && v < lo, field, fmt.Sprint(lo), fmt.Sprint(hi), text)
		return 0, false
	}
	return v, true
}

// intOr is int, with def for null.
func (r *reader) intOr(field string, def int, lo, hi int64) int {
	v, given := r.int(field, lo, hi)
	if !given {
		return def
	}
	return int(v)
}

// optInt is int, with nil for null.
func (r *reader) optInt(field string, lo, hi int64) *int {
	v, given := r.int(field, lo, hi)
	if !given {
		return nil
	}
	return new(int(v))
}

func (r *reader) float(field string, lo, hi float64) (v float32, given bool) {
	text := r.number(field, "a number")
	if text == nil {
		return 0, false
	}
	f, err := strconv.ParseFloat(string(text), 64)
	if err != nil || f < lo || f > hi {
		r.refuseOutside(f < lo, field, fmt.Sprint(lo), fmt.Sprint(hi), text)
		return 0, false
	}
	return float32(f), true
}
