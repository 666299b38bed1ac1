package level

import (
	"encoding/binary"
	"encoding/json"
	"hash/crc32"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
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
// padded to a multiple of Page; numbers are little-endian. Rows begin where a line of 128
// bytes does: a GPU reads them at 51 GB/s so, and at 43 when they begin in the middle of one.
// Segment and slot tell a write that went astray from the record that belongs there. The
// sum of the digests tells a header over another record's rows, as a torn write leaves it.
const (
	magic      = "xpydkv4\n"
	HeaderSize = 128
	Page       = 4096 // O_DIRECT's alignment
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header is a record's first part.
type Header struct {
	Key     kvcache.Hash
	Payload int
	Segment uint64
	Slot    uint32
	Pos     uint32
	Born    int64
	Tenant  uint32 // Unit.Tenant
	Sum     uint32 // of the digests
}

// Unit is what the header says about its unit; of the root only the tenant. A birth in the future,
// by a clock that was ahead, becomes now.
func (h *Header) Unit() *Unit {
	u := &Unit{Key: h.Key, Pos: int(h.Pos), Born: time.Unix(h.Born, 0)}
	if now := time.Now(); u.Born.After(now) {
		u.Born = now
	}
	binary.LittleEndian.PutUint32(u.Root[:], h.Tenant)
	return u
}

// Encode writes the header to the first HeaderSize bytes of b.
func (h *Header) Encode(b []byte) {
	clear(b[:HeaderSize])
	copy(b, magic)
	copy(b[8:], h.Key[:])
	binary.LittleEndian.PutUint32(b[24:], uint32(h.Payload))
	binary.LittleEndian.PutUint32(b[28:], h.Tenant)
	binary.LittleEndian.PutUint64(b[32:], h.Segment)
	binary.LittleEndian.PutUint32(b[40:], h.Slot)
	binary.LittleEndian.PutUint32(b[44:], h.Pos)
	binary.LittleEndian.PutUint64(b[48:], uint64(h.Born))
	binary.LittleEndian.PutUint32(b[56:], crc32.Checksum(b[:56], castagnoli))
	binary.LittleEndian.PutUint32(b[60:], h.Sum)
}

// ParseHeader reads a header and checks its sum.
func ParseHeader(b []byte) (h Header, err error) {
	if len(b) < HeaderSize || string(b[:8]) != magic || binary.LittleEndian.Uint32(b[56:]) != crc32.Checksum(b[:56], castagnoli) {
		return h, ErrCorrupt
	}
	return Header{Key: kvcache.Hash(b[8:24]), Payload: int(binary.LittleEndian.Uint32(b[24:])), Tenant: binary.LittleEndian.Uint32(b[28:]), Segment: binary.LittleEndian.Uint64(b[32:]),
		Slot: binary.LittleEndian.Uint32(b[40:]), Pos: binary.LittleEndian.Uint32(b[44:]),
		Born: int64(binary.LittleEndian.Uint64(b[48:])), Sum: binary.LittleEndian.Uint32(b[60:])}, nil
}

// Stamp writes the header of a unit, whose rows and digests are in rec, to b.
func (s *Shape) Stamp(b []byte, u *Unit, segment uint64, slot int, rec []byte) {
	h := Header{u.Key, s.Payload(), segment, uint32(slot), uint32(u.Pos), u.Born.Unix(), u.Tenant(), s.sum(rec)}
	h.Encode(b)
}

// Whole reads the header of a record and checks that the digests belong to it. Rows are checked
// against the digests when they come into the pool.
func (s *Shape) Whole(rec []byte) (Header, error) {
	h, err := ParseHeader(rec)
	if err == nil && (len(rec) < HeaderSize+s.Payload() || h.Payload != s.Payload() || h.Sum != s.sum(rec)) {
		err = ErrCorrupt
	}
	return h, err
}

// Stamped is Whole for the record that Stamp made of a unit.
func (s *Shape) Stamped(rec []byte, key kvcache.Hash, pos int, segment uint64, slot int) (Header, error) {
	h, err := s.Whole(rec)
	if err == nil && (h.Key != key || h.Pos != uint32(pos) || h.Segment != segment || h.Slot != uint32(slot)) {
		err = ErrCorrupt
	}
	return h, err
}

// sum is the checksum of a record's digests.
func (s *Shape) sum(rec []byte) uint32 {
	return crc32.Checksum(rec[s.end.RowsAt:s.end.DigestsAt], castagnoli)
}

// preamble says what records are. Records of another model, layout or version have another one.
type preamble struct {
	Format   string `json:"format"`
	Segment  uint64 `json:"segment"`
	Identity string `json:"identity"` // of the model and its numerics
	Record   int    `json:"record_bytes"`
	Payload  int    `json:"payload_bytes"`
	Blocks   int    `json:"unit_blocks"`
	// Layout is part of what names a unit: another layout's are never read.
	Layout kvlayout.Layout `json:"layout"`
}

// Preamble says what records are, as JSON.
func (s *Shape) Preamble(format string, segment uint64, identity string) []byte {
	text, err := json.Marshal(preamble{format, segment, identity, s.Record(), s.Payload(), s.Blocks, s.Layout})
	if err != nil { // it has nothing that JSON cannot hold
		panic(err)
	}
	return text
}
