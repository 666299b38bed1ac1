package kvconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/xpyd/xpyd/kvlayout"
)

// Shared describes a receiver's block pool as memory that a sender may write to: block
// b of layer l begins at Layers[l].Offset + b*Layers[l].Stride and holds its rows as
// Gather packs them.
type Shared struct {
	FD     int  // memory file, sealed against shrinking; stays the pool's
	Device bool // a device's memory, which the transport knows, instead of a file
	Bytes  int64
	Blocks int
	Layers []Span // one a layer

	// Epoch is the run of the worker whose pool it is. The connector sets it.
	Epoch uint64
}

// Span is where one layer's blocks lie, in bytes.
type Span struct{ Offset, Stride int64 }

// DevicePool describes a pool in a device's memory: layer after layer, each layer's
// blocks in a row.
func DevicePool(l kvlayout.Layout, blocks int) *Shared {
	s := &Shared{FD: -1, Device: true, Blocks: blocks}
	for _, layer := range l.Resolve() {
		size := int64(layer.BlockBytes())
		s.Layers = append(s.Layers, Span{Offset: s.Bytes, Stride: size})
		s.Bytes += size * int64(blocks)
	}
	return s
}

// maxGrant bounds what a transport adds to the description of a pool.
const maxGrant = 4096

// SharedConn is a connection whose two ends can share memory. A Transport's
// connections implement it, or have a NetConn method that leads to one that
// does.
type SharedConn interface {
	net.Conn
	// Offer hands our pool to the peer. The receiver calls it after the handshake and
	// before bind. The peer's Map gets the grant, if any. A nil Hold without an error
	// means that this transport does not carry pools of this kind.
	Offer(s *Shared) (h Hold, grant []byte, err error)
	// Map opens what the peer offered, if s and grant describe it. s is what the peer
	// said in its frames, checked against its layout. The sender calls it once. The
	// window is a MemoryWindow or a DeviceWindow.
	Map(s *Shared, grant []byte) (Window, error)
}

// DeviceConn is a SharedConn whose windows are DeviceWindows.
type DeviceConn interface {
	SharedConn
	// Refills reports whether they are RefillWindows.
	Refills() bool
	// Staged reports whether they are StagedWindows.
	Staged() bool
}

// Hold is a peer's hold of offered memory.
type Hold interface {
	// Wait returns nil once the peer cannot write any more: it has unmapped
	// the memory, or its process has ended. Silence and a closed connection
	// prove neither.
	Wait(ctx context.Context) error
	Close() error // nobody waits any more; see ErrStuck
}

// ErrStuck is returned by Close of a Hold or a Window that a device holds up. Close
// goes on in the background, and what it uses stays taken until it or the process ends.
var ErrStuck = errors.New("the device does not let go")

// Window is offered memory in the sender's reach.
type Window interface {
	Close() error // unmaps; the window must not be used any more; see ErrStuck
}

// MemoryWindow is offered memory in the sender's address space.
type MemoryWindow interface {
	Window
	Bytes() []byte
	// Copy fills dst, a part of Bytes, from src of the same length. It is meant for
	// much memory: it bypasses the caches and touches nextDst and nextSrc, which are
	// copied next, in advance. The stores are done when it returns.
	Copy(dst, src, nextDst, nextSrc []byte)
}

// sharing unwraps c until it finds a SharedConn; nil: there is none.
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

// validate checks a description of our own pool.
func (s *Shared) validate(layout kvlayout.Layout) error {
	if s == nil {
		return nil
	}
	if s.FD < 0 && !s.Device || s.Bytes < 1 || s.Blocks < 1 {
		return fmt.Errorf("shared pool: descriptor %d, %d bytes, %d blocks", s.FD, s.Bytes, s.Blocks)
	}
	return s.holds(layout)
}

// holds checks that the pool has this layout's blocks, all inside its memory.
func (s *Shared) holds(l kvlayout.Layout) error {
	if err := s.inside(); err != nil {
		return err
	}
	layers := l.Resolve()
	if len(s.Layers) != len(layers) {
		return fmt.Errorf("segment: %d layers, the layout has %d", len(s.Layers), len(layers))
	}
	for i := range layers {
		if need := layers[i].BlockBytes(); s.Layers[i].Stride < int64(need) {
			return fmt.Errorf("segment: layer %d has a block every %d bytes, one needs %d", i, s.Layers[i].Stride, need)
		}
	}
	return nil
}

