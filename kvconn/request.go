package kvconn

import (
	"errors"
	"fmt"
	"slices"

	"github.com/xpyd/xpyd/kvconn/ticket"
)

// request is a ticket on the wire.
type request struct {
	Version         uint8
	ID              uint64
	Secret          [16]byte
	Link            ticket.Link
	DeadlineMS      uint32 // from receipt
	DestBlockTokens uint32
	Positions       uint32
	RequestID       string
	LeaseID         string
	First           []byte
	Tokens          []int32
	Dest            []Dest
	Have            []byte   // bitmap over units, layer-major; empty when nothing is held
	Parts           []partOf // from 2: what of each group to send; empty: all of the receiver's
}

// partOf is what a ticket asks for of one group: a range of the model's KV
// heads, in the receiver's dtype.
type partOf struct {
	First, Heads uint32
	DType        string
}

func (m *request) kind() frameType { return typeTicket }

func (m *request) append(b []byte) []byte {
	b = putU64(b, m.ID)
	b = append(b, m.Secret[:]...)
	b = append(b, m.Link[:]...)
	b = putU32(putU32(putU32(b, m.DeadlineMS), m.DestBlockTokens), m.Positions)
	b = putStr(putStr(b, m.RequestID), m.LeaseID)
	b = putBlob(b, m.First)
	b = putU32(b, uint32(len(m.Tokens)))
	for _, t := range m.Tokens {
		b = putU32(b, uint32(t))
	}
	b = putU32(b, uint32(len(m.Dest)))
	for _, d := range m.Dest {
		b = putU32(putU32(b, uint32(d.Block)), d.Generation)
	}
	b = putBlob(b, m.Have)
	if m.Version < 2 {
		return b
	}
	b = putU32(b, uint32(len(m.Parts)))
	for _, p := range m.Parts {
		b = putStr(putU32(putU32(b, p.First), p.Heads), p.DType)
	}
	return b
}

var errShape = errors.New("positions, block size and blocks do not agree")

func decodeRequest(b []byte, version uint8) (*request, error) {
	c := &cursor{b: b}
	m := &request{Version: version, ID: c.u64(), Secret: c.key(), Link: c.key(),
		DeadlineMS: c.u32(), DestBlockTokens: c.u32(), Positions: c.u32(),
		RequestID: c.str(), LeaseID: c.str(), First: c.blob(maxPayload)}
	if n := c.count(4, maxPositions); n > 0 {
		m.Tokens = make([]int32, n)
		for i := range m.Tokens {
			m.Tokens[i] = int32(c.u32())
		}
	}
	if n := c.count(8, maxPositions); n > 0 {
		m.Dest = make([]Dest, n)
		for i := range m.Dest {
			m.Dest[i] = Dest{Block: int32(c.u32()), Generation: c.u32()}
		}
	}
	m.Have = c.blob(maxUnits / 8)
	if version >= 2 {
		for range c.count(12, maxGroups) { // 12 bytes: the least a part takes
			p := partOf{First: c.u32(), Heads: c.u32(), DType: c.str()}
			if c.err == nil && (p.Heads < 1 || uint64(p.First)+uint64(p.Heads) > maxKVHeads) {
				return nil, fmt.Errorf("ticket: heads %d+%d", p.First, p.Heads)
			}
			m.Parts = append(m.Parts, p)
		}
	}
	if err := c.end(); err != nil {
		return nil, fmt.Errorf("ticket: %w", err)
	}
	bt, n := int64(m.DestBlockTokens), int64(m.Positions)
	if bt < 1 || bt > maxBlockTokens || n < 1 || n > maxPositions || int64(len(m.Dest)) != (n+bt-1)/bt {
		return nil, fmt.Errorf("ticket: %w", errShape)
	}
	return m, nil
}

// layout is the receiver's layout theirs, cut to the parts that the ticket asks
// for. All of it must be in ours, the sender's.
func (m *request) layout(theirs, ours Layout) (Layout, error) {
	if len(m.Parts) > 0 && len(m.Parts) != len(theirs.Groups) {
		return Layout{}, fmt.Errorf("parts of %d groups, the layout has %d", len(m.Parts), len(theirs.Groups))
	}
	ranges := make([]HeadRange, len(m.Parts))
	for i, p := range m.Parts {
		ranges[i] = HeadRange{int(p.First), int(p.Heads)}
		if p.DType != theirs.Groups[i].DType {
			return Layout{}, fmt.Errorf("part %d: %s, the handshake said %s", i, p.DType, theirs.Groups[i].DType)
		}
	}
	return theirs.cut(ranges, ours)
}

// HeadRange is a run of the model's KV heads.
type HeadRange struct{ First, Count int }

// cut narrows the layout to a range of heads a group; none means all that it
// has. The range must be in it and in other, the peer's.
func (l Layout) cut(ranges []HeadRange, other Layout) (Layout, error) {
	if len(l.Groups) != len(other.Groups) || len(ranges) > 0 && len(ranges) != len(l.Groups) {
		return Layout{}, fmt.Errorf("heads of %d groups, the layouts have %d and %d", len(ranges), len(l.Groups), len(other.Groups))
	}
	out := Layout{BlockTokens: l.BlockTokens, Groups: slices.Clone(l.Groups)}
	for i := range out.Groups {
		g := &out.Groups[i]
		r := HeadRange{g.HeadFirst, g.KVHeads}
		if len(ranges) > 0 {
			r = ranges[i]
		}
		for _, in := range []Group{l.Groups[i], other.Groups[i]} {
			if r.Count < 1 || r.First < in.HeadFirst || r.First+r.Count > in.HeadFirst+in.KVHeads {
				return Layout{}, fmt.Errorf("group %d: heads %d+%d are not in %s", i, r.First, r.Count, in.heads())
			}
		}
		g.HeadsTotal, g.HeadFirst, g.KVHeads = g.total(), r.First, r.Count
	}
	return out, nil
}
