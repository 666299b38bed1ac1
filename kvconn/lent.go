package kvconn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
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
	s.Epoch, s.BlockBytes = r.cfg.Identity.Epoch, blockBytes(r.cfg.Identity.Layout)
	h, grant, err := sc.Offer(&s)
	if h == nil || err != nil {
		r.returned()
		if _, network := errors.AsType[*net.OpError](err); err != nil && !network { // not the connection's
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

// awaitReturn closes l.gone once the peer's hold is over. If ctx ends first, nothing was
// proven.
func (r *Receiver) awaitReturn(ctx context.Context, l *lent) {
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
	unit, rows, ok := i.addressed(u.Layer, pushedBlock{u.Index, u.Block, u.Generation})
	sink, views := i.spec.Sink.(ViewSink)
	if !ok || !views || rows != i.tokens || int(u.Rows) != rows || len(digests) != i.layers[u.Layer].Heads {
		return "address"
	}
	if !i.fence.enter() {
		return "ended"
	}
	defer i.fence.leave()
	i.mu.Lock()
	ok = i.claim(unit, true)
	i.mu.Unlock()
	if !ok {
		return "duplicate"
	}
	err := sink.Verify(int(u.Layer), u.Block, 0, rows, int(u.Index)*rows, digests)
	i.stored(err, unit)
	if err == nil {
		i.s.side.units.Inc()
		i.s.came(i.layers[u.Layer].PackedBytes(rows))
	}
	return ""
}

// pushed takes blocks of one layer that the peer's device has written. stale is why
// some were dropped, or "".
func (i *Incoming) pushed(m *landing) (stale string) {
	staged, copies := holdAs[StagedHold](i.s.lent)
	units, blocks := make([]uint32, 0, len(m.Blocks)), make([]PushedBlock, 0, len(m.Blocks))
	var places []Placement
	bytes := 0
	if !i.fence.enter() {
		return "ended"
	}
	defer i.fence.leave()
	i.mu.Lock()
	for at, b := range m.Blocks {
		unit, rows, ok := i.addressed(m.Layer, b)
		switch {
		case !ok:
			stale = "address"
		case !i.claim(unit, !copies): // what we have copied is never written again
			stale = "duplicate"
		default:
			units, bytes = append(units, unit), bytes+i.layers[m.Layer].PackedBytes(rows)
			blocks = append(blocks, PushedBlock{b.Block, int(b.Index) * i.tokens, rows})
			if copies {
				places = append(places, Placement{at, b.Block, rows})
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
		good, err = i.spec.Sink.(DeviceSink).VerifyPushed(ctx, int(m.Layer), blocks) // newIncoming has looked
	}
	switch {
	case err != nil && ctx.Err() != nil:
		err = &Error{"verify", i.s.peer.PeerID, PhaseData, ticket.Late, err}
	case err == nil && len(good) != len(units):
		err = fmt.Errorf("verdicts on %d of %d blocks", len(good), len(units))
	}
	if err != nil {
		i.stored(err, units...)
		return stale
	}
	var bad []uint32
	verified := units[:0]
	for n, unit := range units {
		if good[n] {
			verified = append(verified, unit)
		} else {
			bad = append(bad, unit)
		}
	}
	i.stored(nil, verified...)
	i.stored(ErrDigest, bad...)
	i.s.side.units.Add(float64(len(verified)))
	i.s.came(bytes)
	return stale
}

// holdAs is the peer's hold of our memory, if it is of this kind. l may be nil.
func holdAs[H Hold](l *lent) (h H, ok bool) {
	if l != nil {
		h, ok = l.hold.(H)
	}
	return h, ok
}

// peerWrites reports whether the peer writes into our pool directly.
func (s *Session) peerWrites() bool {
	_, staged := holdAs[StagedHold](s.lent)
	return s.lent != nil && !staged
}

// claim takes on a missing unit. One that the peer writes into its block and that was
// asked for again may be written twice: the second write replaces what was verified,
// and is verified too. Needs mu.
func (i *Incoming) claim(unit uint32, written bool) bool {
	switch {
	case i.units[unit] == unitMissing:
	case written && i.units[unit] == unitStored && i.tries[unit] > 0:
		i.missing++
	default:
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
