package cudaipc

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// grant is the transport's addition to kvconn's description of a pool: the head's
// fields, in this order and little-endian, then for each rank those of a part and its
// handle.
type grant struct {
	head
	ranks []rank
}

type head struct {
	Form        uint32
	Line, Lines int32  // of the flags: this peer's, Lines of them from Line on
	Epoch       uint64 // of the worker that offers
	FlagBytes   int64  // size of the flags' file
	// The pool again: the handles must stand for the pool that the frames describe.
	Blocks, Layers int32
	Heads          int32 // of all ranks
	Ranks          uint32
}

// rank is one rank's part of the pool.
type rank struct {
	part
	handle []byte // the device's, of at most kernels.MaxHandle bytes
}

type part struct {
	First, Heads int32 // of all heads
	BlockBytes   int64 // of one layer
	HandleBytes  uint32
}

const (
	grantForm    = 2
	maxFlagBytes = 16 << 20
	// maxRanks is what fits into a grant: as many as a worker has on GPUs.
	maxRanks = 8
)

func (g *grant) encode() []byte {
	g.Form, g.Ranks = grantForm, uint32(len(g.ranks))
	b, _ := binary.Append(nil, binary.LittleEndian, &g.head) // its fields are of fixed size
	for i := range g.ranks {
		r := &g.ranks[i]
		r.HandleBytes = uint32(len(r.handle))
		b, _ = binary.Append(b, binary.LittleEndian, &r.part)
		b = append(b, r.handle...)
	}
	return b
}

var errGrant = errors.New("cudaipc: the peer's grant is not in order")

// decodeGrant accepts exactly what encode writes, and nothing out of bounds.
func decodeGrant(b []byte) (*grant, error) {
	g := &grant{}
	n, err := binary.Decode(b, binary.LittleEndian, &g.head)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %d bytes", errGrant, len(b))
	case g.Form != grantForm:
		return nil, fmt.Errorf("%w: of form %d", errGrant, g.Form)
	case g.Line < 0 || g.Line >= kernels.FlagLines || g.Lines < 1 || g.Lines > kernels.FlagLines-g.Line:
		return nil, fmt.Errorf("%w: line %d and %d more of %d", errGrant, g.Line, g.Lines, kernels.FlagLines)
	case g.FlagBytes < kernels.FlagLines*kernels.FlagStride || g.FlagBytes > maxFlagBytes:
		return nil, fmt.Errorf("%w: %d bytes of flags", errGrant, g.FlagBytes)
	case g.Blocks < 1 || g.Layers < 1 || g.Layers > 1<<16:
		return nil, fmt.Errorf("%w: %d layers of %d blocks", errGrant, g.Layers, g.Blocks)
	case g.Heads < 1 || g.Heads > kvlayout.MaxHeads || g.Ranks < 1 || g.Ranks > maxRanks:
		return nil, fmt.Errorf("%w: %d heads of %d ranks", errGrant, g.Heads, g.Ranks)
	}
	b = b[n:]
	for range g.Ranks {
		r := rank{}
		n, err := binary.Decode(b, binary.LittleEndian, &r.part)
		switch {
		case err != nil:
			return nil, fmt.Errorf("%w: %d bytes of a rank", errGrant, len(b))
		case r.First < 0 || r.Heads < 1 || r.Heads > g.Heads || r.First > g.Heads-r.Heads:
			return nil, fmt.Errorf("%w: a rank with %d heads from %d on of %d", errGrant, r.Heads, r.First, g.Heads)
		case r.BlockBytes < 1 || r.BlockBytes > 1<<40:
			return nil, fmt.Errorf("%w: a rank with blocks of %d bytes", errGrant, r.BlockBytes)
		case r.HandleBytes < 1 || r.HandleBytes > kernels.MaxHandle || int(r.HandleBytes) > len(b)-n:
			return nil, fmt.Errorf("%w: a handle of %d bytes in %d", errGrant, r.HandleBytes, len(b)-n)
		}
		r.handle = append([]byte(nil), b[n:n+int(r.HandleBytes)]...)
		g.ranks, b = append(g.ranks, r), b[n+int(r.HandleBytes):]
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("%w: %d bytes behind it", errGrant, len(b))
	}
	return g, nil
}

// share is the heads of rank i of n: as many as every other one has.
func share(heads, i, n int) (first, count int) { return i * heads / n, max(heads/n, 1) }

// describes returns an error unless the grant is for the pool that the frames describe,
// which kvconn has compared with the peer's layout, and for as many heads as ours has.
func (g *grant) describes(s *kvconn.Shared, heads int) error {
	if int(g.Heads) != heads {
		return fmt.Errorf("%w: %d heads, ours are %d", errGrant, g.Heads, heads)
	}
	bytes := make([]int64, len(g.ranks))
	for i, r := range g.ranks {
		bytes[i] = r.BlockBytes
		if first, n := share(heads, i, len(g.ranks)); int(r.First) != first || int(r.Heads) != n {
			return fmt.Errorf("%w: rank %d of %d has %d heads from %d on, want %d from %d on", errGrant, i, len(g.ranks), r.Heads, r.First, n, first)
		}
	}
	if err := s.MatchesRanks(g.Epoch, int(g.Layers), int(g.Blocks), bytes); err != nil {
		return fmt.Errorf("%w: %w", errGrant, err)
	}
	return nil
}
