package sim

import (
	"time"

	"github.com/xpyd/xpyd/internal/requestlog"
)

// Logged is a request log as a load.
type Logged struct {
	Requests []Request // by time
	Lines    []*requestlog.Request
	// What is not in there: requests without an answer's token, whose length nobody knows; those of several
	// choices; and those of more tokens than workers take.
	Empty, Several, Long int
}

// FromLog makes a load of a log's requests of at most so many tokens, so many times as fast.
func FromLog(log *requestlog.Log, speed float64, most int) *Logged {
	l, seen := &Logged{}, map[requestlog.Hash]int{}
	first := time.Duration(0)
	for i := range log.Requests {
		q := &log.Requests[i]
		switch {
		case q.Prompt < 1 || q.Output < 1:
			l.Empty++
			continue
		case q.Choices > 1:
			l.Several++
			continue
		case q.Prompt+q.Output > most:
			l.Long++
			continue
		}
		if len(l.Lines) == 0 {
			first = time.Duration(q.Arrived)
		}
		at := time.Duration(float64(time.Duration(q.Arrived)-first) / speed)
		l.Lines = append(l.Lines, q)
		l.Requests = append(l.Requests, Request{At: at, Prompt: logged(log, q, seen, uint64(i)), Output: q.Output})
	}
	return l
}

// logged is a prompt of which the log has the beginnings. Where they end is known in bytes of the text; in
// tokens the first prompt that has one decides, by its own length, so that all who have it share the same tokens.
func logged(log *requestlog.Log, q *requestlog.Request, seen map[requestlog.Hash]int, nth uint64) Prompt {
	offsets := log.Ends(q)
	p := Prompt{tokens: q.Prompt, nth: nth, blocks: make([]uint64, len(offsets)), ends: make([]int, len(offsets))}
	byteAt, tokenAt := 0, 0 // of the last end that was known
	for i, offset := range offsets {
		end, ok := seen[q.Prefix[i]]
		if ok {
			byteAt, tokenAt = offset, min(end, q.Prompt)
			end = tokenAt
		} else {
			if end = q.Prompt; q.Bytes > byteAt {
				end = tokenAt + (q.Prompt-tokenAt)*(offset-byteAt)/(q.Bytes-byteAt)
			}
			seen[q.Prefix[i]] = end
		}
		if p.blocks[i], p.ends[i] = uint64(q.Prefix[i]), end; i > 0 {
			p.ends[i] = max(end, p.ends[i-1])
		}
	}
	return p
}

// Seen is what the client of a logged request saw.
func Seen(q *requestlog.Request) Outcome {
	at := time.Duration(q.Arrived)
	o := Outcome{At: at, First: at + time.Duration(q.TTFT), Last: at + time.Duration(q.Took), Prompt: q.Prompt, Tokens: q.Output, Longest: time.Duration(q.Gap),
		Failed: q.Broken || q.Status != 200 && q.Status != statusLeft}
	return o.As(q)
}

// statusLeft is a request's whose client left, which then saw as many tokens as the log says.
const statusLeft = 499

// As is the outcome as the client of a logged request sees it: an answer in one piece has no first token.
func (o Outcome) As(q *requestlog.Request) Outcome {
	if !q.Stream {
		o.First, o.Longest, o.Tokens = o.At, 0, min(o.Tokens, 1)
	}
	return o
}
