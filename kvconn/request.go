package kvconn

import (
	"errors"
	"fmt"

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

// sameParts checks that the ticket asks for whole groups of layout.
func (m *request) sameParts(layout Layout) error {
	if len(m.Parts) == 0 {
		return nil
	}
	if len(m.Parts) != len(layout.Groups) {
		return fmt.Errorf("parts of %d groups, the layout has %d", len(m.Parts), len(layout.Groups))
	}
	for i, g := range layout.Groups {
		if p := m.Parts[i]; int(p.First) != g.HeadFirst || int(p.Heads) != g.KVHeads || p.DType != g.DType {
			return fmt.Errorf("part %d: heads %d+%d of %s, the layout has %s of %s", i, p.First, p.Heads, p.DType, g.heads(), g.DType)
		}
	}
	return nil
}
