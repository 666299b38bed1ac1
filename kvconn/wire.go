package kvconn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// frameType is the second byte of every frame.
type frameType uint8

// Frame types. R is the receiver, S the sender.
const (
	typeHello  frameType = 1 // both ways, first frame of a control connection
	typeRefuse frameType = 2 // both ways, instead of hello, ready or bound
	typeReady  frameType = 3 // R to S: the session may start
	typeBind   frameType = 4 // R to S, first frame of a bulk connection
	typeBound  frameType = 5 // S to R

	typeTicket   frameType = 16 // R to S, control
	typeRevoke   frameType = 17
	typeResend   frameType = 18
	typeReceived frameType = 19
	typePing     frameType = 20

	typeAccepted  frameType = 32 // S to R, control
	typeCommit    frameType = 33
	typeFailed    frameType = 34
	typeRevokeAck frameType = 35
	typePong      frameType = 36
	typeGoaway    frameType = 37

	typeUnit   frameType = 48 // S to R, bulk
	typeSent   frameType = 49
	typeBeat   frameType = 50
	typePlaced frameType = 51
	typeBatch  frameType = 52
	typePushed frameType = 53
)

// A frame is a header, then length bytes of body, little-endian throughout:
//
//	0  version u8 | 1 type u8 | 2 check u16 | 4 length u32 | 8 seq u32 | 12 crc u32
//
// check is the low half of CRC-32C over bytes 0..1 and 4..11, so that a wrong
// length is detected before the reader waits for that many bytes. seq counts the
// frames of one direction of one connection from 0. crc is CRC-32C over bytes
// 0..11 and the body; for a unit or a batch, over bytes 0..11 and the body up
// to the digests, which cover the rows.
const headerSize = 16

