package kvconn

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// Ticket is a receiver's request as the sender's handler sees it.
type Ticket struct {
	ID              uint64
	Link            ticket.Link
	RequestID       string
	Tokens          []int32
	Positions       int // positions to move, from 0
	First           []byte
	Dest            []Dest // ceil(Positions / DestBlockTokens)
	DestBlockTokens int
	LeaseID         string
	Deadline        time.Time
}

// Outgoing is a ticket on the sender's side. Its methods may be called from
// any goroutine, and do nothing once the ticket is over.
type Outgoing struct {
	p       *sender
	t       Ticket
	tag     uint64
	layout  kvlayout.Layout // of the rows sent: the receiver's
	layers  int
	shapes  []shape // one a layer
	fence   *fence  // around every Load and the write that follows
	ctx     context.Context
	cancel  context.CancelFunc
	start   time.Time
	places  bool   // rows go straight into the receiver's memory; set before handle
	refills bool   // some layers' blocks look different there
	whole   bool   // PushAll: set before any of its units is queued
	have    bitmap // units that the receiver holds; empty when none

	// Guarded by p.mu.
	src       Source
	pushed    bitmap   // units queued at least once
	units     int      // of them
	queue     []uint32 // units to send, from head on
	head      int
	inRing    bool
	inflight  int // batches that a bulk writer loads or writes now
	committed bool
	round     uint32
	marked    bool // the marks of this round are queued
	ended     bool
	err       *Error
	revoked   bool // acknowledge when quiet
	quiet     bool
	returned  bool // OnTicket has
}

// shape describes one layer's units to a writer.
type shape struct {
	kvlayout.Rows      // the receiver's
	same          bool // we keep whole blocks as the receiver does
}

// shapesOf returns the shapes of all layers; alike reports whether same is set in all.
func shapesOf(ours, theirs kvlayout.Layout) (shapes []shape, alike bool) {
	own := ours.Resolve()
	alike = true
	for i, l := range theirs.Resolve() {
		shapes = append(shapes, shape{l.Rows, l.Rows == own[i].Rows})
		alike = alike && shapes[i].same
	}
	return shapes, alike
}

func newOutgoing(p *sender, m *request) (*Outgoing, error) {
	layout := p.peer.Layout
	layers := len(p.shapes)
	units := layers * len(m.Dest)
	if int(m.DestBlockTokens) != layout.BlockTokens {
		return nil, fmt.Errorf("ticket %d: block of %d tokens, the handshake said %d", m.ID, m.DestBlockTokens, layout.BlockTokens)
	}
	if units > maxUnits || (len(m.Have) > 0 && len(m.Have) != (units+7)/8) {
		return nil, fmt.Errorf("ticket %d: %d units, have of %d bytes", m.ID, units, len(m.Have))
	}
	now := time.Now()
	deadline := now.Add(min(time.Duration(m.DeadlineMS)*time.Millisecond, p.cfg.TicketTimeout))
	g := &Outgoing{p: p, tag: unitTag(m.Secret, p.key, m.ID), layout: layout, layers: layers, shapes: p.shapes, refills: !p.alike, start: now, have: m.Have, pushed: newBitmap(units),
		t: Ticket{ID: m.ID, Link: m.Link, RequestID: m.RequestID, Tokens: m.Tokens, Positions: int(m.Positions), First: m.First,
			Dest: m.Dest, DestBlockTokens: int(m.DestBlockTokens), LeaseID: m.LeaseID, Deadline: deadline}}
	g.fence = newFence(g.settle)
	g.ctx, g.cancel = context.WithDeadline(p.ctx, deadline)
	return g, nil
}

// handle is the ticket's own goroutine: the handler's OnTicket.
func (g *Outgoing) handle() {
	g.p.h.OnTicket(g.ctx, g)
	g.p.mu.Lock()
	answered := g.committed || g.ended
	g.returned = true
	g.p.mu.Unlock()
	if !answered {
		if g.ctx.Err() != nil {
			g.end(ticket.Late, errDeadline, true)
		} else {
			g.end(ticket.Refused, errors.New("handler gave no answer"), true)
		}
	}
	g.forget()
}

// Ticket returns what the receiver asked for; read only.
func (g *Outgoing) Ticket() *Ticket { return &g.t }

// Layout is the layout of the rows to send, the receiver's. A source with another one
// has to convert; see package convert.
func (g *Outgoing) Layout() kvlayout.Layout { return g.layout }

// Peer returns the receiver's identity.
func (g *Outgoing) Peer() Identity { return g.p.peer }

