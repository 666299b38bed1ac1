package kvconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/xpyd/xpyd/kvlayout"
)

// Shared describes a receiver's block pool as memory that a sender may write to. Of each rank,
// block b of layer l begins at the layer's Offset + b*Stride and holds the rows of the rank's heads
// (kvlayout.Layout.Ranks), packed.
type Shared struct {
	FD     int  // memory file, sealed against shrinking; stays the pool's
	Device bool // a device's memory, which the transport knows, instead of a file
	Bytes  int64
	Blocks int
	Ranks  int    // tensor-parallel ranks of the receiver; 0 is 1
	Layers []Span // one a layer of each rank, rank after rank

	// BlockBytes is the size of one block of a layer with all heads, where all layers have the
	// same; else 0.
	BlockBytes int64

	// Epoch is the run of the worker whose pool it is. The connector sets it.
	Epoch uint64
}

// Span is where one layer's blocks lie, in bytes.
type Span struct{ Offset, Stride int64 }

// DevicePool describes a pool in a device's memory: layer after layer, each layer's
// blocks in a row.
func DevicePool(l kvlayout.Layout, blocks int) *Shared {
	s := &Shared{FD: -1, Device: true, Blocks: blocks, BlockBytes: blockBytes(l)}
	s.add(l)
	return s
}

// DeviceRanks is DevicePool for ranks with a device each, whose pools follow each other.
func DeviceRanks(l kvlayout.Layout, ranks, blocks int) (*Shared, error) {
	parts, err := l.Ranks(ranks)
	if err != nil {
		return nil, err
	}
	s := &Shared{FD: -1, Device: true, Blocks: blocks, BlockBytes: blockBytes(l), Ranks: ranks}
	for _, part := range parts {
		s.add(part)
	}
	if len(s.Layers) > MaxSpans {
		return nil, fmt.Errorf("%d layers of %d ranks: a pool is described by at most %d spans", l.Layers(), ranks, MaxSpans)
	}
	return s, nil
}

// add describes the layers of one more rank, behind what there is.
func (s *Shared) add(l kvlayout.Layout) {
	for _, layer := range l.Resolve() {
		size := int64(layer.BlockBytes())
		s.Layers = append(s.Layers, Span{Offset: s.Bytes, Stride: size})
		s.Bytes += size * int64(s.Blocks)
	}
}

// blockBytes is a Shared's BlockBytes.
func blockBytes(l kvlayout.Layout) int64 {
	rows, ok := l.Uniform()
	if !ok {
		return 0
	}
	return int64(rows.BlockBytes())
}

// MaxSpans bounds a Shared's Layers: they go into one frame.
const MaxSpans = 3 << 10

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

// ranks is how many ranks the pool has.
func (s *Shared) ranks() int { return max(s.Ranks, 1) }

// holds checks that the pool has this layout's blocks, all inside its memory.
func (s *Shared) holds(l kvlayout.Layout) error {
	if err := s.inside(); err != nil {
		return err
	}
	_, err := s.regions(l)
	return err
}

// region is where one rank's blocks of one layer lie.
type region struct {
	kvlayout.Layer // with the rank's heads
	Span
}

// regions returns every rank's region of each layer. The error says why the pool does not have this
// layout's blocks.
func (s *Shared) regions(l kvlayout.Layout) ([][]region, error) {
	ranks, err := l.Ranks(s.ranks())
	if err != nil {
		return nil, fmt.Errorf("segment: %w", err)
	}
	regions := make([][]region, l.Layers())
	if len(s.Layers) != len(ranks)*len(regions) {
		return nil, fmt.Errorf("segment: %d layers, the layout has %d for each of %d ranks", len(s.Layers), len(regions), len(ranks))
	}
	for r := range ranks {
		for i, layer := range ranks[r].Resolve() {
			span := s.Layers[r*len(regions)+i]
			if need := layer.BlockBytes(); span.Stride < int64(need) {
				return nil, fmt.Errorf("segment: layer %d of rank %d has a block every %d bytes, one needs %d", i, r, span.Stride, need)
			}
			regions[i] = append(regions[i], region{layer, span})
		}
	}
	return regions, nil
}

