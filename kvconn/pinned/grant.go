package pinned

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/stage"
)

// grant is what a receiver says of the ring besides kvconn's description of its
// pool. On the wire, little-endian:
//
//	0 form u32 (2) | 4 slots u32 | 8 moves u32 | 12 blocks u32 | 16 block bytes u64 |
//	24 memory bytes u64 | 32 epoch u64 | 40 layers u32
type grant struct {
	slots, moves int
	bytes        int64 // of the memory that is lent
	epoch        uint64
	// The pool, once more: its blocks are what slots are cut for.
	blockBytes     int64 // of one layer
	blocks, layers int
}

const (
	grantForm = 2 // 1 is cudaipc's
	grantSize = 44
)

func (g *grant) encode() []byte {
	b := make([]byte, 0, grantSize)
	for _, v := range []int{grantForm, g.slots, g.moves, g.blocks} {
		b = binary.LittleEndian.AppendUint32(b, uint32(v))
	}
	b = binary.LittleEndian.AppendUint64(b, uint64(g.blockBytes))
	b = binary.LittleEndian.AppendUint64(b, uint64(g.bytes))
	b = binary.LittleEndian.AppendUint64(b, g.epoch)
	return binary.LittleEndian.AppendUint32(b, uint32(g.layers))
}

var errGrant = errors.New("pinned: the peer's grant is not in order")

// decodeGrant accepts exactly what encode writes, and nothing out of bounds.
func decodeGrant(b []byte) (*grant, error) {
	if len(b) != grantSize {
		return nil, fmt.Errorf("%w: %d bytes", errGrant, len(b))
	}
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	switch {
	case u32(0) != grantForm:
		return nil, fmt.Errorf("%w: of form %d", errGrant, u32(0))
	case u32(4) < 1 || u32(4) > 1<<10 || u32(8) < 1 || u32(8) > 1<<16 || u64(24) < 1 || u64(24) > 1<<36:
		return nil, fmt.Errorf("%w: %d slots of %d blocks in %d bytes", errGrant, u32(4), u32(8), u64(24))
	case u64(16) < 1 || u64(16) > 1<<40 || u32(12) < 1 || u32(12) > 1<<31-1 || u32(40) < 1 || u32(40) > 1<<16:
		return nil, fmt.Errorf("%w: %d layers of %d blocks of %d bytes", errGrant, u32(40), u32(12), u64(16))
	}
	return &grant{slots: int(u32(4)), moves: int(u32(8)), blocks: int(u32(12)), blockBytes: int64(u64(16)),
		bytes: int64(u64(24)), epoch: u64(32), layers: int(u32(40))}, nil
}

// describes tells whether the grant is of the pool that the frames describe, which
// kvconn has compared with the peer's layout, and of a ring as we cut one.
func (g *grant) describes(s *kvconn.Shared, geo stage.Geometry) error {
	switch {
	case g.epoch != s.Epoch:
		return fmt.Errorf("%w: of epoch %d, the peer's is %d", errGrant, g.epoch, s.Epoch)
	case g.blocks != s.Blocks || g.layers != len(s.Layers):
		return fmt.Errorf("%w: %d layers of %d blocks, the peer has %d of %d", errGrant, g.layers, g.blocks, len(s.Layers), s.Blocks)
	case g.slots != geo.Slots || g.moves != geo.Moves || g.bytes != memoryBytes(geo):
		return fmt.Errorf("%w: %d slots of %d blocks in %d bytes, ours are %d of %d in %d", errGrant, g.slots, g.moves, g.bytes, geo.Slots, geo.Moves, memoryBytes(geo))
	}
	for n, l := range s.Layers {
		if l.Stride != g.blockBytes {
			return fmt.Errorf("%w: blocks of %d bytes, those of layer %d have %d", errGrant, g.blockBytes, n, l.Stride)
		}
	}
	return nil
}
