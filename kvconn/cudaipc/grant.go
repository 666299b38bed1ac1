package cudaipc

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
)

// grant is the transport's addition to kvconn's description of a pool: the head's
// fields, in this order and little-endian, then the handle.
type grant struct {
	head
	handle []byte // the device's, of at most kernels.MaxHandle bytes
}

type head struct {
	Form      uint32
	Line      int32  // of the flags: this peer's
	Epoch     uint64 // of the worker that offers
	FlagBytes int64  // size of the flags' file
	// The pool again: the handle must stand for the pool that the frames describe.
	BlockBytes     int64 // of one layer
	Blocks, Layers int32
	HandleBytes    uint32
}

const (
	grantForm    = 1
	maxFlagBytes = 16 << 20
)

func (g *grant) encode() []byte {
	g.Form, g.HandleBytes = grantForm, uint32(len(g.handle))
	b, _ := binary.Append(nil, binary.LittleEndian, &g.head) // its fields are of fixed size
	return append(b, g.handle...)
}

var errGrant = errors.New("cudaipc: the peer's grant is not in order")

// decodeGrant accepts exactly what encode writes, and nothing out of bounds.
func decodeGrant(b []byte) (*grant, error) {
	g := &grant{}
	n, err := binary.Decode(b, binary.LittleEndian, &g.head)
	g.handle = append([]byte(nil), b[n:min(len(b), n+kernels.MaxHandle)]...)
	switch {
	case err != nil || len(b) > n+kernels.MaxHandle:
		return nil, fmt.Errorf("%w: %d bytes", errGrant, len(b))
	case g.Form != grantForm:
		return nil, fmt.Errorf("%w: of form %d", errGrant, g.Form)
	case g.Line < 0 || g.Line >= kernels.FlagLines:
		return nil, fmt.Errorf("%w: line %d of %d", errGrant, g.Line, kernels.FlagLines)
	case g.FlagBytes < 1 || g.FlagBytes > maxFlagBytes:
		return nil, fmt.Errorf("%w: %d bytes of flags", errGrant, g.FlagBytes)
	case g.BlockBytes < 1 || g.BlockBytes > 1<<40 || g.Blocks < 1 || g.Layers < 1 || g.Layers > 1<<16:
		return nil, fmt.Errorf("%w: %d layers of %d blocks of %d bytes", errGrant, g.Layers, g.Blocks, g.BlockBytes)
	case int(g.HandleBytes) != len(g.handle) || g.HandleBytes < 1:
		return nil, fmt.Errorf("%w: a handle of %d bytes in %d", errGrant, g.HandleBytes, len(g.handle))
	}
	return g, nil
}

// describes returns an error unless the grant is for the pool that the frames describe,
// which kvconn has compared with the peer's layout.
func (g *grant) describes(s *kvconn.Shared) error {
	if err := s.Matches(g.Epoch, int(g.Layers), int(g.Blocks), g.BlockBytes); err != nil {
		return fmt.Errorf("%w: %w", errGrant, err)
	}
	return nil
}
