package kvconn

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// Session is one receiver's binding to one run of one sender. run owns its goroutines:
// one reader a connection, and one that writes control messages and enforces deadlines.
// Locks: mu, or one Incoming's mu, never both at once.
type Session struct {
	half
	layers    []kvlayout.Layer // of our pool
	unchecked bool             // both sides said that digests need not be checked
	bulk      []*frameConn
	beats     []atomic.Int64 // by bulk connection: when its last beat came, Unix time in ns
	edge      *edge          // what came of this peer
	lent      *lent          // our memory that the peer writes into; nil: it sends

	mu       sync.Mutex
	tickets  map[uint64]*Incoming
	lastID   uint64
	draining bool
	used     time.Time // last Open, Request or end of a ticket
	err      *Error    // why the session ended
}

func newSession(r *Receiver, h *hello, ctl *frameConn, bulk []*frameConn, loan *lent) *Session {
	s := &Session{half: newHalf(&r.cfg, r.log, r.m, SideReceiver, h.Identity, h.Session, ctl),
		layers: r.layers, unchecked: r.cfg.Unchecked && h.Unchecked, bulk: bulk, lent: loan,
		beats: make([]atomic.Int64, len(bulk)), tickets: map[uint64]*Incoming{}, used: time.Now()}
	s.quit = s.fail
	s.side.sessions.Inc()
	s.edge = r.m.edges.open(h.Identity.ID)
	return s
}

// came counts bytes of rows that are stored.
func (s *Session) came(bytes int) {
	s.side.bytes.Add(float64(bytes))
	s.edge.bytes.Add(int64(bytes))
}

// Peer returns the sender's identity.
func (s *Session) Peer() Identity { return s.peer }

// Unchecked reports whether both sides allow digests to go unchecked: a Sink may then
// accept rows as they come.
func (s *Session) Unchecked() bool { return s.unchecked }

// Exact reports whether the peer computes blocks under our numerics, so that they may
// be mixed with our own.
func (s *Session) Exact() bool { return s.peer.Numerics == s.cfg.Identity.Numerics }

// Done is closed when the session is over.
func (s *Session) Done() <-chan struct{} { return s.ctx.Done() }

// run owns the session's goroutines; it returns when the session is over.
func (s *Session) run(parent context.Context) {
	stop := context.AfterFunc(parent, func() { s.fail(ticket.Cancelled, errClosed) })
	defer stop()
	s.log.Info("kv session open", "build", s.peer.Build, "bulk", len(s.bulk))
	var wg sync.WaitGroup
	wg.Go(func() { s.readControl(s.onControl) })
	for n, f := range s.bulk {
		wg.Go(func() { s.readBulk(n, f) })
	}
	s.writeControl(s.keepTime)
	wg.Wait()
	<-s.over
}

// fail ends the session once; every ticket ends with the same outcome. Done is
// an orderly close; a ticket that slipped in before it is not done.
func (s *Session) fail(o ticket.Outcome, err error) {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	o = orderly(o, err, len(s.tickets))
	s.err = &Error{"session", s.peer.PeerID, PhaseIdle, o, err}
	all := slices.Collect(maps.Values(s.tickets))
	clear(s.tickets)
	s.cancel() // under mu: a caller refused with err gets a new session next time
	s.mu.Unlock()
	hangUp(s.ctl, s.bulk)
	for _, i := range all {
		if o == ticket.Done {
			i.end(ticket.Dead, err)
		} else {
			i.end(o, err)
		}
	}
	s.side.sessionEnd(o)
	s.m.edges.close(s.peer.ID)
	s.log.Info("kv session over", "outcome", string(o), "tickets", len(all), "why", err)
	close(s.over)
}

// touch restarts the idle timeout.
func (s *Session) touch() {
	s.mu.Lock()
	s.used = time.Now()
	s.mu.Unlock()
}

func (s *Session) find(id uint64) *Incoming {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tickets[id]
}

func (s *Session) drop(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.tickets, id)
	s.used = time.Now()
}

// TicketSpec is what a receiver asks for.
type TicketSpec struct {
	Link      ticket.Link
	RequestID string
	Tokens    []int32 // the prompt; may be empty when LeaseID names it
	Positions int     // positions to move, from 0; 0 means len(Tokens)
	First     []byte  // opaque to kvconn: how to sample the first token(s)
	Dest      []Dest  // blocks for positions 0..Positions-1, in order
	// Have reports which Dest blocks already hold their rows: nil, or one entry a
	// block. A partly filled last block always moves and must be false.
	Have []bool
	// Stored resumes a former ticket: units that its Incoming.Stored reported,
	// of the same positions in the same Dest blocks.
	Stored   UnitSet
	LeaseID  string    // foreign routers: names the kept blocks; "" is native
	Deadline time.Time // zero: Config.TicketTimeout from now
	Sink     Sink
}

