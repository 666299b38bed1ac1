package openai

import (
	"strconv"
	"time"
)

// Timing is what a worker tells of a request's time, under the names of vLLM's per-request metrics.
type Timing struct {
	Queue  time.Duration // until it was computed
	First  time.Duration // from then to its first token
	Decode time.Duration // from its first token to its last
	Tokens int           // at least one
}

func (u *Usage) appendTiming(dst []byte) []byte {
	if u.Timing == nil {
		return dst
	}
	return u.Timing.append(append(dst, `,"metrics":`...))
}

// append writes t in milliseconds. The mean between tokens is left out where there is only one.
func (t *Timing) append(dst []byte) []byte {
	ms := func(before string, d time.Duration) {
		dst = strconv.AppendFloat(append(dst, before...), float64(max(d, 0))/float64(time.Millisecond), 'f', 3, 64)
	}
	ms(`{"time_to_first_token_ms":`, t.First)
	ms(`,"generation_time_ms":`, t.Decode)
	ms(`,"queue_time_ms":`, t.Queue)
	if t.Tokens > 1 {
		ms(`,"mean_itl_ms":`, t.Decode/time.Duration(t.Tokens-1))
	}
	if computed := t.First + t.Decode; computed > 0 {
		dst = strconv.AppendFloat(append(dst, `,"tokens_per_second":`...), float64(t.Tokens)/computed.Seconds(), 'f', 3, 64)
	}
	return append(dst, '}')
}
