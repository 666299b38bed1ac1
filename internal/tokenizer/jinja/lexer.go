package jinja

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

type tokKind uint8

const (
	tokEOF tokKind = iota
	tokText
	tokVarBegin
	tokVarEnd
	tokBlockBegin
	tokBlockEnd
	tokName
	tokString
	tokInt
	tokFloat
	tokOp
)

type token struct {
	kind tokKind
	val  string
	line int
}

func (t token) is(kind tokKind, val string) bool { return t.kind == kind && t.val == val }

type lexer struct {
	src       string
	pos       int
	line      int
	lineStart bool // the text that follows begins a line
	toks      []token
}

// lex cuts a template into tokens. It also controls white space, as Jinja2's own lexer does
// with trim_blocks and lstrip_blocks.
func lex(src string) []token {
	src = strings.ReplaceAll(strings.ReplaceAll(src, "\r\n", "\n"), "\r", "\n")
	src = strings.TrimSuffix(src, "\n")
	l := &lexer{src: src, line: 1, lineStart: true}
	for l.text() {
	}
	l.emit(tokEOF, "end of template")
	return l.toks
}

func (l *lexer) fail(format string, args ...any) {
	panic(&Error{Line: l.line, Msg: fmt.Sprintf(format, args...)})
}

func (l *lexer) emit(k tokKind, val string) {
	l.toks = append(l.toks, token{k, val, l.line})
}

func (l *lexer) advance(n int) {
	l.line += strings.Count(l.src[l.pos:l.pos+n], "\n")
	l.pos += n
}

// text takes text and the tag after it; it returns false at the end.
func (l *lexer) text() bool {
	rest := l.src[l.pos:]
	at := 0
	for {
		i := strings.IndexByte(rest[at:], '{')
		if i < 0 || at+i+1 >= len(rest) {
			if rest != "" {
				l.emit(tokText, rest)
			}
			l.pos = len(l.src)
			return false
		}
		at += i
		if c := rest[at+1]; c == '{' || c == '%' || c == '#' {
			break
		}
		at++
	}
	kind := rest[at+1]
	sign, _ := cutSign(rest[at+2:])
	l.before(rest[:at], sign, kind != '{')
	l.advance(at + 2)
	if sign != 0 {
		l.advance(1)
	}
	switch kind {
	case '#':
		end := strings.Index(l.src[l.pos:], "#}")
		if end < 0 {
			l.fail("comment without end")
		}
		mark := byte(0)
		if end > 0 {
			mark = l.src[l.pos+end-1]
		}
		l.advance(end + 2)
		l.afterTag(mark, true)
	case '{':
		l.emit(tokVarBegin, "{{")
		l.inside("}}", tokVarEnd)
	default:
		if !l.raw() {
			l.emit(tokBlockBegin, "{%")
			l.inside("%}", tokBlockEnd)
		}
	}
	return true
}

// cutSign cuts the sign of white space control from s; it is 0 if there is none.
func cutSign(s string) (sign byte, rest string) {
	if s != "" && (s[0] == '-' || s[0] == '+') {
		return s[0], s[1:]
	}
	return 0, s
}

// before emits the text before a tag, less what the tag swallows: all white space at its end
// (-), or the indentation of the line if it is a block or a comment.
func (l *lexer) before(text string, sign byte, block bool) {
	begin := strings.LastIndexByte(text, '\n') + 1
	switch {
	case sign == '-':
		text = strings.TrimRightFunc(text, unicode.IsSpace)
	case sign == 0 && block && (begin > 0 || l.lineStart) && strings.TrimSpace(text[begin:]) == "":
		text = text[:begin]
	}
	if text != "" {
		l.emit(tokText, text)
	}
}

// afterTag drops what a tag swallows after it: all white space (-), or one
// newline if it is a block or a comment.
func (l *lexer) afterTag(mark byte, block bool) {
	start := l.pos
	rest := l.src[l.pos:]
	switch {
	case mark == '-':
		l.advance(len(rest) - len(strings.TrimLeftFunc(rest, unicode.IsSpace)))
	case block && mark != '+' && strings.HasPrefix(rest, "\n"):
		l.advance(1)
	}
	l.lineStart = l.pos > start && l.src[l.pos-1] == '\n'
}

// raw takes {% raw %}…{% endraw %}, after its {%.
func (l *lexer) raw() bool {
	n, mark := rawTag(l.src[l.pos:], "raw")
	if n == 0 {
		return false
	}
	l.advance(n)
	l.afterTag(mark, false)
	for at := l.pos; ; {
		i := strings.Index(l.src[at:], "{%")
		if i < 0 {
			l.fail("raw without endraw")
		}
		at += i
		sign, tag := cutSign(l.src[at+2:])
		n, mark := rawTag(tag, "endraw")
		if n == 0 {
			at += 2
			continue
		}
		l.before(l.src[l.pos:at], sign, true)
		l.advance(len(l.src) - len(tag) + n - l.pos)
		l.afterTag(mark, true)
		return true
	}
}

