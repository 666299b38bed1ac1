package kvconn

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/xpyd/xpyd/internal/trust"
)

// frameConn reads and writes frames of one connection. One goroutine reads
// and one writes at a time; close may come from anywhere.
type frameConn struct {
	conn    net.Conn
	vec     *vectors // nil: everything goes through buffers
	r       *bufio.Reader
	proven  trust.Proven // who the peer is, with a ring
	version uint8
	maxUnit int // largest unit body accepted, bytes
	in, out uint32
	silence time.Duration // 0: deadlines are the caller's
	ordered bool          // refuse gaps and repeats in the sequence numbers
	buf     []byte        // of send
	head    [headerSize]byte
	enc     codec // of frame
	dec     codec // of decode

	// For a unit or a batch, next returns only the head; its rows follow.
	rest  int    // bytes of rows not taken yet
	guess int    // length of the last such head: the next is often as long
	ahead []byte // read behind the rows, not in r yet
	spare []byte // ahead's memory
}

// Read and write chunk sizes. A deadline covers one chunk, so that a slow
// link is not mistaken for a dead peer.
const (
	controlBuffer = 32 << 10
	writeChunk    = 256 << 10
)

func newFrameConn(c net.Conn, readBuffer int) *frameConn {
	f := &frameConn{conn: c, ordered: true}
	f.r = bufio.NewReaderSize(patient{f}, readBuffer)
	return f
}

// newBulkConn is newFrameConn for a connection that will bring units of up to unit
// bytes. Without scatter reads each must fit in the buffer.
func newBulkConn(c net.Conn, unit int) *frameConn {
	v := vectorsOf(c)
	size := max(1<<20, 2*unit)
	if v != nil {
		size = controlBuffer
	}
	f := newFrameConn(c, size)
	f.vec, f.maxUnit, f.spare = v, unit-headerSize, make([]byte, controlBuffer)
	return f
}

// patient reads with the silence deadline. A read that finds nothing for three quarters
// of it is tried once more, so that a stall of this process is not mistaken for the
// peer's silence.
type patient struct{ f *frameConn }

func (p patient) Read(b []byte) (n int, err error) {
	f := p.f
	if len(f.ahead) > 0 {
		n = copy(b, f.ahead)
		f.ahead = f.ahead[n:]
		return n, nil
	}
	if f.vec != nil { // what is read here has to be copied to where it belongs
		b = b[:min(len(b), headerSize+max(f.guess, unitHeadSize))]
	}
	err = f.patiently(func() (err error) {
		n, err = f.conn.Read(b)
		if n > 0 {
			err = nil
		}
		return err
	})
	return n, err
}

