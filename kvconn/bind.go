package kvconn

import (
	"encoding/binary"
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

func (m *bind) append(b []byte) []byte {
	b = putU32(append(b, m.Session[:]...), m.Index)
	b = putU32(putU64(b, m.Segment.Bytes), m.Segment.Blocks)
	b = putU32(b, uint32(len(m.Segment.Layers)))
	for _, l := range m.Segment.Layers {
		b = putU64(putU64(b, l.Offset), l.Stride)
	}
	if len(m.Segment.Layers) == 0 {
		return b
	}
	return putBlob(b, m.Segment.Grant)
}

func decodeBind(b []byte) (*bind, error) {
	c := &cursor{b: b}
	m := &bind{Session: c.key(), Index: c.u32()}
	m.Segment.Bytes, m.Segment.Blocks = c.u64(), c.u32()
	if n := c.count(16, kvlayout.MaxLayers); n > 0 {
		m.Segment.Layers = make([]span, n)
		for i := range m.Segment.Layers {
			m.Segment.Layers[i] = span{c.u64(), c.u64()}
		}
		m.Segment.Grant = c.blob(maxGrant)
	}
	err := c.end()
	if err == nil {
		err = m.Segment.validate()
	}
	if err != nil {
		return nil, fmt.Errorf("bind: %w", err)
	}
	return m, nil
}

// bound answers a bind.
type bound struct {
	Mapped bool // the sender has the segment and will write there
}

func (m *bound) kind() frameType { return typeBound }

func (m *bound) append(b []byte) []byte {
	if m.Mapped {
		return append(b, 1)
	}
	return append(b, 0)
}

func decodeBound(b []byte) (*bound, error) {
	c := &cursor{b: b}
	v := c.u8()
	if v > 1 {
		return nil, fmt.Errorf("bound: mapped %d", v)
	}
	if err := c.end(); err != nil {
		return nil, fmt.Errorf("bound: %w", err)
	}
	return &bound{Mapped: v == 1}, nil
}

// placed announces one block of one layer that already lies in the receiver's memory: a
// unit's head and digests without the rows. Its checksum covers the whole body.
type placed struct {
	unitHead
	Digests []uint64 // one a head
}

func (m *placed) kind() frameType { return typePlaced }

func (m *placed) append(b []byte) []byte {
	b = m.unitHead.append(b)
	for _, d := range m.Digests {
		b = binary.LittleEndian.AppendUint64(b, d)
	}
	return b
}

// decodePlaced appends the digests to sums.
func decodePlaced(b []byte, sums []uint64) (unitHead, []uint64, error) {
	u, sums, rows, err := decodeUnit(b, sums)
	if err == nil && len(rows) > 0 {
		err = fmt.Errorf("placed: %w", errTrail)
	}
	return u, sums, err
}