// Bounds of what a peer may send. They are checked before any allocation.
const (
	maxSmallBody = 64 << 10 // every frame but the three below
	maxLargeBody = 80 << 20 // ticket, resend, commit
	maxString    = 4096     // bytes of any one string
	maxPayload   = 16 << 20 // Ticket.First, Commit.Payload
	maxPositions = 1 << 22  // tokens, and so blocks, of one ticket
	maxUnits     = 1 << 23  // layers x blocks of one ticket
	maxBatch     = 1024     // units in one batch
	maxSums      = 1 << 16  // digests in one batch
	maxBatchBody = 512 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type header struct {
	version uint8
	typ     frameType
	length  uint32
	seq     uint32
	crc     uint32
}

// maxBody is the largest body a frame of this type may have; unit is the
// session's bound for units.
func (t frameType) maxBody(unit int) int {
	switch t {
	case typeTicket, typeResend, typeCommit:
		return maxLargeBody
	case typeUnit:
		return unit
	case typeBatch:
		if unit == 0 {
			return 0 // not a bulk connection
		}
		return maxBatchBody // only its head is ever held
	}
	return maxSmallBody
}

var (
	errCheck   = errors.New("frame: header check mismatch")
	errTrunc   = errors.New("truncated")
	errTrail   = errors.New("trailing bytes")
	errEmpty   = errors.New("empty list")
	errSum     = errors.New("frame: checksum mismatch")
	errVersion = errors.New("frame: wrong version")
)

// beginFrame appends a header to be filled in by endFrame.
func beginFrame(b []byte, version uint8, t frameType) []byte {
	return append(b, version, byte(t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
}

// endFrame completes the frame that starts at b[at] and ends at the end of b.
func endFrame(b []byte, at int, seq uint32) {
	endRows(b, at, seq, 0)
}

// endRows is endFrame for a frame that goes on with rows behind the end of b.
func endRows(b []byte, at int, seq uint32, rows int) {
	f := b[at:]
	binary.LittleEndian.PutUint32(f[4:], uint32(len(f)-headerSize+rows))
	binary.LittleEndian.PutUint32(f[8:], seq)
	binary.LittleEndian.PutUint16(f[2:], headCheck(f))
	binary.LittleEndian.PutUint32(f[12:], frameSum(f[:headerSize], f[headerSize:]))
}

func headCheck(head []byte) uint16 {
	return uint16(crc32.Update(crc32.Checksum(head[:2], castagnoli), castagnoli, head[4:12]))
}

func frameSum(head, body []byte) uint32 {
	switch t := frameType(head[1]); t {
	case typeUnit, typeBatch:
		body = body[:min(len(body), t.checked(body))]
	}
	return crc32.Update(crc32.Checksum(head[:12], castagnoli), castagnoli, body)
}

// parseHeader reads headerSize bytes. It cannot check the sum over the body, which has
// not arrived yet.
func parseHeader(b []byte, version uint8, maxUnit int) (header, error) {
	h := header{
		version: b[0],
		typ:     frameType(b[1]),
		length:  binary.LittleEndian.Uint32(b[4:]),
		seq:     binary.LittleEndian.Uint32(b[8:]),
		crc:     binary.LittleEndian.Uint32(b[12:]),
	}
	if binary.LittleEndian.Uint16(b[2:]) != headCheck(b) {
		return h, errCheck
	}
	if h.version != version {
		return h, fmt.Errorf("%w: %d, agreed on %d", errVersion, h.version, version)
	}
	if max := h.typ.maxBody(maxUnit); int64(h.length) > int64(max) {
		return h, fmt.Errorf("frame: type %d of %d bytes, at most %d", h.typ, h.length, max)
	}
	return h, nil
}

// codec writes the body of a frame or reads one: a message lists its fields once, for
// both. The zero value writes. After the first failure of a read, fields stay zero.
type codec struct {
	b       []byte // written so far, or left to read
	reading bool
	err     error
}

// fail makes a read fail, unless it already has.
func (c *codec) fail(err error) {
	if c.reading && c.err == nil {
		c.err = err
	}
}

// take reads the next n bytes; nil: they are not there.
func (c *codec) take(n int) []byte {
	if n > len(c.b) {
		c.fail(errTrunc)
	}
	if c.err != nil {
		return nil
	}
	v := c.b[:n]
	c.b = c.b[n:]
	return v
}

func (c *codec) u8(v *uint8) {
	if !c.reading {
		c.b = append(c.b, *v)
	} else if b := c.take(1); b != nil {
		*v = b[0]
	}
}

func u32[T ~uint32 | ~int32](c *codec, v *T) {
	if !c.reading {
		c.b = putU32(c.b, uint32(*v))
	} else if b := c.take(4); b != nil {
		*v = T(binary.LittleEndian.Uint32(b))
	}
}

func u64[T ~uint64 | ~int64](c *codec, v *T) {
	if !c.reading {
		c.b = putU64(c.b, uint64(*v))
	} else if b := c.take(8); b != nil {
		*v = T(binary.LittleEndian.Uint64(b))
	}
}

func (c *codec) key(k *[16]byte) {
	if !c.reading {
		c.b = append(c.b, k[:]...)
	} else {
		copy(k[:], c.take(len(k)))
	}
}

// count is for the number of a list's elements of elem bytes each. It returns n or, of
// a read, the number that came: at most max, and no more than the frame holds.
func (c *codec) count(n, elem, max int) int {
	v := uint32(n)
	if u32(c, &v); !c.reading {
		return n
	}
	if c.err == nil && (int64(v) > int64(max) || int64(v)*int64(elem) > int64(len(c.b))) {
		c.fail(fmt.Errorf("count %d: %w", v, errTrunc))
	}
	if c.err != nil {
		return 0
	}
	return int(v)
}

// list is count for a slice, which a read makes; nil when it is empty.
func list[T any](c *codec, v *[]T, elem, max int) []T {
	if n := c.count(len(*v), elem, max); c.reading && n > 0 {
		*v = make([]T, n)
	}
	return *v
}

// str cuts a text that is too long for the wire.
func (c *codec) str(s *string) {
	if n := c.count(min(len(*s), maxString), 1, maxString); !c.reading {
		c.b = append(c.b, (*s)[:n]...)
	} else {
		*s = string(c.take(n))
	}
}

// blob copies what it reads, because bodies live in reused buffers.
func (c *codec) blob(v *[]byte, max int) {
	if n := c.count(len(*v), 1, max); !c.reading {
		c.b = append(c.b, *v...)
	} else {
		*v = append([]byte(nil), c.take(n)...)
	}
}

// ints is for a prompt's tokens: one by one they would cost a millisecond per 100,000.
func (c *codec) ints(v *[]int32, max int) {
	ints := list(c, v, 4, max)
	if !c.reading {
		b := c.b
		for _, n := range ints {
			b = putU32(b, uint32(n))
		}
		c.b = b
		return
	}
	raw := c.take(4 * len(ints))
	for i := range len(raw) / 4 {
		ints[i] = int32(binary.LittleEndian.Uint32(raw[4*i:]))
	}
}

// digests writes d, or appends the n that come.
func (c *codec) digests(d []uint64, n int) []uint64 {
	if !c.reading {
		for _, v := range d {
			c.b = putU64(c.b, v)
		}
		return d
	}
	for b := c.take(8 * n); len(b) > 0; b = b[8:] {
		d = append(d, binary.LittleEndian.Uint64(b))
	}
	return d
}

// end is the error of a read, also if anything is left.
func (c *codec) end() error {
	if len(c.b) > 0 {
		c.fail(errTrail)
	}
	return c.err
}

func putU32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func putU64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }
