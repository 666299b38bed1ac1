package kvconn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// lent is this receiver's memory as one session's peer holds it. It outlives the
// session: until gone is closed the peer may still write.
type lent struct {
	hold  Hold
	grant []byte // for the peer's Map
	gone  chan struct{}
}

// DeviceHold is a peer's hold of a pool in a device's memory.
type DeviceHold interface {
	Hold
	// Landed returns nil once the rows of the peer's push of this number, and of all
	// before it, can be read.
	Landed(ctx context.Context, number uint64) error
}

// StagedHold is a peer's hold of memory between the two pools, for a peer whose device
// cannot reach ours. It pushes into that memory, and we copy the rows into our blocks,
// so only we write our pool.
type StagedHold interface {
	Hold
	// Receive returns nil once the peer's push of this number, with this many blocks,
	// is ready to be copied; ErrForgotten if it was received or forgotten before.
	// Numbers rise by one.
	Receive(ctx context.Context, number uint64, blocks int) error
	// Place copies blocks of a received push into ours, digests included.
	Place(ctx context.Context, number uint64, layer int, blocks []Placement) error
	// Free gives the memory of a push back to the peer, whether or not it was stored.
	// It is called once for each push that was received.
	Free(number uint64)
	// Ready returns nil once our end can receive. It is called before a session counts
	// as open, at the same time as Ready of the peer's StagedWindow.
	Ready(ctx context.Context) error
	// Ahead is how many pushes of one connection may be received at a time, at least 1.
	Ahead() int
	// Forget frees pushes that came without a frame, where the peer's frames can be
	// lost without ending the session.
	Forget()
}

// ErrForgotten is returned by Receive for a push that is gone.
var ErrForgotten = errors.New("the push was received or forgotten before")

// Placement is one block of a push, the At-th, and its destination: Rows of it are
// filled.
type Placement struct {
	At    int
	Block int32
	Rows  int
}

// DeviceSink is a Sink whose blocks lie in a device's memory, where a peer pushes them
// together with their digests.
//
// VerifyPushed checks blocks of one layer that have landed. It recomputes the digests
// from the rows and reports for each block whether they match those that came with it,
// for exactly that many rows. An error ends the ticket. The rules of ViewSink.Verify
// hold.
type DeviceSink interface {
	Sink
	VerifyPushed(ctx context.Context, layer int, blocks []PushedBlock) (good []bool, err error)
}

// PushedBlock is a block whose rows 0 .. Rows-1 are the positions from FirstPos on.
type PushedBlock struct {
	Block          int32
	FirstPos, Rows int
}

// lend offers our pool to a peer after the handshake, if there is a pool to offer and
// the connection can carry one. theirs is the layout of the peer's pool.
func (r *Receiver) lend(c net.Conn, theirs kvlayout.Layout) (*lent, error) {
	sc := sharing(c)
	if r.cfg.Shared == nil || sc == nil {
		return nil, nil
	}
	if d, ok := sc.(DeviceConn); ok && d.Staged() { // else the sender knows whether its device refills
		if err := alike(sc, r.cfg.Identity.Layout, theirs); err != nil {
			return nil, &refusal{ticket.Refused, err}
		}
	}
	r.mu.Lock()
	full := r.lent >= r.cfg.MaxSessions
	if !full {
		r.lent++
	}
	r.mu.Unlock()
	if full {
		return nil, fmt.Errorf("%d peers have our memory and do not let go of it: %w", r.cfg.MaxSessions, errHeld)
	}
	s := *r.cfg.Shared
	s.Epoch = r.cfg.Identity.Epoch
	h, grant, err := sc.Offer(&s)
	if h == nil || err != nil {
		r.returned()
		if op := (*net.OpError)(nil); err != nil && !errors.As(err, &op) { // not the connection's
			err = &refusal{ticket.Refused, err} // another way may be taken, as when the peer refuses it
		}
		return nil, err
	}
	r.m.mapped.WithLabelValues(string(SideReceiver)).Inc()
	return &lent{hold: h, grant: grant, gone: make(chan struct{})}, nil
}

