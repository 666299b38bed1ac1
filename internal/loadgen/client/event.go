package client

import (
	"bytes"
	"errors"
	"strconv"
)

// Usage is the token counts that the server reports.
type Usage struct {
	Prompt, Completion, Cached int
}

// event is the content of a stream's chunk, or of a whole answer.
type event struct {
	tokens   bool // a choice carries text, reasoning or a tool call
	finish   bool // a choice has a finish_reason
	hasUsage bool
	usage    Usage
	err      []byte // raw JSON of "error"; nil without one
}

var (
	errSyntax = errors.New("no valid JSON")
	errDepth  = errors.New("JSON nested too deep")
)

// maxDepth bounds the nesting of skipped values.
const maxDepth = 64

// parse reads an event in one pass, without allocating. It appends the choices' text as raw
// JSON (escapes as they came, without quotes) to *answer, unless nil. It does not check
// numbers, escapes and UTF-8 inside skipped values.
func (e *event) parse(b []byte, answer *[]byte) error {
	*e = event{}
	s := scanner{b: b}
	if err := s.object(func(key []byte) error { return e.member(&s, key, answer) }); err != nil {
		return err
	}
	if s.peek() != 0 || s.i < len(b) {
		return errSyntax
	}
	return nil
}

func (e *event) member(s *scanner, key []byte, answer *[]byte) error {
	switch string(key) {
	case "choices":
		if s.peek() != '[' {
			return s.skip(0)
		}
		return s.array(func() error {
			if s.peek() != '{' {
				return s.skip(0)
			}
			return s.object(func(key []byte) error { return e.choice(s, key, answer) })
		})
	case "usage":
		if s.peek() != '{' {
			return s.skip(0)
		}
		e.hasUsage = true
		return s.object(func(key []byte) error { return e.count(s, key) })
	case "error":
		s.peek()
		from := s.i
		if err := s.skip(0); err != nil {
			return err
		}
		if raw := s.b[from:s.i]; string(raw) != "null" {
			e.err = raw
		}
		return nil
	}
	return s.skip(0)
}

// choice reads a member of a choice: delta (a chat's stream), message (a whole chat answer)
// or text.
func (e *event) choice(s *scanner, key []byte, answer *[]byte) error {
	switch string(key) {
	case "text":
		return e.text(s, answer)
	case "finish_reason":
		if s.peek() == '"' {
			e.finish = true
		}
	case "delta", "message":
		if s.peek() == '{' {
			return s.object(func(key []byte) error {
				switch string(key) {
				case "content":
					return e.text(s, answer)
				case "reasoning_content", "reasoning", "refusal":
					return e.text(s, nil)
				case "tool_calls":
					if s.peek() == '[' {
						return s.array(func() error { e.tokens = true; return s.skip(0) })
					}
				}
				return s.skip(0)
			})
		}
	}
	return s.skip(0)
}

// text reads a string, which counts as tokens if it is not empty. Other types do not.
func (e *event) text(s *scanner, answer *[]byte) error {
	if s.peek() != '"' {
		return s.skip(0)
	}
	raw, err := s.str()
	if err != nil {
		return err
	}
	if len(raw) > 0 {
		e.tokens = true
		if answer != nil {
			*answer = append(*answer, raw...)
		}
	}
	return nil
}

func (e *event) count(s *scanner, key []byte) error {
	switch string(key) {
	case "prompt_tokens":
		return s.count(&e.usage.Prompt)
	case "completion_tokens":
		return s.count(&e.usage.Completion)
	case "prompt_tokens_details":
		if s.peek() == '{' {
			return s.object(func(key []byte) error {
				if string(key) == "cached_tokens" {
					return s.count(&e.usage.Cached)
				}
				return s.skip(0)
			})
		}
	}
	return s.skip(0)
}

// scanner walks JSON.
type scanner struct {
	b []byte
	i int
}

// peek returns the next byte that is not white space, 0 at the end.
func (s *scanner) peek() byte {
	for ; s.i < len(s.b); s.i++ {
		switch c := s.b[s.i]; c {
		case ' ', '\t', '\r', '\n':
		default:
			return c
		}
	}
	return 0
}

// str reads a string and returns it without its quotes.
func (s *scanner) str() ([]byte, error) {
	if s.peek() != '"' {
		return nil, errSyntax
	}
	s.i++
	from := s.i
	for {
		n := bytes.IndexByte(s.b[s.i:], '"')
		if n < 0 {
			return nil, errSyntax
		}
		s.i += n + 1
		slashes := 0
		for j := s.i - 2; j >= from && s.b[j] == '\\'; j-- {
			slashes++
		}
		if slashes%2 == 0 {
			return s.b[from : s.i-1 : s.i-1], nil
		}
	}
}

// count reads a number of tokens. It ignores anything but an integer within bounds.
func (s *scanner) count(to *int) error {
	s.peek()
	from := s.i
	if err := s.skip(0); err != nil {
		return err
	}
	const digits = 10
	if raw := s.b[from:s.i]; len(raw) <= digits {
		if n, err := strconv.ParseUint(string(raw), 10, 32); err == nil {
			*to = int(n)
		}
	}
	return nil
}

// object calls f at each value, which f must consume.
func (s *scanner) object(f func(key []byte) error) error {
	if s.peek() != '{' {
		return errSyntax
	}
	s.i++
	if s.peek() == '}' {
		s.i++
		return nil
	}
	for {
		key, err := s.str()
		if err != nil {
			return err
		}
		if s.peek() != ':' {
			return errSyntax
		}
		s.i++
		if err := f(key); err != nil {
			return err
		}
		if done, err := s.comma('}'); done || err != nil {
			return err
		}
	}
}

// array calls f at each value, which f must consume.
func (s *scanner) array(f func() error) error {
	s.i++ // '['
	if s.peek() == ']' {
		s.i++
		return nil
	}
	for {
		if err := f(); err != nil {
			return err
		}
		if done, err := s.comma(']'); done || err != nil {
			return err
		}
	}
}

func (s *scanner) comma(end byte) (done bool, err error) {
	switch s.peek() {
	case ',':
		s.i++
		return false, nil
	case end:
		s.i++
		return true, nil
	}
	return false, errSyntax
}

// skip skips a value.
func (s *scanner) skip(depth int) error {
	if depth > maxDepth {
		return errDepth
	}
	switch c := s.peek(); c {
	case '"':
		_, err := s.str()
		return err
	case '{':
		return s.object(func([]byte) error { return s.skip(depth + 1) })
	case '[':
		return s.array(func() error { return s.skip(depth + 1) })
	default:
		from := s.i
		for s.i < len(s.b) && isScalar(s.b[s.i]) {
			s.i++
		}
		if s.i == from {
			return errSyntax
		}
		return nil
	}
}

// isScalar reports whether c is part of a number, true, false or null.
func isScalar(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c == '-' || c == '+' || c == '.' || c == 'E'
}
