// Package clientwatch notices that a client left while nothing is being read
// from or written to its connection: before the first flush a server learns of
// it in no other way.
//
// A Watcher is one goroutine on one epoll set. It waits for the peer's FIN or
// RST (EPOLLRDHUP, EPOLLHUP, EPOLLERR) and reads nothing, so it can watch a
// connection that an HTTP server owns, TLS included. A client that closes only
// its writing side counts as gone; HTTP/1.1 clients do not do that while they
// wait for an answer.
//
// On systems other than Linux nothing is noticed: Watch never calls back, and
// a departed client is found by the first failing write.
package clientwatch

import (
	"net"
	"syscall"
)

// raw finds the file descriptor's connection under wrappers such as
// *tls.Conn. It returns nil when there is none (in-memory connections).
func raw(conn net.Conn) syscall.RawConn {
	for conn != nil {
		if sc, ok := conn.(syscall.Conn); ok {
			rc, err := sc.SyscallConn()
			if err != nil {
				return nil
			}
			return rc
		}
		u, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		conn = u.NetConn()
	}
	return nil
}
