package kvconn

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// Log keys.
const (
	logPeer   = "peer"
	logPhase  = "phase"
	logTicket = "ticket"
	logReqID  = "request_id"
)

// Receiver is a pool of sessions to senders, at most one per address and
// expected peer. It dials on demand; a session that has died is replaced by
// the next Open.
type Receiver struct {
	cfg    Config
	layers []kvlayout.Layer // of our pool
	tr     Transport
	log    *slog.Logger
	m      *Metrics

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	wg      sync.WaitGroup // dials and sessions
	revoked revoked
	refused sparing // sessions that were not opened

	mu     sync.Mutex
	slots  map[slotKey]*slot
	lent   int // peers that have our memory
	closed bool
}

type slotKey struct {
	addr   string
	expect PeerID
}

// slot is one session or the dial that will make it. s and err are set before
// ready is closed.
type slot struct {
	ready chan struct{}
	s     *Session
	err   error
}

// NewReceiver makes a pool that dials over tr. Close it.
func NewReceiver(cfg Config, tr Transport, log *slog.Logger, m *Metrics) (*Receiver, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("kvconn receiver: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Receiver{cfg: cfg, layers: cfg.Identity.Layout.Resolve(), tr: tr, log: log, m: m, ctx: ctx, cancel: cancel, refused: sparing{log: log}, slots: map[slotKey]*slot{}}, nil
}

// Open returns a live session to the sender at addr, and dials if there is none;
// concurrent callers share one dial. A zero expect.ID or expect.Epoch is not checked.
// The error is an *Error: Incompatible when the handshake was refused, Dead when there
// is no answer or another run of the worker answers, Late when a deadline passed.
func (r *Receiver) Open(ctx context.Context, addr string, expect PeerID) (*Session, error) {
	key := slotKey{addr, expect}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil, &Error{"open", expect, PhaseDial, ticket.Cancelled, errClosed}
	}
	sl := r.slots[key]
	if sl == nil || sl.over() {
		sl = &slot{ready: make(chan struct{})}
		r.slots[key] = sl
		r.wg.Go(func() { r.runSlot(key, sl) })
	}
	r.mu.Unlock()
	select {
	case <-sl.ready:
	case <-ctx.Done():
		return nil, &Error{"open", expect, PhaseDial, ended(ctx), ctx.Err()}
	}
	if sl.err != nil {
		return nil, sl.err
	}
	sl.s.touch()
	return sl.s, nil
}

// over reports whether the slot's session has ended or its dial has failed.
func (sl *slot) over() bool {
	select {
	case <-sl.ready:
		return sl.err != nil || sl.s.ctx.Err() != nil
	default:
		return false
	}
}