// returned counts one peer less that holds our memory.
func (r *Receiver) returned() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lent--
}

// await closes l.gone once the peer's hold is over. If ctx ends first, nothing was
// proven.
func (r *Receiver) await(ctx context.Context, l *lent) {
	err := l.hold.Wait(ctx)
	if err == nil {
		close(l.gone)
	} else if ctx.Err() == nil {
		// Without proof the blocks of its revoked tickets stay quarantined.
		r.log.Error("cannot learn when a peer lets go of our memory", "error", err)
	}
	began := time.Now()
	if err := l.hold.Close(); err != nil {
		r.m.unended(SideReceiver, err)
		r.log.Warn("close the hold on a peer", "error", err)
	}
	slowly(r.log, began)
	r.m.mapped.WithLabelValues(string(SideReceiver)).Dec()
	r.returned()
}

// slowly logs a close of shared memory that took long: other work of the devices may
// have waited for it.
func slowly(log *slog.Logger, began time.Time) {
	if took := time.Since(began); took > 100*time.Millisecond {
		log.Info("kv memory of a session closed", "took", took.Round(time.Millisecond))
	}
}

// placed takes one unit that the peer has written into its block. stale is why it was
// dropped, or "".
func (i *Incoming) placed(u *unitHead, digests []uint64) (stale string) {
	unit, size, ok := i.addressed(u, len(digests))
	bt := i.tokens
	if !ok || int(u.Rows) != bt {
		return "address"
	}
	if !i.fence.enter() {
		return "ended"
	}
	defer i.fence.leave()
	if !i.claimPlaced(unit) {
		return "duplicate"
	}
	err := i.view.Verify(int(u.Layer), u.Block, 0, bt, int(u.Index)*bt, digests)
	i.stored(unit, err)
	if err == nil {
		i.s.side.units.Inc()
		i.s.side.bytes.Add(float64(size))
	}
	return ""
}

// pushed takes blocks of one layer that the peer's device has written. stale is why
// some were dropped, or "".
func (i *Incoming) pushed(m *landing) (stale string) {
	sink := i.spec.Sink.(DeviceSink) // newIncoming has looked
	staged, copies := i.s.staged()
	claims := i.claimsPlaced
	if copies { // what is stored is never written again
		claims = i.claims
	}
	units, blocks := make([]uint32, 0, len(m.Blocks)), make([]PushedBlock, 0, len(m.Blocks))
	var places []Placement
	bytes := 0
	if !i.fence.enter() {
		return "ended"
	}
	defer i.fence.leave()
	heads := 0 // of a layer that there is: addressed looks
	if m.Layer < uint32(len(i.layers)) {
		heads = i.layers[m.Layer].Heads
	}
	i.mu.Lock()
	for at, b := range m.Blocks {
		u := i.unitAt(m, b, heads)
		unit, size, ok := i.addressed(&u, int(u.Heads))
		switch {
		case !ok:
			stale = "address"
		case !claims(unit):
			stale = "duplicate"
		default:
			units, bytes = append(units, unit), bytes+size
			blocks = append(blocks, PushedBlock{u.Block, int(u.Index) * i.tokens, int(u.Rows)})
			if copies {
				places = append(places, Placement{at, u.Block, int(u.Rows)})
			}
		}
	}
	i.mu.Unlock()
	if len(units) == 0 {
		return stale
	}
	ctx, cancel := context.WithTimeout(i.s.ctx, i.s.landing())
	defer cancel()
	var good []bool
	var err error
	if copies {
		err = staged.Place(ctx, m.Number, int(m.Layer), places)
	}
	if err == nil {
		good, err = sink.VerifyPushed(ctx, int(m.Layer), blocks)
	}
	switch {
	case err != nil && ctx.Err() != nil:
		err = &Error{"verify", i.s.peer.PeerID, PhaseData, ticket.Late, err}
	case err == nil && len(good) != len(units):
		err = fmt.Errorf("verdicts on %d of %d blocks", len(good), len(units))
	}
	if err != nil {
		for _, unit := range units {
			i.stored(unit, err)
		}
		return stale
	}
	i.s.side.units.Add(float64(i.storedAll(units, good)))
	i.s.side.bytes.Add(float64(bytes))
	return stale
}

