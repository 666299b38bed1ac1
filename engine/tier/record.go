package tier

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// A record is one unit, in host memory as on the SSD:
//
//	offset  bytes
//	0       8     magic
//	8       16    the unit's hash
//	24      4     bytes of rows and digests
//	28      4     the first bytes of the root's hash: whose unit it is
//	32      8     segment's number (SSD)
//	40      4     slot in the segment (SSD)
//	44      4     position of the unit's first token
//	48      8     when the unit came into the tiers, seconds since 1970
//	56      4     CRC-32C of bytes 0..55
//	60      4     CRC-32C of the digests: those of this header's rows
//	64      64    zeros
//	128           rows [layer][block], each packed as its kvlayout.Rows says
//	...           digests [layer][block][head], uint64
//
// padded to a multiple of page; numbers are little-endian. Rows begin where a line of 128
// bytes does: a GPU reads them at 51 GB/s so, and at 43 when they begin in the middle of one. Segment and slot
// tell a write that went astray from the record that belongs there. A header
// over another record's rows, which are whole in themselves (a write that was
// torn), is told by the sum of the digests.
const (
	magic      = "xpydkv4\n"
	headerSize = 128
	page       = 4096 // O_DIRECT's alignment
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// header is a record's first part.
type header struct {
	key     kvcache.Hash
	payload int
	segment uint64
	slot    uint32
	pos     uint32
	born    int64
	tenant  uint32 // see unit.tag
	sum     uint32 // see shape.sum
}

// unit is what the header says of its unit; of the root only who it belongs to. A
// time to come is that of a clock that was ahead, or is another's.
func (h *header) unit() *unit {
	u := &unit{key: h.key, pos: int(h.pos), born: time.Unix(h.born, 0)}
	if now := time.Now(); u.born.After(now) {
		u.born = now
	}
	binary.LittleEndian.PutUint32(u.root[:], h.tenant)
	return u
}

func (h *header) encode(b []byte) {
	clear(b[:headerSize])
	copy(b, magic)
	copy(b[8:], h.key[:])
	binary.LittleEndian.PutUint32(b[24:], uint32(h.payload))
	binary.LittleEndian.PutUint32(b[28:], h.tenant)
	binary.LittleEndian.PutUint64(b[32:], h.segment)
	binary.LittleEndian.PutUint32(b[40:], h.slot)
	binary.LittleEndian.PutUint32(b[44:], h.pos)
	binary.LittleEndian.PutUint64(b[48:], uint64(h.born))
	binary.LittleEndian.PutUint32(b[56:], crc32.Checksum(b[:56], castagnoli))
	binary.LittleEndian.PutUint32(b[60:], h.sum)
}

var errRecord = errors.New("no record")

// parseHeader believes nothing but a whole header.
func parseHeader(b []byte) (h header, err error) {
	if len(b) < headerSize || string(b[:8]) != magic || binary.LittleEndian.Uint32(b[56:]) != crc32.Checksum(b[:56], castagnoli) {
		return h, errRecord
	}
	return header{key: kvcache.Hash(b[8:24]), payload: int(binary.LittleEndian.Uint32(b[24:])), tenant: binary.LittleEndian.Uint32(b[28:]), segment: binary.LittleEndian.Uint64(b[32:]),
		slot: binary.LittleEndian.Uint32(b[40:]), pos: binary.LittleEndian.Uint32(b[44:]),
		born: int64(binary.LittleEndian.Uint64(b[48:])), sum: binary.LittleEndian.Uint32(b[60:])}, nil
}

// shape is what a unit of the pool looks like.
type shape struct {
	kvlayout.Layout
	blocks int // of a unit
	layers []unitLayer
	heads  int // the most that a layer has
	end    unitLayer
}

// unitLayer is one layer of a unit, and where its rows and digests lie in a record.
type unitLayer struct {
	kvlayout.Layer
	rows, digests int
}

func newShape(l kvlayout.Layout, blocks int) shape {
	s := shape{Layout: l, blocks: blocks, end: unitLayer{rows: headerSize}}
	s.end.digests = headerSize + blocks*l.BlockBytes()
	for _, layer := range l.Resolve() {
		s.end.Layer = layer
		s.layers = append(s.layers, s.end)
		s.heads = max(s.heads, layer.Heads)
		s.end.rows += blocks * layer.BlockBytes()
		s.end.digests += blocks * layer.DigestBytes()
	}
	return s
}

func (s *shape) payload() int { return s.end.digests - headerSize }
func (s *shape) record() int  { return (s.end.digests + page - 1) / page * page }

// sum is the checksum of a record's digests.
func (s *shape) sum(rec []byte) uint32 {
	return crc32.Checksum(rec[s.end.rows:s.end.digests], castagnoli)
}

// whole reads the header of a record, and sees that the rest is its own. Whether
// the rows are what the digests say is seen when they come into the pool.
func (s *shape) whole(rec []byte) (header, error) {
	h, err := parseHeader(rec)
	if err == nil && (len(rec) < headerSize+s.payload() || h.payload != s.payload() || h.sum != s.sum(rec)) {
		err = errRecord
	}
	return h, err
}

// block returns the rows and the digests of one layer of the unit's i-th block.
func (s *shape) block(rec []byte, layer, i int) (rows, digests []byte) {
	l := &s.layers[layer]
	size, sums := l.BlockBytes(), l.DigestBytes()
	return rec[l.rows+i*size:][:size], rec[l.digests+i*sums:][:sums]
}

// gather copies a unit out of the pool.
func (s *shape) gather(pool kernels.Pool, ids []int32, rec []byte) {
	sums := make([]uint64, s.heads)
	for layer := range s.layers {
		for i, id := range ids {
			rows, digests := s.block(rec, layer, i)
			pool.Gather(layer, id, 0, s.BlockTokens, rows)
			pool.Digest(layer, id, sums[:len(digests)/8])
			for h := range len(digests) / 8 {
				binary.LittleEndian.PutUint64(digests[8*h:], sums[h])
			}
		}
	}
}

// scatter puts a unit, whose first token has position pos, into blocks that
// nobody reads. False: its rows are not what the digests were made of.
func (s *shape) scatter(pool kernels.Pool, ids []int32, pos int, rec []byte) bool {
	sums := make([]uint64, s.heads)
	for layer := range s.layers {
		for i, id := range ids {
			rows, made, good := s.verify(pos, rec, layer, i, sums)
			if !good {
				return false
			}
			pool.Scatter(layer, id, 0, s.BlockTokens, rows)
			pool.SetDigest(layer, id, s.BlockTokens, made)
		}
	}
	return true
}

// verify makes the digests of one layer of the unit's i-th block from its rows, in
// sums, and reports whether they are those that came with them.
func (s *shape) verify(pos int, rec []byte, layer, i int, sums []uint64) (rows []byte, made []uint64, good bool) {
	l := &s.layers[layer]
	rows, digests := s.block(rec, layer, i)
	made = sums[:l.Heads]
	kernels.DigestRows(&l.Layer, pos+i*s.BlockTokens, s.BlockTokens, rows, made)
	for h, d := range made {
		if d != binary.LittleEndian.Uint64(digests[8*h:]) {
			return rows, made, false
		}
	}
	return rows, made, true
}

// right reports whether all rows of a unit are what its digests were made of.
func (s *shape) right(pos int, rec []byte) bool {
	sums := make([]uint64, s.heads)
	for layer := range s.layers {
		for i := range s.blocks {
			if _, _, good := s.verify(pos, rec, layer, i, sums); !good {
				return false
			}
		}
	}
	return true
}
