// Package zmtp speaks ZMTP 3.0 and 3.1, the wire protocol of ZeroMQ, with the NULL and CURVE
// mechanisms, as far as inference engines use it. Subscribe with Dial and Conn, publish with
// Publisher, and take messages of DEALER and REQ sockets with Router.
//
// It is written against rfc.zeromq.org/spec/23, /26 and /37, and tested against libzmq. What a
// peer sends is bounded before it is stored, every wait has a deadline or a heartbeat, and
// nothing reconnects by itself.
//
// With NULL nobody is authenticated: take what comes in as a hint, and send only what everybody
// may read. With CURVE (Config.Doors, Config.Keys) both ends prove their keys, and all is
// encrypted. An end speaks one mechanism and refuses peers of the other.
//
// PLAIN, ZMTP 2 and further socket semantics (fair queueing, high-water blocking) are not
// supported.
package zmtp

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/xpyd/xpyd/internal/scarce"
)

// Type is the kind of a socket, as peers announce it.
type Type string

// Socket types.
const (
	Pub        Type = "PUB"
	Sub        Type = "SUB"
	XPub       Type = "XPUB"
	XSub       Type = "XSUB"
	Dealer     Type = "DEALER"
	RouterType Type = "ROUTER"
	Req        Type = "REQ"
	Rep        Type = "REP"
)

// partners lists which types may talk to each other.
var partners = map[Type][]Type{
	Pub: {Sub, XSub}, XPub: {Sub, XSub}, Sub: {Pub, XPub}, XSub: {Pub, XPub},
	Dealer: {Dealer, RouterType, Rep}, RouterType: {Dealer, RouterType, Req},
	Req: {RouterType, Rep}, Rep: {Dealer, Req},
}

// All errors of a Conn are an *Error that wraps one of these or an error of the network.
var (
	ErrProtocol  = errors.New("not ZMTP 3")
	ErrMechanism = errors.New("the peer has another security mechanism")
	ErrKey       = errors.New("the peer has no key for this")
	ErrRefused   = errors.New("refused by the peer")
	ErrPartner   = errors.New("sockets of these types do not talk to each other")
	ErrTooLarge  = errors.New("message too large")
	ErrSilent    = errors.New("the peer is silent")
	ErrFull      = errors.New("too many connections")
)

// Error is a failure of a connection, with the operation that failed.
type Error struct {
	Op   string // handshake, read or write
	Peer string // address
	Err  error
}

func (e *Error) Error() string { return fmt.Sprintf("zmtp %s %s: %v", e.Op, e.Peer, e.Err) }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Config describes one end of a connection; zero fields take their defaults.
type Config struct {
	Type     Type
	Identity []byte // at most 255 bytes; may be empty

	// Doors makes this a server of CURVE, called for each connection: a client must find one of
	// the doors and be among its Clients. Keys makes this a client. With neither it speaks NULL.
	Doors func() []Door
	Keys  *Keys
	// Refused, if not nil, is called for each connection to a listening end whose handshake
	// failed, from many goroutines.
	Refused func(error)

	MaxMessage int // bytes of a message, over all frames; default 16 MiB
	MaxFrames  int // frames of a message; default 64
	// Silence ends a connection on which nothing has come for so long; default 30 s. Peers of
	// ZMTP 3.1 are asked for a sign of life in time; those of 3.0 have only TCP's keep-alive.
	Silence time.Duration

	Log    *slog.Logger   // failed accepts of a listening end; nil for none
	Failed scarce.Counter // counts failed accepts; nil for none
}

const (
	handshakeTime = 5 * time.Second
	writeTime     = 10 * time.Second // for one message
)

func (c Config) withDefaults() Config {
	c.Silence = cmp.Or(c.Silence, 30*time.Second)
	c.MaxMessage = cmp.Or(c.MaxMessage, 16<<20)
	c.MaxFrames = cmp.Or(c.MaxFrames, 64)
	return c
}

// Peer is what the other end says about itself.
type Peer struct {
	Addr     string
	Type     Type
	Identity []byte
	Minor    int // of the protocol version, 3.Minor
}
