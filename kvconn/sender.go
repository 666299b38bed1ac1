package kvconn

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// sender is the sender's half of a session. run owns its goroutines: a control reader,
// a control writer that also enforces deadlines, a writer and a hang-up watcher for
// each bulk connection, and one OnTicket a ticket. Locks: mu guards the session and all
// its Outgoings; a fence's lock may be taken inside it, never the other way round.
type sender struct {
	half
	srv    *Server
	shapes []shape // of the units that the receiver gets
	alike  bool    // all of them are whole blocks of ours
	h      Handler
	opened time.Time

	wg     sync.WaitGroup // the control reader, the watchers and the tickets
	writes sync.WaitGroup // the bulk writers
	drains sync.WaitGroup // awaitPushes
	pushes chan inFlight  // to awaitPushes, which ends when it is closed

	mu      sync.Mutex
	bulk    []*bulkWriter // by index; nil until bound
	pool    *peerPool     // the receiver's, if it shares it; set before the last bulk connection is bound
	joining bool          // the pool's window may take longer to make than a handshake
	bound   int
	tickets map[uint64]*Outgoing
	lastID  uint64
	ring    []*Outgoing // those with queued units, each once, oldest turn first
	err     *Error
}

func newSender(s *Server, hi *hello, ctl *frameConn, h Handler) *sender {
	var key [16]byte
	rand.Read(key[:]) // never fails (crypto/rand)
	p := &sender{half: newHalf(&s.cfg, s.log, s.m, SideSender, hi.Identity, key, ctl), srv: s, h: h, opened: time.Now(),
		pushes: make(chan inFlight, maxPushes), bulk: make([]*bulkWriter, hi.Bulk), tickets: map[uint64]*Outgoing{}}
	p.quit = p.fail
	p.shapes, p.alike = shapesOf(s.cfg.Identity.Layout, hi.Identity.Layout)
	return p
}

// run owns the session's goroutines; it returns when the session is over.
func (p *sender) run(parent context.Context) {
	stop := context.AfterFunc(parent, func() { p.fail(ticket.Cancelled, errClosed) })
	defer stop()
	p.log.Info("kv session accepted", "build", p.peer.Build, "bulk", len(p.bulk))
	p.wg.Go(func() { p.readControl(func(t frameType, body []byte) error { return breach(p.onControl(t, body)) }) })
	p.writeControl(p.keepTime)
	p.wait()
}

// wait waits for the goroutines of a session that has failed. It unmaps the receiver's
// memory once no writer is left.
func (p *sender) wait() {
	<-p.over
	p.writes.Wait()
	close(p.pushes)
	p.drains.Wait()
	p.mu.Lock()
	pool := p.pool
	p.mu.Unlock()
	if pool != nil {
		p.unmap(pool)
		p.m.mapped.WithLabelValues(string(SideSender)).Dec()
	}
	p.wg.Wait()
}

// join waits until our end of memory between two pools can push, or the receiver hangs
// up.
func (p *sender) join(pool *peerPool) error {
	staged, ok := pool.device.(StagedWindow)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(p.ctx, joinTimeouts*p.cfg.HandshakeTimeout)
	defer cancel()
	return staged.Ready(ctx)
}

func (p *sender) unmap(pool *peerPool) {
	began := time.Now()
	if err := pool.window.Close(); err != nil {
		p.m.unended(SideSender, err)
		p.log.Error("unmap the peer's pool", "error", err)
	}
	slowly(p.log, began)
}

// bind takes on a bulk connection and, with the first one, the receiver's memory if
// offered.
func (p *sender) bind(f *frameConn, m *bind) error {
	index := m.Index
	no := func(o ticket.Outcome, why string) error {
		return f.turnAway(o, &Incompatible{Field: "session", Ours: why, Theirs: "bulk " + strconv.FormatUint(uint64(index), 10)})
	}
	if index >= uint32(len(p.bulk)) {
		return no(ticket.Refused, "no such connection")
	}
	f.vec = vectorsOf(f.conn)
	var pool *peerPool
	if len(m.Pool.Layers) > 0 {
		err := f.within(joinTimeouts * p.cfg.HandshakeTimeout)
		if err != nil {
			return err
		}
		p.mu.Lock()
		p.joining = true // and for good: the other connections come after it
		p.mu.Unlock()
		if pool, err = mapPeer(f.conn, m, &p.peer, p.cfg.Identity.Layout); err == nil {
			err = p.join(pool)
		}
		if err != nil {
			if p.ctx.Err() == nil { // else the memory is fine, and the peer need not try another transport
				err = f.turnAway(ticket.Refused, &Incompatible{Field: "segment", Ours: err.Error(), Theirs: fmt.Sprint(m.Pool.Bytes, " bytes")})
			}
			if pool != nil { // after the answer: it may take longer than the peer waits
				p.unmap(pool)
			}
			return err
		}
	}
	w := &bulkWriter{p: p, f: f, wake: make(chan struct{}, 1)}
	p.mu.Lock()
	over, free := p.err != nil, p.bulk[index] == nil && (pool == nil || p.pool == nil)
	if free && !over {
		p.bulk[index] = w // before the answer: a ticket may follow it at once
		p.bound++
		if pool != nil {
			p.pool = pool
			p.m.mapped.WithLabelValues(string(SideSender)).Inc()
			if pool.device != nil { // here: the writer of another connection may push before ours is started
				p.drains.Go(p.awaitPushes)
			}
		}
	}
	p.mu.Unlock()
	if pool != nil && (over || !free) {
		p.unmap(pool)
	}
	if over {
		return no(ticket.Dead, "session is over")
	}
	if !free {
		return no(ticket.Refused, "already bound")
	}
	err := f.send(&bound{Mapped: pool != nil})
	if err == nil {
		err = f.within(0)
	}
	if err != nil {
		p.fail(classify(err), fmt.Errorf("bind: %w", err))
		return err
	}
	f.silence = p.cfg.PeerSilence
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return p.err // the caller closes the connection
	}
	p.writes.Go(w.writeBulk) // err is nil, so wait has not begun
	p.wg.Go(w.awaitHangUp)
	return nil
}

