// Package shm is kvconn's transport between processes of one user on one
// machine: unix sockets for what is said (kvconn/local), shared memory for the
// rows.
//
// A receiver whose block pool lies in a sealed memory file (internal/memfd)
// offers it on the first connection of a session; the sender maps it and
// copies rows straight into the blocks.
//
// The two ends trust each other as far as processes of one user must: the
// kernel is asked what the offered descriptor is. What kvconn guarantees on top
// is in its DESIGN.md, "Shared memory".
package shm

import (
	"net"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/local"
)

// ErrUnsupported is what New's error is where the kernel lacks what is needed.
var ErrUnsupported = local.ErrUnsupported

// Name is the transport's name and the scheme of its addresses.
const Name = "shm"

// New makes a transport; see local.New.
func New() (kvconn.Transport, error) { return local.New(Name, dress) }

// dress makes one of our connections of a socket.
func dress(c *local.Conn) net.Conn { return &conn{c} }

// conn is one end of a connection.
type conn struct{ *local.Conn }
