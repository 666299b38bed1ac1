package workload

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/client"
)

// TalkShape is what conversations look like.
type TalkShape struct {
	Shape      // In and Out are of a turn; the prefix is a system message
	Turns Dist // of a conversation
	Think Dist // time between an answer and the next turn
	Open  int  // conversations open at once: the working set
	Total int  // conversations in all; 0: no end
	Chat  bool // messages; else one text that grows
}

// Talks is conversations. Next takes the one that has waited longest, so that with more open
// conversations than clients each idles before its next turn.
type Talks struct {
	text  *Text
	shape TalkShape

	queue
	open  []*talk // ready for a turn, the longest waiting first
	begun int     // conversations so far
}

// talk is one conversation, owned by the queue or by its current turn.
type talk struct {
	number   uint64
	rng      *rand.Rand
	turns    int
	turn     int // last handed out
	messages []Message
	tokens   int       // of all messages, as far as known
	ready    time.Time // when the next turn may go
}

// NewTalks opens the first conversations.
func NewTalks(text *Text, shape TalkShape) *Talks {
	t := &Talks{text: text, shape: shape}
	t.wake.L = &t.mu
	for range shape.Open {
		if c := t.begin(); c != nil {
			t.open = append(t.open, c)
		}
	}
	return t
}

// begin opens a conversation; nil if there have been enough. mu is held.
func (t *Talks) begin() *talk {
	if t.shape.Total > 0 && t.begun == t.shape.Total {
		return nil
	}
	number := uint64(t.begun)
	t.begun++
	c := &talk{number: number, rng: t.text.rng(streamTalk, number)}
	c.turns = t.shape.Turns.Tokens(c.rng, 1)
	if prefix := t.shape.prefix(t.text, number, c.rng.Float64()); prefix != nil {
		c.messages = append(c.messages, Message{Role: "system", Content: prefix})
		c.tokens = t.shape.Prefix
	}
	c.tokens += t.text.Overhead
	return c
}

// Next waits for a conversation and its user's thinking time, and makes the next turn. It returns
// false when all conversations are over or ctx ends.
func (t *Talks) Next(ctx context.Context) (*Item, bool) {
	ok := t.lock(ctx, func() bool { return len(t.open) == 0 })
	if !ok {
		t.mu.Unlock()
		return nil, false
	}
	c := t.open[0]
	t.open[0] = nil // let it be collected
	t.open = t.open[1:]
	t.mu.Unlock()
	if !WaitUntil(ctx, c.ready) {
		t.over(func() {})
		return nil, false
	}
	c.turn++
	in, out := t.shape.In.Tokens(c.rng, 1), t.shape.Out.Tokens(c.rng, 1)
	content := make([]byte, 0, t.text.bytes(in))
	if !t.shape.Chat && len(c.messages) > 0 {
		content = append(content, ' ')
	}
	rng := t.text.rng(streamTurn, c.number<<20^uint64(c.turn))
	content = append(content, t.text.append(nil, rng, t.text.count(in))...)
	c.messages = append(c.messages, Message{Role: "user", Content: content})
	c.tokens += in
	return &Item{Messages: c.messages, In: c.tokens, Out: out, Turn: c.turn, talk: c}, true
}

// Done adds a turn's answer to its conversation. After a failed or last turn another one begins.
func (t *Talks) Done(it *Item, res *client.Result) {
	t.over(func() {
		c := it.talk
		if res.OK() && c.turn < c.turns {
			c.messages = append(c.messages, Message{Role: "assistant", Content: append([]byte(nil), res.Answer...)})
			c.tokens += res.Tokens()
		} else if c = t.begin(); c == nil {
			return
		}
		c.ready = time.Now().Add(t.shape.Think.Time(c.rng))
		t.open = append(t.open, c)
	})
}