// patiently calls wait under the silence deadline, and once more near its end.
func (f *frameConn) patiently(wait func() error) error {
	d := f.silence
	if d <= 0 {
		return wait()
	}
	for _, part := range [2]time.Duration{d - d/4, d / 4} {
		if err := f.conn.SetReadDeadline(time.Now().Add(part)); err != nil {
			return err
		}
		if err := wait(); !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
	return errSilent
}

// readRows reads rows of the frame that next has returned, and what follows them, into
// bufs. It never waits: on errAgain there was nothing, and waitRows waits. bufs must
// not reach past the end of the rows.
func (f *frameConn) readRows(bufs [][]byte) (n int, err error) {
	for f.r.Buffered() > 0 && len(bufs) > 0 {
		m, _ := f.r.Read(bufs[0][:min(len(bufs[0]), f.r.Buffered())]) // buffered: cannot fail
		if bufs[0] = bufs[0][m:]; len(bufs[0]) == 0 {
			bufs = bufs[1:]
		}
		n += m
	}
	if n > 0 {
		f.rest -= n
		return n, nil
	}
	size := 0
	for _, b := range bufs {
		size += len(b)
	}
	if size == f.rest {
		bufs = append(bufs, f.spare[:min(len(f.spare), headerSize+f.guess)])
	}
	if n, err = f.vec.read(bufs); n > size {
		f.ahead, n = f.spare[:n-size], size
	}
	f.rest -= n
	return n, err
}

// waitRows waits until readRows finds something, within the silence deadline.
func (f *frameConn) waitRows() error { return f.patiently(f.vec.waitRead) }

// takeRows returns the next n bytes of rows, valid until the following read.
func (f *frameConn) takeRows(n int) ([]byte, error) {
	f.rest -= n
	return f.take(n)
}

// take returns the next n bytes, valid until the following read.
func (f *frameConn) take(n int) ([]byte, error) {
	if n > f.r.Size() {
		b, err := readGrowing(f.r, n)
		return b, cut(err)
	}
	b, err := f.r.Peek(n)
	if err != nil {
		return nil, cut(err)
	}
	_, _ = f.r.Discard(n) // buffered: cannot fail, and leaves the bytes in place
	return b, nil
}

// writeRows writes the gathered bytes. The deadline covers the wait for room,
// not the whole: a peer that takes bytes slowly is not a stalled one.
func (f *frameConn) writeRows(bufs [][]byte) error {
	for len(bufs) > 0 {
		n, err := f.vec.write(bufs)
		for n > 0 {
			m := min(n, len(bufs[0]))
			bufs[0], n = bufs[0][m:], n-m
			if len(bufs[0]) == 0 {
				bufs = bufs[1:]
			}
		}
		if err == errAgain {
			if err = f.conn.SetWriteDeadline(time.Now().Add(f.silence)); err == nil {
				err = f.vec.waitWrite()
			}
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return errStalled
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// write sends whole frames in chunks with a deadline each.
func (f *frameConn) write(b []byte) error {
	for len(b) > 0 {
		n := min(len(b), writeChunk)
		if f.silence > 0 {
			if err := f.conn.SetWriteDeadline(time.Now().Add(f.silence)); err != nil {
				return err
			}
		}
		n, err := f.conn.Write(b[:n])
		if errors.Is(err, os.ErrDeadlineExceeded) && f.silence > 0 {
			return errStalled
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// frame appends m as the next frame of this connection.
func (f *frameConn) frame(b []byte, m message) []byte {
	at := len(b)
	f.enc.b = beginFrame(b, f.version, m.kind())
	m.fields(&f.enc)
	b, f.enc.b = f.enc.b, nil
	endFrame(b, at, f.out)
	f.out++
	return b
}

// decode reads a frame's body into m. An error is a wireError.
func (f *frameConn) decode(m message, body []byte) error {
	f.dec = codec{b: body, reading: true}
	m.fields(&f.dec)
	if err := f.dec.end(); err != nil {
		return &wireError{fmt.Errorf("frame type %d: %w", m.kind(), err)}
	}
	return nil
}

// send writes messages as one chunk of bytes.
func (f *frameConn) send(ms ...message) error {
	f.buf = f.buf[:0]
	for _, m := range ms {
		f.buf = f.frame(f.buf, m)
	}
	err := f.write(f.buf)
	if cap(f.buf) > 1<<20 { // one long ticket must not pin its size for ever
		f.buf = nil
	}
	return err
}

// next returns the next frame. The body is valid until the following call; for a unit
// or a batch it ends before the rows. Rows that were not taken are skipped.
func (f *frameConn) next() (frameType, []byte, error) {
	for f.rest > 0 {
		n, err := f.r.Discard(f.rest)
		if f.rest -= n; err != nil {
			return 0, nil, cut(err)
		}
	}
	head, err := f.r.Peek(headerSize)
	if err != nil {
		if err == io.EOF && len(head) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	h, err := parseHeader(head, f.version, f.maxUnit)
	if err != nil {
		return 0, nil, &wireError{err}
	}
	copy(f.head[:], head) // reading the body may move the buffer under it
	_, _ = f.r.Discard(headerSize)
	size, rest := int(h.length), 0
	if fixed := h.typ.fixed(); fixed > 0 {
		if size, err = f.headSize(h, fixed); err != nil {
			return 0, nil, err
		}
		rest, f.guess = int(h.length)-size, size
	}
	body, err := f.take(size)
	if err != nil {
		return 0, nil, err
	}
	if frameSum(f.head[:], body) != h.crc {
		return 0, nil, &wireError{errSum}
	}
	if f.ordered && h.seq != f.in {
		return 0, nil, &wireError{fmt.Errorf("frame: sequence %d, want %d", h.seq, f.in)}
	}
	f.in = h.seq + 1
	f.rest = rest
	return h.typ, body, nil
}

// headSize is how much of a unit's or a batch's body precedes its rows.
func (f *frameConn) headSize(h header, fixed int) (int, error) {
	if int(h.length) < fixed {
		return 0, &wireError{errTrunc}
	}
	b, err := f.r.Peek(fixed)
	if err != nil {
		return 0, cut(err)
	}
	n, err := h.typ.headSize(b)
	if err == nil && n > int(h.length) {
		err = errTrunc
	}
	if err != nil {
		return 0, &wireError{err}
	}
	return n, nil
}

// readGrowing reads n bytes and never allocates more than twice what has arrived.
func readGrowing(r io.Reader, n int) ([]byte, error) {
	b := make([]byte, 0, min(n, 256<<10))
	for len(b) < n {
		if len(b) == cap(b) {
			b = append(make([]byte, 0, min(n, 2*cap(b))), b...)
		}
		m, err := io.ReadFull(r, b[len(b):cap(b)])
		b = b[:len(b)+m]
		if err != nil {
			return nil, err
		}
	}
	return b, nil
}

// wireError is a peer that breaks the protocol or a path that changes bytes.
type wireError struct{ err error }

func (e *wireError) Error() string { return e.err.Error() }
func (e *wireError) Unwrap() error { return e.err }

// breach makes an error a wireError; nil stays nil.
func breach(err error) error {
	if err == nil {
		return nil
	}
	return &wireError{err}
}

func cut(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
