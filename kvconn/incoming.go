package kvconn

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// Incoming is a ticket on the receiver's side. Units go missing -> storing -> stored; a
// wrong digest puts one back to missing and asks for it again. The ticket is over when
// all are stored and the commit has come, or at the first failure. At that moment the
// fence is shut for good.
type Incoming struct {
	s      *Session
	id     uint64
	tag    uint64
	spec   TicketSpec
	layers []kvlayout.Layer // ours
	tokens int              // of our blocks
	fence  *fence
	done   chan struct{}
	still  chan struct{} // closed by stopped
	// stopped records that the peer has confirmed that it writes no more; idempotent.
	stopped func()

	mu        sync.Mutex
	units     []unitState // layer*len(Dest) + index
	missing   int         // units not stored
	tries     map[uint32]int
	torn      map[uint32]bool // wrong, of a peer that may have ended with them; see doubt
	round     uint32          // of resends; marks of older rounds do not count
	marks     uint64          // bit n: bulk connection n has delivered all of this round
	accepted  bool
	committed bool
	commit    Commit
	started   time.Time
	progress  time.Time // last stored unit, commit or resend
	ended     bool
	err       *Error    // why it ended; nil is success
	revoked   time.Time // when the peer was told; zero: it knows, or need not know
}

type unitState uint8

const (
	unitMissing unitState = iota
	unitStoring
	unitStored
	unitHad
)

// Commit is the sender's statement that the prompt is computed.
type Commit struct {
	Payload []byte // opaque: what the sender's handler gave to Outgoing.Commit
	Units   int    // units that the sender pushed
}

// newIncoming checks the spec and makes the ticket and its wire form; ids and
// secret are the caller's to fill in.
func newIncoming(s *Session, spec TicketSpec) (*Incoming, *request, error) {
	bt, layers, blocks := s.cfg.Identity.Layout.BlockTokens, len(s.layers), len(spec.Dest)
	switch {
	case spec.Sink == nil:
		return nil, nil, errors.New("no sink")
	case spec.Positions < 1 || spec.Positions > maxPositions || len(spec.Tokens) > maxPositions:
		return nil, nil, fmt.Errorf("%d positions, %d tokens: want 1..%d", spec.Positions, len(spec.Tokens), maxPositions)
	case blocks != (spec.Positions+bt-1)/bt:
		return nil, nil, fmt.Errorf("%d blocks of %d tokens for %d positions", blocks, bt, spec.Positions)
	case blocks*layers > maxUnits:
		return nil, nil, fmt.Errorf("%d blocks of %d layers: over %d units", blocks, layers, maxUnits)
	case spec.Have != nil && len(spec.Have) != blocks:
		return nil, nil, fmt.Errorf("have lists %d blocks of %d", len(spec.Have), blocks)
	case spec.Have != nil && spec.Have[blocks-1] && spec.Positions%bt != 0:
		return nil, nil, errors.New("have lists the partly filled last block")
	case spec.Stored.layers != 0 && (spec.Stored.layers != layers || spec.Stored.blocks != blocks):
		return nil, nil, errors.New("stored is of another shape")
	case s.lent != nil && !s.suits(spec.Sink):
		return nil, nil, errors.New("this session's peer writes into blocks, and the sink cannot look at them there")
	case len(spec.RequestID) > maxString || len(spec.LeaseID) > maxString || len(spec.First) > maxPayload:
		return nil, nil, errors.New("a field is too long")
	}
	now := time.Now()
	i := &Incoming{s: s, spec: spec, layers: s.layers, tokens: bt, fence: newFence(nil), done: make(chan struct{}),
		still: make(chan struct{}), units: make([]unitState, layers*blocks), missing: layers * blocks, started: now, progress: now}
	i.stopped = sync.OnceFunc(func() { close(i.still) })
	m := &request{Link: spec.Link, DestBlockTokens: uint32(bt), Positions: uint32(spec.Positions), RequestID: spec.RequestID,
		LeaseID: spec.LeaseID, First: spec.First, Tokens: spec.Tokens, Dest: spec.Dest}
	for u := range i.units {
		if spec.Have == nil && spec.Stored.layers == 0 {
			break
		}
		if (spec.Have != nil && spec.Have[u%blocks]) || spec.Stored.Has(u/blocks, u%blocks) {
			if m.Have == nil {
				m.Have = newBitmap(len(i.units))
			}
			bitmap(m.Have).set(u)
			i.units[u] = unitHad
			i.missing--
		}
	}
	return i, m, nil
}

