package kvconn

import (
	"errors"
	"fmt"
	"math"

	"github.com/xpyd/xpyd/kvlayout"
)

// bind opens a bulk connection of a session. The first one may share the receiver's
// pool; a descriptor of the memory then travels beside the frame.
type bind struct {
	Session [16]byte
	Index   uint32 // 0 .. bulk-1
	Pool    Shared // Bytes, Blocks, Ranks and Layers; without layers nothing is shared
	Grant   []byte // the transport's addition, opaque; may be empty
}

// maxSegment keeps every sum and product of a pool's fields inside 63 bits.
const maxSegment = 1 << 47

var errSegment = errors.New("segment: blocks lie outside the memory")

// inside checks that every block lies inside the memory, taking its length as the
// stride.
func (s *Shared) inside() error {
	if len(s.Layers) == 0 && s.Bytes == 0 && s.Blocks == 0 {
		return nil
	}
	if len(s.Layers) == 0 || s.Blocks < 1 || s.Blocks > math.MaxInt32 || s.Bytes < 0 || s.Bytes > maxSegment {
		return errSegment
	}
	for _, l := range s.Layers {
		if l.Stride < 1 || l.Stride > s.Bytes || l.Offset < 0 || l.Offset > s.Bytes || int64(s.Blocks) > (s.Bytes-l.Offset)/l.Stride {
			return errSegment
		}
	}
	return nil
}

func (m *bind) kind() frameType { return typeBind }

func (m *bind) fields(c *codec) {
	c.key(&m.Session)
	u32(c, &m.Index)
	blocks := uint32(m.Pool.Blocks)
	u64(c, &m.Pool.Bytes)
	u32(c, &blocks)
	m.Pool.Blocks = int(blocks)
	layers := list(c, &m.Pool.Layers, 16, MaxSpans)
	for i := range layers {
		u64(c, &layers[i].Offset)
		u64(c, &layers[i].Stride)
	}
	if len(layers) > 0 {
		ranks := uint32(m.Pool.ranks())
		if u32(c, &ranks); ranks < 1 || ranks > kvlayout.MaxRanks {
			c.fail(fmt.Errorf("segment: %d ranks, want 1..%d", ranks, kvlayout.MaxRanks))
		}
		m.Pool.Ranks = int(ranks)
		c.blob(&m.Grant, maxGrant)
	}
	if err := m.Pool.inside(); err != nil {
		c.fail(err)
	}
}

// bound answers a bind.
type bound struct {
	Mapped bool // the sender has the pool and will write there
}

func (m *bound) kind() frameType { return typeBound }

func (m *bound) fields(c *codec) {
	v := uint8(0)
	if m.Mapped {
		v = 1
	}
	if c.u8(&v); v > 1 {
		c.fail(fmt.Errorf("mapped %d", v))
	}
	m.Mapped = v == 1
}
