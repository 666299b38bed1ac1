package tokenizer

import (
	"fmt"
	"regexp"
	"strings"
)

// whiteSpace is \s of the regular expressions in tokenizer files (Oniguruma,
// Unicode White_Space) as the inside of a Go character class.
const whiteSpace = `\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}`

// spaceTail is the one use that pre-splitting patterns make of look-ahead.
const spaceTail = `\s+(?!\S)`

// patternCutter returns the cutter of a pattern.
func patternCutter(pattern string) (cutter, error) {
	switch pattern {
	case gpt2Pattern:
		return cutGPT2, nil
	case llama3Pattern:
		return cutLlama3(3), nil
	case qwen2Pattern:
		return cutLlama3(1), nil
	}
	return regexpCutter(pattern)
}

// regexpCutter runs a pattern on Go's regexp, in linear time. \s+(?!\S), which
// Go lacks, is matched as \s+ in a group of its own, whose last character is
// given back if a non-space follows.
func regexpCutter(pattern string) (cutter, error) {
	re, tail, err := compilePattern(pattern)
	if err != nil {
		return nil, err
	}
	return func(s string) (int, bool) {
		loc := re.FindStringSubmatchIndex(s)
		switch {
		case loc == nil || loc[0] == loc[1]:
			return len(s), false
		case loc[0] > 0:
			return loc[0], false
		case tail > 0 && loc[2*tail] >= 0:
			return cutSpace(s, loc[1]), true
		}
		return loc[1], true
	}, nil
}

// compilePattern translates an Oniguruma pattern to Go's dialect. tail is the
// number of the group that stands for spaceTail, or 0.
func compilePattern(pattern string) (re *regexp.Regexp, tail int, err error) {
	var b strings.Builder
	groups, class, escaped := 0, false, false
	for i := 0; i < len(pattern); {
		rest := pattern[i:]
		switch {
		case !class && strings.HasPrefix(rest, spaceTail):
			if tail != 0 {
				return nil, 0, fmt.Errorf("pattern %q: two look-aheads", pattern)
			}
			groups++
			tail = groups
			b.WriteString("([" + whiteSpace + "]+)")
			i += len(spaceTail)
			// A following |\s+ is what an only space falls back to; the group
			// has taken it.
			continue
		case strings.HasPrefix(rest, "(?=") || strings.HasPrefix(rest, "(?!") || strings.HasPrefix(rest, "(?<"):
			return nil, 0, fmt.Errorf("pattern %q: look-around is not supported", pattern)
		case rest[0] == '\\' && len(rest) > 1:
			switch c := rest[1]; {
			case c == 's' && class:
				b.WriteString(whiteSpace)
			case c == 's':
				b.WriteString("[" + whiteSpace + "]")
			case c == 'S' && !class:
				b.WriteString("[^" + whiteSpace + "]")
			case c == 'd' && class:
				b.WriteString(`\p{Nd}`)
			case c == 'd':
				b.WriteString(`[\p{Nd}]`)
			case strings.IndexByte("SDwWbBhHRX123456789", c) >= 0:
				return nil, 0, fmt.Errorf("pattern %q: \\%c is not supported here", pattern, c)
			default:
				b.WriteString(rest[:2])
			}
			i += 2
			escaped = true
			continue
		case class && rest[0] == ']':
			class = false
		case class && strings.HasPrefix(rest, "&&"), class && rest[0] == '[' && !strings.HasPrefix(rest, "[:"):
			return nil, 0, fmt.Errorf("pattern %q: nested classes are not supported", pattern)
		case !class && rest[0] == '[':
			class = true
		case !class && rest[0] == '(' && !strings.HasPrefix(rest, "(?"):
			groups++
		case !class && !escaped && rest[0] == '+' && i > 0 && strings.IndexByte("?*+", pattern[i-1]) >= 0:
			return nil, 0, fmt.Errorf("pattern %q: possessive repetition is not supported", pattern)
		}
		b.WriteByte(rest[0])
		i++
		escaped = false
	}
	re, err = regexp.Compile(b.String())
	if err != nil {
		return nil, 0, fmt.Errorf("pattern %q: %w", pattern, err)
	}
	return re, tail, nil
}
