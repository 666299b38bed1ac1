package kvconntest

import (
	"bufio"
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"

	"github.com/xpyd/xpyd/kvconn"
)

// This file reads and writes the wire as DESIGN.md describes it, without a
// line of kvconn's own codec: recorded and hostile peers are made of it.

const (
	wireVersion = 4
	wireBanner  = "xpyd-kv 4-4\n"

	headerSize   = 16
	unitHeadSize = 40
	maxFrame     = 128 << 20
)

// Frame is one frame, header and body.
type Frame struct {
	Version uint8
	Step    Step
	Seq     uint32
	Body    []byte
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Bytes seals the frame: length, check and checksum are right.
func (f Frame) Bytes() []byte {
	b := make([]byte, headerSize, headerSize+len(f.Body))
	b[0], b[1] = f.Version, byte(f.Step)
	binary.LittleEndian.PutUint32(b[4:], uint32(len(f.Body)))
	binary.LittleEndian.PutUint32(b[8:], f.Seq)
	b = append(b, f.Body...)
	Seal(b)
	return b
}

// Seal corrects a changed frame's check and checksum, and leaves its length.
func Seal(frame []byte) {
	sum := crc32.Update(crc32.Checksum(frame[:2], castagnoli), castagnoli, frame[4:12])
	binary.LittleEndian.PutUint16(frame[2:], uint16(sum))
	covered := frame[headerSize:]
	switch {
	case Step(frame[1]) == Unit:
		covered = covered[:min(len(covered), unitHeadSize)]
	case Step(frame[1]) == Batch && len(covered) >= 24:
		units := int(min(binary.LittleEndian.Uint32(covered[16:]), 1024))
		covered = covered[:min(len(covered), 24+28*units)]
	}
	binary.LittleEndian.PutUint32(frame[12:], crc32.Update(crc32.Checksum(frame[:12], castagnoli), castagnoli, covered))
}

// ParseFrame takes a sealed frame apart.
func ParseFrame(b []byte) (Frame, error) {
	if len(b) < headerSize || int(binary.LittleEndian.Uint32(b[4:])) != len(b)-headerSize {
		return Frame{}, fmt.Errorf("frame of %d bytes", len(b))
	}
	f := Frame{Version: b[0], Step: Step(b[1]), Seq: binary.LittleEndian.Uint32(b[8:]), Body: b[headerSize:]}
	again := bytes.Clone(b)
	if Seal(again); !bytes.Equal(again, b) {
		return f, errors.New("frame is not sealed")
	}
	return f, nil
}

// Body builds a frame's body.
type Body []byte

// U32 appends numbers of 32 bits.
func (b Body) U32(v ...uint32) Body { return b.numbers(v) }

// U64 appends numbers of 64 bits.
func (b Body) U64(v ...uint64) Body { return b.numbers(v) }

func (b Body) numbers(v any) Body {
	b, err := binary.Append(b, binary.LittleEndian, v)
	if err != nil {
		panic(err)
	}
	return b
}

// Str appends strings or blobs, each behind its length.
func (b Body) Str(v ...string) Body {
	for _, s := range v {
		b = append(b.U32(uint32(len(s))), s...)
	}
	return b
}

// HelloBody is a hello without flags. role is 1 for a receiver, 2 for a sender.
func HelloBody(lo, hi, role, bulk uint8, session [16]byte, id kvconn.Identity) Body {
	b := append(Body{lo, hi, role, bulk}, session[:]...).U64(id.Epoch)
	return b.Str(id.ID, id.ModelFingerprint, id.TokenizerFingerprint, id.Numerics, id.Build, string(id.Layout.Encode())).U32(0)
}

// BindBody binds a bulk connection, and shares no memory.
func BindBody(session [16]byte, index uint32) Body {
	return append(Body(nil), session[:]...).U32(index).U64(0).U32(0, 0)
}

// HelloSession is the session key in a hello's body.
func HelloSession(body []byte) (key [16]byte) {
	copy(key[:], body[4:])
	return key
}

// TicketBody is a ticket for a prompt into dest.
func TicketBody(id uint64, secret [16]byte, blockTokens int, tokens []int32, positions int, dest []kvconn.Dest, have []byte) Body {
	b := append(Body(nil).U64(id), secret[:]...)
	b = append(b, make([]byte, 16)...) // link
	b = b.U32(60_000, uint32(blockTokens), uint32(positions)).Str("hostile", "", "").U32(uint32(len(tokens)))
	for _, t := range tokens {
		b = b.U32(uint32(t))
	}
	b = b.U32(uint32(len(dest)))
	for _, d := range dest {
		b = b.U32(uint32(d.Block), d.Generation)
	}
	return b.Str(string(have))
}

// UnitTag is the tag of a ticket's units.
func UnitTag(secret, session [16]byte, id uint64) uint64 {
	h := hmac.New(sha256.New, secret[:])
	h.Write([]byte("xpyd-kv unit"))
	h.Write(session[:])
	h.Write(Body(nil).U64(id))
	return binary.LittleEndian.Uint64(h.Sum(nil))
}

// RawConn is one connection spoken frame by frame.
type RawConn struct {
	net.Conn
	Version uint8
	Out     uint32 // sequence number of the next frame sent
	r       *bufio.Reader
}

// NewRawConn wraps a connection that has carried nothing yet.
func NewRawConn(c net.Conn) *RawConn {
	return &RawConn{Conn: c, Version: wireVersion, r: bufio.NewReader(c)}
}

// frame is the next frame to be sent.
func (c *RawConn) frame(step Step, body []byte) []byte {
	return Frame{Version: c.Version, Step: step, Seq: c.Out, Body: body}.Bytes()
}

// Send writes a frame with the next sequence number.
func (c *RawConn) Send(step Step, body []byte) error {
	b := c.frame(step, body)
	c.Out++
	_, err := c.Write(b)
	return err
}

// Next reads a frame.
func (c *RawConn) Next() (Frame, error) {
	b, err := c.read(headerSize)
	if err != nil {
		return Frame{}, err
	}
	n := binary.LittleEndian.Uint32(b[4:])
	if n > maxFrame {
		return Frame{}, fmt.Errorf("frame of %d bytes", n)
	}
	body, err := c.read(int(n))
	if err != nil {
		return Frame{}, err
	}
	return ParseFrame(append(b, body...))
}

// read reads n bytes.
func (c *RawConn) read(n int) ([]byte, error) {
	b := make([]byte, n)
	_, err := io.ReadFull(c.r, b)
	return b, err
}

// Expect reads frames until one of step comes; others are passed over.
func (c *RawConn) Expect(step Step) (Frame, error) {
	for {
		f, err := c.Next()
		if err != nil || f.Step == step {
			return f, err
		}
	}
}
