package kvconn

import (
	"context"
	"net"
)

// Transport makes byte streams between workers. Its connections are ordered,
// honour deadlines, and fail at once when the peer closes or dies. Sessions
// read and write them from one goroutine each, and close them from any.
type Transport interface {
	Dial(ctx context.Context, addr string) (net.Conn, error)
	Listen(addr string) (net.Listener, error)
	Name() string // "tcp"; used as a log value
}
