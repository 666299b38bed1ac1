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

// keepAlive has the kernel probe idle peers. The sessions' own pings are faster; this
// clears sockets that are not read.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

// Transport implements kvconn.Transport.
type Transport struct {
	client, server *tls.Config // nil: plain TCP
}

// New makes a transport; it holds nothing open. With creds every connection is mutual
// TLS 1.3, nil: plain TCP. Both ends of a connection must agree.
func New(creds *trust.TLS) *Transport {
	return &Transport{client: creds.Client(), server: creds.Server()}
}

// Name returns "tcp".
func (t *Transport) Name() string { return "tcp" }

// Dial connects to host:port.
func (t *Transport) Dial(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{KeepAliveConfig: keepAlive}
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
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
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

// tune sets the socket options. The peer may have closed already, so a failure is that
// connection's error, not the listener's.
func (t *Transport) tune(c net.Conn, dialled bool) (net.Conn, error) {
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return c, nil
	}
	if err := tc.SetNoDelay(true); err != nil {
		c.Close()
		return nil, fmt.Errorf("tune %s: %w", c.RemoteAddr(), err)
	}
	withoutPacing(tc)
	return t.secure(c, dialled), nil
}
