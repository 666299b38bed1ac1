package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// claim is one thing that a vector says of an answer.
type claim struct {
	call int // of which call; -1: of the answer
	what string
	path []any // of an argument
	want any
}

// vector is a text that SMG's tests have parsed whole, and what they say of the outcome. Only what is written as a literal is
// read of it.
type vector struct {
	name, parser, text string
	reasoning          bool
	started            bool // the prompt has opened the reasoning
	tools              bool // it is parsed with a list of tools, which is not read
	claims             []claim
	unread             int // claims that are not understood
}

var (
	rustTest   = regexp.MustCompile(`(?m)^\s*(?:async )?fn (test_\w+)\(\)[^{]*\{`)
	rustLet    = regexp.MustCompile(`^let (?:mut )?(\w+)(?:: [^=]+)? =\s*`)
	rustParser = regexp.MustCompile(`^let (?:mut )?(\w+) = (\w+Parser)::(\w+)\(`)
	rustTuple  = regexp.MustCompile(`^let \((\w+), (?:mut )?(\w+)\)\s*=\s*(\w+)\s*\.parse_complete(\w*)\(\s*&?`)
	rustResult = regexp.MustCompile(`^let (\w+)\s*=\s*(\w+)\s*\.detect_and_parse_reasoning\(\s*`)
	rustArgs   = regexp.MustCompile(`^let (\w+)(?:: [\w:]+)?\s*=\s*(?:serde_json::)?from_str(?:::<[\w:]+>)?\(\s*&(\w+)\[(\d+)\]\s*\.function\s*\.arguments`)
	rustEqual  = regexp.MustCompile(`^assert_eq!\(\s*`)
	rustEmpty  = regexp.MustCompile(`^assert!\((\w+)\.is_empty\(\)`)
	rustLen    = regexp.MustCompile(`^(\w+)\.len\(\)$`)
	rustName   = regexp.MustCompile(`^(\w+)\[(\d+)\]\.function\.name$`)
	rustIndex  = regexp.MustCompile(`^(\w+)((?:\[[^\]]+\])*)$`)
	rustPart   = regexp.MustCompile(`\[("[^"]*"|\d+)\]`)
)

// readSMG reads the vectors of the repository's parsers.
func readSMG(dir string) (list []vector, err error) {
	for _, glob := range []string{"crates/tool_parser/tests/*.rs", "crates/reasoning_parser/src/parsers/*.rs"} {
		paths, err := filepath.Glob(filepath.Join(dir, glob))
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			at := rustTest.FindAllSubmatchIndex(text, -1)
			for i, m := range at {
				end := len(text)
				if i+1 < len(at) {
					end = at[i+1][0]
				}
				name := strings.TrimSuffix(filepath.Base(path), ".rs") + "/" + string(text[m[2]:m[3]])
				list = append(list, readTest(name, string(text[m[1]:end]))...)
			}
		}
	}
	return list, nil
}

// readTest goes over a test's statements.
func readTest(name, body string) (list []vector) {
	texts, parsers, args, v := map[string]string{}, map[string]string{}, map[string]int{}, (*vector)(nil)
	var tools, normal string // variables of the latest outcome
	started := strings.Contains(body, ".mark_reasoning_started()")
	add := func(parser, text string, reasoning bool) {
		list = append(list, vector{name: name + "#" + strconv.Itoa(len(list)+1), parser: parsers[parser], text: text, reasoning: reasoning, started: started})
		v, args = &list[len(list)-1], map[string]int{}
	}
	for _, s := range statements(body) {
		if m := rustParser.FindStringSubmatch(s); m != nil {
			parsers[m[1]] = m[2] + "::" + m[3]
			continue
		}
		if m := rustTuple.FindStringSubmatchIndex(s); m != nil {
			parser := s[m[6]:m[7]]
			if text, ok := rustText(s[m[1]:], texts); ok && parsers[parser] != "" {
				add(parser, text, false)
				v.tools = m[8] != m[9]
				normal, tools = s[m[2]:m[3]], s[m[4]:m[5]]
			} else {
				v = nil
			}
			continue
		}
		if m := rustResult.FindStringSubmatchIndex(s); m != nil {
			parser := s[m[4]:m[5]]
			if text, ok := rustText(s[m[1]:], texts); ok && parsers[parser] != "" {
				add(parser, text, true)
				normal, tools = s[m[2]:m[3]], ""
			} else {
				v = nil
			}
			continue
		}
		if m := rustArgs.FindStringSubmatch(s); m != nil && m[2] == tools {
			args[m[1]], _ = strconv.Atoi(m[3])
			continue
		}
		if m := rustLet.FindStringSubmatchIndex(s); m != nil {
			if text, ok := rustText(s[m[1]:], texts); ok {
				texts[s[m[2]:m[3]]] = text
			}
			continue
		}
		if v == nil || !strings.HasPrefix(s, "assert") {
			continue
		}
		if m := rustEmpty.FindStringSubmatch(s); m != nil && m[1] == tools {
			v.claims = append(v.claims, claim{call: -1, what: "calls", want: 0.0})
			continue
		}
		if c, ok := equality(s, tools, normal, texts, args); ok {
			v.claims = append(v.claims, c)
		} else {
			v.unread++
		}
	}
	return list
}