// ID is the ticket id, unique in its session.
func (i *Incoming) ID() uint64 { return i.id }

// Done is closed when the ticket is over: complete, failed or revoked.
func (i *Incoming) Done() <-chan struct{} { return i.done }

// Wait returns when every missing block of every layer is stored and verified
// and the commit has come, or when the ticket fails. The error is an *Error.
// When ctx ends first the ticket goes on: Revoke it.
func (i *Incoming) Wait(ctx context.Context) (Commit, error) {
	select {
	case <-i.done:
	case <-ctx.Done():
		i.mu.Lock()
		defer i.mu.Unlock()
		return Commit{}, &Error{"wait", i.s.peer.PeerID, i.phase(), ended(ctx), ctx.Err()}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.err != nil {
		return Commit{}, i.err
	}
	return i.commit, nil
}

// Revoke is the fence: once it has returned nil, no Store of this ticket runs or will
// run, so its blocks may get a new generation and be reused. Over a byte stream it
// waits only for a Store that is running, not for the peer, which is told in passing.
// Where the peer itself writes into our memory, it also waits for that peer's
// acknowledgement, or for proof that it can no longer write. It may be called at any
// time, even after the ticket is over, and again after an error (ctx ended).
func (i *Incoming) Revoke(ctx context.Context) error {
	i.end(ticket.Cancelled, errRevoked)
	err := proven(ctx, i.fence.quiet, nil)
	if err == nil {
		err = i.unwritable(ctx)
	}
	if err != nil {
		return &Error{"revoke", i.s.peer.PeerID, PhaseRelease, ticket.Late, err}
	}
	return nil
}

// proven waits for one of two proofs. One that is there counts even when ctx is over: a
// process that was stopped for a while may find both.
func proven(ctx context.Context, a, b <-chan struct{}) error {
	select {
	case <-a:
		return nil
	case <-b:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-a:
		return nil
	case <-b:
		return nil
	default:
		return ctx.Err()
	}
}

// Stored returns the units that are stored and verified so far, including those that
// the spec listed. It is final after Revoke. A unit that a peer with our memory was
// asked for again is left out: the peer may have died rewriting it.
func (i *Incoming) Stored() UnitSet {
	i.mu.Lock()
	defer i.mu.Unlock()
	set := UnitSet{layers: len(i.layers), blocks: len(i.spec.Dest), bits: newBitmap(len(i.units))}
	for u, st := range i.units {
		if st == unitHad || st == unitStored && (!i.s.peerWrites() || i.tries[uint32(u)] == 0) {
			set.bits.set(u)
		}
	}
	return set
}

// end shuts the fence and settles the ticket, once. While the peer may still send, the
// ticket stays in the ledger as revoking.
func (i *Incoming) end(o ticket.Outcome, err error) {
	i.fence.shut()
	i.mu.Lock()
	if i.ended {
		i.mu.Unlock()
		return
	}
	if o != ticket.Done {
		i.err = &Error{"wait", i.s.peer.PeerID, i.phase(), o, err}
		i.revoked = time.Now()
	}
	i.ended = true
	i.s.m.lost.Add(float64(len(i.torn)))
	seconds := time.Since(i.started).Seconds()
	i.mu.Unlock()
	close(i.done)
	i.s.side.ticketEnd(o, seconds)
	if o == ticket.Done {
		i.stopped()
		i.s.drop(i.id)
		i.s.post(&note{typeReceived, i.id})
		return
	}
	i.s.log.Debug("kv ticket over", logTicket, i.id, logReqID, i.spec.RequestID, logPhase, string(i.err.Phase), "outcome", string(o), "why", err)
	i.s.post(&note{typeRevoke, i.id})
}

// addressed checks a block of a layer against the ticket. It returns the unit, and how
// many rows it has.
func (i *Incoming) addressed(layer uint32, b pushedBlock) (unit uint32, rows int, ok bool) {
	blocks := uint32(len(i.spec.Dest))
	if layer >= uint32(len(i.layers)) || b.Index >= blocks || i.spec.Dest[b.Index] != (Dest{b.Block, b.Generation}) {
		return 0, 0, false
	}
	return layer*blocks + b.Index, min(i.tokens, i.spec.Positions-int(b.Index)*i.tokens), true
}

// doubt counts a unit with a wrong digest as corrupt, unless it may be torn. Through
// memory between two GPUs a dying peer can deliver part of a block before its
// connections end (kvconn/nccl). Such a unit counts as corrupt once it comes again,
// which shows that the peer lives, and as lost if it does not; needs mu.
func (i *Incoming) doubt(unit uint32) {
	if _, staged := holdAs[StagedHold](i.s.lent); !staged {
		i.s.m.corrupt.Inc()
		return
	}
	if i.torn == nil {
		i.torn = map[uint32]bool{}
	}
	i.torn[unit] = true
}

// stored settles claimed units that had the same result.
func (i *Incoming) stored(err error, units ...uint32) {
	if len(units) == 0 {
		return
	}
	i.mu.Lock()
	for _, unit := range units {
		i.keep(unit, err)
	}
	if err == nil {
		i.progress = time.Now()
	}
	complete := err == nil && i.complete()
	var wrong asking
	if errors.Is(err, ErrDigest) {
		slices.Sort(units)
		var runs []run
		for _, unit := range units {
			runs = appendUnit(runs, unit)
		}
		wrong = i.again(runs, err)
	}
	i.mu.Unlock()
	switch {
	case complete:
		i.end(ticket.Done, nil)
	case err == nil:
	case errors.Is(err, ErrDigest):
		i.ask(wrong)
	default:
		i.end(OutcomeOf(err, ticket.Corrupt), fmt.Errorf("store: %w", err))
	}
}

// keep records the result of a claimed unit; needs mu.
func (i *Incoming) keep(unit uint32, err error) {
	if i.torn[unit] {
		delete(i.torn, unit)
		i.s.m.corrupt.Inc()
	}
	if errors.Is(err, ErrDigest) {
		i.doubt(unit)
	}
	if err != nil {
		i.units[unit] = unitMissing
		return
	}
	i.units[unit] = unitStored
	i.missing--
	if i.tries[unit] > 0 {
		i.s.m.repaired.Inc()
	}
}

func (i *Incoming) onAccepted() {
	i.mu.Lock()
	i.accepted = true
	i.mu.Unlock()
}

func (i *Incoming) onCommit(m *commit) {
	i.mu.Lock()
	if i.ended || i.committed {
		i.mu.Unlock()
		return
	}
	i.accepted, i.committed = true, true
	i.commit = Commit{Payload: m.Payload, Units: int(m.Units)}
	i.progress = time.Now()
	complete := i.complete()
	var lost asking
	if !complete {
		lost = i.settledRound()
	}
	i.mu.Unlock()
	if complete {
		i.end(ticket.Done, nil)
	}
	i.ask(lost)
}

func (i *Incoming) onRevokeAck() {
	i.mu.Lock()
	ended := i.ended
	i.mu.Unlock()
	if ended {
		i.stopped()
		i.s.drop(i.id)
	}
}

// keepTime applies this ticket's deadlines.
func (i *Incoming) keepTime(now time.Time) {
	cfg := i.s.cfg
	i.mu.Lock()
	var late error
	var lost asking
	mute := false
	switch {
	case i.ended:
		mute = !i.revoked.IsZero() && now.Sub(i.revoked) > cfg.RevokeTimeout
	case now.After(i.spec.Deadline):
		late = errDeadline
	case !i.accepted && now.Sub(i.started) > cfg.AcceptTimeout:
		late = fmt.Errorf("not accepted: %w", errDeadline)
	case i.committed && now.Sub(i.progress) > cfg.RepairTimeout && i.s.idle(i.progress, now):
		lost = i.again(i.lost(), errLost) // or, if nothing is missing, only for the marks
	}
	i.mu.Unlock()
	switch {
	case late != nil:
		i.end(ticket.Late, late)
	case mute:
		i.s.fail(ticket.Late, fmt.Errorf("revoke of ticket %d not acknowledged: %w", i.id, errDeadline))
	default:
		i.ask(lost)
	}
}

// phase needs mu.
func (i *Incoming) phase() Phase { return phaseOf(i.ended, i.committed, i.accepted) }

func (i *Incoming) entry() Entry {
	i.mu.Lock()
	defer i.mu.Unlock()
	e := Entry{Side: SideReceiver, TicketID: i.id, Link: i.spec.Link.String(), RequestID: i.spec.RequestID,
		Peer: i.s.peer.PeerID, Since: i.started, Blocks: len(i.spec.Dest), Missing: i.missing}
	e.state(i.err, i.ended, i.committed, i.accepted)
	return e
}
