package kvconn

import (
	"errors"

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

var errShape = errors.New("positions, block size and blocks do not agree")

func (m *request) fields(c *codec) {
	u64(c, &m.ID)
	c.key(&m.Secret)
	c.key((*[16]byte)(&m.Link))
	u32(c, &m.DeadlineMS)
	u32(c, &m.DestBlockTokens)
	u32(c, &m.Positions)
	c.str(&m.RequestID)
	c.str(&m.LeaseID)
	c.blob(&m.First, maxPayload)
	c.ints(&m.Tokens, maxPositions)
	dest := list(c, &m.Dest, 8, maxPositions)
	for i := range dest {
		u32(c, &dest[i].Block)
		u32(c, &dest[i].Generation)
	}
	c.blob(&m.Have, maxUnits/8)
	bt, n := int64(m.DestBlockTokens), int64(m.Positions)
	if bt < 1 || bt > kvlayout.MaxBlockTokens || n < 1 || n > maxPositions || int64(len(m.Dest)) != (n+bt-1)/bt {
		c.fail(errShape)
	}
}
