package kvconn

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Metrics are this package's counters; one value serves a process's receiver
// and its server.
type Metrics struct{}

// NewMetrics registers the metrics with reg, which may be nil (then they are
// counted and shown nowhere).
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) { return &Metrics{}, nil }

// Dest is one destination block: its id in the receiver's pool and the
// generation under which the receiver holds it.
type Dest struct {
	Block      int32
	Generation uint32
}

// UnitSet is a set of (layer, destination block index) pairs.
type UnitSet struct{}

// TicketSpec is what a receiver asks for.
type TicketSpec struct {
	Link      ticket.Link
	RequestID string
	Tokens    []int32 // the prompt; may be empty when LeaseID names it
	Positions int     // positions to move, from 0; 0 means len(Tokens)
	First     []byte  // opaque to kvconn: how to sample the first token(s)
	Dest      []Dest  // blocks for positions 0..Positions-1, in order
	// Have tells which Dest blocks already hold their rows: nil, or one entry
	// a block. A partly filled last block always moves and must be false.
	Have []bool
	// Stored resumes a former ticket: units that its Incoming.Stored reported,
	// of the same positions in the same Dest blocks.
	Stored   UnitSet
	LeaseID  string    // foreign exchange: names the kept blocks; "" is native
	Deadline time.Time // zero: Config.TicketTimeout from now
	Sink     Sink
}

// Receiver is a pool of sessions to senders.
type Receiver struct{}

// NewReceiver makes a pool that dials over tr.
func NewReceiver(cfg Config, tr Transport, log *slog.Logger, m *Metrics) (*Receiver, error) {
	return nil, errors.New("draft")
}

// Open returns a live session to the sender at addr, and dials one when there
// is none. A zero expect.ID or expect.Epoch is not checked.
func (r *Receiver) Open(ctx context.Context, addr string, expect PeerID) (*Session, error) {
	return nil, errors.New("draft")
}

// Ledger lists the tickets that are not over.
func (r *Receiver) Ledger() []Entry { return nil }

// Close ends every session and waits for their goroutines.
func (r *Receiver) Close(ctx context.Context) error { return nil }

// Session is one receiver's binding to one sender.
type Session struct{}

// Peer returns the sender's identity.
func (s *Session) Peer() Identity { return Identity{} }

// Done is closed when the session is over.
func (s *Session) Done() <-chan struct{} { return nil }

// Request sends a ticket. It does not wait for the answer: Incoming.Wait does.
func (s *Session) Request(ctx context.Context, spec TicketSpec) (*Incoming, error) {
	return nil, errors.New("draft")
}

// Incoming is a ticket on the receiver's side.
type Incoming struct{}

// Commit is the sender's word that the prompt is computed.
type Commit struct {
	Payload []byte // opaque: what the sender's handler gave to Outgoing.Commit
	Units   int    // units that the sender pushed
}

// ID is the ticket id, unique in its session.
func (i *Incoming) ID() uint64 { return 0 }

// Done is closed when the ticket is over: complete, failed or revoked.
func (i *Incoming) Done() <-chan struct{} { return nil }

// Wait returns when every missing block of every layer is stored and verified
// and the commit has come, or when the ticket fails (*Error).
func (i *Incoming) Wait(ctx context.Context) (Commit, error) { return Commit{}, errors.New("draft") }

// Revoke is the fence: once it has returned nil, no Store of this ticket runs
// or will run.
func (i *Incoming) Revoke(ctx context.Context) error { return nil }

// Stored returns the units that are stored and verified so far.
func (i *Incoming) Stored() UnitSet { return UnitSet{} }

// Ticket is a receiver's request as the sender's handler sees it.
type Ticket struct {
	ID              uint64
	Link            ticket.Link
	RequestID       string
	Tokens          []int32
	Positions       int
	First           []byte
	Dest            []Dest
	DestBlockTokens int
	LeaseID         string
	Deadline        time.Time
}

// Handler answers tickets on the sender's side.
type Handler interface {
	// OnTicket runs on a goroutine of its own, one a ticket; Serve waits for
	// all of them. ctx ends with the ticket. It should call o.Accept soon,
	// then Push as layers are computed, then Commit; or Fail at any point.
	OnTicket(ctx context.Context, o *Outgoing)
}

// Server is the sender's side: it accepts sessions and answers tickets.
type Server struct{}

// NewServer makes a server.
func NewServer(cfg Config, log *slog.Logger, m *Metrics) (*Server, error) {
	return nil, errors.New("draft")
}

// Serve accepts on ln until ctx ends, then ends every session and waits.
func (s *Server) Serve(ctx context.Context, ln net.Listener, h Handler) error {
	return errors.New("draft")
}

// Drain tells every receiver to send no more tickets, and waits until those
// there are over or ctx ends.
func (s *Server) Drain(ctx context.Context) error { return nil }

// Ledger lists the tickets that are not over.
func (s *Server) Ledger() []Entry { return nil }

// Outgoing is a ticket on the sender's side.
type Outgoing struct{}

// Ticket returns what the receiver asked for; read only.
func (o *Outgoing) Ticket() *Ticket { return nil }

// Peer returns the receiver's identity.
func (o *Outgoing) Peer() Identity { return Identity{} }

// Has tells whether the receiver holds this destination block of this layer.
func (o *Outgoing) Has(layer, index int) bool { return false }

// Accept takes the ticket on; src is read until Done is closed.
func (o *Outgoing) Accept(src Source) error { return errors.New("draft") }

// Push queues destination blocks of one layer that are ready. It never blocks
// and skips what the receiver has.
func (o *Outgoing) Push(layer int, ready []int) {}

// Commit says that everything has been pushed; payload goes to the receiver.
func (o *Outgoing) Commit(payload []byte) {}

// Fail ends the ticket and tells the receiver why.
func (o *Outgoing) Fail(outcome ticket.Outcome, msg string) {}

// Done is closed when the ticket is over and src will not be read again:
// the moment to free the blocks.
func (o *Outgoing) Done() <-chan struct{} { return nil }

// Err is nil until Done, and after it when the receiver has everything.
func (o *Outgoing) Err() error { return nil }
