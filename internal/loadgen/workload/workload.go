// Package workload makes the prompts of a load test: synthetic ones with
// lengths from a distribution, those of a trace with the trace's shared
// prefixes, and conversations whose next turn holds the last answer. All of it
// is made from a seed: the same seed, the same bytes.
package workload

import (
	"time"
)

// Item is one request to make.
type Item struct {
	// At is when a trace's request is due, from the trace's start.
	At time.Duration
	// Messages are the chat; a completion's prompt is their content, one after
	// the other.
	Messages []Message
	In       int // tokens that the prompt is meant to have; 0: not known
	Out      int // tokens that the answer may have
	Turn     int // of a conversation, from 1; 0 without one

	talk  *talk
	entry int // of Chains
}

// Message is one message of a chat.
type Message struct {
	Role string // system, user or assistant
	// Content is raw JSON: the inside of a string or, with token ids, of an
	// array.
	Content []byte
}

// BlockTokens is the size of the blocks that a Mooncake trace's hash ids name.
const BlockTokens = 512
