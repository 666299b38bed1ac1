// Package workload makes the prompts of a load test: synthetic ones with lengths from a
// distribution, those of a trace with its shared prefixes, and conversations, whose turns contain
// the earlier answers. The same seed gives the same bytes.
package workload

import (
	"context"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/loadgen/client"
)

// Item is one request to make.
type Item struct {
	// At is when a trace's request is due, from the trace's start.
	At time.Duration
	// Messages are the chat. A completion's prompt is their contents, joined.
	Messages []Message
	In       int // intended tokens of the prompt; 0: unknown
	Out      int // max_tokens
	Turn     int // of a conversation, from 1; 0 without one

	talk  *talk
	entry int // of Chains
}

// Message is one message of a chat.
type Message struct {
	Role string // system, user or assistant
	// Content is raw JSON: the inside of a string or, with token ids, of an array.
	Content []byte
}

// BlockTokens is the size of the blocks that a Mooncake trace's hash ids name.
const BlockTokens = 512

// unrelated is embedded by sources whose requests depend on no answer.
type unrelated struct{}

// Done does nothing.
func (unrelated) Done(*Item, *client.Result) {}

// queue hands out work. Finished work may add more.
type queue struct {
	mu     sync.Mutex
	wake   sync.Cond
	active int // handed out and not over
}

// lock waits for something to hand out and returns with mu held. It returns false when nothing
// will come any more or ctx ends.
func (q *queue) lock(ctx context.Context, empty func() bool) bool {
	stop := context.AfterFunc(ctx, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.wake.Broadcast()
	})
	defer stop()
	q.mu.Lock()
	for empty() && q.active > 0 && ctx.Err() == nil {
		q.wake.Wait()
	}
	if empty() || ctx.Err() != nil {
		return false
	}
	q.active++
	return true
}

// over ends work that was handed out; add puts in what follows it.
func (q *queue) over(add func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.active--
	add()
	q.wake.Broadcast()
}

// WaitUntil waits for a time; false if ctx ends first.
func WaitUntil(ctx context.Context, at time.Time) bool {
	wait := time.Until(at)
	if wait <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
