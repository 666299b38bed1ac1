package zmtp

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Conn is one connection after its handshake. One goroutine reads; any may
// write or close.
type Conn struct {
	cfg  Config
	raw  net.Conn
	in   *bufio.Reader
	peer Peer
	buf  []byte // of the message being read

	mu sync.Mutex // writes

	closed atomic.Bool
}

// Dial connects to host:port and shakes hands; both within the handshake's
// timeout and ctx.
func Dial(ctx context.Context, addr string, cfg Config) (*Conn, error) {
	cfg = cfg.withDefaults()
	ctx, cancel := context.WithTimeout(ctx, cfg.HandshakeTimeout)
	defer cancel()
	raw, err := (&net.Dialer{KeepAlive: 15 * time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, &Error{"dial", addr, err}
	}
	stop := context.AfterFunc(ctx, func() { raw.Close() }) // ends the handshake too
	c, err := NewConn(raw, cfg)
	if !stop() && err == nil {
		err = &Error{"handshake", addr, context.Cause(ctx)}
	}
	if err != nil {
		raw.Close()
		return nil, err
	}
	return c, nil
}

// NewConn shakes hands over a connection that it owns from then on. After an
// error the connection is closed.
func NewConn(raw net.Conn, cfg Config) (*Conn, error) {
	cfg = cfg.withDefaults()
	c := &Conn{cfg: cfg, raw: raw, peer: Peer{Addr: raw.RemoteAddr().String()}}
	c.in = bufio.NewReaderSize(&watched{c: c}, 32<<10)
	err := raw.SetDeadline(time.Now().Add(cfg.HandshakeTimeout))
	if err == nil {
		err = c.shake()
	}
	if err == nil {
		err = raw.SetDeadline(time.Time{})
	}
	if err != nil {
		raw.Close()
		return nil, &Error{"handshake", c.peer.Addr, err}
	}
	c.in.Reset(&watched{c: c, beat: c.peer.Minor >= 1, rest: c.buffered()})
	return c, nil
}

// buffered is what the handshake read beyond its end.
func (c *Conn) buffered() []byte {
	b, _ := c.in.Peek(c.in.Buffered()) // all of it is there
	return append([]byte(nil), b...)
}

// watched is the connection's read side. Below the buffer, so that no frame is
// torn by it, it asks a silent peer for a sign of life and gives up on one
// that gives none.
type watched struct {
	c    *Conn
	beat bool
	rest []byte
}

func (w *watched) Read(b []byte) (int, error) {
	if len(w.rest) > 0 {
		n := copy(b, w.rest)
		w.rest = w.rest[n:]
		return n, nil
	}
	if !w.beat {
		return w.c.raw.Read(b)
	}
	for asked := false; ; asked = true {
		if err := w.c.raw.SetReadDeadline(time.Now().Add(w.c.cfg.Silence / 2)); err != nil {
			return 0, err
		}
		n, err := w.c.raw.Read(b)
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		if asked {
			return 0, ErrSilent
		}
		ttl := binary.BigEndian.AppendUint16(nil, uint16(min(w.c.cfg.Silence/(100*time.Millisecond), 65535)))
		if err := w.c.write(appendCommand(nil, "PING", ttl)); err != nil {
			return 0, err
		}
	}
}

// Peer is the other end.
func (c *Conn) Peer() Peer { return c.peer }

// ReadMessage returns the frames of the next message, valid until the next
// call. Commands are answered or skipped, but for those in which a peer
// subscribes, which come as a message in the older form (1 or 0, then the
// prefix).
func (c *Conn) ReadMessage(frames [][]byte) ([][]byte, error) {
	frames, err := c.read(frames[:0])
	if err != nil {
		return nil, &Error{"read", c.peer.Addr, err}
	}
	return frames, nil
}

// keptBuffer is how much memory an idle connection keeps for its next message.
const keptBuffer = 256 << 10

func (c *Conn) read(frames [][]byte) ([][]byte, error) {
	if cap(c.buf) > keptBuffer {
		c.buf = nil
	}
	c.buf = c.buf[:0]
	var ends [64]int
	at := ends[:0]
	for {
		start := len(c.buf)
		flags, buf, err := readFrame(c.in, c.buf, c.cfg.MaxMessage-start)
		c.buf = buf
		if err != nil {
			if start > 0 || len(at) > 0 {
				err = cut(err)
			}
			return nil, err
		}
		if flags&flagCommand != 0 {
			if len(at) > 0 {
				return nil, fmt.Errorf("%w: a command within a message", ErrProtocol)
			}
			text, err := c.command(c.buf)
			if err != nil {
				return nil, err
			}
			if text != nil {
				return append(frames, text), nil
			}
			c.buf = c.buf[:0]
			continue
		}
		if at = append(at, len(c.buf)); len(at) > c.cfg.MaxFrames {
			return nil, fmt.Errorf("%w: more than %d frames", ErrTooLarge, c.cfg.MaxFrames)
		}
		if flags&flagMore == 0 {
			break
		}
	}
	start := 0
	for _, end := range at {
		frames = append(frames, c.buf[start:end:end])
		start = end
	}
	return frames, nil
}

// command answers a PING, and returns a subscription in its older form.
func (c *Conn) command(b []byte) (text []byte, err error) {
	name, body, err := splitCommand(b)
	if err != nil {
		return nil, err
	}
	switch name {
	case "PING":
		if len(body) < 2 || len(body) > 2+16 {
			return nil, fmt.Errorf("%w: a PING of %d bytes", ErrProtocol, len(body))
		}
		return nil, c.write(appendCommand(nil, "PONG", body[2:]))
	case "SUBSCRIBE":
		return append([]byte{1}, body...), nil
	case "CANCEL":
		return append([]byte{0}, body...), nil
	case "ERROR":
		return nil, fmt.Errorf("%w: %q", ErrRefused, body)
	}
	return nil, nil // PONG, and what later versions may add
}

// WriteMessage sends one message.
func (c *Conn) WriteMessage(frames ...[]byte) error {
	return c.write(appendMessage(nil, frames))
}

// Subscribe asks a publisher for the topics with a prefix; all for "".
func (c *Conn) Subscribe(prefix string) error {
	// Every version takes the form of a message.
	return c.WriteMessage(append([]byte{1}, prefix...))
}

func (c *Conn) write(wire []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.raw.SetWriteDeadline(time.Now().Add(c.cfg.WriteTimeout))
	if err == nil {
		_, err = c.raw.Write(wire)
	}
	if err != nil {
		return &Error{"write", c.peer.Addr, err}
	}
	return nil
}

// Close ends the connection; a read under way ends with it.
func (c *Conn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	return c.raw.Close()
}
