package stage

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kvconn"
)

// Grant describes the ring, beside kvconn's description of the pool. On the wire, little-endian:
//
//	0 form u32 | 4 slots u32 | 8 moves u32 | 12 blocks u32 | 16 block bytes u64 |
//	24 bytes u64 | 32 epoch u64 | 40 layers u32
type Grant struct {
	Form         uint32 // of the transport: cudaipc's is 1
	Slots, Moves int
	Bytes        int64 // of the memory that the ring is in
	Epoch        uint64
	// The pool again: slots are cut for its blocks.
	BlockBytes     int64 // of one layer
	Blocks, Layers int
}

// GrantBytes is the size of a Grant on the wire; a transport may append more.
const GrantBytes = 44

// ErrGrant is the error for an invalid grant.
var ErrGrant = errors.New("the peer's grant is not in order")

// GrantOf is the grant of a pool and of a ring in this many bytes of memory.
func GrantOf(form uint32, s *kvconn.Shared, geo Geometry, bytes int64) Grant {
	return Grant{Form: form, Slots: geo.Slots, Moves: geo.Moves, Bytes: bytes, Epoch: s.Epoch,
		BlockBytes: s.Layers[0].Stride, Blocks: s.Blocks, Layers: len(s.Layers)}
}

// Encode is the grant's GrantBytes bytes.
func (g *Grant) Encode() []byte {
	b := make([]byte, 0, GrantBytes)
	for _, v := range []uint32{g.Form, uint32(g.Slots), uint32(g.Moves), uint32(g.Blocks)} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(g.BlockBytes))
	b = binary.LittleEndian.AppendUint64(b, uint64(g.Bytes))
	b = binary.LittleEndian.AppendUint64(b, g.Epoch)
	return binary.LittleEndian.AppendUint32(b, uint32(g.Layers))
}

// DecodeGrant accepts exactly what Encode writes for a form, within bounds. It returns
// the bytes that follow.
func DecodeGrant(b []byte, form uint32) (g Grant, rest []byte, err error) {
	if len(b) < GrantBytes {
		return g, nil, fmt.Errorf("%w: %d bytes", ErrGrant, len(b))
	}
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	switch {
	case u32(0) != form:
		return g, nil, fmt.Errorf("%w: of form %d", ErrGrant, u32(0))
	case u32(4) < 1 || u32(4) > 1<<10 || u32(8) < 1 || u32(8) > 1<<16 || u64(24) < 1 || u64(24) > 1<<36:
		return g, nil, fmt.Errorf("%w: %d slots of %d blocks in %d bytes", ErrGrant, u32(4), u32(8), u64(24))
	case u64(16) < 1 || u64(16) > 1<<40 || u32(12) < 1 || u32(12) > 1<<31-1 || u32(40) < 1 || u32(40) > 1<<16:
		return g, nil, fmt.Errorf("%w: %d layers of %d blocks of %d bytes", ErrGrant, u32(40), u32(12), u64(16))
	}
	return Grant{Form: form, Slots: int(u32(4)), Moves: int(u32(8)), Blocks: int(u32(12)), BlockBytes: int64(u64(16)),
		Bytes: int64(u64(24)), Epoch: u64(32), Layers: int(u32(40))}, b[GrantBytes:], nil
}

// Describes returns an error unless the grant is for the pool that the frames describe,
// which kvconn has compared with the peer's layout, and for a ring cut as ours.
func (g *Grant) Describes(s *kvconn.Shared, geo Geometry, bytes int64) error {
	switch {
	case g.Epoch != s.Epoch:
		return fmt.Errorf("%w: of epoch %d, the peer's is %d", ErrGrant, g.Epoch, s.Epoch)
	case g.Blocks != s.Blocks || g.Layers != len(s.Layers):
		return fmt.Errorf("%w: %d layers of %d blocks, the peer has %d of %d", ErrGrant, g.Layers, g.Blocks, len(s.Layers), s.Blocks)
	case g.Slots != geo.Slots || g.Moves != geo.Moves || g.Bytes != bytes:
		return fmt.Errorf("%w: %d slots of %d blocks in %d bytes, ours are %d of %d in %d", ErrGrant, g.Slots, g.Moves, g.Bytes, geo.Slots, geo.Moves, bytes)
	}
	for n, l := range s.Layers {
		if l.Stride != g.BlockBytes {
			return fmt.Errorf("%w: blocks of %d bytes, those of layer %d have %d", ErrGrant, g.BlockBytes, n, l.Stride)
		}
	}
	return nil
}
