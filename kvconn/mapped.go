package kvconn

import (
	"context"
	"net"
)

// Shared describes a receiver's block pool as memory that a sender on the same
// machine may map: block b of layer l begins at Layers[l].Offset +
// b*Layers[l].Stride and holds its rows as Gather packs them.
type Shared struct {
	FD     int // memory file, sealed against shrinking; stays the pool's
	Bytes  int64
	Blocks int
	Layers []Span // one a layer
}

// Span is where one layer's blocks lie, in bytes.
type Span struct{ Offset, Stride int64 }

// SharedConn is a connection whose two ends can share memory. A Transport's
// connections implement it, or have a NetConn method that leads to one that
// does.
type SharedConn interface {
	net.Conn
	// Offer hands the memory behind fd to the peer. The receiver calls it, on
	// a connection on which nothing was written yet.
	Offer(fd int) (Hold, error)
	// Map maps what the peer offered, of which it says that it has so many
	// bytes. The sender calls it once.
	Map(bytes int64) (Window, error)
}

// Hold is a peer's hold of offered memory.
type Hold interface {
	// Wait returns nil once the peer cannot write any more: it has unmapped
	// the memory, or its process has ended. Silence and a closed connection
	// prove neither.
	Wait(ctx context.Context) error
	Close() error // nobody waits any more
}

// Window is offered memory in the sender's address space.
type Window interface {
	Bytes() []byte
	Close() error // unmaps; Bytes must not be touched any more
}

// sharing digs for a connection's ability to share memory; nil: it has none.
func sharing(c net.Conn) SharedConn {
	for {
		if s, ok := c.(SharedConn); ok {
			return s
		}
		u, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = u.NetConn()
	}
}