// rawTag matches the rest of a tag that is one word: "raw -%}". It returns its
// length, 0 for no match, and the sign before its end.
func rawTag(s, word string) (n int, mark byte) {
	rest := strings.TrimLeftFunc(s, unicode.IsSpace)
	rest, ok := strings.CutPrefix(rest, word)
	if !ok {
		return 0, 0
	}
	mark, rest = cutSign(strings.TrimLeftFunc(rest, unicode.IsSpace))
	rest, ok = strings.CutPrefix(rest, "%}")
	if !ok {
		return 0, 0
	}
	return len(s) - len(rest), mark
}

// inside takes the tokens of a tag up to its end.
func (l *lexer) inside(end string, endKind tokKind) {
	var open []byte
	for {
		rest := l.src[l.pos:]
		if ws := len(rest) - len(strings.TrimLeftFunc(rest, unicode.IsSpace)); ws > 0 {
			l.advance(ws)
			rest = l.src[l.pos:]
		}
		if rest == "" {
			l.fail("tag without end")
		}
		if len(open) == 0 {
			mark, tail := cutSign(rest)
			if strings.HasPrefix(tail, end) && (mark != '+' || endKind == tokBlockEnd) {
				l.emit(endKind, end)
				l.advance(len(rest) - len(tail) + 2)
				l.afterTag(mark, endKind == tokBlockEnd)
				return
			}
		}
		r, _ := utf8.DecodeRuneInString(rest)
		switch {
		case r == '"' || r == '\'':
			l.str(rest)
		case r >= '0' && r <= '9':
			l.number(rest)
		case r == '_' || unicode.IsLetter(r):
			n := strings.IndexFunc(rest, func(r rune) bool {
				return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r)
			})
			if n < 0 {
				n = len(rest)
			}
			if n > maxName {
				l.fail("name longer than %d bytes", maxName)
			}
			l.emit(tokName, rest[:n])
			l.advance(n)
		default:
			open = l.op(rest, open)
		}
	}
}

// op takes an operator and keeps the stack of open brackets.
func (l *lexer) op(rest string, open []byte) []byte {
	n := 1
	switch c := rest[0]; {
	case len(rest) > 1 && strings.Contains(" // ** == != <= >= ", " "+rest[:2]+" "):
		n = 2
	case strings.IndexByte("+-*/%~[](){}.:|,=<>", c) < 0:
		l.fail("unexpected character %q", c)
	case strings.IndexByte("([{", c) >= 0:
		open = append(open, c+1+c>>6) // its closing bracket: ) is ( + 1, ] and } are + 2
	case strings.IndexByte(")]}", c) >= 0:
		if len(open) == 0 || open[len(open)-1] != c {
			l.fail("unexpected %q", c)
		}
		open = open[:len(open)-1]
	}
	l.emit(tokOp, rest[:n])
	l.advance(n)
	return open
}

var numberPattern = regexp.MustCompile(`^[0-9_]+(\.[0-9][0-9_]*)?([eE][+-]?[0-9_]+)?`)

func (l *lexer) number(rest string) {
	m, kind := numberPattern.FindStringSubmatch(rest), tokInt
	if m[1] != "" || m[2] != "" {
		kind = tokFloat
	}
	l.emit(kind, strings.ReplaceAll(m[0], "_", ""))
	l.advance(len(m[0]))
}

func (l *lexer) str(rest string) {
	quote := rest[0]
	var b strings.Builder
	for i := 1; i < len(rest); i++ {
		switch c := rest[i]; {
		case c == quote:
			l.emit(tokString, b.String())
			l.advance(i + 1)
			return
		case c != '\\' || i+1 == len(rest):
			b.WriteByte(c)
		default:
			i += l.escape(&b, rest[i+1:])
		}
	}
	l.fail("string without end")
}

// escape writes what the escape after a backslash means, and returns its
// length. An unknown one stands for itself, backslash included.
func (l *lexer) escape(b *strings.Builder, s string) int {
	const simple, meaning = `n"'\trabfv0`, "\n\"'\\\t\r\a\b\f\v\x00"
	if i := strings.IndexByte(simple, s[0]); i >= 0 {
		b.WriteByte(meaning[i])
		return 1
	}
	width := map[byte]int{'x': 2, 'u': 4, 'U': 8}[s[0]]
	switch {
	case s[0] == '\n':
		return 1
	case width == 0:
		b.WriteByte('\\')
		_, n := utf8.DecodeRuneInString(s)
		b.WriteString(s[:n])
		return n
	case len(s) <= width:
		l.fail("short \\%c escape", s[0])
	}
	n, err := strconv.ParseUint(s[1:1+width], 16, 32)
	if err != nil || n > unicode.MaxRune {
		l.fail("bad \\%c escape", s[0])
	}
	b.WriteRune(rune(n))
	return 1 + width
}
