// Package clientwatch notices that a client left while nothing is being read from or written to its
// connection, which a server cannot learn otherwise before the first flush.
//
// A Watcher is one goroutine on one epoll set. It waits for the peer's FIN or RST (EPOLLRDHUP,
// EPOLLHUP, EPOLLERR) and reads nothing, so it can watch a connection that an HTTP server owns, TLS
// included. A client that closes only its writing side counts as gone; HTTP/1.1 clients do not do
// that while they wait for a response.
//
// On systems other than Linux, Watch never calls back; the first failing write finds a departed
// client.
package clientwatch

import (
	"net"
	"syscall"
)

// Teller is a connection without a descriptor that tells itself when its peer has closed it.
type Teller interface {
	// OnPeerClose calls gone as Watch does.
	OnPeerClose(gone func()) (stop func())
}

// raw finds the connection with the file descriptor under wrappers such as *tls.Conn. It returns
// neither if there is none (in-memory connections).
func raw(conn net.Conn) (syscall.RawConn, Teller) {
	for conn != nil {
		if t, ok := conn.(Teller); ok {
			return nil, t
		}
		if sc, ok := conn.(syscall.Conn); ok {
			rc, err := sc.SyscallConn()
			if err != nil {
				return nil, nil
			}
			return rc, nil
		}
		u, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			return nil, nil
		}
		conn = u.NetConn()
	}
	return nil, nil
}
