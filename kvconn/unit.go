package kvconn

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// unitHead is what stands before the digests and rows of one block of one
// layer. On the wire:
//
//	0 ticket u64 | 8 tag u64 | 16 layer u32 | 20 index u32 | 24 block i32 |
//	28 generation u32 | 32 rows u32 | 36 heads u32
//
// then digests [heads]u64, then rows packed as [2 (K,V)][heads][rows][row_bytes].
type unitHead struct {
	Ticket      uint64
	Tag         uint64
	Layer       uint32
	Index       uint32 // of the destination block in the ticket's list
	Block       int32
	Generation  uint32
	Rows, Heads uint32
}

const unitHeadSize = 40

func (u *unitHead) append(b []byte) []byte {
	b = putU64(putU64(b, u.Ticket), u.Tag)
	for _, v := range []uint32{u.Layer, u.Index, uint32(u.Block), u.Generation, u.Rows, u.Heads} {
		b = putU32(b, v)
	}
	return b
}

// decodeUnit splits a unit's body; digests are appended to sums, and rows
// point into b.
func decodeUnit(b []byte, sums []uint64) (u unitHead, digests []uint64, rows []byte, err error) {
	c := &cursor{b: b}
	u = unitHead{Ticket: c.u64(), Tag: c.u64(), Layer: c.u32(), Index: c.u32(),
		Block: int32(c.u32()), Generation: c.u32(), Rows: c.u32(), Heads: c.u32()}
	if c.err == nil && u.Heads > maxKVHeads {
		c.err = fmt.Errorf("%d heads, at most %d", u.Heads, maxKVHeads)
	}
	raw := c.take(8 * int(min(u.Heads, maxKVHeads)))
	if c.err != nil {
		return unitHead{}, nil, nil, fmt.Errorf("unit: %w", c.err)
	}
	for i := 0; i < len(raw); i += 8 {
		sums = append(sums, binary.LittleEndian.Uint64(raw[i:]))
	}
	return u, sums, c.b, nil
}

// unitBytes is the whole frame of a unit with this many heads and row bytes.
func unitBytes(heads, payload int) int { return headerSize + unitHeadSize + 8*heads + payload }

// sent marks, on each bulk connection, that every unit of this round of the
// ticket stands before it. What is still missing when all marks of the
// current round are there was lost.
type sent struct {
	ID, Tag uint64
	Round   uint32
}

func (m *sent) kind() frameType        { return typeSent }
func (m *sent) append(b []byte) []byte { return putU32(putU64(putU64(b, m.ID), m.Tag), m.Round) }

func decodeSent(b []byte) (*sent, error) {
	c := &cursor{b: b}
	m := &sent{ID: c.u64(), Tag: c.u64(), Round: c.u32()}
	if err := c.end(); err != nil {
		return nil, fmt.Errorf("sent: %w", err)
	}
	return m, nil
}

// unitTag is what proves that a unit comes from the holder of the ticket's
// secret: 64 bits of HMAC-SHA256 over the session and the ticket id.
func unitTag(secret, session [16]byte, id uint64) uint64 {
	h := hmac.New(sha256.New, secret[:])
	h.Write([]byte("xpyd-kv unit"))
	h.Write(session[:])
	h.Write(putU64(nil, id))
	return binary.LittleEndian.Uint64(h.Sum(nil))
}
