package kvbench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The bare loop is the limit of any transport over TCP: the same scattered
// blocks, writev into readv, no frames, no checks. Each connection moves its
// share of the blocks; 8 bytes from the receiver, how many of each layer, start
// a transfer.

// bareBatch is how many bytes one writev or readv names. Larger ones were no
// faster on loopback.
const bareBatch = 1 << 20

// unpaced gives the loop the congestion control that kvconn/tcp uses inside one
// machine, so that BBR's timers do not hold a limit back. Connections inherit it from
// their listener. Between machines, or where it is unavailable, the host's own stays.
func unpaced(_, addr string, rc syscall.RawConn) error {
	if host, _, err := net.SplitHostPort(addr); err == nil && net.ParseIP(host).IsLoopback() {
		return rc.Control(func(fd uintptr) { _ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno") })
	}
	return nil
}

// bare serves loops until ctx ends or the receiver closes them.
func (s *sender) bare(ctx context.Context, c net.Conn, conns int) (addr string, err error) {
	lc := net.ListenConfig{Control: unpaced}
	ln, err := lc.Listen(ctx, "tcp", Transport{}.at(c))
	if err != nil {
		return "", err
	}
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	s.wg.Go(func() {
		defer stop()
		defer ln.Close()
		for range conns {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			s.wg.Go(func() {
				if err := s.bareServe(ctx, c); err != nil && !errors.Is(err, io.EOF) {
					s.log.Warn("bench kv: bare loop", "error", err)
				}
			})
		}
	})
	return ln.Addr().String(), nil
}

func (s *sender) bareServe(ctx context.Context, c net.Conn) error {
	f, err := blocking(c)
	if err != nil {
		return err
	}
	defer f.Close()
	hung := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(hung)
		hangUp(f)
	})
	defer func() {
		if !stop() { // it uses the descriptor, which is closed next
			<-hung
		}
	}()
	var go8 [8]byte
	for {
		if _, err := io.ReadFull(f, go8[:]); err != nil {
			return err
		}
		first, n := int(binary.LittleEndian.Uint32(go8[:])), int(binary.LittleEndian.Uint32(go8[4:]))
		if first < 0 || n < 1 || first+n > len(s.order) {
			return fmt.Errorf("%d blocks from %d of %d", n, first, len(s.order))
		}
		if err := vectored(f, s.pool, s.order[first:first+n], unix.Writev); err != nil {
			return err
		}
	}
}

// blocking takes c's socket out of the runtime's poller: a bare loop waits in
// the system call.
func blocking(c net.Conn) (*os.File, error) {
	defer c.Close() // the file is another descriptor of the socket
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return nil, fmt.Errorf("%T is no TCP connection", c)
	}
	f, err := tc.File()
	if err != nil {
		return nil, err
	}
	limit := unix.NsecToTimeval(controlIdle.Nanoseconds())
	fd := int(f.Fd())
	if err := errors.Join(unix.SetNonblock(fd, false),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit)); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// hangUp ends a blocked read or write; closing the descriptor would not.
func hangUp(f *os.File) { _ = unix.Shutdown(int(f.Fd()), unix.SHUT_RDWR) }

// vectored moves the blocks of every layer with one system call a batch.
func vectored(f *os.File, p *pool, order []int32, move func(fd int, iovs [][]byte) (int, error)) error {
	fd := int(f.Fd())
	batch := max(1, min(bareBatch/p.size, 512))
	iovs := make([][]byte, 0, batch)
	for layer := range p.layers {
		for at := 0; at < len(order); at += batch {
			iovs = iovs[:0]
			for _, b := range order[at:min(at+batch, len(order))] {
				iovs = append(iovs, p.run(layer, b))
			}
			for rest := iovs; len(rest) > 0; {
				n, err := move(fd, rest)
				if errors.Is(err, unix.EINTR) {
					continue
				}
				if err != nil {
					return err
				}
				if n == 0 {
					return io.ErrUnexpectedEOF
				}
				rest = skip(rest, n)
			}
		}
	}
	return nil
}

// skip drops the first n bytes of v, in place.
func skip(v [][]byte, n int) [][]byte {
	for len(v) > 0 && n >= len(v[0]) {
		n -= len(v[0])
		v = v[1:]
	}
	if n > 0 {
		v[0] = v[0][n:]
	}
	return v
}

// bareLoop is the receiver's end: its connections.
type bareLoop []*os.File

func dialBare(ctx context.Context, addr string, conns int) (l bareLoop, err error) {
	d := net.Dialer{Timeout: 5 * time.Second, Control: unpaced}
	for len(l) < conns && err == nil {
		var c net.Conn
		var f *os.File
		if c, err = d.DialContext(ctx, "tcp", addr); err == nil {
			f, err = blocking(c)
		}
		if err == nil {
			l = append(l, f)
		}
	}
	if err != nil {
		l.close()
		return nil, fmt.Errorf("bare loop: %w", err)
	}
	return l, nil
}

// transfer moves the first blocks of the sender's sequence into order.
func (l bareLoop) transfer(ctx context.Context, p *pool, order []int32) error {
	stop := context.AfterFunc(ctx, func() {
		for _, f := range l {
			hangUp(f)
		}
	})
	defer stop()
	errs := make([]error, len(l))
	var wg sync.WaitGroup
	for i, f := range l {
		first, end := len(order)*i/len(l), len(order)*(i+1)/len(l)
		if first == end {
			continue
		}
		wg.Go(func() {
			var go8 [8]byte
			binary.LittleEndian.PutUint32(go8[:], uint32(first))
			binary.LittleEndian.PutUint32(go8[4:], uint32(end-first))
			if _, errs[i] = f.Write(go8[:]); errs[i] == nil {
				errs[i] = vectored(f, p, order[first:end], unix.Readv)
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("bare loop: %w", err)
	}
	return nil
}

func (l bareLoop) close() {
	for _, f := range l {
		f.Close()
	}
}
