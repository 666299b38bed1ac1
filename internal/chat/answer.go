package chat

import (
	"bytes"
	"iter"
	"strconv"

	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// Usage counts tokens.
// Created are the prompt's tokens that were put into a cache, of engines that tell: vLLM.
type Usage struct{ Prompt, Cached, Created, Completion, Reasoning int }

// Piece is a call of a tool, or what an event adds to one: then without ID and Name behind the first.
type Piece struct {
	Index               int
	ID, Name, Arguments Text
}

// Answer is what a whole answer says of its first choice, or what an event of a stream adds to it.
// Its texts alias what was read.
type Answer struct {
	Model                       Text
	Reasoning, Content, Refusal Text
	Logprobs                    []byte // of Content: items of a JSON list, without its brackets
	Calls                       []Piece
	Finish                      Text // finish_reason; empty while there is none
	Stop                        Text // the stop string that was met, if the engine tells
	Usage                       Usage
	Told                        bool // Usage is there
	Error                       *openai.Error
}

// Read reads a whole answer, or the data of an event, into a, which keeps only its memory. It reports
// whether it is a chat's: invalid JSON and what has neither choices nor an error are not.
func Read(data []byte, a *Answer) bool {
	*a = Answer{Calls: a.Calls[:0]}
	s := jsonscan.Scanner{Lenient: true}
	s.Reset(data)
	if !s.Enter(jsonscan.Object) {
		return false
	}
	is := false
	for s.Next() == jsonscan.Key {
		switch string(s.Decoded()) {
		case "choices":
			is = true
			a.choices(&s)
		case "model":
			a.Model = text(&s)
		case "usage":
			a.usage(&s)
		case "error":
			if s.Peek() == jsonscan.Null {
				s.Skip()
				continue
			}
			s.Skip()
			a.Error = openai.Refusal(0, data)
		case "object":
			if string(text(&s)) == "error" {
				a.Error = openai.Refusal(0, data)
			}
		default:
			s.Skip()
		}
	}
	return s.End() == nil && (is || a.Error != nil)
}

// text reads a string; nil for anything else.
func text(s *jsonscan.Scanner) Text {
	if s.Peek() != jsonscan.String {
		s.Skip()
		return nil
	}
	s.Next()
	return s.Text()
}

// count reads a number of tokens; 0 for anything else.
func count(s *jsonscan.Scanner) int {
	if s.Peek() != jsonscan.Number {
		s.Skip()
		return 0
	}
	s.Next()
	n, err := strconv.ParseInt(string(s.Text()), 10, 32)
	if err != nil || n < 0 {
		return 0
	}
	return int(n)
}

func (a *Answer) usage(s *jsonscan.Scanner) {
	if a.Told = s.Enter(jsonscan.Object); !a.Told {
		return
	}
	for s.Next() == jsonscan.Key {
		switch string(s.Decoded()) {
		case "prompt_tokens":
			a.Usage.Prompt = count(s)
		case "completion_tokens":
			a.Usage.Completion = count(s)
		case "prompt_tokens_details":
			details(s, map[string]*int{"cached_tokens": &a.Usage.Cached, "created_cache_tokens": &a.Usage.Created})
		case "completion_tokens_details":
			details(s, map[string]*int{"reasoning_tokens": &a.Usage.Reasoning})
		default:
			s.Skip()
		}
	}
	u := &a.Usage
	u.Cached, u.Reasoning = min(u.Cached, u.Prompt), min(u.Reasoning, u.Completion)
	u.Created = min(u.Created, u.Prompt-u.Cached)
}

// details reads counts by their names, those that are there.
func details(s *jsonscan.Scanner, counts map[string]*int) {
	if !s.Enter(jsonscan.Object) {
		return
	}
	for s.Next() == jsonscan.Key {
		if n := counts[string(s.Decoded())]; n != nil {
			*n = count(s)
		} else {
			s.Skip()
		}
	}
}

// choices reads the first choice: these APIs ask for no more.
func (a *Answer) choices(s *jsonscan.Scanner) {
	if !s.Enter(jsonscan.Array) {
		return
	}
	for first := true; s.Item(); first = false {
		if !first || !s.Enter(jsonscan.Object) {
			if !first {
				s.Skip()
			}
			continue
		}
		for s.Next() == jsonscan.Key {
			switch string(s.Decoded()) {
			case "message", "delta":
				a.message(s)
			case "finish_reason":
				a.Finish = text(s)
			case "stop_reason", "matched_stop": // vLLM's and ours, SGLang's
				if t := text(s); t != nil {
					a.Stop = t
				}
			case "logprobs":
				a.logprobs(s)
			default:
				s.Skip()
			}
		}
	}
}

func (a *Answer) logprobs(s *jsonscan.Scanner) {
	if !s.Enter(jsonscan.Object) {
		return
	}
	for s.Next() == jsonscan.Key {
		if string(s.Decoded()) == "content" && s.Peek() == jsonscan.Array {
			if raw := s.Raw(); len(raw) > 2 {
				a.Logprobs = bytes.TrimSpace(raw[1 : len(raw)-1])
			}
		} else {
			s.Skip()
		}
	}
}

func (a *Answer) message(s *jsonscan.Scanner) {
	if !s.Enter(jsonscan.Object) {
		return
	}
	for s.Next() == jsonscan.Key {
		switch string(s.Decoded()) {
		case "content":
			a.Content = text(s)
		case "refusal":
			a.Refusal = text(s)
		case "reasoning_content", "reasoning": // one text, under the names that clients know
			if t := text(s); len(t) > 0 {
				a.Reasoning = t
			}
		case "tool_calls":
			a.calls(s)
		default:
			s.Skip()
		}
	}
}

func (a *Answer) calls(s *jsonscan.Scanner) {
	if !s.Enter(jsonscan.Array) {
		return
	}
	for s.Item() {
		p := Piece{Index: len(a.Calls)}
		if !s.Enter(jsonscan.Object) {
			continue
		}
		for s.Next() == jsonscan.Key {
			switch string(s.Decoded()) {
			case "index":
				p.Index = count(s)
			case "id":
				p.ID = text(s)
			case "function":
				p.function(s)
			default:
				s.Skip()
			}
		}
		a.Calls = append(a.Calls, p)
	}
}

func (p *Piece) function(s *jsonscan.Scanner) {
	if !s.Enter(jsonscan.Object) {
		return
	}
	for s.Next() == jsonscan.Key {
		switch string(s.Decoded()) {
		case "name":
			p.Name = text(s)
		case "arguments":
			p.Arguments = text(s)
		default:
			s.Skip()
		}
	}
}

var (
	prefix = []byte("data:")
	done   = []byte("[DONE]")
)

// Events yields the data of a run of whole server-sent events, up to [DONE]. Lines end in LF, CRLF
// or CR; comments and other fields are left out.
func Events(run []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for len(run) > 0 {
			line := run
			if i := bytes.IndexAny(run, "\r\n"); i >= 0 {
				line, run = run[:i], run[i+1:]
			} else {
				run = nil
			}
			data, ok := bytes.CutPrefix(line, prefix)
			if data = bytes.TrimPrefix(data, []byte(" ")); ok && len(data) > 0 && !yield(data) {
				return
			}
		}
	}
}

// IsDone reports whether an event's data ends the stream.
func IsDone(data []byte) bool { return bytes.HasPrefix(data, done) }
