package kvconn

import (
	"fmt"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Side is an end of a ticket.
type Side string

// Sides.
const (
	SideReceiver Side = "receiver"
	SideSender   Side = "sender"
)

// Entry is one ticket that this process still holds.
type Entry struct {
	Side      Side           `json:"side"`
	TicketID  uint64         `json:"ticket_id"`
	Link      string         `json:"link"`
	RequestID string         `json:"request_id"`
	Peer      PeerID         `json:"peer"`
	State     string         `json:"state"` // "ticketed", "accepted", "committed", "revoking", "ending"
	Phase     Phase          `json:"phase"`
	Since     time.Time      `json:"since"`
	Blocks    int            `json:"blocks"`  // destination blocks named by the ticket
	Missing   int            `json:"missing"` // units (block of a layer) not yet there, or not yet sent
	Outcome   ticket.Outcome `json:"outcome,omitempty"`
	Why       string         `json:"why"` // what it waits for, or why it failed
}

// States of a ticket in the ledger.
const (
	stateTicketed  = "ticketed"
	stateAccepted  = "accepted"
	stateCommitted = "committed"
	stateRevoking  = "revoking" // receiver: failed, and the peer has not confirmed that it stopped
	stateEnding    = "ending"   // sender: over, and its blocks are still being read
)

// phaseOf is how far a ticket is.
func phaseOf(ended, committed, accepted bool) Phase {
	switch {
	case ended:
		return PhaseRelease
	case committed:
		return PhaseCommit
	case accepted:
		return PhaseData
	}
	return PhaseTicket
}

// state sets how far the ticket is, and what it waits for or why it failed.
func (e *Entry) state(err *Error, ended, committed, accepted bool) {
	e.Phase = phaseOf(ended, committed, accepted)
	receives := e.Side == SideReceiver
	switch {
	case ended && receives:
		e.State, e.Why = stateRevoking, "the peer may still send"
	case ended:
		e.State, e.Why = stateEnding, "a write of its blocks is under way, or its handler runs"
	case committed && receives:
		e.State, e.Why = stateCommitted, fmt.Sprintf("%d blocks of a layer have not arrived whole", e.Missing)
	case committed:
		e.State, e.Why = stateCommitted, fmt.Sprintf("%d blocks of a layer to write; then the receiver's word that it has all", e.Missing)
	case accepted && receives:
		e.State, e.Why = stateAccepted, fmt.Sprintf("the peer computes and sends; %d blocks of a layer to come", e.Missing)
	case accepted:
		e.State, e.Why = stateAccepted, fmt.Sprintf("the prompt runs; %d blocks of a layer to write", e.Missing)
	case receives:
		e.State, e.Why = stateTicketed, "the peer has not accepted it"
	default:
		e.State, e.Why = stateTicketed, "its handler has not accepted it"
	}
	if err != nil {
		e.Outcome, e.Why, e.Phase = err.Outcome, err.Err.Error(), err.Phase
	}
}