// Dest is one destination block: its id in the receiver's pool and the
// generation under which the receiver holds it.
type Dest struct {
	Block      int32
	Generation uint32
}

// Request sends a ticket and does not wait for the answer; Incoming.Wait does. The
// error is an *Error: Dead when the session is over, NoSpace when the peer drains or
// MaxTickets are under way, Refused when the spec is invalid. The slices of spec must
// not change until the ticket is over.
func (s *Session) Request(ctx context.Context, spec TicketSpec) (*Incoming, error) {
	refuse := func(o ticket.Outcome, err error) (*Incoming, error) {
		return nil, &Error{"request", s.peer.PeerID, PhaseTicket, o, err}
	}
	if err := ctx.Err(); err != nil {
		return refuse(ended(ctx), err)
	}
	now := time.Now()
	if spec.Positions == 0 {
		spec.Positions = len(spec.Tokens)
	}
	if spec.Deadline.IsZero() {
		spec.Deadline = now.Add(s.cfg.TicketTimeout)
	}
	left := spec.Deadline.Sub(now)
	if left <= 0 {
		return refuse(ticket.Late, errDeadline)
	}
	i, m, err := newIncoming(s, spec)
	if err != nil {
		return refuse(ticket.Refused, err)
	}
	m.DeadlineMS = uint32(min(max(left.Milliseconds(), 1), math.MaxUint32))
	rand.Read(m.Secret[:]) // never fails (crypto/rand)

	s.mu.Lock()
	var o ticket.Outcome
	sent := true
	switch {
	case s.err != nil && s.err.Outcome == ticket.Done: // closed for idleness just now
		o, err = ticket.Dead, s.err.Err
	case s.err != nil:
		o, err = s.err.Outcome, s.err.Err
	case s.draining:
		o, err = ticket.NoSpace, errDraining
	case len(s.tickets) >= s.cfg.MaxTickets:
		o, err = ticket.NoSpace, fmt.Errorf("%d tickets are under way", len(s.tickets))
	default:
		s.lastID++
		i.id, m.ID, s.used = s.lastID, s.lastID, now
		i.tag = unitTag(m.Secret, s.key, m.ID)
		s.tickets[i.id] = i
		s.side.active.Inc()
		// Under mu, because the sender takes ids in rising order only: two
		// requests at once must not overtake each other on the way out.
		select {
		case s.out <- m:
		default:
			sent = false
		}
	}
	s.mu.Unlock()
	if err != nil {
		return refuse(o, err)
	}
	if !sent {
		s.fail(ticket.Dead, errStalled)
	}
	return i, nil
}

// onControl handles one control message.
func (s *Session) onControl(typ frameType, body []byte) error {
	switch typ {
	case typePong:
	case typeGoaway:
		s.mu.Lock()
		s.draining = true
		s.mu.Unlock()
	case typeAccepted, typeRevokeAck:
		n := &note{typ: typ}
		if err := s.ctl.decode(n, body); err != nil {
			return err
		}
		if i := s.find(n.ID); i != nil && typ == typeAccepted {
			i.onAccepted()
		} else if i != nil {
			i.onRevokeAck()
		}
	case typeCommit:
		m := &commit{}
		if err := s.ctl.decode(m, body); err != nil {
			return err
		}
		if i := s.find(m.ID); i != nil {
			i.onCommit(m)
		}
	case typeFailed:
		m := &failed{}
		if err := s.ctl.decode(m, body); err != nil {
			return err
		}
		if i := s.find(m.ID); i != nil { // the peer has stopped already
			i.end(m.Outcome, fmt.Errorf("peer: %s", m.Message))
		}
	default:
		return &wireError{fmt.Errorf("frame type %d on a receiver's control connection", typ)}
	}
	return nil
}

// keepTime applies the deadlines and returns a ping, or ends a session that has been
// idle for too long.
func (s *Session) keepTime(now time.Time) message {
	s.mu.Lock()
	most := s.cfg.IdleTimeout
	if !s.ctl.proven.Newest(s.cfg.Ring) { // the next one is by the newest, before the older is retired
		most = min(most, 2*s.cfg.KeepAlive)
	}
	idle := len(s.tickets) == 0 && now.Sub(s.used) > most
	all := slices.Collect(maps.Values(s.tickets))
	s.mu.Unlock()
	for _, i := range all {
		i.keepTime(now)
	}
	if idle {
		s.fail(ticket.Done, errors.New("idle"))
		return nil
	}
	return bare(typePing)
}

func (s *Session) ledger() (out []Entry) {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.tickets))
	s.mu.Unlock()
	for _, i := range all {
		out = append(out, i.entry())
	}
	return out
}
