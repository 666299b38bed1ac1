package kvconn

import (
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Side tells the two ends of a ticket apart.
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
	Why       string         `json:"why,omitempty"`
}
