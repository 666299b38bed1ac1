package jsonscan

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// Kind is what a token is.
type Kind byte

// Kinds. None is no token: the text or the piece has ended, or Err says why.
const (
	None      Kind = 0
	Object    Kind = '{'
	ObjectEnd Kind = '}'
	Array     Kind = '['
	ArrayEnd  Kind = ']'
	Key       Kind = ':' // a member's name
	String    Kind = '"'
	Number    Kind = '0'
	True      Kind = 't'
	False     Kind = 'f'
	Null      Kind = 'n'
)

const (
	MaxDepth = 64      // open objects and arrays
	MaxToken = 1 << 10 // bytes that Text returns of a token that came in pieces
)

// Errors beside SyntaxError.
var (
	ErrDepth = fmt.Errorf("nested deeper than %d levels", MaxDepth)
	ErrUTF8  = errors.New("not valid UTF-8")
)

// SyntaxError says what is wrong, and where.
type SyntaxError struct {
	What string
	At   int // offset in the text
}

func (e *SyntaxError) Error() string { return fmt.Sprintf("%s at byte %d", e.What, e.At) }

// Scanner reads one JSON text. Use Reset for a whole one, or Feed for each piece.
type Scanner struct {
	// Lenient also accepts, as encoding/json does, invalid UTF-8 and lone
	// surrogates. Decoded returns U+FFFD for these.
	Lenient bool

	buf   []byte
	pos   int // in buf
	base  int // offset of buf in the text
	whole bool
	err   error

	want    want
	depth   int
	objects uint64 // a bit for each level: the lowest is the innermost

	// The last token.
	start   int // offset
	from    int // of its text in buf
	to      int
	pieced  bool // its text is held
	escaped bool
	scratch []byte

	ahead Kind   // of the next token, if it is known
	cut   bool   // it has begun in the pieces before
	held  []byte // what there was of it
	state byte   // within a string's escape, a number or a literal
	unit  rune   // \uXXXX as far as it was read
	high  rune   // the surrogate before it

	rest  [utf8.UTFMax]byte // of a character that a piece has cut
	nrest int
}

// want is what may come next.
type want byte

const (
	wantValue  want = iota // at the beginning, and after ':' or an array's ','
	wantItem               // after '['
	wantKey                // after an object's ','
	wantMember             // after '{'
	wantColon
	wantComma // after a value in an object or array
	wantEnd   // after the one value
)

// Reset starts a whole text, which must not change while it is read.
func (s *Scanner) Reset(text []byte) {
	s.buf, s.base, s.pos, s.whole, s.err = text, 0, 0, true, nil
	s.want, s.depth, s.ahead, s.cut, s.from, s.to = wantValue, 0, None, false, 0, 0
	if !s.Lenient && !utf8.Valid(text) {
		s.err = ErrUTF8
	}
}

// Feed adds the next piece of a text, after Next has returned None for the one
// before.
func (s *Scanner) Feed(piece []byte) {
	s.base += len(s.buf)
	s.buf, s.pos, s.from, s.to = piece, 0, 0, 0
	if s.err == nil && !s.Lenient && !s.validPiece(piece) {
		s.Fail(ErrUTF8)
	}
}

// Close marks the last piece as fed: a number may end here.
func (s *Scanner) Close() { s.whole = true }

// validPiece reports whether p continues valid UTF-8. It holds back an incomplete last
// character.
func (s *Scanner) validPiece(p []byte) bool {
	for ; s.nrest > 0 && len(p) > 0; p = p[1:] {
		s.rest[s.nrest] = p[0]
		s.nrest++
		if whole := s.rest[:s.nrest]; utf8.FullRune(whole) {
			if !utf8.Valid(whole) {
				return false
			}
			s.nrest = 0
		}
	}
	for i := max(0, len(p)-utf8.UTFMax+1); i < len(p); i++ {
		if utf8.RuneStart(p[i]) && !utf8.FullRune(p[i:]) {
			s.nrest = copy(s.rest[:], p[i:])
			p = p[:i]
		}
	}
	return utf8.Valid(p)
}

// Err is why no more can be read; nil at the end of a valid text or piece.
func (s *Scanner) Err() error { return s.err }

// Pos is the offset behind the last token, or behind Peek of the next one.
func (s *Scanner) Pos() int { return s.base + s.pos }

// Left is how many bytes of the text or the piece come after Pos.
func (s *Scanner) Left() int { return len(s.buf) - s.pos }

// Start is the offset of the last token, and of one that the piece's end cuts.
func (s *Scanner) Start() int { return s.start }

