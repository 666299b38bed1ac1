package client

import (
	"bytes"
	"errors"
	"io"
	"time"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

var errTooMany = errors.New("more than 2^20 chunks in one answer")

// stream reads an event stream to its end. Events that arrive together have the same time.
func (c *Client) stream(sc *scratch, req *Request, res *Result) bool {
	if ct := sc.header.ContentType(); !bytes.HasPrefix(ct, []byte("text/event-stream")) {
		text, err := sc.read(maxEvent)
		res.Kind, res.Message = Malformed, clip("Content-Type "+string(ct)+", not text/event-stream: "+string(text))
		return err == nil
	}
	sc.sse.reset()
	t := streamed{res: res, answer: res.answerBuf(req)}
	for {
		p, err := sc.body.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			res.broke(err, Truncated)
			return false
		}
		now := time.Since(res.Start)
		for {
			data, rest, named, ok, err := sc.sse.next(p)
			if err != nil {
				res.fail(Malformed, err)
				return false
			}
			if !ok {
				break
			}
			p = rest
			if err := t.event(&sc.event, data, named, now); err != nil {
				res.fail(Malformed, err)
				return false
			}
		}
	}
	t.over()
	return true
}

// streamed is the state of a stream.
type streamed struct {
	res            *Result
	answer         *[]byte
	finished, done bool // a finish_reason came; [DONE] came
}

// event handles the data of an event that arrived at now.
func (t *streamed) event(e *event, data []byte, named bool, now time.Duration) error {
	res := t.res
	if string(data) == "[DONE]" {
		t.done = true
		return nil
	}
	if err := e.parse(data, t.answer); err != nil {
		return err
	}
	if e.err == nil && named {
		e.err = data
	}
	if e.err != nil && res.Kind == "" {
		res.Kind, res.Message = ErrorEvent, errorText(e.err)
	}
	if e.hasUsage {
		res.HasUsage, res.Usage = true, e.usage
	}
	if e.tokens {
		if res.Chunks == 0 {
			res.FirstToken = now
		} else {
			if len(res.Gaps) == maxGaps {
				return errTooMany
			}
			res.Gaps = append(res.Gaps, now-res.LastToken)
		}
		res.Chunks++
		res.LastToken = now
	} else if e.finish && res.Chunks == 0 && !t.finished { // it ended with the first token
		res.FirstToken, res.LastToken = now, now
	}
	t.finished = t.finished || e.finish
	return nil
}

// over judges the stream at its end.
func (t *streamed) over() {
	res := t.res
	switch {
	case res.Kind != "":
	case !t.done && !t.finished:
		res.Kind, res.Message = Truncated, "the stream ended "+res.phase()+", without finish_reason and [DONE]"
	case res.Chunks == 0 && res.Usage.Completion == 0:
		res.Kind, res.Message = Empty, "an answer without a token"
	}
}

// errorText is the message in the raw JSON of an error, or else the JSON.
func errorText(raw []byte) string {
	var s jsonscan.Scanner
	s.Reset(raw)
	for ok := s.Enter(jsonscan.Object); ok && s.Next() == jsonscan.Key; {
		if string(s.Decoded()) != "message" {
			s.Skip()
		} else if s.Enter(jsonscan.String) {
			return clip(string(s.Text()))
		}
	}
	return clip(string(raw))
}
