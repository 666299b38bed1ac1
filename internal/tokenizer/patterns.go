package tokenizer

import (
	"math"
	"unicode"
	"unicode/utf8"
)

// The pre-splitting patterns of the common model families, as their
// tokenizer.json spells them, and the same by hand: several times faster than
// a regular expression. Any other pattern goes through compilePattern.
const (
	gpt2Pattern   = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	llama3Pattern = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	qwen2Pattern  = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

type class uint8

const (
	other class = iota
	letter
	number
	space
)

// classOf returns the class of the first character of s and its length; s may
// be empty.
func classOf(s string) (class, int) {
	if s == "" {
		return other, 0
	}
	if c := s[0]; c < utf8.RuneSelf {
		switch {
		case 'a' <= c|0x20 && c|0x20 <= 'z':
			return letter, 1
		case '0' <= c && c <= '9':
			return number, 1
		case c == ' ' || '\t' <= c && c <= '\r':
			return space, 1
		}
		return other, 1
	}
	r, n := utf8.DecodeRuneInString(s)
	switch {
	case unicode.IsLetter(r):
		return letter, n
	case unicode.IsNumber(r):
		return number, n
	case unicode.IsSpace(r):
		return space, n
	}
	return other, n
}

// run returns the length of the characters of class c that s begins with, at
// most limit of them.
func run(s string, c class, limit int) int {
	i := 0
	for ; limit > 0 && i < len(s); limit-- {
		k, n := classOf(s[i:])
		if k != c {
			break
		}
		i += n
	}
	return i
}

const noLimit = math.MaxInt

// cutGPT2 cuts by gpt2Pattern.
func cutGPT2(s string) (int, bool) {
	if n := contraction(s, false); n > 0 {
		return n, true
	}
	i := 0
	if s[0] == ' ' {
		i = 1
	}
	if c, _ := classOf(s[i:]); c != space && i < len(s) {
		return i + run(s[i:], c, noLimit), true
	}
	return cutSpace(s, run(s, space, noLimit)), true
}

// cutLlama3 cuts by llama3Pattern (digits 3) or qwen2Pattern (digits 1).
func cutLlama3(digits int) cutter {
	return func(s string) (int, bool) {
		if n := contraction(s, true); n > 0 {
			return n, true
		}
		c, n := classOf(s)
		switch c {
		case letter:
			return run(s, letter, noLimit), true
		case number:
			return run(s, number, digits), true
		}
		if s[0] != '\r' && s[0] != '\n' {
			if l := run(s[n:], letter, noLimit); l > 0 {
				return n + l, true
			}
		}
		i := 0
		if s[0] == ' ' {
			i = 1
		}
		if l := run(s[i:], other, noLimit); l > 0 {
			for i += l; i < len(s) && (s[i] == '\r' || s[i] == '\n'); i++ {
			}
			return i, true
		}
		end := run(s, space, noLimit)
		for k := end; k > 0; k-- {
			if s[k-1] == '\r' || s[k-1] == '\n' {
				return k, true
			}
		}
		return cutSpace(s, end), true
	}
}

// cutSpace cuts by \s+(?!\S)|\s+ where s begins with end bytes of white space:
// the last character stays with what follows, unless it is the only one.
func cutSpace(s string, end int) int {
	if end < len(s) {
		if _, n := utf8.DecodeLastRuneInString(s[:end]); n < end {
			return end - n
		}
	}
	return end
}

// contraction returns the length of the 's 't 're 've 'm 'll 'd that s begins
// with, or 0. Without regard to case, ſ (U+017F) is an s too.
func contraction(s string, fold bool) int {
	if len(s) < 2 || s[0] != '\'' {
		return 0
	}
	lower := func(c byte) byte {
		if fold && 'A' <= c && c <= 'Z' {
			return c | 0x20
		}
		return c
	}
	switch a := lower(s[1]); a {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v', 'l':
		if len(s) > 2 {
			if b := lower(s[2]); b == 'e' && a != 'l' || b == 'l' && a == 'l' {
				return 3
			}
		}
	}
	if fold && len(s) > 2 && s[1:3] == "ſ" {
		return 3
	}
	return 0
}

// cutDigits cuts at digits: each one alone is a match.
func cutDigits(s string) (int, bool) {
	if c, n := classOf(s); c == number {
		return n, true
	}
	i := 0
	for i < len(s) {
		c, n := classOf(s[i:])
		if c == number {
			break
		}
		i += n
	}
	return i, false
}
