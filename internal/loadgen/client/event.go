package client

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// Usage is the token counts that the server reports.
type Usage struct {
	Prompt, Completion, Cached int
}

// event is what one chunk of a stream, or a whole answer, says.
type event struct {
	tokens   bool // a choice carries text, reasoning or a tool call
	finish   bool // a choice has a finish_reason
	hasUsage bool
	usage    Usage
	err      []byte // raw JSON of "error"; nil without one
}

// parse reads an event, in one pass and without allocating. The raw JSON text
// (escapes as they came, without quotes) of the choices' content is appended
// to *answer, if that is not nil.
func (e *event) parse(b []byte, answer *[]byte) error {
	*e = event{}
	s := jsonscan.Scanner{Lenient: true}
	if s.Reset(b); !s.Enter(jsonscan.Object) {
		s.Fail(errors.New("not an object"))
	}
	for s.Next() == jsonscan.Key {
		switch string(s.Decoded()) {
		case "choices":
			if s.Enter(jsonscan.Array) {
				for s.Item() {
					e.choice(&s, answer)
				}
			}
		case "usage":
			e.readUsage(&s)
		case "error":
			if raw := s.Raw(); string(raw) != "null" {
				e.err = raw
			}
		default:
			s.Skip()
		}
	}
	if err := s.End(); err != nil {
		return fmt.Errorf("no valid JSON: %w", err)
	}
	return nil
}

// choice reads the tokens of a choice: a delta (a chat stream), a message (a
// whole chat answer) or text.
func (e *event) choice(s *jsonscan.Scanner, answer *[]byte) {
	if !s.Enter(jsonscan.Object) {
		return
	}
	for s.Next() == jsonscan.Key {
		switch string(s.Decoded()) {
		case "text":
			e.text(s, answer)
		case "finish_reason":
			e.finish = e.finish || s.Peek() == jsonscan.String
			s.Skip()
		case "delta", "message":
			e.message(s, answer)
		default:
			s.Skip()
		}
	}
}

func (e *event) message(s *jsonscan.Scanner, answer *[]byte) {
	if !s.Enter(jsonscan.Object) {
		return
	}
	for s.Next() == jsonscan.Key {
		switch string(s.Decoded()) {
		case "content":
			e.text(s, answer)
		case "reasoning_content", "reasoning", "refusal":
			e.text(s, nil)
		case "tool_calls":
			if s.Enter(jsonscan.Array) {
				for s.Item() {
					e.tokens = true
					s.Skip()
				}
			}
		default:
			s.Skip()
		}
	}
}

// text reads a string that counts as tokens when it is not empty; null and
// other types do not.
func (e *event) text(s *jsonscan.Scanner, answer *[]byte) {
	if !s.Enter(jsonscan.String) {
		return
	}
	if raw := s.Text(); len(raw) > 0 && s.Err() == nil {
		e.tokens = true
		if answer != nil {
			*answer = append(*answer, raw...)
		}
	}
}

func (e *event) readUsage(s *jsonscan.Scanner) {
	if !s.Enter(jsonscan.Object) {
		return
	}
	e.hasUsage = true
	for s.Next() == jsonscan.Key {
		switch string(s.Decoded()) {
		case "prompt_tokens":
			count(s, &e.usage.Prompt)
		case "completion_tokens":
			count(s, &e.usage.Completion)
		case "prompt_tokens_details":
			if !s.Enter(jsonscan.Object) {
				continue
			}
			for s.Next() == jsonscan.Key {
				if string(s.Decoded()) == "cached_tokens" {
					count(s, &e.usage.Cached)
				} else {
					s.Skip()
				}
			}
		default:
			s.Skip()
		}
	}
}

// count reads a number of tokens; anything but an integer within bounds is
// ignored.
func count(s *jsonscan.Scanner, to *int) {
	const digits = 10
	if raw := s.Raw(); len(raw) <= digits {
		if n, err := strconv.ParseUint(string(raw), 10, 32); err == nil {
			*to = int(n)
		}
	}
}