// Has reports whether the receiver holds this destination block of this layer.
func (g *Outgoing) Has(layer, index int) bool {
	if layer < 0 || layer >= g.layers || index < 0 || index >= len(g.t.Dest) || len(g.have) == 0 {
		return false
	}
	return g.have.has(layer*len(g.t.Dest) + index)
}

// Accept takes the ticket on; src is read until Done is closed. The error is an *Error
// when the ticket is already over. Only the first call counts. Loads must be as short
// as a copy: a connection that waits for one looks silent.
func (g *Outgoing) Accept(src Source) error {
	g.p.mu.Lock()
	if g.ended {
		defer g.p.mu.Unlock()
		if g.err != nil {
			return g.err
		}
		return &Error{"accept", g.p.peer.PeerID, PhaseRelease, ticket.Refused, errClosed}
	}
	first := g.src == nil
	if first {
		g.src = src
	}
	g.p.mu.Unlock()
	if first {
		g.p.post(&note{typeAccepted, g.t.ID})
	}
	return nil
}

// Push queues destination blocks of one layer whose rows are ready to be loaded. It
// does not keep ready, never blocks, and skips blocks that the receiver has or that
// were pushed before. Call Accept first.
func (g *Outgoing) Push(layer int, ready []int) {
	g.p.mu.Lock()
	ok := g.ended || g.enqueue(layer, ready)
	g.p.schedule(g)
	g.p.mu.Unlock()
	if !ok {
		g.Fail(ticket.Refused, fmt.Sprintf("push of layer %d, blocks %v: before accept, or out of range", layer, ready))
	}
}

// enqueue queues the new ones of these blocks of one layer; needs p.mu. It returns
// false if some are not the ticket's, or it is not accepted yet.
func (g *Outgoing) enqueue(layer int, ready []int) bool {
	blocks := len(g.t.Dest)
	if layer < 0 || layer >= g.layers || g.src == nil {
		return len(ready) == 0
	}
	for _, index := range ready {
		if index < 0 || index >= blocks {
			return false
		}
		u := layer*blocks + index
		if g.pushed.has(u) || (len(g.have) > 0 && g.have.has(u)) {
			continue
		}
		g.pushed.set(u)
		g.units++
		g.queue = append(g.queue, uint32(u))
	}
	return true
}

// PushAll is Push of every block of every layer, for a source whose rows are all
// complete from the start and whose Block names the same block in every layer for an
// index. A device then pushes several layers at once. Nothing may have been pushed
// before.
func (g *Outgoing) PushAll() {
	blocks := make([]int, len(g.t.Dest))
	for i := range blocks {
		blocks[i] = i
	}
	g.p.mu.Lock()
	ok := true
	if !g.ended {
		g.whole = g.units == 0
		g.queue = slices.Grow(g.queue, g.layers*len(blocks))
		for layer := 0; layer < g.layers && ok; layer++ { // all before a writer takes the first
			ok = g.enqueue(layer, blocks)
		}
		g.p.schedule(g)
	}
	g.p.mu.Unlock()
	if !ok {
		g.Fail(ticket.Refused, "push of all layers before accept")
	}
}

// Commit ends the pushes; payload goes to the receiver. Blocks still queued follow. A
// second call does nothing.
func (g *Outgoing) Commit(payload []byte) {
	g.p.mu.Lock()
	if g.ended || g.committed {
		g.p.mu.Unlock()
		return
	}
	if g.src == nil || len(payload) > maxPayload {
		g.p.mu.Unlock()
		g.Fail(ticket.Refused, fmt.Sprintf("commit before accept, or of %d bytes", len(payload)))
		return
	}
	g.committed = true
	m := &commit{ID: g.t.ID, Units: uint32(g.units), Payload: payload}
	g.mark()
	g.p.mu.Unlock()
	g.p.post(m)
}

// Fail ends the ticket and tells the receiver why. Done is no failure.
func (g *Outgoing) Fail(o ticket.Outcome, msg string) {
	if o == ticket.Done {
		o = ticket.Refused
	}
	g.end(o, errors.New(msg), true)
}

// Done is closed when the ticket is over and the source will not be read
// again: the moment to free the blocks.
func (g *Outgoing) Done() <-chan struct{} { return g.fence.quiet }

// Err is nil until the ticket is over, and afterwards if the receiver has everything;
// else an *Error.
func (g *Outgoing) Err() error {
	g.p.mu.Lock()
	defer g.p.mu.Unlock()
	if g.err == nil {
		return nil // not a *Error that is nil
	}
	return g.err
}

