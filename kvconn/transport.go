package kvconn

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Transport makes byte streams between workers. Its connections are ordered,
// honour deadlines, and fail at once when the peer closes or dies. Sessions
// read and write them from one goroutine each, and close them from any.
type Transport interface {
	Dial(ctx context.Context, addr string) (net.Conn, error)
	Listen(addr string) (net.Listener, error)
	Name() string // "tcp"; the network's is a value of kv.transport
}

// SplitPorts reads host:port or host:first-last, as Listen takes it. Port 0,
// any free one, cannot be in a range.
func SplitPorts(addr string) (host string, first, last int, err error) {
	host, ports, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, 0, err
	}
	lo, hi, ranged := strings.Cut(ports, "-")
	if !ranged {
		hi = lo
	}
	a, errA := strconv.ParseUint(lo, 10, 16)
	b, errB := strconv.ParseUint(hi, 10, 16)
	if errA != nil || errB != nil || b < a || ranged && a == 0 {
		return "", 0, 0, fmt.Errorf("address %s: ports %q are not port or first-last", addr, ports)
	}
	return host, int(a), int(b), nil
}

// PrivateConn is a connection that knows whether only holders of the fleet's secrets
// can be at its other end or listen in.
type PrivateConn interface {
	net.Conn
	Private() bool
}

// Private reports whether a secret may be sent on this ticket's session: its connection
// is mutual TLS under the fleet's CA, or a socket inside this machine whose other end
// belongs to our user, as the kernel says.
func (g *Outgoing) Private() bool {
	c, ok := g.p.ctl.conn.(PrivateConn)
	return ok && c.Private()
}
