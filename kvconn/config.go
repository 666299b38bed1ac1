package kvconn

import (
	"errors"
	"fmt"
	"time"

	"github.com/xpyd/xpyd/internal/trust"
)

// Config is what both sides of the connector need. Start from DefaultConfig.
// Every wait of this package ends by one of these durations.
type Config struct {
	// Identity is what this worker says about itself; see Identity.
	Identity Identity

	// Ring holds the fleet's secrets: both ends of every connection prove that they
	// have one of them. nil: no proof is asked of peers.
	Ring *trust.Ring

	// Shared describes this worker's pool, if it lies in memory that a sender on
	// the same machine may write to; nil: rows are only ever received.
	Shared *Shared

	// ProtocolMin and ProtocolMax bound the wire versions offered. They are
	// the package's own unless a test or a staged upgrade narrows them.
	ProtocolMin, ProtocolMax int

	// Convert allows rows whose dtype differs from the peer's: the sender converts
	// them. Numerics may then differ, so the same tokens are no longer promised. In
	// force when both sides set it.
	Convert bool
	// Unchecked allows digests to go unchecked on arrival, to measure what the checks
	// cost. In force when both sides set it.
	Unchecked bool

	// BulkConns is how many bulk connections a receiver dials for a session.
	// One fills loopback and 10 GbE; faster links want 2 to 8.
	BulkConns int

	// DialTimeout bounds one connect.
	DialTimeout time.Duration
	// HandshakeTimeout bounds the handshake of one connection, both sides,
	// and how long a sender waits for a session's bulk connections.
	HandshakeTimeout time.Duration
	// KeepAlive is how often each side sends something on an idle connection, and the
	// grain of the ticket deadlines below.
	KeepAlive time.Duration
	// PeerSilence is how long a connection may be silent, or take no bytes,
	// before its peer counts as dead. At least three KeepAlives.
	PeerSilence time.Duration
	// AcceptTimeout bounds the time from sending a ticket to its acceptance.
	AcceptTimeout time.Duration
	// TicketTimeout bounds a whole ticket when the caller gives no deadline,
	// and caps the deadline that a peer may ask for.
	TicketTimeout time.Duration
	// RepairTimeout is how long a committed ticket may make no progress
	// before its missing blocks are asked for again.
	RepairTimeout time.Duration
	// RevokeTimeout bounds the peer's acknowledgement of a revoke; then the session
	// ends.
	RevokeTimeout time.Duration
	// IdleTimeout closes a session that carried no ticket for so long.
	IdleTimeout time.Duration

	// Resends is how often one block of one layer is asked for again before
	// the ticket ends as Corrupt.
	Resends int
	// MaxTickets bounds the tickets of one session at a time.
	MaxTickets int
	// MaxSessions bounds the sessions of a server, and the handshakes under way at a
	// time.
	MaxSessions int
	// BatchBytes is how much a bulk writer gathers before one write; at most this plus
	// one block of one layer is in flight on a connection.
	BatchBytes int
}

// DefaultConfig returns the settings that DESIGN.md's deadline table lists.
func DefaultConfig() Config {
	return Config{
		ProtocolMin:      ProtocolMin,
		ProtocolMax:      ProtocolMax,
		BulkConns:        1,
		DialTimeout:      time.Second,
		HandshakeTimeout: 2 * time.Second,
		KeepAlive:        250 * time.Millisecond,
		PeerSilence:      time.Second,
		AcceptTimeout:    5 * time.Second,
		TicketTimeout:    5 * time.Minute,
		RepairTimeout:    500 * time.Millisecond,
		RevokeTimeout:    2 * time.Second,
		IdleTimeout:      2 * time.Minute,
		Resends:          3,
		MaxTickets:       1024,
		MaxSessions:      256,
		BatchBytes:       1 << 20,
	}
}

const maxBulkConns = 64

// Validate reports everything that is wrong with the settings.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Identity.ID == "" {
		bad("identity: id is empty")
	}
	for _, s := range []string{c.Identity.ID, c.Identity.ModelFingerprint, c.Identity.TokenizerFingerprint, c.Identity.Numerics, c.Identity.Build} {
		if len(s) > maxString {
			bad("identity: a field is over %d bytes", maxString)
		}
	}
	if err := c.Identity.Layout.Validate(); err != nil {
		errs = append(errs, err)
	} else if err := c.Shared.validate(c.Identity.Layout); err != nil {
		errs = append(errs, err)
	}
	if c.ProtocolMin < 1 || c.ProtocolMax < c.ProtocolMin || c.ProtocolMax > 255 {
		bad("protocol range %d-%d is not inside 1-255", c.ProtocolMin, c.ProtocolMax)
	}
	for _, d := range []struct {
		name string
		d    time.Duration
	}{
		{"dial_timeout", c.DialTimeout}, {"handshake_timeout", c.HandshakeTimeout}, {"keep_alive", c.KeepAlive},
		{"accept_timeout", c.AcceptTimeout}, {"ticket_timeout", c.TicketTimeout}, {"repair_timeout", c.RepairTimeout},
		{"revoke_timeout", c.RevokeTimeout}, {"idle_timeout", c.IdleTimeout},
	} {
		if d.d <= 0 {
			bad("%s must be positive", d.name)
		}
	}
	if c.PeerSilence < 3*c.KeepAlive {
		bad("peer_silence %v is under three keep_alives of %v", c.PeerSilence, c.KeepAlive)
	}
	for _, n := range []struct {
		name         string
		n, low, high int
	}{
		{"bulk_conns", c.BulkConns, 1, maxBulkConns}, {"resends", c.Resends, 0, 100}, {"max_tickets", c.MaxTickets, 1, 1 << 20},
		{"max_sessions", c.MaxSessions, 1, 1 << 16}, {"batch_bytes", c.BatchBytes, 1, 64 << 20},
	} {
		if n.n < n.low || n.n > n.high {
			bad("%s %d is not in %d..%d", n.name, n.n, n.low, n.high)
		}
	}
	return errors.Join(errs...)
}
