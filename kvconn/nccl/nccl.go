// Package nccl is kvconn's transport between GPUs that reach each other only through
// NCCL: on one host without peer access, or on two. Frames go over another transport's
// connections (kvconn/tcp); rows go through a ring of device memory at each end
// (kvconn/stage), with a communicator for each pair.
//
// A receiver names the link on the first connection of a session, and both ends
// join it while the session is made, which the router's probe does before any
// request. The session's end aborts the link: nothing waits for a peer that is gone.
// Only the receiver writes its pool, so nothing is quarantined.
//
// A transfer whose frame is lost leaves the two ends out of step; connections lose
// no frames, and if one does the session ends.
//
// GPUs and NCCL are behind kernels.Linker; the tests use kerneltest.FakeGPU, whose
// links are a fake NCCL over sockets that hangs when its peer is gone, as NCCL does.
package nccl

import (
	"context"
	"net"
	"strings"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvconn/way"
	"github.com/xpyd/xpyd/kvlayout"
)

// Name is the transport's name and the scheme of its addresses: "nccl:" and an address
// of the transport underneath.
const Name = "nccl"

// DefaultRing is the memory of a pair: 64 MiB, at each end, beside what NCCL itself takes.
func DefaultRing() stage.Ring { return stage.Ring{Slots: 8, SlotBytes: 8 << 20} }

// New makes a transport over base that receives into the pool of ours and sends from
// that of theirs, both of layout l; a worker passes its backend for both. The listener
// also serves callers of base.
func New(base kvconn.Transport, ours, theirs kernels.Linker, l kvlayout.Layout, r stage.Ring) kvconn.Transport {
	return &transport{base, &device{ours: ours, theirs: theirs, geo: stage.NewGeometry(l, r)}}
}

// Way describes the transport to a worker, over the network's: it serves pools in GPUs'
// memory. Of several ranks rank 0's device has the links and their rings, with blocks of
// all heads, to and from which each rank moves its own.
func Way(network kvconn.Transport) way.Kind {
	return way.Kind{Name: Name, OverNetwork: true, PoolIn: "a GPU's memory",
		Suits: func(b kernels.Backend) bool { _, ok := b.(kernels.Linker); return ok },
		Open: func(p way.Pool) (kvconn.Transport, *kvconn.Shared, error) {
			l := p.Backend.(kernels.Linker)
			shared, err := p.OnDevice()
			return New(network, l, l, p.Backend.Layout(), DefaultRing()), shared, err
		}}
}

// device is both halves of this process's GPU.
type device struct {
	ours, theirs kernels.Linker
	geo          stage.Geometry
}

type transport struct {
	base kvconn.Transport
	d    *device
}

// Name returns "nccl".
func (t *transport) Name() string { return Name }

// Dial implements kvconn.Transport.
func (t *transport) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := t.base.Dial(ctx, strings.TrimPrefix(addr, Name+":"))
	if err != nil {
		return nil, err
	}
	return t.dress(c), nil
}

// Listen implements kvconn.Transport.
func (t *transport) Listen(addr string) (net.Listener, error) {
	ln, err := t.base.Listen(strings.TrimPrefix(addr, Name+":"))
	if err != nil {
		return nil, err
	}
	return &listener{ln, t}, nil
}

type listener struct {
	net.Listener
	t *transport
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.t.dress(c), nil
}

// conn is one end of a connection.
type conn struct {
	net.Conn
	d    *device
	ctx  context.Context // ends with the connection
	hang context.CancelFunc
}

func (t *transport) dress(c net.Conn) *conn {
	ctx, cancel := context.WithCancel(context.Background())
	return &conn{c, t.d, ctx, cancel}
}

// Refills implements kvconn.DeviceConn: slots are for whole blocks.
func (c *conn) Refills() bool { return false }

// Staged implements kvconn.DeviceConn.
func (c *conn) Staged() bool { return true }

var (
	_ kvconn.DeviceConn  = (*conn)(nil)
	_ kvconn.PrivateConn = (*conn)(nil)
)

// Close also ends the link that was made for the connection.
func (c *conn) Close() error {
	c.hang()
	return c.Conn.Close()
}

// Private implements kvconn.PrivateConn.
func (c *conn) Private() bool {
	p, ok := c.Conn.(kvconn.PrivateConn)
	return ok && p.Private()
}
