package kvconn

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"

	"github.com/xpyd/xpyd/internal/lobby"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Handler answers tickets on the sender's side.
type Handler interface {
	// OnTicket runs on its own goroutine, one a ticket; Serve waits for all of them.
	// ctx ends with the ticket: complete, revoked, failed, past its deadline, or its
	// session gone. OnTicket should call o.Accept soon, then Push as layers are
	// computed, then Commit; or Fail at any point. It may return before the ticket is
	// over, but only after Commit or Fail.
	OnTicket(ctx context.Context, o *Outgoing)
}

// Server is the sender's side: it accepts sessions and answers tickets.
type Server struct {
	cfg  Config
	log  *slog.Logger
	m    *Metrics
	gone chan struct{} // a ticket has left; one slot

	shaking chan struct{} // a slot for each peer whose handshake is not over

	revoked   revoked
	strangers sparing // handshakes that failed before the peer was known,
	failures  sparing // and after

	mu       sync.Mutex
	sessions map[[16]byte]*sender
	draining bool
}

// NewServer makes a server.
func NewServer(cfg Config, log *slog.Logger, m *Metrics) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("kvconn server: %w", err)
	}
	return &Server{cfg: cfg, log: log, m: m, gone: make(chan struct{}, 1), shaking: make(chan struct{}, cfg.MaxSessions), sessions: map[[16]byte]*sender{},
		strangers: sparing{log: log}, failures: sparing{log: log}}, nil
}

// Serve accepts on ln until ctx ends, then closes ln, ends every session and
// waits for every goroutine, the handler's included. It returns nil when ctx
// ended it.
func (s *Server) Serve(ctx context.Context, ln net.Listener, h Handler) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	ln = scarce.Listener(ln, s.log, s.m.failedAccepts)
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	hall := lobby.New(min(s.cfg.MaxSessions, scarce.Files()/8))
	for {
		c, err := ln.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				c.Close()
			}
			return nil
		case err != nil:
			return &Error{"serve", s.cfg.Identity.PeerID, PhaseDial, ticket.Dead, err}
		default:
			g := hall.Enter(c)
			wg.Go(func() {
				s.serveConn(ctx, c, func() { hall.Leave(g) }, h)
			})
		}
	}
}

// serveConn does the handshake; a control connection then lives here, a bulk connection
// goes to its session. met is called when the peer has proved itself, or failed to.
func (s *Server) serveConn(ctx context.Context, c net.Conn, met func(), h Handler) {
	f := newFrameConn(c, controlBuffer)
	stop := context.AfterFunc(ctx, func() { c.Close() })
	err := f.within(s.cfg.HandshakeTimeout)
	if err == nil {
		err = f.introduce(&s.cfg, roleSender)
	}
	met()
	log, sess := &s.strangers, (*sender)(nil)
	if err == nil {
		log = &s.failures
		sess, err = s.handshake(f, h)
	}
	stop()
	if err != nil {
		c.Close()
		s.m.refused(err)
		log.Log(ctx, failureLevel(err), "kv handshake", "addr", c.RemoteAddr(), "outcome", string(classify(err)), "error", err)
		return
	}
	if sess != nil {
		sess.run(ctx)
		s.remove(sess)
	}
}

// handshake is the sender's half of the handshake after the banners. It returns a session
// for a control connection; a bulk connection it binds, and returns nil.
func (s *Server) handshake(f *frameConn, h Handler) (*sender, error) {
	select {
	case s.shaking <- struct{}{}:
		defer func() { <-s.shaking }()
	default:
		return nil, f.turnAway(ticket.NoSpace, &Incompatible{Field: "capacity", Ours: "handshakes are all under way", Theirs: "one more"})
	}
	head, err := f.r.Peek(2)
	if err != nil {
		return nil, err
	}
	if frameType(head[1]) == typeBind {
		return nil, s.greetBulk(f)
	}
	hi, err := f.expectHello(roleReceiver, &s.cfg)
	if err != nil {
		return nil, err
	}
	if err := s.revoked.refuse(f, hi); err != nil {
		return nil, err
	}
	sess := newSender(s, hi, f, h)
	if !s.add(sess) { // before our hello: the key in it may come back on a bulk connection at once
		sess.cancel()
		return nil, f.turnAway(ticket.NoSpace, &Incompatible{Field: "capacity", Ours: "sessions are all taken", Theirs: "one more"})
	}
	err = greetReceiver(f, &s.cfg, hi, sess.key)
	if err == nil {
		err = f.within(0)
	}
	if err != nil {
		sess.fail(classify(err), err)
		sess.wait()
		s.remove(sess)
		return nil, err
	}
	f.silence = s.cfg.PeerSilence
	s.welcome(sess)
	return sess, nil
}

func (s *Server) greetBulk(f *frameConn) error {
	body, err := f.expect(typeBind)
	if err != nil {
		return err
	}
	m := &bind{}
	if err := f.decode(m, body); err != nil {
		return err
	}
	s.mu.Lock()
	sess := s.sessions[m.Session]
	s.mu.Unlock()
	if sess == nil {
		return f.turnAway(ticket.Dead, &Incompatible{Field: "session", Ours: "no such session", Theirs: fmt.Sprintf("bulk %d", m.Index)})
	}
	if !f.proven.Same(sess.ctl.proven) {
		return f.turnAway(ticket.Refused, &Incompatible{Field: "identity", Ours: "the session is another peer's", Theirs: fmt.Sprintf("bulk %d", m.Index)})
	}
	if f.version != sess.ctl.version { // a banner has no checksum
		return &wireError{fmt.Errorf("%w: bulk has %d, the session %d", errVersion, f.version, sess.ctl.version)}
	}
	return sess.bind(f, m)
}

// add registers a session, if there is room.
func (s *Server) add(sess *sender) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sessions) >= s.cfg.MaxSessions {
		return false
	}
	s.sessions[sess.key] = sess
	sess.side.sessions.Inc()
	return true
}

func (s *Server) remove(sess *sender) {
	s.mu.Lock()
	delete(s.sessions, sess.key)
	s.mu.Unlock()
	s.wake()
}

// welcome starts a session after its handshake. A new run of a known receiver proves
// that the former one is gone.
func (s *Server) welcome(sess *sender) {
	for _, o := range s.all() {
		if o.peer.ID == sess.peer.ID && o.peer.Epoch != sess.peer.Epoch {
			o.fail(ticket.Dead, fmt.Errorf("peer has restarted as epoch %d", sess.peer.Epoch))
		}
	}
	if s.isDraining() {
		sess.post(bare(typeGoaway))
	}
	sess.endIfRevoked(&s.revoked) // it may have been revoked since its hello
}

func (s *Server) all() []*sender {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.sessions))
}

// wake tells Drain that a ticket has left.
func (s *Server) wake() {
	select {
	case s.gone <- struct{}{}:
	default:
	}
}

// Drain tells every receiver to send no more tickets, refuses any that still come, and
// waits until the current ones are over or ctx ends. Only one caller.
func (s *Server) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	for _, sess := range s.all() {
		sess.post(bare(typeGoaway))
	}
	for len(s.Ledger()) > 0 {
		select {
		case <-s.gone:
		case <-ctx.Done():
			return fmt.Errorf("kvconn drain: %w", ctx.Err())
		}
	}
	return nil
}

func (s *Server) isDraining() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining
}

// Ledger lists the tickets that are not over.
func (s *Server) Ledger() []Entry {
	var out []Entry
	for _, sess := range s.all() {
		out = append(out, sess.ledger()...)
	}
	return out
}