// end settles the ticket once and shuts its fence. If the session has failed, the
// ticket gets the session's outcome, whether fail comes first or a handler that gives
// up.
func (g *Outgoing) end(o ticket.Outcome, err error, tell bool) {
	g.p.mu.Lock()
	if g.ended {
		g.p.mu.Unlock()
		return
	}
	if over := g.p.err; over != nil && o != ticket.Done {
		o, err, tell = over.Outcome, over.Err, false
	}
	if o != ticket.Done {
		g.err = &Error{"send", g.p.peer.PeerID, g.phase(), o, err}
	}
	g.ended = true
	g.queue, g.head = nil, 0
	g.p.mu.Unlock()
	g.cancel()
	g.fence.shut()
	g.p.side.ticketEnd(o, time.Since(g.start).Seconds())
	if o != ticket.Done {
		g.p.log.Debug("kv ticket over", logTicket, g.t.ID, logReqID, g.t.RequestID, logPhase, string(g.err.Phase), "outcome", string(o), "why", err)
	}
	if tell {
		g.p.post(&failed{ID: g.t.ID, Outcome: o, Message: err.Error()})
	}
}

// settle runs when the last load and write of an ended ticket are over.
func (g *Outgoing) settle() {
	g.p.mu.Lock()
	g.quiet = true
	ack := g.revoked
	g.p.mu.Unlock()
	if ack {
		g.p.post(&note{typeRevokeAck, g.t.ID})
	}
	g.forget()
}

// forget drops the ticket from the ledger once it is quiet and its handler has
// returned.
func (g *Outgoing) forget() {
	g.p.mu.Lock()
	over := g.quiet && g.returned
	if over {
		delete(g.p.tickets, g.t.ID)
	}
	g.p.mu.Unlock()
	if over {
		g.p.srv.wake()
	}
}

// onRevoke stops the ticket; the acknowledgement follows when it is quiet.
func (g *Outgoing) onRevoke() {
	g.p.mu.Lock()
	now := g.quiet
	g.revoked = true
	g.p.mu.Unlock()
	if now {
		g.p.post(&note{typeRevokeAck, g.t.ID})
		return
	}
	g.end(ticket.Cancelled, errRevoked, false)
}

func (g *Outgoing) onReceived() error {
	g.p.mu.Lock()
	early := !g.committed && !g.ended
	g.p.mu.Unlock()
	if early {
		return fmt.Errorf("ticket %d: received before its commit", g.t.ID)
	}
	g.end(ticket.Done, nil, false)
	return nil
}

// onResend queues units once more. A peer that asks faster than we send is
// cut off.
func (g *Outgoing) onResend(m *resend) error {
	total := g.layers * len(g.t.Dest)
	g.p.mu.Lock()
	defer g.p.mu.Unlock()
	if g.ended {
		return nil
	}
	if g.src == nil {
		return fmt.Errorf("ticket %d: resend before accept", g.t.ID)
	}
	n := 0
	for _, r := range m.Runs {
		if int(r.First)+int(r.Count) > total {
			return fmt.Errorf("ticket %d: resend of unit %d of %d", g.t.ID, r.First+r.Count-1, total)
		}
		n += int(r.Count)
	}
	if len(g.queue)-g.head+n > 4*total {
		return fmt.Errorf("ticket %d: too many resends", g.t.ID)
	}
	for _, r := range m.Runs {
		for u := r.First; u < r.First+r.Count; u++ {
			if !g.committed && !g.pushed.has(int(u)) { // its rows may still be another prompt's
				return fmt.Errorf("ticket %d: resend of unit %d, which was not pushed", g.t.ID, u)
			}
			g.queue = append(g.queue, u)
		}
	}
	g.p.side.resends.Add(float64(n))
	g.round, g.marked = max(g.round, m.Round), false // two rounds may have overtaken each other
	g.mark()                                         // asked for nothing but the marks
	g.p.schedule(g)
	return nil
}

// phase needs p.mu.
func (g *Outgoing) phase() Phase { return phaseOf(g.ended, g.committed, g.src != nil) }

// entry needs p.mu.
func (g *Outgoing) entry() Entry {
	e := Entry{Side: SideSender, TicketID: g.t.ID, Link: g.t.Link.String(), RequestID: g.t.RequestID, Peer: g.p.peer.PeerID,
		Since: g.start, Blocks: len(g.t.Dest), Missing: len(g.queue) - g.head}
	e.state(g.err, g.ended, g.committed, g.src != nil)
	return e
}
