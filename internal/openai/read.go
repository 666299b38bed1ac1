package openai

import (
	"encoding/binary"
	"math"
	"math/bits"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// reader is a cursor over one JSON text (RFC 8259). Values are read in place;
// nothing is copied until a caller asks for a decoded string.
type reader struct {
	b        []byte
	i        int
	depth    int
	maxDepth int
	key      []byte // scratch of object
	keyAt    int    // where the present key's quote is

	isURL func(key []byte) bool // see Top.fetched; nil finds none
	urls  []string
}

func newReader(b []byte, maxDepth int) (reader, *Error) {
	r := reader{b: b, maxDepth: maxDepth}
	if !utf8.Valid(b) {
		return r, BadRequest("", "the body is not valid UTF-8")
	}
	return r, nil
}

func (r *reader) syntax(what string) *Error {
	return BadRequest("", "the body is not valid JSON: %s at byte %d", what, r.i)
}

// peek skips white space and returns the next byte, 0 at the end.
func (r *reader) peek() byte {
	for r.i < len(r.b) {
		switch c := r.b[r.i]; c {
		case ' ', '\t', '\n', '\r':
			r.i++
		default:
			return c
		}
	}
	return 0
}

// end refuses bytes after the value.
func (r *reader) end() *Error {
	if r.peek() != 0 || r.i < len(r.b) {
		return r.syntax("trailing data")
	}
	return nil
}

// kind names the next value for messages.
func (r *reader) kind() string {
	switch c := r.peek(); {
	case c == '"':
		return "a string"
	case c == '{':
		return "an object"
	case c == '[':
		return "an array"
	case c == 't' || c == 'f':
		return "a boolean"
	case c == 'n':
		return "null"
	case c == '-' || c >= '0' && c <= '9':
		return "a number"
	}
	return "something else"
}

// wrong is the type error of field; a value that is no JSON at all stays a
// syntax error.
func (r *reader) wrong(field, want string) *Error {
	at := r.i
	if err := r.skip(); err != nil {
		return err
	}
	r.i = at
	return BadRequest(field, "%s must be %s, not %s", field, want, r.kind())
}

func (r *reader) literal(s string) *Error {
	if len(r.b)-r.i < len(s) || string(r.b[r.i:r.i+len(s)]) != s {
		return r.syntax("invalid literal")
	}
	r.i += len(s)
	return nil
}

// null consumes a null and says whether there was one.
func (r *reader) null() (bool, *Error) {
	if r.peek() != 'n' {
		return false, nil
	}
	return true, r.literal("null")
}

// str reads a string and returns what stands between its quotes, undecoded.
func (r *reader) str() (raw []byte, escaped bool, err *Error) {
	if r.peek() != '"' {
		return nil, false, r.syntax("expected a string")
	}
	r.i++
	start := r.i
	for r.i += plain(r.b[r.i:]); r.i < len(r.b); r.i += plain(r.b[r.i:]) {
		switch c := r.b[r.i]; {
		case c == '"':
			raw = r.b[start:r.i]
			r.i++
			return raw, escaped, nil
		case c == '\\':
			escaped = true
			if err := r.escape(); err != nil {
				return nil, false, err
			}
		default:
			return nil, false, r.syntax("control character in a string")
		}
	}
	return nil, false, r.syntax("unterminated string")
}

// plain is how many bytes come before the first quote, backslash or control
// character. Prompts are mostly such bytes, so it looks at eight at once: the
// lowest of the high bits that x-y &^ x leaves marks the first byte of x that
// is less than y's (Hacker's Delight, 6-1).
func plain(b []byte) int {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	n := 0
	for ; len(b)-n >= 8; n += 8 {
		x := binary.LittleEndian.Uint64(b[n:])
		quote, slash := x^('"'*ones), x^('\\'*ones)
		if hit := ((quote-ones)&^quote | (slash-ones)&^slash | (x-0x20*ones)&^x) & highs; hit != 0 {
			return n + bits.TrailingZeros64(hit)/8
		}
	}
	for n < len(b) && b[n] >= 0x20 && b[n] != '"' && b[n] != '\\' {
		n++
	}
	return n
}

// escape steps over one escape sequence; a surrogate must come in a pair.
func (r *reader) escape() *Error {
	if r.i+1 >= len(r.b) {
		return r.syntax("unterminated string")
	}
	switch r.b[r.i+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		r.i += 2
		return nil
	case 'u':
		c := hex4(r.b[r.i+2:])
		if c < 0 {
			return r.syntax("invalid \\u escape")
		}
		if !utf16.IsSurrogate(c) {
			r.i += 6
			return nil
		}
		rest := r.b[r.i+6:]
		if len(rest) >= 6 && rest[0] == '\\' && rest[1] == 'u' &&
			utf16.DecodeRune(c, hex4(rest[2:])) != utf8.RuneError {
			r.i += 12
			return nil
		}
		return r.syntax("lone surrogate")
	}
	return r.syntax("invalid escape")
}

func hex4(b []byte) rune {
	if len(b) < 4 {
		return -1
	}
	var v rune
	for _, c := range b[:4] {
		switch {
		case c >= '0' && c <= '9':
			v = v<<4 | rune(c-'0')
		case c >= 'a' && c <= 'f':
			v = v<<4 | rune(c-'a'+10)
		case c >= 'A' && c <= 'F':
			v = v<<4 | rune(c-'A'+10)
		default:
			return -1
		}
	}
	return v
}

// unquote appends the decoded form of a raw string that str has checked.
func unquote(dst, raw []byte) []byte {
	for i := 0; i < len(raw); {
		c := raw[i]
		if c != '\\' {
			dst = append(dst, c)
			i++
			continue
		}
		switch e := raw[i+1]; e {
		case 'b':
			dst = append(dst, '\b')
		case 'f':
			dst = append(dst, '\f')
		case 'n':
			dst = append(dst, '\n')
		case 'r':
			dst = append(dst, '\r')
		case 't':
			dst = append(dst, '\t')
		case 'u':
			v := hex4(raw[i+2:])
			i += 4
			if utf16.IsSurrogate(v) {
				v = utf16.DecodeRune(v, hex4(raw[i+4:]))
				i += 6
			}
			dst = utf8.AppendRune(dst, v)
		default:
			dst = append(dst, e)
		}
		i += 2
	}
	return dst
}

// num steps over a number and returns its text.
func (r *reader) num() ([]byte, *Error) {
	start := r.i
	if r.at('-') {
		r.i++
	}
	if r.at('0') {
		r.i++
	} else if !r.digits() {
		return nil, r.syntax("invalid number")
	}
	if r.at('.') {
		r.i++
		if !r.digits() {
			return nil, r.syntax("invalid number")
		}
	}
	if r.at('e') || r.at('E') {
		r.i++
		if r.at('+') || r.at('-') {
			r.i++
		}
		if !r.digits() {
			return nil, r.syntax("invalid number")
		}
	}
	return r.b[start:r.i], nil
}

func (r *reader) at(c byte) bool { return r.i < len(r.b) && r.b[r.i] == c }

func (r *reader) digits() bool {
	start := r.i
	for r.i < len(r.b) && r.b[r.i] >= '0' && r.b[r.i] <= '9' {
		r.i++
	}
	return r.i > start
}

// skip steps over one value of any kind, checking its syntax.
func (r *reader) skip() *Error {
	switch c := r.peek(); {
	case c == '"':
		_, _, err := r.str()
		return err
	case c == '{':
		return r.object(r.member)
	case c == '[':
		return r.array(func(int) *Error { return r.skip() })
	case c == 't':
		return r.literal("true")
	case c == 'f':
		return r.literal("false")
	case c == 'n':
		return r.literal("null")
	case c == '-' || c >= '0' && c <= '9':
		_, err := r.num()
		return err
	}
	if r.i >= len(r.b) {
		return r.syntax("unexpected end")
	}
	return r.syntax("unexpected character")
}

// object reads {…}; field must consume the value of each key. key is decoded
// and lives until field reads the value.
func (r *reader) object(field func(key []byte) *Error) *Error {
	if r.depth++; r.depth > r.maxDepth {
		return BadRequest("", "the body nests deeper than %d levels", r.maxDepth)
	}
	r.i++ // {
	for first := true; ; first = false {
		c := r.peek()
		if c == '}' && first {
			break
		}
		at := r.i
		key, escaped, err := r.str()
		if err != nil {
			return err
		}
		if escaped {
			r.key = unquote(r.key[:0], key)
			key = r.key
		}
		if r.peek() != ':' {
			return r.syntax("expected ':'")
		}
		r.i++
		r.keyAt = at
		if err := field(key); err != nil {
			return err
		}
		if c = r.peek(); c == '}' {
			break
		}
		if c != ',' {
			return r.syntax("expected ',' or '}'")
		}
		r.i++
	}
	r.i++ // }
	r.depth--
	return nil
}

// array reads […]; item must consume each value.
func (r *reader) array(item func(i int) *Error) *Error {
	if r.depth++; r.depth > r.maxDepth {
		return BadRequest("", "the body nests deeper than %d levels", r.maxDepth)
	}
	r.i++ // [
	for n := 0; ; n++ {
		c := r.peek()
		if c == ']' && n == 0 {
			break
		}
		if err := item(n); err != nil {
			return err
		}
		if c = r.peek(); c == ']' {
			break
		}
		if c != ',' {
			return r.syntax("expected ',' or ']'")
		}
		r.i++
	}
	r.i++ // ]
	r.depth--
	return nil
}

// readString, readBool, readInt and readFloat read one value of a field;
// given is false for null.

func (r *reader) readString(field string) (v string, given bool, err *Error) {
	if null, err := r.null(); null || err != nil {
		return "", false, err
	}
	if r.peek() != '"' {
		return "", false, r.wrong(field, "a string")
	}
	raw, escaped, err := r.str()
	if err != nil {
		return "", false, err
	}
	if escaped {
		raw = unquote(make([]byte, 0, len(raw)), raw)
	}
	return string(raw), true, nil
}

func (r *reader) readBool(field string) (v, given bool, err *Error) {
	switch r.peek() {
	case 't':
		return true, true, r.literal("true")
	case 'f':
		return false, true, r.literal("false")
	case 'n':
		return false, false, r.literal("null")
	}
	return false, false, r.wrong(field, "a boolean")
}

// plainInt reads an integer of at most nine digits. What else it may be, null or
// 1e3, it leaves to readInt.
func (r *reader) plainInt() (v int64, ok bool) {
	r.peek()
	n := 0
	for b := r.b[r.i:]; n < len(b) && n < 10 && b[n] >= '0' && b[n] <= '9'; n++ {
		v = 10*v + int64(b[n]-'0')
	}
	if n == 0 || n > 9 || n > 1 && r.b[r.i] == '0' || r.i+n == len(r.b) {
		return 0, false
	}
	if c := r.b[r.i+n]; c != ',' && c != ']' {
		return 0, false
	}
	r.i += n
	return v, true
}

// plainInts appends the items of an array from the next comma on, as far as they are
// plain integers of at most hi. It ends before a comma, or at what follows an item.
func (r *reader) plainInts(to []int32, hi int64) []int32 {
	for r.i < len(r.b) && r.b[r.i] == ',' {
		at := r.i
		r.i++
		v, ok := r.plainInt()
		if !ok || v > hi {
			r.i = at
			return to
		}
		to = append(to, int32(v))
	}
	return to
}

func (r *reader) readInt(field string, lo, hi int64) (v int64, given bool, err *Error) {
	if null, err := r.null(); null || err != nil {
		return 0, false, err
	}
	if c := r.peek(); c != '-' && (c < '0' || c > '9') {
		return 0, false, r.wrong(field, "an integer")
	}
	text, err := r.num()
	if err != nil {
		return 0, false, err
	}
	v, perr := strconv.ParseInt(string(text), 10, 64)
	if perr != nil {
		// 1.0 and 1e3 are integers too (JSON Schema); 1.5 is not.
		f, _ := strconv.ParseFloat(string(text), 64)
		if f != math.Trunc(f) {
			return 0, false, BadRequest(field, "%s must be an integer, not %s", field, clip(string(text), 40))
		}
		if f < -(1<<53) || f > 1<<53 {
			return 0, false, outOfRange(field, string(text), lo, hi)
		}
		v = int64(f)
	}
	if v < lo || v > hi {
		return 0, false, outOfRange(field, string(text), lo, hi)
	}
	return v, true, nil
}

func outOfRange(field, text string, lo, hi int64) *Error {
	return BadRequest(field, "%s must be between %d and %d, not %s", field, lo, hi, clip(text, 40))
}

func (r *reader) readFloat(field string, lo, hi float64) (v float32, given bool, err *Error) {
	if null, err := r.null(); null || err != nil {
		return 0, false, err
	}
	if c := r.peek(); c != '-' && (c < '0' || c > '9') {
		return 0, false, r.wrong(field, "a number")
	}
	text, err := r.num()
	if err != nil {
		return 0, false, err
	}
	f, perr := strconv.ParseFloat(string(text), 64)
	if perr != nil || f < lo || f > hi {
		return 0, false, BadRequest(field, "%s must be between %v and %v, not %s", field, lo, hi, clip(string(text), 40))
	}
	return float32(f), true, nil
}