// storedAll is stored for the claimed units of a push; good reports for each whether
// its digests match. It returns how many do.
func (i *Incoming) storedAll(units []uint32, good []bool) int {
	var bad []uint32
	i.mu.Lock()
	for n, unit := range units {
		switch {
		case !good[n]:
			i.keep(unit, ErrDigest)
			bad = append(bad, unit)
		default:
			i.keep(unit, nil)
		}
	}
	if len(bad) < len(units) {
		i.progress = time.Now()
	}
	complete := i.complete()
	var wrong asking
	if len(bad) > 0 {
		slices.Sort(bad)
		runs := make([]run, len(bad))
		for n, unit := range bad {
			runs[n] = run{unit, 1}
		}
		wrong = i.again(runs, ErrDigest)
	}
	i.mu.Unlock()
	if complete {
		i.end(ticket.Done, nil)
	}
	i.ask(wrong)
	return len(units) - len(bad)
}

// unitAt is the unit head that matches a pushed block. Rows and heads are the ticket's,
// and the digests that came with the block must cover exactly these.
func (i *Incoming) unitAt(m *landing, b pushedBlock, heads int) unitHead {
	first := int(min(b.Index, maxPositions)) * i.tokens
	rows := max(0, min(i.tokens, i.spec.Positions-first))
	return unitHead{Ticket: m.Ticket, Tag: m.Tag, Layer: m.Layer, Index: b.Index, Block: b.Block, Generation: b.Generation,
		Rows: uint32(rows), Heads: uint32(heads)}
}

// staged is the hold of a peer that pushes into memory between the pools. l may be nil:
// then there is none.
func (l *lent) staged() (h StagedHold, ok bool) {
	if l == nil {
		return nil, false
	}
	h, ok = l.hold.(StagedHold)
	return h, ok
}

func (s *Session) staged() (h StagedHold, ok bool) { return s.lent.staged() }

// peerWrites reports whether the peer writes into our pool directly.
func (s *Session) peerWrites() bool {
	_, staged := s.staged()
	return s.lent != nil && !staged
}

// claimPlaced is claim for a unit that already lies in its block. One that was asked
// for again may be written twice: the second write replaces what was verified, so it is
// verified too.
func (i *Incoming) claimPlaced(unit uint32) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.claimsPlaced(unit)
}

// claimsPlaced is claimPlaced; it needs mu.
func (i *Incoming) claimsPlaced(unit uint32) bool {
	switch {
	case i.units[unit] == unitStored && i.tries[unit] > 0:
		i.missing++
	case i.units[unit] != unitMissing:
		return false
	}
	i.units[unit] = unitStoring
	return true
}

// complete reports whether everything is there and the peer writes no more; needs mu.
// In the first round a placed frame follows the only write of its block. Later writes
// may overlap: then only the marks show that they are over.
func (i *Incoming) complete() bool {
	return i.missing == 0 && i.committed && (!i.s.peerWrites() || i.round == 0 || i.marked())
}

// stopped records that the peer has confirmed that it writes no more; idempotent.
func (i *Incoming) stopped() {
	i.stop.Do(func() { close(i.still) })
}

// unwritable waits until the peer can no longer write into the ticket's blocks: it has
// confirmed so, or no longer holds our memory.
func (i *Incoming) unwritable(ctx context.Context) error {
	if !i.s.peerWrites() {
		return nil
	}
	if err := proven(ctx, i.still, i.s.lent.gone); err != nil {
		return fmt.Errorf("the peer may still write: %w", err)
	}
	return nil
}