// equality reads an assert_eq of something known and a literal.
func equality(s, tools, normal string, texts map[string]string, args map[string]int) (c claim, ok bool) {
	at := rustEqual.FindStringIndex(s)
	if at == nil {
		return c, false
	}
	left, right, ok := strings.Cut(s[at[1]:], ",")
	if !ok {
		return c, false
	}
	left, right = strings.Join(strings.Fields(left), ""), strings.TrimSpace(right)
	if c.want, ok = rustValue(right, texts); !ok {
		return c, false
	}
	c.call = -1
	switch m := rustName.FindStringSubmatch(left); {
	case left == normal || left == normal+".normal_text":
		c.what = "text"
		return c, true
	case left == normal+".reasoning_text":
		c.what = "reasoning"
		return c, true
	case m != nil && m[1] == tools:
		c.what = "name"
		c.call, _ = strconv.Atoi(m[2])
		return c, true
	}
	if m := rustLen.FindStringSubmatch(left); m != nil && m[1] == tools {
		c.what = "calls"
		return c, true
	}
	m := rustIndex.FindStringSubmatch(left)
	if m == nil {
		return c, false
	}
	if c.call, ok = args[m[1]]; !ok {
		return c, false
	}
	c.what = "argument"
	for _, part := range rustPart.FindAllStringSubmatch(m[2], -1) {
		if n, err := strconv.Atoi(part[1]); err == nil {
			c.path = append(c.path, n)
		} else {
			c.path = append(c.path, strings.Trim(part[1], `"`))
		}
	}
	return c, true
}

// statements cuts a body at semicolons that are in no string, comments left out.
func statements(body string) (list []string) {
	var b strings.Builder
	for i := 0; i < len(body); {
		rest := body[i:]
		switch {
		case strings.HasPrefix(rest, "//"):
			n := strings.IndexByte(rest, '\n')
			if n < 0 {
				n = len(rest)
			}
			i += n
		case rest[0] == ';':
			list = append(list, strings.TrimLeft(b.String(), " \t\r\n{}"))
			b.Reset()
			i++
		case rest[0] == '"' || strings.HasPrefix(rest, `r"`) || strings.HasPrefix(rest, `r#`):
			_, n, ok := rustString(rest)
			if !ok {
				n = 1
			}
			b.WriteString(rest[:n])
			i += n
		default:
			b.WriteByte(rest[0])
			i++
		}
	}
	return list
}

// rustString reads a string literal at the front, and how long it is.
func rustString(s string) (text string, n int, ok bool) {
	if raw, is := strings.CutPrefix(s, "r"); is {
		hashes := len(raw) - len(strings.TrimLeft(raw, "#"))
		if hashes == len(raw) || raw[hashes] != '"' {
			return "", 0, false
		}
		end := strings.Index(raw[hashes+1:], `"`+strings.Repeat("#", hashes))
		if end < 0 {
			return "", 0, false
		}
		return raw[hashes+1 : hashes+1+end], 1 + hashes + 1 + end + 1 + hashes, true
	}
	if s == "" || s[0] != '"' {
		return "", 0, false
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] == '"':
			return b.String(), i + 1, true
		case s[i] != '\\' || i+1 == len(s):
			b.WriteByte(s[i])
		default:
			i++
			switch s[i] {
			case 'n':
				b.WriteByte('\n')
			case 't':
				b.WriteByte('\t')
			case 'r':
				b.WriteByte('\r')
			case 'u':
				end := strings.IndexByte(s[i:], '}')
				if end < 0 {
					return "", 0, false
				}
				r, err := strconv.ParseInt(s[i+2:i+end], 16, 32)
				if err != nil {
					return "", 0, false
				}
				b.WriteRune(rune(r))
				i += end
			case '\n': // the line goes on
				i += len(s[i+1:]) - len(strings.TrimLeft(s[i+1:], " \t\r\n"))
			default:
				b.WriteByte(s[i])
			}
		}
	}
	return "", 0, false
}

// rustText reads a string, or a variable that is one.
func rustText(s string, texts map[string]string) (string, bool) {
	if text, _, ok := rustString(s); ok {
		return text, true
	}
	word := s[:len(s)-len(strings.TrimLeft(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789"))]
	text, ok := texts[word]
	return text, ok
}

// rustValue reads a literal: a string, a number, a word, or JSON.
func rustValue(s string, texts map[string]string) (v any, ok bool) {
	if text, ok := rustText(s, texts); ok {
		return text, true
	}
	if inner, is := strings.CutPrefix(s, "json!("); is {
		d := json.NewDecoder(strings.NewReader(inner))
		return v, d.Decode(&v) == nil
	}
	s = strings.TrimRight(strings.Split(s, ",")[0], " \n)")
	if s == "serde_json::Value::Null" {
		return nil, true
	}
	return v, json.Unmarshal([]byte(s), &v) == nil
}
