package kvconn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	srv    *Server
	cfg    *Config
	log    *slog.Logger
	side   perSide
	peer   Identity
	shapes []shape // of the units that the receiver gets
	alike  bool    // all of them are whole blocks of ours
	key    [16]byte
	ctl    *frameConn
	out    chan message
	h      Handler

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	writes sync.WaitGroup // of it, the bulk writers
	pushes chan inFlight  // to drain, which ends with them
	drains sync.WaitGroup // drain
	over   chan struct{}  // fail has run to its end
	opened time.Time

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
	p := &sender{srv: s, cfg: &s.cfg, log: s.log.With(logPeer, hi.Identity.PeerID.String()), side: s.m.of(SideSender),
		peer: hi.Identity, key: newKey(), ctl: ctl, out: make(chan message, controlQueue), h: h,
		opened: time.Now(), over: make(chan struct{}), bulk: make([]*bulkWriter, hi.Bulk), tickets: map[uint64]*Outgoing{}}
	p.shapes, p.alike = shapesOf(s.cfg.Identity.Layout, hi.Identity.Layout)
	p.pushes = make(chan inFlight, maxPushes)
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

// run owns the session's goroutines; it returns when the session is over.
func (p *sender) run(parent context.Context) {
	stop := context.AfterFunc(parent, func() { p.fail(ticket.Cancelled, errClosed) })
	defer stop()
	p.log.Info("kv session accepted", "build", p.peer.Build, "bulk", len(p.bulk))
	p.wg.Go(p.readControl)
	p.writeControl()
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
		p.srv.m.mapped.WithLabelValues(string(SideSender)).Dec()
	}
	p.wg.Wait()
}

// meet waits until our end of memory between two pools can push, or the receiver hangs
// up.
func (p *sender) meet(pool *peerPool) error {
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
		p.srv.m.unended(SideSender, err)
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
	if len(m.Segment.Layers) > 0 {
		err := f.within(joinTimeouts * p.cfg.HandshakeTimeout)
		if err != nil {
			return err
		}
		p.mu.Lock()
		p.joining = true // and for good: the other connections come after it
		p.mu.Unlock()
		if pool, err = mapPeer(f.conn, m.Segment, &p.peer, p.cfg.Identity.Layout); err == nil {
			err = p.meet(pool)
		}
		if err != nil {
			if p.ctx.Err() == nil { // else the memory is fine, and the peer need not try another transport
				err = f.turnAway(ticket.Refused, &Incompatible{Field: "segment", Ours: err.Error(), Theirs: strconv.FormatUint(m.Segment.Bytes, 10) + " bytes"})
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
			p.srv.m.mapped.WithLabelValues(string(SideSender)).Inc()
			if pool.device != nil { // here: the writer of another connection may push before ours is started
				p.drains.Go(p.drain)
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
	p.writes.Go(w.run) // err is nil, so wait has not begun
	p.wg.Go(w.watch)
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
	all := p.outgoings()
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

// outgoings needs mu.
func (p *sender) outgoings() []*Outgoing {
	all := make([]*Outgoing, 0, len(p.tickets))
	for _, g := range p.tickets {
		all = append(all, g)
	}
	return all
}

// post queues a control message; it never blocks.
func (p *sender) post(m message) {
	select {
	case p.out <- m:
	default:
		p.fail(ticket.Dead, errStalled)
	}
}

func (p *sender) find(id uint64) *Outgoing {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tickets[id]
}

// readControl handles control messages until the connection ends.
func (p *sender) readControl() {
	for {
		typ, body, err := p.ctl.next()
		if err == nil {
			if err = p.onControl(typ, body); err != nil {
				err = &wireError{err}
			}
		}
		if err != nil {
			p.fail(classify(err), fmt.Errorf("control: %w", err))
			return
		}
	}
}

func (p *sender) onControl(typ frameType, body []byte) error {
	switch typ {
	case typePing:
		p.post(bare(typePong))
		return nil
	case typeTicket:
		m, err := decodeRequest(body)
		if err != nil {
			return err
		}
		return p.onTicket(m)
	case typeRevoke, typeReceived:
		n, err := decodeNote(typ, body)
		if err != nil {
			return err
		}
		g := p.find(n.ID)
		switch {
		case typ == typeReceived && g == nil: // it has crossed our Failed
			return nil
		case typ == typeReceived:
			return g.onReceived()
		case g == nil:
			p.post(note{typeRevokeAck, n.ID})
		default:
			g.onRevoke()
		}
		return nil
	case typeResend:
		m, err := decodeResend(body)
		if err != nil {
			return err
		}
		if g := p.find(m.ID); g != nil {
			return g.onResend(m)
		}
		return nil
	}
	return fmt.Errorf("frame type %d on a sender's control connection", typ)
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
		p.wg.Go(g.run)
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

// writeControl sends queued messages and enforces the tickets' deadlines.
func (p *sender) writeControl() {
	tick := time.NewTicker(p.cfg.KeepAlive)
	defer tick.Stop()
	var queued []message
	for {
		select {
		case <-p.ctx.Done():
			return
		case m := <-p.out:
			queued = waiting(m, p.out, queued)
			if err := p.ctl.send(queued...); err != nil {
				p.fail(classify(err), fmt.Errorf("control: %w", err))
				return
			}
		case now := <-tick.C:
			p.keepTime(now)
		}
	}
}

func (p *sender) keepTime(now time.Time) {
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
