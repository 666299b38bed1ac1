package kvconn

import "net"

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