// Depth is how many objects and arrays are open.
func (s *Scanner) Depth() int { return s.depth }

// Cut is the kind of the token that the piece's end cuts, None if it cuts none.
// Text is what there is of it.
func (s *Scanner) Cut() Kind {
	if !s.cut {
		return None
	}
	return s.ahead
}

// Fail ends the reading: no more tokens come, and Err is err unless it was set before.
func (s *Scanner) Fail(err error) {
	if s.err == nil {
		s.err, s.ahead = err, None
	}
}

func (s *Scanner) fail(at int, what string) Kind {
	s.Fail(&SyntaxError{what, s.base + at})
	return None
}

// kinds maps the first byte of a value to its kind.
var kinds = func() (k [256]Kind) {
	for _, c := range []Kind{Object, Array, String, True, False, Null} {
		k[c] = c
	}
	for c := range "0123456789" {
		k['0'+c] = Number
	}
	k['-'] = Number
	return k
}()

// Peek returns the kind of the next token without reading it; Pos is then where
// it begins.
func (s *Scanner) Peek() Kind {
	if s.ahead == None && s.err == nil {
		s.ahead = s.look()
	}
	return s.ahead
}

// look skips what separates the last token from the next, and returns the next one's
// kind.
func (s *Scanner) look() Kind {
	for b, i := s.buf, s.pos; ; i++ {
		for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
			i++
		}
		if s.pos = i; i == len(b) {
			break
		}
		c := b[i]
		switch s.want {
		case wantValue, wantItem:
			if k := kinds[c]; k != None {
				return k
			}
			if c == ']' && s.want == wantItem {
				return ArrayEnd
			}
		case wantKey, wantMember:
			if c == '"' {
				return Key
			}
			if c == '}' && s.want == wantMember {
				return ObjectEnd
			}
		case wantColon:
			if c == ':' {
				s.want = wantValue
				continue
			}
		case wantComma:
			if c == ',' {
				if s.want = wantValue; s.inObject() {
					s.want = wantKey
				}
				continue
			}
			if c == s.closing() {
				return Kind(c)
			}
		}
		return s.unexpected()
	}
	if s.whole && s.want != wantEnd {
		return s.unexpected()
	}
	return None
}

func (s *Scanner) inObject() bool { return s.objects&1 != 0 }

func (s *Scanner) closing() byte {
	if s.inObject() {
		return '}'
	}
	return ']'
}

// unexpected refuses what is at pos, or the end there.
func (s *Scanner) unexpected() Kind {
	what := "unexpected character"
	switch s.want {
	case wantKey, wantMember:
		what = "expected a string"
	case wantColon:
		what = "expected ':'"
	case wantComma:
		what = "expected ',' or '" + string(s.closing()) + "'"
	case wantEnd:
		what = "trailing data"
	default:
		if s.pos == len(s.buf) {
			what = "unexpected end"
		}
	}
	return s.fail(s.pos, what)
}

// Next reads the next token. It returns None at the end of a piece; after Feed it
// continues the token that was cut.
func (s *Scanner) Next() Kind {
	k := s.Peek()
	if (k == String || k == Key) && !s.cut { // most tokens: whole, without an escape
		from := s.pos + 1
		if to := from + plain(s.buf[from:]); to < len(s.buf) && s.buf[to] == '"' {
			s.start, s.from, s.to, s.pos = s.base+s.pos, from, to, to+1
			s.escaped, s.pieced, s.ahead = false, false, None
			if s.want = wantColon; k == String {
				s.valueRead()
			}
			return k
		}
	}
	if k == Number && !s.cut { // most numbers: digits
		b, to := s.buf, s.pos
		for to < len(b) && b[to]-'0' <= 9 {
			to++
		}
		if to < len(b) && to > s.pos && (b[s.pos] != '0' || to == s.pos+1) && (b[to] == ',' || b[to] == ']' || b[to] == '}') {
			s.start, s.from, s.to, s.pos = s.base+s.pos, s.pos, to, to
			s.escaped, s.pieced, s.ahead = false, false, None
			s.valueRead()
			return k
		}
	}
	return s.next(k)
}

