package jsonscan

import (
	"encoding/binary"
	"math/bits"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Places within a string; 1 to 4 are hex digits that are to come.
const (
	inText    = 0
	inEscape  = 5 // after a backslash
	inPair    = 6 // after a high surrogate: \
	inPairHex = 7 // and u
)

// str goes on in a string, and reports whether it is over.
func (s *Scanner) str() bool {
	for {
		if s.state == inText {
			s.pos += plain(s.buf[s.pos:])
		}
		if s.pos == len(s.buf) {
			return false
		}
		c := s.buf[s.pos]
		s.pos++
		switch s.state {
		case inText:
			switch c {
			case '"':
				return true
			case '\\':
				s.escaped, s.state, s.high = true, inEscape, 0
			default:
				s.fail(s.pos-1, "control character in a string")
				return false
			}
		case inEscape:
			switch {
			case c == 'u':
				s.state, s.unit = 4, 0
			case strings.IndexByte(`"\/bfnrt`, c) >= 0:
				s.state = inText
			default:
				s.fail(s.pos-2, "invalid escape")
				return false
			}
		case inPair, inPairHex:
			if want := [...]byte{'\\', 'u'}[s.state-inPair]; c != want {
				s.fail(s.pos-1, "lone surrogate")
				return false
			}
			if s.state++; s.state > inPairHex {
				s.state, s.unit = 4, 0
			}
		default:
			v := hexDigit(c)
			if v < 0 {
				s.fail(s.pos-1, "invalid \\u escape")
				return false
			}
			s.unit = s.unit<<4 | v
			if s.state--; s.state == 0 && !s.Lenient && !s.paired() {
				s.fail(s.pos-1, "lone surrogate")
				return false
			}
		}
	}
}

// paired takes a \uXXXX, and reports whether it may stand there.
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

func hexDigit(c byte) rune {
	switch {
	case c >= '0' && c <= '9':
		return rune(c - '0')
	case c|0x20 >= 'a' && c|0x20 <= 'f':
		return rune(c|0x20-'a') + 10
	}
	return -1
}

// AppendDecoded appends the string that raw, which a Scanner has read, stands
// for: U+FFFD for a lone surrogate. If raw was cut within an escape, it ends before
// that.
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
			c = raw[i]
			if at := strings.IndexByte("bfnrt", c); at >= 0 {
				c = "\b\f\n\r\t"[at]
			}
			dst = append(dst, c)
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

// Places within a number: what there was last.
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

// number goes on in a number, and reports whether it is over.
func (s *Scanner) number() bool {
	for ; s.pos < len(s.buf); s.pos++ {
		next, c := byte(inNumber), s.buf[s.pos]
		switch digit := c >= '0' && c <= '9'; s.state {
		case inNumber, inMinus:
			switch {
			case c == '-' && s.state == inNumber:
				next = inMinus
			case c == '0':
				next = inZero
			case digit:
				next = inInt
			}
		case inZero, inInt, inFraction:
			switch {
			case digit && s.state != inZero:
				continue
			case c == '.' && s.state != inFraction:
				next = inPoint
			case c == 'e' || c == 'E':
				next = inExp
			}
		case inPoint:
			if digit {
				next = inFraction
			}
		case inExp, inExpSign, inExpDigits:
			switch {
			case digit:
				next = inExpDigits
			case s.state == inExp && (c == '+' || c == '-'):
				next = inExpSign
			}
		}
		if next == inNumber {
			return s.numberOver()
		}
		s.state = next
	}
	return s.whole && s.numberOver()
}

// numberOver reports whether what was read is a number.
func (s *Scanner) numberOver() bool {
	switch s.state {
	case inZero, inInt, inFraction, inExpDigits:
		return true
	}
	s.fail(s.pos, "invalid number")
	return false
}

// literal goes on in true, false or null, and reports whether it is over.
func (s *Scanner) literal(k Kind) bool {
	word := "null"
	switch k {
	case True:
		word = "true"
	case False:
		word = "false"
	}
	for ; s.pos < len(s.buf) && int(s.state) < len(word); s.state++ {
		if s.buf[s.pos] != word[s.state] {
			s.fail(s.start-s.base, "invalid literal")
			return false
		}
		s.pos++
	}
	return int(s.state) == len(word)
}
