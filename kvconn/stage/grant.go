package stage

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kvconn"
)

// Grant describes the ring, beside kvconn's description of the pool: its fields, in this
// order and little-endian, are the wire format.
type Grant struct {
	Form         uint32 // of the transport: cudaipc's is 1
	Slots, Moves int32
	Blocks       int32 // of the pool, as are BlockBytes and Layers: slots are cut for it
	BlockBytes   int64 // of one layer
	Bytes        int64 // of the memory that the ring is in
	Epoch        uint64
	Layers       int32
}

// GrantBytes is the size of a Grant on the wire; a transport may append more.
const GrantBytes = 44

// ErrGrant is the error for an invalid grant.
var ErrGrant = errors.New("the peer's grant is not in order")

// GrantOf is the grant of a pool and of a ring in this many bytes of memory.
func GrantOf(form uint32, s *kvconn.Shared, geo Geometry, bytes int64) Grant {
	return Grant{Form: form, Slots: int32(geo.Slots), Moves: int32(geo.Moves), Bytes: bytes, Epoch: s.Epoch,
		BlockBytes: s.BlockBytes, Blocks: int32(s.Blocks), Layers: int32(len(s.Layers) / max(s.Ranks, 1))}
}

// Encode is the grant's GrantBytes bytes.
func (g *Grant) Encode() []byte {
	b, _ := binary.Append(nil, binary.LittleEndian, g) // its fields are of fixed size
	return b
}

// DecodeGrant accepts exactly what Encode writes for a form, within bounds. It returns
// the bytes that follow.
func DecodeGrant(b []byte, form uint32) (g Grant, rest []byte, err error) {
	n, err := binary.Decode(b, binary.LittleEndian, &g)
	switch {
	case err != nil:
		return Grant{}, nil, fmt.Errorf("%w: %d bytes", ErrGrant, len(b))
	case g.Form != form:
		return Grant{}, nil, fmt.Errorf("%w: of form %d", ErrGrant, g.Form)
	case g.Slots < 1 || g.Slots > 1<<10 || g.Moves < 1 || g.Moves > 1<<16 || g.Bytes < 1 || g.Bytes > 1<<36:
		return Grant{}, nil, fmt.Errorf("%w: %d slots of %d blocks in %d bytes", ErrGrant, g.Slots, g.Moves, g.Bytes)
	case g.BlockBytes < 1 || g.BlockBytes > 1<<40 || g.Blocks < 1 || g.Layers < 1 || g.Layers > 1<<16:
		return Grant{}, nil, fmt.Errorf("%w: %d layers of %d blocks of %d bytes", ErrGrant, g.Layers, g.Blocks, g.BlockBytes)
	}
	return g, b[n:], nil
}

// Describes returns an error unless the grant is for the pool that the frames describe,
// which kvconn has compared with the peer's layout, and for a ring cut as ours.
func (g *Grant) Describes(s *kvconn.Shared, geo Geometry, bytes int64) error {
	if err := s.Matches(g.Epoch, int(g.Layers), int(g.Blocks), g.BlockBytes); err != nil {
		return fmt.Errorf("%w: %w", ErrGrant, err)
	}
	if int(g.Slots) != geo.Slots || int(g.Moves) != geo.Moves || g.Bytes != bytes {
		return fmt.Errorf("%w: %d slots of %d blocks in %d bytes, ours are %d of %d in %d", ErrGrant, g.Slots, g.Moves, g.Bytes, geo.Slots, geo.Moves, bytes)
	}
	return nil
}
