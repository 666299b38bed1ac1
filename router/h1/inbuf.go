package h1

import (
	"bufio"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// lender lends the buffers that connections are read through. A waiting connection has
// none: ten thousand streams between two tokens need a handful.
type lender struct {
	pool sync.Pool
	size int // of each; a header has to fit in one
}

func newLender(size int) *lender { return &lender{size: size} }

func (l *lender) get(b *inbuf) *bufio.Reader {
	br, _ := l.pool.Get().(*bufio.Reader)
	if br == nil {
		return bufio.NewReaderSize(b, l.size)
	}
	br.Reset(b)
	return br
}

// inbuf reads a connection through a buffer that is borrowed when bytes have come and given
// back when they are used up. One goroutine uses it.
type inbuf struct {
	conn net.Conn
	raw  syscall.RawConn // nil if the system cannot tell that there are bytes: TLS
	from *lender
	br   *bufio.Reader // nil without a buffer

	out  []byte       // what ask and write have yet to write
	sent *atomic.Bool // set once all is written

	into []byte // where Read wants its bytes, and how many it got
	got  int

	fd  int                   // while try runs, else -1
	try func(fd uintptr) bool // b.readable; made once
	put func(fd uintptr) bool // b.writable; made once
	err error                 // of try or put

	until time.Time     // the read deadline in force
	begun time.Duration // how long what has begun to come may take; 0: as until says
}

func (b *inbuf) init(conn net.Conn, from *lender) {
	b.conn, b.from, b.fd = conn, from, -1
	if raw := socket(conn); raw != nil {
		b.raw, b.try, b.put = raw, b.readable, b.writable
	}
}

// socket is conn's raw connection; nil for TLS, which does more than the socket, and
// without one.
func socket(conn net.Conn) syscall.RawConn {
	for {
		if sc, ok := conn.(syscall.Conn); ok {
			raw, err := sc.SyscallConn()
			if err != nil {
				return nil
			}
			return raw
		}
		over, ok := conn.(interface{ NetConn() net.Conn })
		if _, isTLS := conn.(*tls.Conn); isTLS || !ok {
			return nil
		}
		conn = over.NetConn()
	}
}

var errAgain = errors.New("nothing to read yet")

// await waits until there are bytes to read, or for the error or end that comes instead. A
// connection that ended properly is io.EOF.
func (b *inbuf) await() error {
	if b.buffered() > 0 {
		return nil
	}
	if b.raw == nil {
		b.borrow()
		_, err := b.br.Peek(1)
		if err != nil {
			b.rest()
		}
		return err
	}
	if err := b.raw.Read(b.try); err != nil {
		b.rest()
		return err
	}
	return b.err
}

// ask writes out and awaits the answer. The poller watches for it before there can be one,
// which saves a read that would find nothing. left is what the connection would not take at
// once; then nothing was awaited. sent, if not nil, is set when all is written.
func (b *inbuf) ask(out []byte, sent *atomic.Bool) (left []byte, err error) {
	b.out, b.sent = out, sent
	err = b.raw.Read(b.try)
	left, b.out, b.sent = b.out, nil, nil
	if err != nil {
		b.rest()
		return nil, err
	}
	return left, b.err
}

// readable reads what there is, to where Read wants it or else into a buffer; false if
// there is nothing. First it writes what ask was given.
func (b *inbuf) readable(fd uintptr) bool {
	if b.into != nil {
		b.got, b.err = readNow(int(fd), b.into)
		return b.err != errAgain //nolint:errorlint // our own, never wrapped
	}
	if len(b.out) > 0 {
		n, err := writeNow(int(fd), b.out)
		b.out, b.err = b.out[n:], err
		if err != nil || len(b.out) > 0 {
			return true
		}
		if b.sent != nil {
			b.sent.Store(true)
		}
		return false
	}
	b.borrow()
	b.fd = int(fd)
	_, err := b.br.Peek(1)
	b.fd = -1
	if err != nil {
		b.rest()
	}
	b.err = err
	return err != errAgain //nolint:errorlint // our own, never wrapped
}

// write writes p within the connection's write deadline.
func (b *inbuf) write(p []byte) error {
	if b.raw == nil {
		_, err := b.conn.Write(p)
		return err
	}
	b.out = p
	err := b.raw.Write(b.put)
	if b.out = nil; err != nil {
		return err
	}
	return b.err
}

// writable writes what is taken; false if there is more.
func (b *inbuf) writable(fd uintptr) bool {
	n, err := writeNow(int(fd), b.out)
	b.out, b.err = b.out[n:], err
	return err != nil || len(b.out) == 0
}

// Read is for the bufio.Reader, and for what is too large for one. It waits.
func (b *inbuf) Read(p []byte) (int, error) {
	if b.fd >= 0 {
		return readNow(b.fd, p)
	}
	if b.begun > 0 { // the rest of what has begun to come
		if err := b.within(b.begun); err != nil {
			return 0, err
		}
		b.begun = 0
	}
	if b.raw == nil || len(p) == 0 {
		return b.conn.Read(p)
	}
	b.into = p
	err := b.raw.Read(b.try)
	if b.into = nil; err != nil {
		return 0, err
	}
	return b.got, b.err
}

func (b *inbuf) borrow() {
	if b.br == nil {
		b.br = b.from.get(b)
	}
}

// rest gives the buffer back if it is empty.
func (b *inbuf) rest() {
	if b.br != nil && b.br.Buffered() == 0 {
		b.from.pool.Put(b.br)
		b.br = nil
	}
}

func (b *inbuf) drop() {
	if b.br != nil {
		b.from.pool.Put(b.br)
		b.br = nil
	}
}

func (b *inbuf) buffered() int {
	if b.br == nil {
		return 0
	}
	return b.br.Buffered()
}

// within bounds the time to the next byte by d or up to an eighth more: renewing the
// deadline for each read would cost as much as the read's own bookkeeping.
func (b *inbuf) within(d time.Duration) error {
	next, renew := prolong(b.until, d)
	if !renew {
		return nil
	}
	b.until = next
	return b.conn.SetReadDeadline(next)
}

// prolong returns a deadline that is d to d+d/8 away, and whether it is a new one.
func prolong(inForce time.Time, d time.Duration) (next time.Time, renew bool) {
	now := time.Now()
	if left := inForce.Sub(now); left >= d && left <= d+d/8 {
		return inForce, false
	}
	return now.Add(d + d/8), true
}

// outs lends slices in which one write is put together.
type outs struct{ pool sync.Pool }

const maxOut = 64 << 10 // a larger slice is not kept

func (o *outs) get() *[]byte {
	b, _ := o.pool.Get().(*[]byte)
	if b == nil {
		b = new([]byte)
		*b = make([]byte, 0, 4<<10)
	}
	return b
}

func (o *outs) put(b *[]byte) {
	if cap(*b) <= maxOut {
		*b = (*b)[:0]
		o.pool.Put(b)
	}
}

// readNow reads what there is without waiting: errAgain if there is nothing.
func readNow(fd int, p []byte) (int, error) {
	for {
		n, err := sysRead(fd, p)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, errAgain
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

// writeNow writes what is taken without waiting.
func writeNow(fd int, p []byte) (int, error) {
	for {
		n, err := sysWrite(fd, p)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, nil
		case err != nil:
			return 0, os.NewSyscallError("write", err)
		default:
			return n, nil
		}
	}
}
