package kvconn

import (
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// request is a ticket on the wire.
type request struct {
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
	Have            []byte // bitmap over units, layer-major; empty when nothing is held
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
	return putBlob(b, m.Have)
}

var errShape = errors.New("positions, block size and blocks do not agree")

func decodeRequest(b []byte) (*request, error) {
	c := &cursor{b: b}
	m := &request{ID: c.u64(), Secret: c.key(), Link: c.key(),
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
	if err := c.end(); err != nil {
		return nil, fmt.Errorf("ticket: %w", err)
	}
	bt, n := int64(m.DestBlockTokens), int64(m.Positions)
	if bt < 1 || bt > kvlayout.MaxBlockTokens || n < 1 || n > maxPositions || int64(len(m.Dest)) != (n+bt-1)/bt {
		return nil, fmt.Errorf("ticket: %w", errShape)
	}
	return m, nil
}
