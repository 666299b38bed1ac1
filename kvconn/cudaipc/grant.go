package cudaipc

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
)

// grant is the transport's addition to kvconn's description of a pool. On the
// wire, little-endian:
//
//	0 form u32 (1) | 4 line u32 | 8 epoch u64 | 16 flag bytes u64 | 24 block bytes u64 |
//	32 blocks u32 | 36 layers u32 | 40 length u32, then the device's handle
type grant struct {
	line      int    // of the flags: this peer's
	epoch     uint64 // of the worker that offers
	flagBytes int64  // size of the flags' file
	// The pool again: the handle must stand for the pool that the frames describe.
	blockBytes     int64 // of one layer
	blocks, layers int
	handle         []byte
}

const (
	grantForm    = 1
	grantHead    = 44
	maxFlagBytes = 16 << 20
)

func (g *grant) encode() []byte {
	b := make([]byte, 0, grantHead+len(g.handle))
	b = binary.LittleEndian.AppendUint32(b, grantForm)
	b = binary.LittleEndian.AppendUint32(b, uint32(g.line))
	b = binary.LittleEndian.AppendUint64(b, g.epoch)
	b = binary.LittleEndian.AppendUint64(b, uint64(g.flagBytes))
	b = binary.LittleEndian.AppendUint64(b, uint64(g.blockBytes))
	b = binary.LittleEndian.AppendUint32(b, uint32(g.blocks))
	b = binary.LittleEndian.AppendUint32(b, uint32(g.layers))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(g.handle)))
	return append(b, g.handle...)
}

var errGrant = errors.New("cudaipc: the peer's grant is not in order")

// decodeGrant accepts exactly what encode writes, and nothing out of bounds.
func decodeGrant(b []byte) (*grant, error) {
	if len(b) < grantHead || len(b) > grantHead+kernels.MaxHandle {
		return nil, fmt.Errorf("%w: %d bytes", errGrant, len(b))
	}
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	switch {
	case u32(0) != grantForm:
		return nil, fmt.Errorf("%w: of form %d", errGrant, u32(0))
	case u32(4) >= kernels.FlagLines:
		return nil, fmt.Errorf("%w: line %d of %d", errGrant, u32(4), kernels.FlagLines)
	case u64(16) < 1 || u64(16) > maxFlagBytes:
		return nil, fmt.Errorf("%w: %d bytes of flags", errGrant, u64(16))
	case u64(24) < 1 || u64(24) > 1<<40 || u32(32) < 1 || u32(32) > 1<<31-1 || u32(36) < 1 || u32(36) > 1<<16:
		return nil, fmt.Errorf("%w: %d layers of %d blocks of %d bytes", errGrant, u32(36), u32(32), u64(24))
	case int(u32(40)) != len(b)-grantHead || u32(40) < 1:
		return nil, fmt.Errorf("%w: a handle of %d bytes in %d", errGrant, u32(40), len(b)-grantHead)
	}
	return &grant{line: int(u32(4)), epoch: u64(8), flagBytes: int64(u64(16)), blockBytes: int64(u64(24)),
		blocks: int(u32(32)), layers: int(u32(36)), handle: append([]byte(nil), b[grantHead:]...)}, nil
}

// describes returns an error unless the grant is for the pool that the frames describe,
// which kvconn has compared with the peer's layout.
func (g *grant) describes(s *kvconn.Shared) error {
	switch {
	case g.epoch != s.Epoch:
		return fmt.Errorf("%w: of epoch %d, the peer's is %d", errGrant, g.epoch, s.Epoch)
	case g.blocks != s.Blocks || g.layers != len(s.Layers):
		return fmt.Errorf("%w: %d layers of %d blocks, the peer has %d of %d", errGrant, g.layers, g.blocks, len(s.Layers), s.Blocks)
	}
	for n, l := range s.Layers {
		if l.Stride != g.blockBytes {
			return fmt.Errorf("%w: blocks of %d bytes, those of layer %d have %d", errGrant, g.blockBytes, n, l.Stride)
		}
	}
	return nil
}
