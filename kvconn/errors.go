package kvconn

import (
	"context"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Phase is how far a session or a ticket had come.
type Phase string

// Phases, in order.
const (
	PhaseDial      Phase = "dial"
	PhaseHandshake Phase = "handshake"
	PhaseTicket    Phase = "ticket"  // sent, not accepted
	PhaseData      Phase = "data"    // accepted, no commit yet
	PhaseCommit    Phase = "commit"  // committed, blocks still missing
	PhaseRelease   Phase = "release" // all there; the sender may free
	PhaseIdle      Phase = "idle"    // a session without tickets
)

// Error is every failure that leaves this package.
type Error struct {
	Op      string // "open", "request", "wait", "revoke", "send", "serve"
	Peer    PeerID
	Phase   Phase
	Outcome ticket.Outcome
	Err     error
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s %s: %s: %s: %v", e.Op, e.Peer, e.Phase, e.Outcome, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// OutcomeOf returns the outcome that err carries, or fallback if it carries none. A nil
// error is Done.
func OutcomeOf(err error, fallback ticket.Outcome) ticket.Outcome {
	if err == nil {
		return ticket.Done
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Outcome
	}
	return fallback
}

// ended is the outcome of a wait that ctx has ended.
func ended(ctx context.Context) ticket.Outcome {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return ticket.Late
	}
	return ticket.Cancelled
}

// orderly turns a hang-up (EOF, or a reset when bytes crossed it) that
// interrupted nothing into an ordinary end.
func orderly(o ticket.Outcome, err error, tickets int) ticket.Outcome {
	if o == ticket.Dead && !errors.Is(err, errSilent) && tickets == 0 {
		return ticket.Done
	}
	return o
}

// Incompatible names the field of the handshake that keeps two peers apart. Both sides
// get one, each with its own value in Ours.
type Incompatible struct {
	Field        string // "protocol", "model_fingerprint", "layout.groups[0].dtype", "epoch"
	Ours, Theirs string
}

func (e *Incompatible) Error() string {
	return fmt.Sprintf("%s differs: ours %q, theirs %q", e.Field, e.Ours, e.Theirs)
}

// ErrDigest is returned by a Sink for rows whose digest does not match. The session
// asks for them again, and gives up after Config.Resends tries.
var ErrDigest = errors.New("digest mismatch")

// ErrNoRoom is returned by a StagedWindow that has no room for a push yet.
var ErrNoRoom = errors.New("no room for a push yet")

// ErrBroken is wrapped by errors of a StagedWindow that can push nothing more.
var ErrBroken = errors.New("the way to the peer is broken")

var (
	errHeld     = errors.New("memory is held")
	errSilent   = errors.New("peer is silent")
	errStalled  = errors.New("peer does not take bytes")
	errClosed   = errors.New("closed")
	errDraining = errors.New("peer is draining")
	errRevoked  = errors.New("revoked")
	errDeadline = errors.New("deadline passed")
)
