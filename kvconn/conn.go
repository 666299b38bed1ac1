package kvconn

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

// frameConn reads and writes frames of one connection. One goroutine reads
// and one writes at a time; close may come from anywhere.
type frameConn struct {
	conn    net.Conn
	r       *bufio.Reader
	version uint8
	maxUnit int // largest unit body accepted, bytes
	in, out uint32
	silence time.Duration // 0: deadlines are the caller's
	ordered bool          // refuse gaps and repeats in the sequence numbers
	buf     []byte        // of send
	head    [headerSize]byte
}

// Read and write chunk sizes. A deadline covers one chunk, so that a slow
// link is not taken for a dead peer.
const (
	controlBuffer = 32 << 10
	writeChunk    = 256 << 10
)

func newFrameConn(c net.Conn, readBuffer int) *frameConn {
	f := &frameConn{conn: c, ordered: true}
	f.r = bufio.NewReaderSize(patient{f}, readBuffer)
	return f
}

// patient reads with the silence deadline. A read that finds nothing for
// three quarters of it is tried once more, so that a stall of this very
// process is not taken for the peer's silence.
type patient struct{ f *frameConn }

func (p patient) Read(b []byte) (int, error) {
	d := p.f.silence
	if d <= 0 {
		return p.f.conn.Read(b)
	}
	for _, wait := range []time.Duration{d - d/4, d / 4} {
		if err := p.f.conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return 0, err
		}
		n, err := p.f.conn.Read(b)
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
	}
	return 0, errSilent
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
	b = m.append(beginFrame(b, f.version, m.kind()))
	endFrame(b, at, f.out)
	f.out++
	return b
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

// next returns the next frame. The body is valid until the following call.
func (f *frameConn) next() (frameType, []byte, error) {
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
	size := headerSize + int(h.length)
	var body []byte
	if size <= f.r.Size() {
		whole, err := f.r.Peek(size)
		if err != nil {
			return 0, nil, cut(err)
		}
		body = whole[headerSize:]
		_, _ = f.r.Discard(size) // buffered: cannot fail, and leaves the bytes in place
	} else {
		_, _ = f.r.Discard(headerSize)
		if body, err = readGrowing(f.r, int(h.length)); err != nil {
			return 0, nil, cut(err)
		}
	}
	if frameSum(f.head[:], body) != h.crc {
		return 0, nil, &wireError{errSum}
	}
	if f.ordered && h.seq != f.in {
		return 0, nil, &wireError{fmt.Errorf("frame: sequence %d, want %d", h.seq, f.in)}
	}
	f.in = h.seq + 1
	return h.typ, body, nil
}

// readGrowing reads n bytes and allocates no more than twice what has come.
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

func cut(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