// Matches returns an error unless a grant, which names its pool by these, came with the
// pool that the peer's frames describe; blockBytes are of a block with all heads.
func (s *Shared) Matches(epoch uint64, layers, blocks int, blockBytes int64) error {
	if err := s.matches(epoch, layers, blocks); err != nil {
		return err
	}
	if blockBytes != s.BlockBytes {
		return fmt.Errorf("blocks of %d bytes, the peer's have %d", blockBytes, s.BlockBytes)
	}
	return nil
}

// MatchesRanks is Matches for a grant that names the bytes of a block as each rank has it.
func (s *Shared) MatchesRanks(epoch uint64, layers, blocks int, blockBytes []int64) error {
	if len(blockBytes) != s.ranks() {
		return fmt.Errorf("of %d ranks, the peer has %d", len(blockBytes), s.ranks())
	}
	if err := s.matches(epoch, layers, blocks); err != nil {
		return err
	}
	for n, l := range s.Layers {
		if want := blockBytes[n/layers]; l.Stride != want {
			return fmt.Errorf("blocks of %d bytes, those of layer %d of rank %d have %d", want, n%layers, n/layers, l.Stride)
		}
	}
	return nil
}

func (s *Shared) matches(epoch uint64, layers, blocks int) error {
	switch {
	case epoch != s.Epoch:
		return fmt.Errorf("of epoch %d, the peer's is %d", epoch, s.Epoch)
	case blocks != s.Blocks || layers < 1 || layers*s.ranks() != len(s.Layers):
		return fmt.Errorf("%d layers of %d blocks, the peer has %d of %d", layers, blocks, len(s.Layers)/s.ranks(), s.Blocks)
	}
	return nil
}

// peerPool is a receiver's pool as its sender reaches it.
type peerPool struct {
	window  Window
	memory  MemoryWindow // the window, if rows are copied there; mem are its bytes
	mem     []byte
	device  DeviceWindow // the window, if a device pushes rows there
	seg     Shared
	layers  []kvlayout.Layer // the receiver's, with all heads
	regions [][]region       // where each layer's blocks lie, rank by rank
}

// mapPeer opens the pool that the receiver offered on c, as m describes it; ours is
// our own pool's layout.
func mapPeer(c net.Conn, m *bind, peer *Identity, ours kvlayout.Layout) (_ *peerPool, err error) {
	seg := m.Pool
	seg.FD, seg.Epoch, seg.BlockBytes = -1, peer.Epoch, blockBytes(peer.Layout)
	if err := seg.inside(); err != nil {
		return nil, err
	}
	regions, err := seg.regions(peer.Layout)
	if err != nil {
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
	p := &peerPool{window: w, seg: seg, layers: peer.Layout.Resolve(), regions: regions}
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

// block is the memory of one whole block of one layer, as one rank keeps it.
func (p *peerPool) block(layer, rank int, block int32) (run []byte, ok bool) {
	if layer < 0 || layer >= len(p.regions) || rank < 0 || rank >= len(p.regions[layer]) || block < 0 || int(block) >= p.seg.Blocks {
		return nil, false
	}
	l := &p.regions[layer][rank]
	size := int64(l.BlockBytes())
	at := l.Offset + int64(block)*l.Stride // checked by regions: the product and the sums stay inside mem
	return p.mem[at : at+size : at+size], true
}

// spread writes a whole block, packed with all heads, to where each rank keeps its own.
func (p *peerPool) spread(layer int, block int32, packed []byte) {
	all := &p.layers[layer]
	n := all.BlockTokens
	for rank := range p.regions[layer] {
		run, _ := p.block(layer, rank, block) // spot has looked
		kvlayout.CopyHeads(&p.regions[layer][rank].Layer, run, n, 0, all, packed, n, 0, n)
	}
}
