package jsonscan

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// Places within a string; 1 to 4 count the hex digits still to come.
const (
	inText    = 0
	inEscape  = 5 // after a backslash
	inPair    = 6 // after a high surrogate: \
	inPairHex = 7 // and u
)

// unescaped is what a backslash and one other byte stand for.
var unescaped = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// str continues a string and reports whether it has ended.
func (s *Scanner) str() bool {
	for s.state == inText || s.escape() {
		b, i := s.buf, s.pos
		i += plain(b[i:])
		if s.pos = i; i == len(b) {
			return false
		}
		s.pos++
		switch b[i] {
		case '"':
			return true
		case '\\':
			s.escaped = true
			if s.pos < len(b) && unescaped[b[s.pos]] != 0 {
				s.pos++
				continue
			}
			s.state, s.high = inEscape, 0
		default:
			s.fail(i, "control character in a string")
			return false
		}
	}
	return false
}

// escape continues an escape sequence, or two that are a pair of surrogates, and
// reports whether it has ended.
func (s *Scanner) escape() bool {
	for ; s.pos < len(s.buf); s.pos++ {
		at, what := s.pos, ""
		switch c := s.buf[s.pos]; s.state {
		case inText:
			return true
		case inEscape:
			switch {
			case c == 'u':
				s.state, s.unit = 4, 0
			case unescaped[c] != 0:
				s.state = inText
			default:
				at, what = at-1, "invalid escape"
			}
		case inPair:
			if s.state = inPairHex; c != '\\' {
				what = "lone surrogate"
			}
		case inPairHex:
			if s.state, s.unit = 4, 0; c != 'u' {
				what = "lone surrogate"
			}
		default:
			v := hexDigit(c)
			s.unit = s.unit<<4 | v
			s.state--
			if v < 0 {
				what = "invalid \\u escape"
			} else if s.state == inText && !s.Lenient && !s.paired() {
				what = "lone surrogate"
			}
		}
		if what != "" {
			s.fail(at, what)
			return false
		}
	}
	return s.state == inText
}

// paired takes a \u with its four digits and reports whether it is valid there.
func (s *Scanner) paired() bool {
	switch {
	case s.high != 0:
		ok := utf16.DecodeRune(s.high, s.unit) != utf8.RuneError
		s.high = 0
		return ok
	case utf16.IsSurrogate(s.unit):
		s.high, s.state = s.unit, inPair
		return s.unit < 0xdc00
	}
	return true
}

// plain counts the bytes before the first quote, backslash or control character.
// Prompts are mostly such bytes, so it looks at eight at once: the lowest high bit
// of x-y &^ x marks the first byte of x that is less than y's (Hacker's Delight, 6-1).
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

func hexDigit(c byte) rune {
	switch {
	case c >= '0' && c <= '9':
		return rune(c - '0')
	case c|0x20 >= 'a' && c|0x20 <= 'f':
		return rune(c|0x20-'a') + 10
	}
	return -1
}

// AppendDecoded appends the string that raw, as read by a Scanner, stands for, with
// U+FFFD for a lone surrogate. If raw is cut within an escape, it stops before that.
func AppendDecoded(dst, raw []byte) []byte {
	for i := 0; i < len(raw); i++ {
		c := raw[i]
		if c != '\\' {
			dst = append(dst, c)
			continue
		}
		if i++; i == len(raw) {
			break
		}
		if raw[i] != 'u' {
			dst = append(dst, unescaped[raw[i]])
			continue
		}
		v := hex4(raw[i+1:])
		if v < 0 {
			break
		}
		i += 4
		if utf16.IsSurrogate(v) && len(raw)-i > 6 && raw[i+1] == '\\' && raw[i+2] == 'u' {
			if pair := utf16.DecodeRune(v, hex4(raw[i+3:])); pair != utf8.RuneError {
				v = pair
				i += 6
			}
		}
		dst = utf8.AppendRune(dst, v)
	}
	return dst
}

func hex4(b []byte) (v rune) {
	if len(b) < 4 {
		return -1
	}
	for _, c := range b[:4] {
		v = v<<4 | hexDigit(c)
	}
	return v
}

// Places within a number: what came last.
const (
	inNumber = iota // nothing
	inMinus
	inZero
	inInt
	inPoint
	inFraction
	inExp
	inExpSign
	inExpDigits
)

// numberStep is the place that follows each place after 0, another digit, minus, plus,
// point or e; inNumber: none.
var numberStep = [...][7]byte{
	inNumber:    {1: inZero, 2: inInt, 3: inMinus},
	inMinus:     {1: inZero, 2: inInt},
	inZero:      {5: inPoint, 6: inExp},
	inInt:       {1: inInt, 2: inInt, 5: inPoint, 6: inExp},
	inPoint:     {1: inFraction, 2: inFraction},
	inFraction:  {1: inFraction, 2: inFraction, 6: inExp},
	inExp:       {1: inExpDigits, 2: inExpDigits, 3: inExpSign, 4: inExpSign},
	inExpSign:   {1: inExpDigits, 2: inExpDigits},
	inExpDigits: {1: inExpDigits, 2: inExpDigits},
}

var numberClass = [256]byte{'0': 1, '1': 2, '2': 2, '3': 2, '4': 2, '5': 2, '6': 2, '7': 2, '8': 2, '9': 2,
	'-': 3, '+': 4, '.': 5, 'e': 6, 'E': 6}

// number continues a number and reports whether it has ended.
func (s *Scanner) number() bool {
	i, state := s.pos, s.state
	for ; i < len(s.buf); i++ {
		next := numberStep[state][numberClass[s.buf[i]]]
		if next == inNumber {
			break
		}
		state = next
	}
	s.pos, s.state = i, state
	switch {
	case i == len(s.buf) && !s.whole:
		return false
	case state == inZero, state == inInt, state == inFraction, state == inExpDigits:
		return true
	}
	s.fail(i, "invalid number")
	return false
}

var literals = [256]string{True: "true", False: "false", Null: "null"}

// literal continues true, false or null and reports whether it has ended.
func (s *Scanner) literal(k Kind) bool {
	word := literals[k]
	for ; s.pos < len(s.buf) && int(s.state) < len(word); s.state++ {
		if s.buf[s.pos] != word[s.state] {
			s.fail(s.start-s.base, "invalid literal")
			return false
		}
		s.pos++
	}
	return int(s.state) == len(word)
}
