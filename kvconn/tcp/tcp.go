// Package tcp is kvconn's transport over TCP, with mutual TLS if configured.
package tcp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn"
)

// Config tunes the sockets.
type Config struct {
	// BufferBytes is the kernel's send and receive buffer a connection. 0, the
	// default, leaves it to the kernel, which grows it to fill the path; a
	// fixed size turns that off and is cut to net.core.{r,w}mem_max.
	BufferBytes int
	// KeepAlive is the idle time after which the kernel probes the peer. The
	// sessions' own pings are faster; this one clears sockets that are not read.
	KeepAlive time.Duration

	// TLS makes every connection mutual TLS 1.3; nil: plain TCP. Both ends of a
	// connection must agree.
	TLS *trust.TLS
}

// DefaultConfig returns the settings for a data-centre network.
func DefaultConfig() Config {
	return Config{KeepAlive: 15 * time.Second}
}

// Validate reports what is wrong with the settings.
func (c Config) Validate() error {
	if c.BufferBytes < 0 || c.BufferBytes > 1<<30 {
		return fmt.Errorf("tcp: buffer_bytes %d is not in 0..%d", c.BufferBytes, 1<<30)
	}
	if c.KeepAlive <= 0 {
		return fmt.Errorf("tcp: keep_alive must be positive")
	}
	return nil
}

// Transport implements kvconn.Transport.
type Transport struct {
	cfg            Config
	client, server *tls.Config // nil: plain TCP
}

// New makes a transport; it holds nothing open.
func New(cfg Config) (*Transport, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Transport{cfg: cfg, client: cfg.TLS.Client(), server: cfg.TLS.Server()}, nil
}

// Name returns "tcp".
func (t *Transport) Name() string { return "tcp" }

// Dial connects to host:port.
func (t *Transport) Dial(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{KeepAliveConfig: t.keepAlive()}
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return t.tune(c, true)
}

// Listen binds host:port; port 0 picks a free one, and first-last the first
// free one of a range, bounds included. The host may be an IPv6 address in
// brackets.
func (t *Transport) Listen(addr string) (net.Listener, error) {
	host, first, last, err := kvconn.SplitPorts(addr)
	if err != nil {
		return nil, err
	}
	lc := net.ListenConfig{KeepAliveConfig: t.keepAlive()}
	for port := first; ; port++ {
		ln, err := lc.Listen(context.Background(), "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			return &listener{Listener: ln, t: t}, nil
		}
		if port == last || !errors.Is(err, syscall.EADDRINUSE) {
			return nil, err
		}
	}
}

type listener struct {
	net.Listener
	t *Transport
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.t.tune(c, false)
}

func (t *Transport) keepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: t.cfg.KeepAlive, Interval: t.cfg.KeepAlive / 3, Count: 3}
}

// tune sets the socket options. The peer may have closed already, so a failure is that
// connection's error, not the listener's.
func (t *Transport) tune(c net.Conn, dialled bool) (net.Conn, error) {
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return c, nil
	}
	err := tc.SetNoDelay(true)
	if err == nil && t.cfg.BufferBytes > 0 {
		if err = tc.SetReadBuffer(t.cfg.BufferBytes); err == nil {
			err = tc.SetWriteBuffer(t.cfg.BufferBytes)
		}
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("tune %s: %w", c.RemoteAddr(), err)
	}
	withoutPacing(tc)
	return t.secure(c, dialled), nil
}