// next reads a token of kind k, or the part of it that has come.
func (s *Scanner) next(k Kind) Kind {
	fresh := !s.cut
	if k == None {
		return None
	}
	if fresh {
		s.start, s.escaped, s.state = s.base+s.pos, false, 0
	}
	s.ahead, s.cut, s.from, s.to, s.pieced = None, false, s.pos, s.pos, false
	quote, over := 0, false
	switch k {
	case Object, Array:
		return s.open(k)
	case ObjectEnd, ArrayEnd:
		s.pos++
		s.depth--
		s.objects >>= 1
		s.valueRead()
		return k
	case Key, String:
		if fresh {
			s.pos++
			s.from++
		}
		if over = s.str(); over {
			quote = 1
		}
	case Number:
		over = s.number()
	default:
		over = s.literal(k)
	}
	s.to = s.pos - quote
	if !over || !fresh {
		s.hold(fresh)
	}
	switch {
	case !over:
		return s.wait(k)
	case k == Key:
		s.want = wantColon
	default:
		s.valueRead()
	}
	return k
}

// hold keeps this piece's part of the token until the next piece comes.
func (s *Scanner) hold(first bool) {
	if first {
		s.held = s.held[:0]
	}
	text := s.buf[s.from:s.to]
	s.held = append(s.held, text[:min(len(text), MaxToken-len(s.held))]...)
	s.pieced = true
}

// wait is at the end of a piece, or of the text, within a token.
func (s *Scanner) wait(k Kind) Kind {
	switch {
	case !s.whole && s.err == nil:
		s.ahead, s.cut = k, true
	case k == Key || k == String:
		s.fail(s.pos, "unterminated string")
	default:
		s.fail(s.start-s.base, "invalid literal")
	}
	return None
}

func (s *Scanner) open(k Kind) Kind {
	if s.depth == MaxDepth {
		s.Fail(ErrDepth)
		return None
	}
	s.pos++
	s.depth++
	s.objects <<= 1
	if s.want = wantItem; k == Object {
		s.want = wantMember
		s.objects |= 1
	}
	return k
}

// valueRead is after a whole value.
func (s *Scanner) valueRead() {
	if s.want = wantComma; s.depth == 0 {
		s.want = wantEnd
	}
}

// Text is the last token as written, a string without its quotes, valid until the
// next token. Of one that came in pieces it is the first MaxToken bytes.
func (s *Scanner) Text() []byte {
	if s.pieced {
		return s.held
	}
	return s.buf[s.from:s.to:s.to]
}

// Decoded is the last token, a string with its escapes replaced, valid until the next
// token.
func (s *Scanner) Decoded() []byte {
	if !s.escaped {
		return s.Text()
	}
	s.scratch = AppendDecoded(s.scratch[:0], s.Text())
	return s.scratch
}

// Enter reads the next token if it is of kind k, and reports whether it is. It skips
// any other value.
func (s *Scanner) Enter(k Kind) bool {
	if s.Peek() != k {
		s.Skip()
		return false
	}
	return s.Next() == k
}

// Item reports whether an array has another value; if not, it reads the closing bracket.
func (s *Scanner) Item() bool {
	k := s.Peek()
	if k == ArrayEnd {
		s.Next()
		return false
	}
	return k != None
}

// Skip reads the next value.
func (s *Scanner) Skip() {
	depth := s.depth
	s.Next()
	s.Leave(depth)
}

// Leave reads on until no more than depth objects and arrays are open.
func (s *Scanner) Leave(depth int) {
	for s.depth > depth && s.Next() != None {
	}
}

// Raw reads the next value of a whole text and returns it as written; nil if it is
// invalid.
func (s *Scanner) Raw() []byte {
	s.Peek()
	from := s.pos
	s.Skip()
	return s.Since(from)
}

// Since returns a whole text from an offset up to Pos; nil after an error.
func (s *Scanner) Since(from int) []byte {
	if s.err != nil {
		return nil
	}
	return s.buf[from:s.pos:s.pos]
}

// End returns the error of a text, also if anything follows its value.
func (s *Scanner) End() error {
	if s.Peek(); s.err == nil && s.want != wantEnd {
		s.unexpected()
	}
	return s.err
}

// Ints appends the next integers of an array while they are plain, of at most nine
// digits and at most most: lists of token ids are long. Next reads what remains.
func (s *Scanner) Ints(dst []int32, most int64) []int32 {
	for s.Peek() == Number && !s.cut {
		var v int64
		n := 0
		for b := s.buf[s.pos:]; n < len(b) && n < 10 && b[n] >= '0' && b[n] <= '9'; n++ {
			v = 10*v + int64(b[n]-'0')
		}
		end := s.pos + n
		if n == 0 || n > 9 || n > 1 && s.buf[s.pos] == '0' || v > most || end == len(s.buf) || s.buf[end] != ',' && s.buf[end] != ']' {
			break
		}
		s.pos, s.want, s.ahead = end, wantComma, None
		dst = append(dst, int32(v))
	}
	return dst
}