// fail ends the session once; every ticket ends with the same outcome.
func (p *sender) fail(o ticket.Outcome, err error) {
	p.mu.Lock()
	if p.err != nil {
		p.mu.Unlock()
		return
	}
	o = orderly(o, err, len(p.tickets))
	p.err = &Error{"session", p.peer.PeerID, PhaseIdle, o, err}
	bulk := make([]*frameConn, 0, len(p.bulk))
	for _, w := range p.bulk {
		if w != nil {
			bulk = append(bulk, w.f)
		}
	}
	all := slices.Collect(maps.Values(p.tickets))
	pool := p.pool
	p.mu.Unlock()
	p.cancel()
	if pool != nil {
		if staged, ok := pool.device.(StagedWindow); ok { // its writers must not wait for room
			staged.Abandon()
		}
	}
	hangUp(p.ctl, bulk)
	for _, g := range all {
		g.end(o, err, false)
	}
	p.side.sessionEnd(o)
	p.log.Info("kv session over", "outcome", string(o), "tickets", len(all), "why", err)
	close(p.over)
}

func (p *sender) find(id uint64) *Outgoing {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tickets[id]
}

// onControl handles one control message.
func (p *sender) onControl(typ frameType, body []byte) error {
	switch typ {
	case typePing:
		p.post(bare(typePong))
	case typeTicket:
		m := &request{}
		if err := p.ctl.decode(m, body); err != nil {
			return err
		}
		return p.onTicket(m)
	case typeRevoke, typeReceived:
		n := &note{typ: typ}
		if err := p.ctl.decode(n, body); err != nil {
			return err
		}
		g := p.find(n.ID)
		switch {
		case typ == typeReceived && g == nil: // it has crossed our Failed
		case typ == typeReceived:
			return g.onReceived()
		case g == nil:
			p.post(&note{typeRevokeAck, n.ID})
		default:
			g.onRevoke()
		}
	case typeResend:
		m := &resend{}
		if err := p.ctl.decode(m, body); err != nil {
			return err
		}
		if g := p.find(m.ID); g != nil {
			return g.onResend(m)
		}
	default:
		return fmt.Errorf("frame type %d on a sender's control connection", typ)
	}
	return nil
}

func (p *sender) onTicket(m *request) error {
	g, err := newOutgoing(p, m)
	if err != nil {
		return err
	}
	p.mu.Lock()
	if p.bound < len(p.bulk) || m.ID <= p.lastID {
		p.mu.Unlock()
		return fmt.Errorf("ticket %d: before the bulk connections, or not a new id", m.ID)
	}
	p.lastID = m.ID
	if p.err != nil {
		p.mu.Unlock()
		return nil
	}
	if !p.pool.has(m.Dest) {
		p.mu.Unlock()
		return fmt.Errorf("ticket %d: blocks outside the memory that was shared", m.ID)
	}
	full := len(p.tickets) >= p.cfg.MaxTickets
	if !full && !p.srv.isDraining() {
		p.tickets[m.ID] = g
		g.places = p.pool != nil
		p.mu.Unlock()
		p.side.active.Inc()
		p.wg.Go(g.handle)
		return nil
	}
	p.mu.Unlock()
	g.cancel()
	why := errDraining.Error()
	if full {
		why = fmt.Sprintf("%d tickets are under way", p.cfg.MaxTickets)
	}
	p.post(&failed{ID: m.ID, Outcome: ticket.NoSpace, Message: why})
	return nil
}

// keepTime enforces the deadlines; it has nothing to send.
func (p *sender) keepTime(now time.Time) message {
	p.mu.Lock()
	patience := p.cfg.HandshakeTimeout
	if p.joining {
		patience *= joinTimeouts + 1
	}
	unbound := p.bound < len(p.bulk) && now.Sub(p.opened) > patience
	var late []*Outgoing
	for _, g := range p.tickets {
		if !g.ended && now.After(g.t.Deadline) {
			late = append(late, g)
		}
	}
	p.mu.Unlock()
	if unbound {
		p.fail(ticket.Late, errors.New("bulk connections did not come"))
	}
	for _, g := range late {
		g.end(ticket.Late, errDeadline, true)
	}
	return nil
}

func (p *sender) ledger() []Entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Entry, 0, len(p.tickets))
	for _, g := range p.tickets {
		out = append(out, g.entry())
	}
	return out
}
