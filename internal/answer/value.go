package answer

// maxDepth is how deep objects and arrays may be nested.
const maxDepth = 256

// verdict is what a byte means for a JSON value.
type verdict uint8

const (
	more   verdict = iota
	done           // the value ends with this byte
	before         // it ended before this byte: a number
	bad            // this byte cannot be part of it
)

// value checks one JSON value, byte by byte.
type value struct {
	open  [maxDepth / 64]uint64 // a bit for each level: it is an object
	depth int
	state valueState
	word  string // of true, false or null: what must still come
	hex   int8   // digits of \u that must still come
	key   bool   // the string is a key
}

type valueState uint8

const (
	atValue  valueState = iota
	atItem              // a value or ]
	atMember            // a key or }
	atKey
	atColon
	atComma
	inString
	inEscape
	inHex
	inWord
	atMinus // the states of a number
	atZero
	inInt
	atDot
	inFraction
	atExp
	atExpSign
	inExp
	atEnd // only whitespace may come
)

func (v *value) inObject() bool { return v.open[(v.depth-1)/64]>>((v.depth-1)%64)&1 != 0 }

func (v *value) push(object bool) bool {
	if v.depth == maxDepth {
		return false
	}
	bit := uint64(1) << (v.depth % 64)
	v.open[v.depth/64] &^= bit
	if object {
		v.open[v.depth/64] |= bit
	}
	v.depth++
	return true
}

// ended is the verdict for a byte that ends an inner value, or the whole.
func (v *value) ended() verdict {
	if v.depth == 0 {
		return done
	}
	v.state = atComma
	return more
}

func (v *value) add(c byte) verdict {
	switch v.state {
	case inString:
		switch {
		case c == '"' && v.key:
			v.state = atColon
		case c == '"':
			return v.ended()
		case c == '\\':
			v.state = inEscape
		case c < 0x20:
			return bad
		}
		return more
	case inEscape:
		switch c {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			v.state = inString
		case 'u':
			v.state, v.hex = inHex, 4
		default:
			return bad
		}
		return more
	case inHex:
		if !isHex(c) {
			return bad
		}
		if v.hex--; v.hex == 0 {
			v.state = inString
		}
		return more
	case inWord:
		if c != v.word[0] {
			return bad
		}
		if v.word = v.word[1:]; v.word == "" {
			return v.ended()
		}
		return more
	case atMinus, atZero, inInt, atDot, inFraction, atExp, atExpSign, inExp:
		return v.number(c)
	}
	switch {
	case isSpace(c):
		return more
	case v.state == atEnd:
		return bad
	}
	return v.token(c)
}

// token takes a byte that begins or ends something.
func (v *value) token(c byte) verdict {
	switch v.state {
	case atColon:
		if c != ':' {
			return bad
		}
		v.state = atValue
		return more
	case atComma:
		switch {
		case c == ',' && v.inObject():
			v.state = atKey
		case c == ',':
			v.state = atValue
		case c == '}' && v.inObject(), c == ']' && !v.inObject():
			v.depth--
			return v.ended()
		default:
			return bad
		}
		return more
	case atMember, atKey:
		switch {
		case c == '"':
			v.state, v.key = inString, true
		case c == '}' && v.state == atMember:
			v.depth--
			return v.ended()
		default:
			return bad
		}
		return more
	case atItem:
		if c == ']' {
			v.depth--
			return v.ended()
		}
	}
	switch {
	case c == '{' && v.push(true):
		v.state = atMember
	case c == '[' && v.push(false):
		v.state = atItem
	case c == '"':
		v.state, v.key = inString, false
	case c == 't':
		v.state, v.word = inWord, "true"[1:]
	case c == 'f':
		v.state, v.word = inWord, "false"[1:]
	case c == 'n':
		v.state, v.word = inWord, "null"[1:]
	case c == '-':
		v.state = atMinus
	case c == '0':
		v.state = atZero
	case c >= '1' && c <= '9':
		v.state = inInt
	default:
		return bad
	}
	return more
}

// number takes a byte within a number, or the one behind it.
func (v *value) number(c byte) verdict {
	digit := c >= '0' && c <= '9'
	switch v.state {
	case atMinus:
		switch {
		case c == '0':
			v.state = atZero
		case digit:
			v.state = inInt
		default:
			return bad
		}
		return more
	case atDot, atExpSign:
		if !digit {
			return bad
		}
		v.state++ // inFraction, inExp
		return more
	case atExp:
		switch {
		case digit:
			v.state = inExp
		case c == '+' || c == '-':
			v.state = atExpSign
		default:
			return bad
		}
		return more
	}
	switch {
	case digit && v.state != atZero:
		return more
	case c == '.' && (v.state == atZero || v.state == inInt):
		v.state = atDot
		return more
	case (c == 'e' || c == 'E') && v.state != inExp:
		v.state = atExp
		return more
	case v.depth == 0:
		return before
	}
	v.state = atComma
	return v.add(c)
}

// whole reports whether the value may end here: a number has no other end.
func (v *value) whole() bool {
	return v.depth == 0 && (v.state == atZero || v.state == inInt || v.state == inFraction || v.state == inExp)
}

// validJSON reports whether text is one JSON value.
func validJSON(text []byte) bool {
	var v value
	for i, c := range text {
		switch v.add(c) {
		case bad, before:
			return false
		case done:
			return i == len(text)-1
		}
	}
	return v.whole()
}

func isHex(c byte) bool { return c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'f' }
