package kvconn

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/xpyd/xpyd/kvlayout"
)

// unitHead precedes the digests and rows of one block of one layer. On the wire:
//
//	0 ticket u64 | 8 tag u64 | 16 layer u32 | 20 index u32 | 24 block i32 |
//	28 generation u32 | 32 rows u32 | 36 heads u32
//
// then digests [heads]u64, then the packed rows (kvlayout.Rows).
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
	if c.err == nil && u.Heads > kvlayout.MaxHeads {
		c.err = fmt.Errorf("%d heads, at most %d", u.Heads, kvlayout.MaxHeads)
	}
	raw := c.take(8 * int(min(u.Heads, kvlayout.MaxHeads)))
	if c.err != nil {
		return unitHead{}, nil, nil, fmt.Errorf("unit: %w", c.err)
	}
	for i := 0; i < len(raw); i += 8 {
		sums = append(sums, binary.LittleEndian.Uint64(raw[i:]))
	}
	return u, sums, c.b, nil
}

// A batch is several units of one ticket in one frame, so that their rows can
// be written and read with one system call. On the wire:
//
//	0 ticket u64 | 8 tag u64 | 16 units u32 | 20 digests u32
//
// then units x {layer u32, index u32, block i32, generation u32, rows u32,
// heads u32, bytes u32}, then the digests of all units, then their rows, as
// in a unit.
const (
	batchHeadSize  = 24
	batchEntrySize = 28
)

// arrival is one unit of a frame that is being received.
type arrival struct {
	unitHead
	bytes   int // of its rows
	digests []uint64
	at      arrivalAt
	unit    uint32 // its number in the ticket, once admitted
	run     []byte // where the rows go
}

// fixed is how many bytes of the body are needed to know how long its head is; 0 for
// frames without rows.
func (t frameType) fixed() int {
	switch t {
	case typeUnit:
		return unitHeadSize
	case typeBatch:
		return batchHeadSize
	}
	return 0
}

// checked is how many bytes of the body the frame's crc covers; headSize adds the
// digests, up to the rows. body has at least fixed bytes.
func (t frameType) checked(body []byte) int {
	if t == typeBatch && len(body) >= batchHeadSize {
		return batchHeadSize + batchEntrySize*int(min(binary.LittleEndian.Uint32(body[16:]), maxBatch))
	}
	return t.fixed()
}

func (t frameType) headSize(body []byte) (int, error) {
	n, sums, limit := uint32(1), uint32(0), uint32(kvlayout.MaxHeads)
	if t == typeBatch {
		n, sums, limit = binary.LittleEndian.Uint32(body[16:]), binary.LittleEndian.Uint32(body[20:]), maxSums
	} else {
		sums = binary.LittleEndian.Uint32(body[36:])
	}
	if n < 1 || n > maxBatch || sums > limit {
		return 0, fmt.Errorf("%d units with %d digests, at most %d with %d", n, sums, maxBatch, limit)
	}
	return t.checked(body) + 8*int(sums), nil
}

// appendBatchHead begins a batch; entries, then digests, follow.
func appendBatchHead(b []byte, ticket, tag uint64, units, digests int) []byte {
	return putU32(putU32(putU64(putU64(b, ticket), tag), uint32(units)), uint32(digests))
}

func (u *unitHead) appendEntry(b []byte, bytes int) []byte {
	for _, v := range []uint32{u.Layer, u.Index, uint32(u.Block), u.Generation, u.Rows, u.Heads, uint32(bytes)} {
		b = putU32(b, v)
	}
	return b
}

// decodeArrivals reads the head of a unit or a batch whose rows take rest
// bytes. The units are appended to list, their digests to sums; both are
// returned even with an error, for their memory.
func decodeArrivals(t frameType, b []byte, rest int, list []arrival, sums []uint64) ([]arrival, []uint64, error) {
	if t == typeUnit {
		u, sums, rows, err := decodeUnit(b, sums)
		if err == nil && len(rows) > 0 {
			err = fmt.Errorf("unit: %w", errTrail)
		}
		return append(list, arrival{unitHead: u, bytes: rest, digests: sums}), sums, err
	}
	c := &cursor{b: b}
	ticket, tag, n, count := c.u64(), c.u64(), c.u32(), c.u32()
	total, heads := 0, 0
	for range min(n, maxBatch) {
		u := arrival{unitHead: unitHead{Ticket: ticket, Tag: tag, Layer: c.u32(), Index: c.u32(), Block: int32(c.u32()),
			Generation: c.u32(), Rows: c.u32(), Heads: c.u32()}, bytes: int(c.u32())}
		total, heads = total+u.bytes, heads+int(u.Heads)
		list = append(list, u)
	}
	for range min(count, maxSums) {
		sums = append(sums, c.u64())
	}
	err := c.end()
	if err == nil && (total != rest || heads != int(count) || n > maxBatch || count > maxSums) {
		err = fmt.Errorf("%d bytes of rows and %d digests, its units say %d and %d", rest, count, total, heads)
	}
	if err != nil {
		return list, sums, fmt.Errorf("batch: %w", err)
	}
	left := sums
	for i := range list {
		list[i].digests, left = left[:list[i].Heads:list[i].Heads], left[list[i].Heads:]
	}
	return list, sums, nil
}

// unitBytes is the whole frame of a unit with this many heads and row bytes.
func unitBytes(heads, payload int) int { return headerSize + unitHeadSize + 8*heads + payload }

// sent, on each bulk connection, follows every unit of this round of the ticket. A unit
// still missing when all marks of the current round are there was lost.
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

// unitTag proves that a unit comes from the holder of the ticket's secret: 64 bits of
// HMAC-SHA256 over the session and the ticket id.
func unitTag(secret, session [16]byte, id uint64) uint64 {
	h := hmac.New(sha256.New, secret[:])
	h.Write([]byte("xpyd-kv unit"))
	h.Write(session[:])
	h.Write(putU64(nil, id))
	return binary.LittleEndian.Uint64(h.Sum(nil))
}
