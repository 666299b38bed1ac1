// Package ticket holds the few types that the router, the workers and the
// connector share about one KV handoff. It has no behaviour beyond encoding.
package ticket

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
)

// Link names one attempt. It is random, fresh (a retry never reuses one) and never derived
// from a client's id.
type Link [16]byte

// NewLink returns a random link key.
func NewLink() Link {
	var l Link
	rand.Read(l[:]) // never fails (crypto/rand)
	return l
}

func (l Link) String() string { return hex.EncodeToString(l[:]) }

// ParseLink reads the 32 hex digits that String writes.
func ParseLink(s string) (Link, error) {
	var l Link
	if len(s) != 32 {
		return l, fmt.Errorf("link key: want 32 hex digits, have %d characters", len(s))
	}
	if _, err := hex.Decode(l[:], []byte(s)); err != nil {
		return l, fmt.Errorf("link key: %w", err)
	}
	return l, nil
}

// Outcome is how a handoff ended, as the router sees it.
type Outcome string

// Outcomes.
const (
	Done         Outcome = "done"
	NoSpace      Outcome = "no_space"     // decode has no blocks, or prefill has none
	Late         Outcome = "late"         // a deadline or a lease passed
	Dead         Outcome = "dead"         // the peer's process or connection is gone
	Incompatible Outcome = "incompatible" // the handshake refused the peer
	Corrupt      Outcome = "corrupt"      // digests failed and repair was exhausted
	Cancelled    Outcome = "cancelled"    // the other side gave up (client left)
	Refused      Outcome = "refused"      // unknown ticket, bad secret, bad request
	Invalid      Outcome = "invalid"      // the model's output is not a number, as it would be anywhere
	Shed         Outcome = "shed"         // prefill cannot keep what is promised of the first token; others have no time to spare either
)

// Retryable reports whether the same request may succeed on another pair.
func (o Outcome) Retryable() bool {
	switch o {
	case NoSpace, Late, Dead, Incompatible, Corrupt:
		return true
	}
	return false
}