// Matches returns an error unless a grant, which names its pool by these, came with the
// pool that the peer's frames describe.
func (s *Shared) Matches(epoch uint64, layers, blocks int, blockBytes int64) error {
	switch {
	case epoch != s.Epoch:
		return fmt.Errorf("of epoch %d, the peer's is %d", epoch, s.Epoch)
	case blocks != s.Blocks || layers != len(s.Layers):
		return fmt.Errorf("%d layers of %d blocks, the peer has %d of %d", layers, blocks, len(s.Layers), s.Blocks)
	}
	for n, l := range s.Layers {
		if l.Stride != blockBytes {
			return fmt.Errorf("blocks of %d bytes, those of layer %d have %d", blockBytes, n, l.Stride)
		}
	}
	return nil
}

// peerPool is a receiver's pool as its sender reaches it.
type peerPool struct {
	window Window
	memory MemoryWindow // the window, if rows are copied there; mem are its bytes
	mem    []byte
	device DeviceWindow // the window, if a device pushes rows there
	seg    Shared
	layers []kvlayout.Layer // the receiver's
}

// mapPeer opens the pool that the receiver offered on c, as m describes it; ours is
// our own pool's layout.
func mapPeer(c net.Conn, m *bind, peer *Identity, ours kvlayout.Layout) (_ *peerPool, err error) {
	seg := m.Pool
	seg.FD, seg.Epoch = -1, peer.Epoch
	if err := seg.holds(peer.Layout); err != nil {
		return nil, err
	}
	sc := sharing(c)
	if sc == nil {
		return nil, errors.New("segment: no memory comes with this connection")
	}
	if err := alike(sc, ours, peer.Layout); err != nil {
		return nil, err
	}
	w, err := sc.Map(&seg, m.Grant)
	if err != nil {
		return nil, err
	}
	p := &peerPool{window: w, seg: seg, layers: peer.Layout.Resolve()}
	if p.device, _ = w.(DeviceWindow); p.device != nil {
		return p, nil
	}
	if p.memory, _ = w.(MemoryWindow); p.memory == nil {
		return nil, errors.Join(fmt.Errorf("segment: a window that cannot be written to: %T", w), w.Close())
	}
	if p.mem = p.memory.Bytes(); int64(len(p.mem)) != seg.Bytes {
		return nil, errors.Join(fmt.Errorf("segment: %d bytes mapped, the peer says %d", len(p.mem), seg.Bytes), w.Close())
	}
	return p, nil
}

// alike reports why devices that do not refill cannot move rows between the two pools
// over c: the dtypes differ or, over slots, the block sizes. The sender's host could
// still convert and send them over the connection, but a session that claims to run
// between devices must not do that.
func alike(c SharedConn, ours, theirs kvlayout.Layout) error {
	d, ok := c.(DeviceConn)
	if !ok || d.Refills() {
		return nil
	}
	own, peer := ours.Resolve(), theirs.Resolve()
	for i := range min(len(own), len(peer)) {
		a, b := &own[i], &peer[i]
		if a.DType != b.DType {
			return fmt.Errorf("the peer's KV rows are %s, ours %s, and this transport does not convert them", b.DType, a.DType)
		}
		if n, m := a.BlockBytes(), b.BlockBytes(); d.Staged() && n != m {
			return fmt.Errorf("the peer's blocks are of %d bytes a layer, ours of %d: a ring has slots of one size", m, n)
		}
	}
	return nil
}

// has reports whether the pool has all of a ticket's blocks. Without a pool nothing is
// written, so any may be named.
func (p *peerPool) has(dest []Dest) bool {
	return p == nil || !slices.ContainsFunc(dest, func(d Dest) bool { return d.Block < 0 || int(d.Block) >= p.seg.Blocks })
}

// block is the memory of one whole block of one layer.
func (p *peerPool) block(layer int, block int32) (run []byte, ok bool) {
	if layer < 0 || layer >= len(p.seg.Layers) || block < 0 || int(block) >= p.seg.Blocks {
		return nil, false
	}
	size := int64(p.layers[layer].BlockBytes())
	l := p.seg.Layers[layer] // checked by holds: the product and the sums stay inside mem
	at := l.Offset + int64(block)*l.Stride
	return p.mem[at : at+size : at+size], true
}
