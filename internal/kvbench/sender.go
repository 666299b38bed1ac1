package kvbench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kvconn"
)

// Transport is a transport that may be measured.
type Transport struct {
	kvconn.Transport
	Local bool // between processes of one machine; "" is where it listens
}

// onceWait is how long a sender that serves once waits for its receiver, which
// may have been killed after it started the sender.
const onceWait = 30 * time.Second

// Serve is the sender's process: it accepts control connections on ln, one
// after the other, and does what they ask, until ctx ends or, with once, until
// the first of them is over. ln is closed when it returns.
func Serve(ctx context.Context, ln net.Listener, transports map[string]Transport, log *slog.Logger, once bool) error {
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	defer ln.Close()
	if tl, ok := ln.(*net.TCPListener); ok && once {
		if err := tl.SetDeadline(time.Now().Add(onceWait)); err != nil {
			return err
		}
	}
	for {
		c, err := ln.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("bench kv: accept: %w", err)
		}
		err = (&sender{transports: transports, log: log}).serve(ctx, c)
		if once {
			return err
		}
		if err != nil {
			log.Warn("bench kv: sender", "peer", c.RemoteAddr().String(), "error", err)
		}
	}
}

// sender is one control connection's pool and what serves it.
type sender struct {
	transports map[string]Transport
	log        *slog.Logger
	cfg        Config
	pool       *pool
	order      []int32
	wg         sync.WaitGroup // the kvconn server and the bare loops
}

// serve answers until the connection ends, then waits for all it started.
func (s *sender) serve(ctx context.Context, c net.Conn) error {
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		s.wg.Wait()
		if s.pool != nil {
			s.pool.memory.Close()
		}
	}()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	defer c.Close()
	k := newControl(c)
	for {
		var q request
		if err := k.receive(&q); err != nil {
			if errors.Is(err, io.EOF) || ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("control: %w", err)
		}
		a, err := s.do(ctx, c, q)
		if err != nil {
			a.Error = err.Error()
		}
		if err := k.send(a); err != nil {
			return fmt.Errorf("control: %w", err)
		}
	}
}

func (s *sender) do(ctx context.Context, c net.Conn, q request) (a answer, err error) {
	switch {
	case q.Ask == askStart && s.pool == nil:
		if err = q.Config.Validate(); err == nil {
			a.Addr, err = s.start(ctx, c, q)
		}
	case q.Ask == askCPU:
		a.CPU = cpuTime()
	case q.Ask == askBare && s.pool != nil && q.Connections >= 1 && q.Connections <= maxConns:
		a.Addr, err = s.bare(ctx, c, q.Connections)
	default:
		err = fmt.Errorf("cannot %q now", q.Ask)
	}
	return a, err
}

// start fills a pool and serves it over one transport.
func (s *sender) start(ctx context.Context, c net.Conn, q request) (addr string, err error) {
	tr, ok := s.transports[q.Transport]
	if !ok {
		return "", fmt.Errorf("no transport %q here", q.Transport)
	}
	m, err := kvconn.NewMetrics(nil)
	if err != nil {
		return "", err
	}
	cfg := q.Config.connector("bench-sender")
	cfg.Unchecked = true // in force where the receiver says so too
	srv, err := kvconn.NewServer(cfg, s.log, m)
	if err != nil {
		return "", err
	}
	s.cfg = q.Config
	blocks := s.cfg.blocks(s.cfg.most())
	if s.pool, err = newPool(s.cfg, blocks, false); err != nil {
		return "", err
	}
	s.order = order(s.cfg.Scatter, blocks, 1)
	s.pool.fill(s.order)
	ln, err := tr.Transport.Listen(tr.at(c))
	if err != nil {
		return "", err
	}
	s.wg.Go(func() {
		if err := srv.Serve(ctx, ln, s); err != nil {
			s.log.Error("bench kv: serve", "error", err)
		}
	})
	return ln.Addr().String(), nil
}

// at is where to listen for the peer at the other end of c: on the address that c came
// to, so that the benchmark crosses the same network.
func (t Transport) at(c net.Conn) string {
	if t.Local {
		return ""
	}
	host, _, err := net.SplitHostPort(c.LocalAddr().String())
	if err != nil {
		return "127.0.0.1:0"
	}
	return net.JoinHostPort(host, "0")
}

// OnTicket implements kvconn.Handler: everything is computed already.
func (s *sender) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	if o.Accept(source{s.pool, s.order}) != nil {
		return
	}
	all := make([]int, len(o.Ticket().Dest))
	for i := range all {
		all[i] = i
	}
	for l := range s.cfg.Layers {
		o.Push(l, all)
	}
	o.Commit(nil)
}
