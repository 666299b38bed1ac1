package kvconn

import "net"

// PrivateConn is a connection that knows who can be at its other end and listen
// in: nobody who may not know the fleet's secrets.
type PrivateConn interface {
	net.Conn
	Private() bool
}

// Private tells whether a secret may be answered to on this ticket's session:
// its connection is mutual TLS under the fleet's CA, or a socket inside this
// machine whose other end the kernel says is our user's.
func (g *Outgoing) Private() bool {
	c, ok := g.p.ctl.conn.(PrivateConn)
	return ok && c.Private()
}
