package tcp

import (
	"crypto/tls"
	"net"
)

// secured is a TLS connection that closes at once. The library's Close waits for the
// peer to take its close_notify, which a stalled peer does not; frames mark their own
// end.
type secured struct{ *tls.Conn }

func (s secured) Close() error { return s.NetConn().Close() }

// Private implements kvconn.PrivateConn: both sides show a certificate of the fleet's
// CA before any of their bytes is read.
func (s secured) Private() bool { return true }

// secure wraps one end of a connection. The handshake runs with the first read or
// write, under its deadline.
func (t *Transport) secure(c net.Conn, dialled bool) net.Conn {
	switch {
	case t.client == nil:
		return c
	case dialled:
		return secured{tls.Client(c, t.client)}
	}
	return secured{tls.Server(c, t.server)}
}