// runSlot dials, then lives as long as the session.
func (r *Receiver) runSlot(key slotKey, sl *slot) {
	s, err := r.connect(key)
	if err != nil {
		r.refused.Log(r.ctx, failureLevel(err), "kv session not opened", logPeer, key.expect.String(), "addr", key.addr, "error", err)
	}
	sl.s, sl.err = s, err
	close(sl.ready)
	if err == nil {
		s.endIfRevoked(&r.revoked) // it may have been revoked since its hello
		s.run(r.ctx)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.slots[key] == sl {
		delete(r.slots, key)
	}
}

// connect makes the control connection and the bulk connections of a session.
func (r *Receiver) connect(key slotKey) (_ *Session, err error) {
	phase := PhaseDial
	var conns []*frameConn
	var h *hello // the sender's, once it has come
	var loan *lent
	defer func() {
		if loan != nil { // also of a peer that then refused the session
			r.wg.Go(func() { r.awaitReturn(r.ctx, loan) })
		}
		if err == nil {
			return
		}
		for _, f := range conns {
			f.conn.Close()
		}
		e := &Error{"open", key.expect, phase, classify(err), err}
		if r.ctx.Err() != nil {
			e.Outcome = ticket.Cancelled
		}
		r.m.refused(err)
		err = e
	}()
	dial := func(wrap func(net.Conn) *frameConn, greet func(*frameConn) error) error {
		phase = PhaseDial
		ctx, cancel := context.WithTimeout(r.ctx, r.cfg.DialTimeout)
		defer cancel()
		c, err := r.tr.Dial(ctx, key.addr)
		if err != nil {
			return err
		}
		f := wrap(c)
		conns = append(conns, f)
		phase = PhaseHandshake
		if err := f.within(r.cfg.HandshakeTimeout); err != nil {
			return err
		}
		stop := context.AfterFunc(r.ctx, func() { c.Close() })
		defer stop()
		if err := f.introduce(&r.cfg, roleReceiver); err != nil {
			return err
		}
		if err := greet(f); err != nil {
			return err
		}
		f.silence = r.cfg.PeerSilence
		return f.within(0)
	}
	if err := dial(func(c net.Conn) *frameConn { return newFrameConn(c, controlBuffer) }, func(f *frameConn) (err error) {
		h, err = greetSender(f, &r.cfg, key.expect, &r.revoked)
		return err
	}); err != nil {
		return nil, err
	}
	// The sender's end of the session is live from here on, and the next steps may take
	// longer than its PeerSilence.
	stop := conns[0].pings(r.cfg.KeepAlive)
	defer stop()
	unit := 0 // the largest
	for i := range r.layers {
		unit = max(unit, unitBytes(r.layers[i].Heads, r.layers[i].BlockBytes()))
	}
	for i := range r.cfg.BulkConns {
		if err := dial(func(c net.Conn) *frameConn { return newBulkConn(c, unit) }, func(f *frameConn) (err error) {
			if i > 0 {
				return bindBulk(f, conns[0], &bind{Session: h.Session, Index: uint32(i)})
			}
			if loan, err = r.lend(f.conn, h.Identity.Layout); err != nil {
				return err
			}
			return r.bindFirst(f, conns[0], h, loan)
		}); err != nil {
			return nil, err
		}
		conns[len(conns)-1].ordered = false // a lost or repeated unit is repaired, not fatal
	}
	stop()
	return newSession(r, h, conns[0], conns[1:], loan), nil
}

// joinTimeouts is how many HandshakeTimeouts the two ends of memory between two pools
// may take to connect, beside other work of the devices.
const joinTimeouts = 3

// pings sends pings on a control connection until stop, which waits for the last.
func (f *frameConn) pings(every time.Duration) (stop func()) {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-over:
				return
			case <-tick.C:
				if f.send(bare(typePing)) != nil { // the reader will see why
					return
				}
			}
		}
	}()
	return sync.OnceFunc(func() {
		close(over)
		<-ended
	})
}

// bindFirst binds the connection that lends our pool, if loan is not nil. The two ends
// of memory between two pools connect meanwhile. If ours fails or is late, the error is
// a refusal with our end's reason, so that another transport is tried.
func (r *Receiver) bindFirst(f, ctl *frameConn, h *hello, loan *lent) error {
	m := &bind{Session: h.Session}
	if loan != nil {
		m.Pool, m.Grant = *r.cfg.Shared, loan.grant
	}
	staged, ok := holdAs[StagedHold](loan)
	if !ok {
		return bindBulk(f, ctl, m)
	}
	patience := joinTimeouts * r.cfg.HandshakeTimeout
	if err := f.within(patience); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.ctx, patience)
	defer cancel()
	joined := make(chan error, 1)
	r.wg.Go(func() {
		err := staged.Ready(ctx)
		joined <- err
		if err != nil {
			f.conn.Close() // the peer may wait for longer
		}
	})
	err := bindBulk(f, ctl, m)
	var ours error
	if err == nil || classify(err) == ticket.Late {
		ours = <-joined
	} else {
		select {
		case ours = <-joined:
		default: // the peer's refusal, or its end
		}
	}
	if ours != nil {
		return &refusal{ticket.Refused, ours}
	}
	return err
}

// Ledger lists the tickets that are not over.
func (r *Receiver) Ledger() []Entry {
	var out []Entry
	for _, s := range r.sessions() {
		out = append(out, s.ledger()...)
	}
	return out
}

func (r *Receiver) sessions() []*Session {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []*Session
	for _, sl := range r.slots {
		select {
		case <-sl.ready:
			if sl.s != nil {
				out = append(out, sl.s)
			}
		default:
		}
	}
	return out
}

// Close ends every session, their tickets with Cancelled, and waits for all
// goroutines or for ctx.
func (r *Receiver) Close(ctx context.Context) error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	done := make(chan struct{})
	go func() { // ends with the last of them
		r.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("kvconn close: %w", ctx.Err())
	}
}

// hangUp closes the connections of one session; reads and writes on them fail.
func hangUp(ctl *frameConn, bulk []*frameConn) {
	ctl.conn.Close()
	for _, f := range bulk {
		f.conn.Close()
	}
}
