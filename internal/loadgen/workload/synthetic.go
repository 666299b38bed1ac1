package workload

import (
	"context"
	"sync/atomic"
)

// Shape is the lengths of prompts that come from no trace.
type Shape struct {
	In, Out Dist // tokens of a prompt, without its prefix, and of an answer
	// Prefix tokens come before each prompt: one of Groups texts for a Share of the prompts,
	// for the others a text of their own.
	Prefix int
	Groups int
	Share  float64 // 0..1
}

// Synthetic is requests that have nothing in common but a prefix. It never ends.
type Synthetic struct {
	unrelated
	text  *Text
	shape Shape
	next  atomic.Uint64
}

// NewSynthetic starts at the seed's first request.
func NewSynthetic(text *Text, shape Shape) *Synthetic {
	return &Synthetic{text: text, shape: shape}
}

// Next makes the next request.
func (s *Synthetic) Next(context.Context) (*Item, bool) {
	number := s.next.Add(1) - 1
	rng := s.text.rng(streamPrompt, number)
	in, out := s.shape.In.Tokens(rng, 1), s.shape.Out.Tokens(rng, 1)
	it := &Item{In: in + s.shape.Prefix, Out: out}
	prefix := s.shape.prefix(s.text, number, rng.Float64())
	dst := make([]byte, 0, s.text.bytes(it.In))
	dst = append(dst, prefix...)
	own := max(1, in-s.text.Overhead)
	it.Messages = []Message{{Role: "user", Content: s.text.append(dst, rng, s.text.count(own))}}
	return it, true
}

// prefix is the text before a prompt; draw, from 0 to 1, decides whether it is shared.
func (s *Shape) prefix(t *Text, number uint64, draw float64) []byte {
	if s.Prefix == 0 {
		return nil
	}
	which := number % uint64(s.Groups)
	if draw >= s.Share {
		which = number | 1<<59
	}
	return t.append(make([]byte, 0, t.bytes(s.Prefix)), t.rng(streamPrefix, which), t.count(s.Prefix))
}
