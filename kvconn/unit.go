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

func (u *unitHead) fields(c *codec) {
	u64(c, &u.Ticket)
	u64(c, &u.Tag)
	if u.block(c); u.Heads > kvlayout.MaxHeads {
		c.fail(fmt.Errorf("%d heads, at most %d", u.Heads, kvlayout.MaxHeads))
	}
}

// block is the part that differs between the units of a batch.
func (u *unitHead) block(c *codec) {
	u32(c, &u.Layer)
	u32(c, &u.Index)
	u32(c, &u.Block)
	u32(c, &u.Generation)
	u32(c, &u.Rows)
	u32(c, &u.Heads)
}

// placed announces one block of one layer that already lies in the receiver's memory: a
// unit without the rows. Its checksum covers the whole body.
type placed struct {
	unitHead
	Digests []uint64 // one a head; a read appends them
}

func (m *placed) kind() frameType { return typePlaced }

func (m *placed) fields(c *codec) {
	m.unitHead.fields(c)
	m.Digests = c.digests(m.Digests, int(m.Heads))
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

// batchHead begins a batch; the units' entries, then their digests, follow.
type batchHead struct {
	Ticket, Tag    uint64
	Units, Digests uint32
}

func (h *batchHead) fields(c *codec) {
	u64(c, &h.Ticket)
	u64(c, &h.Tag)
	u32(c, &h.Units)
	u32(c, &h.Digests)
}

// entry is one unit of a batch; bytes is the size of its rows.
func (u *unitHead) entry(c *codec, bytes *int) {
	n := uint32(*bytes)
	u.block(c)
	u32(c, &n)
	*bytes = int(n)
}

// decodeArrivals reads the head of a unit or a batch whose rows take rest
// bytes. The units are appended to list, their digests to sums; both are
// returned even with an error, for their memory.
func decodeArrivals(t frameType, b []byte, rest int, list []arrival, sums []uint64) ([]arrival, []uint64, error) {
	c := codec{b: b, reading: true}
	if t == typeUnit {
		u := placed{Digests: sums}
		u.fields(&c)
		return append(list, arrival{unitHead: u.unitHead, bytes: rest, digests: u.Digests}), u.Digests, c.end()
	}
	var h batchHead
	h.fields(&c)
	total, heads := 0, 0
	for range min(h.Units, maxBatch) {
		u := arrival{unitHead: unitHead{Ticket: h.Ticket, Tag: h.Tag}}
		u.entry(&c, &u.bytes)
		total, heads = total+u.bytes, heads+int(u.Heads)
		list = append(list, u)
	}
	sums = c.digests(sums, int(h.Digests))
	if total != rest || heads != int(h.Digests) || h.Units > maxBatch || h.Digests > maxSums {
		c.fail(fmt.Errorf("batch of %d bytes of rows and %d digests, its units say %d and %d", rest, h.Digests, total, heads))
	}
	if err := c.end(); err != nil {
		return list, sums, err
	}
	left := sums
	for i := range list {
		list[i].digests, left = left[:list[i].Heads:list[i].Heads], left[list[i].Heads:]
	}
	return list, sums, nil
}

// unitBytes is the whole frame of a unit with this many heads and row bytes.
func unitBytes(heads, payload int) int { return headerSize + unitHeadSize + 8*heads + payload }

// unitTag proves that a unit comes from the holder of the ticket's secret: 64 bits of
// HMAC-SHA256 over the session and the ticket id.
func unitTag(secret, session [16]byte, id uint64) uint64 {
	h := hmac.New(sha256.New, secret[:])
	h.Write([]byte("xpyd-kv unit"))
	h.Write(session[:])
	h.Write(putU64(nil, id))
	return binary.LittleEndian.Uint64(h.Sum(nil))
}
