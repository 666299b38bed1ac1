// Package tcp is kvconn's transport over TCP.
package tcp

import (
	"context"
	"fmt"
	"net"
	"time"
)

// Config tunes the sockets.
type Config struct {
	// BufferBytes is the kernel's send and receive buffer a connection. 0, the
	// default, leaves it to the kernel, which grows it to fill the path; a
	// fixed size turns that off and is cut to net.core.{r,w}mem_max.
	BufferBytes int
	// KeepAlive is the idle time after which the kernel probes the peer. The
	// sessions' own pings are faster; this one clears sockets that nobody reads.
	KeepAlive time.Duration
}

// DefaultConfig returns the settings for a data-centre network.
func DefaultConfig() Config {
	return Config{KeepAlive: 15 * time.Second}
}

// Validate says what is wrong with the settings.
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
type Transport struct{ cfg Config }

// New makes a transport; it holds nothing open.
func New(cfg Config) (*Transport, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Transport{cfg: cfg}, nil
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
	return t.tune(c)
}

// Listen binds host:port; port 0 picks a free one.
func (t *Transport) Listen(addr string) (net.Listener, error) {
	lc := net.ListenConfig{KeepAliveConfig: t.keepAlive()}
	ln, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, err
	}
	return &listener{Listener: ln, t: t}, nil
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
	return l.t.tune(c)
}

func (t *Transport) keepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: t.cfg.KeepAlive, Interval: t.cfg.KeepAlive / 3, Count: 3}
}

// tune sets the socket options. A peer may have closed in the meantime, so a
// failure is that connection's error, not the listener's.
func (t *Transport) tune(c net.Conn) (net.Conn, error) {
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
	return c, nil
}
