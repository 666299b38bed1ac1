package kvconn

import (
	"errors"
	"fmt"
	"math"

	"github.com/xpyd/xpyd/kvlayout"
)

// bind opens a bulk connection of a session.
type bind struct {
	Session [16]byte
	Index   uint32 // 0 .. bulk-1
	Segment segment
}

// segment says where the receiver's blocks lie in memory that it shares with
// the sender, whose descriptor travels beside the frame. Block b of layer l
// begins at Layers[l].Offset + b*Layers[l].Stride. The zero value shares none.
type segment struct {
	Bytes  uint64 // size of the memory
	Blocks uint32
	Layers []span // one a layer
	Grant  []byte // the transport's addition, opaque; may be empty
}

type span struct{ Offset, Stride uint64 } // bytes

// maxSegment keeps every sum and product of a segment's fields inside 63 bits.
const maxSegment = 1 << 47

var errSegment = errors.New("segment: blocks lie outside the memory")

// validate checks that every block lies inside the memory, taking its length as the
// stride.
func (s *segment) validate() error {
	if len(s.Layers) == 0 {
		if s.Bytes != 0 || s.Blocks != 0 || len(s.Grant) > 0 {
			return errSegment
		}
		return nil
	}
	if s.Blocks < 1 || s.Blocks > math.MaxInt32 || s.Bytes > maxSegment {
		return errSegment
	}
	for _, l := range s.Layers {
		if l.Stride < 1 || l.Stride > s.Bytes || l.Offset > s.Bytes || uint64(s.Blocks) > (s.Bytes-l.Offset)/l.Stride {
			return errSegment
		}
	}
	return nil
}

func (m *bind) kind() frameType { return typeBind }

func (m *bind) fields(c *codec) {
	c.key(&m.Session)
	u32(c, &m.Index)
	s := &m.Segment
	c.u64(&s.Bytes)
	u32(c, &s.Blocks)
	layers := list(c, &s.Layers, 16, kvlayout.MaxLayers)
	for i := range layers {
		c.u64(&layers[i].Offset)
		c.u64(&layers[i].Stride)
	}
	if len(layers) > 0 {
		c.blob(&s.Grant, maxGrant)
	}
	if err := s.validate(); err != nil {
		c.fail(err)
	}
}

// bound answers a bind.
type bound struct {
	Mapped bool // the sender has the segment and will write there
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
