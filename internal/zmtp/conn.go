package zmtp

import (
	"bufio"
	"bytes"
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

// Conn is one connection after its handshake. One goroutine reads; any may write or close.
type Conn struct {
	cfg     Config
	raw     net.Conn
	in      *bufio.Reader
	peer    Peer
	admit   func() error // called once the peer has proven itself
	session *session     // nil: NULL
	door    *Door        // by which the peer came in; nil: none
	buf     []byte       // the message being read
	sealed  []byte       // the frame being read, with CURVE

	mu  sync.Mutex // writes
	out []byte     // of the message being written

	closed atomic.Bool
}

// Dial connects to host:port and shakes hands, both within the handshake's timeout and ctx.
func Dial(ctx context.Context, addr string, cfg Config) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
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

// NewConn shakes hands over a connection and owns it from then on; after an error it is closed.
func NewConn(raw net.Conn, cfg Config) (*Conn, error) {
	return newConn(raw, cfg, func() error { return nil })
}

// Sizes of the read buffer, during the handshake and after it.
const (
	strangersBuffer = 4 << 10
	readBuffer      = 32 << 10
)

func newConn(raw net.Conn, cfg Config, admit func() error) (*Conn, error) {
	cfg = cfg.withDefaults()
	c := &Conn{cfg: cfg, raw: raw, admit: admit, peer: Peer{Addr: raw.RemoteAddr().String()}}
	c.in = bufio.NewReaderSize(raw, strangersBuffer)
	err := raw.SetDeadline(time.Now().Add(handshakeTime))
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
	rest, _ := c.in.Peek(c.in.Buffered()) // behind the handshake; cannot fail: all of it is there
	c.in = bufio.NewReaderSize(&watched{c: c, beat: c.peer.Minor >= 1, rest: bytes.Clone(rest)}, readBuffer)
	return c, nil
}

// watched is the connection's read side. It asks a silent peer for a sign of life and gives up on
// one that sends none. It sits below the buffer, so that it tears no frame.
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
		if err := w.c.command("PING", ttl); err != nil {
			return 0, err
		}
	}
}

// Peer describes the other end.
func (c *Conn) Peer() Peer { return c.peer }

// ReadMessage returns the frames of the next message, valid until the next call. It answers or
// skips commands, except subscriptions, which it returns in the older form of a message (1 or 0,
// then the prefix).
func (c *Conn) ReadMessage(frames [][]byte) ([][]byte, error) {
	frames, err := c.read(frames[:0])
	if err != nil {
		return nil, &Error{"read", c.peer.Addr, err}
	}
	return frames, nil
}

// keptBuffer is how much memory an idle connection keeps for its next message.
const keptBuffer = 256 << 10

// kept returns a buffer for reuse, or nil if it has grown large.
func kept(b []byte) []byte {
	if cap(b) > keptBuffer {
		return nil
	}
	return b[:0]
}

func (c *Conn) read(frames [][]byte) ([][]byte, error) {
	c.buf = kept(c.buf)
	var ends [64]int
	at := ends[:0]
	for {
		start := len(c.buf)
		flags, err := c.readFrame(c.cfg.MaxMessage - start)
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
			text, err := c.heed(c.buf)
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

// readFrame appends one frame's content to c.buf, at most room bytes.
func (c *Conn) readFrame(room int) (flags byte, err error) {
	if c.session == nil {
		flags, c.buf, err = readFrame(c.in, c.buf, room)
		return flags, err
	}
	flags, b, err := readFrame(c.in, c.sealed, room+sealing)
	c.sealed = kept(b)
	if err != nil {
		return 0, err
	}
	if flags&flagMore != 0 {
		return 0, fmt.Errorf("%w: a MESSAGE in parts", ErrProtocol)
	}
	flags, c.buf, err = c.session.open(c.buf, b)
	return flags, err
}

// heed handles a command: it answers a PING, and returns a subscription in its older form.
func (c *Conn) heed(b []byte) (text []byte, err error) {
	name, body, err := splitCommand(b)
	if err != nil {
		return nil, err
	}
	switch name {
	case "PING":
		if len(body) < 2 || len(body) > 2+16 {
			return nil, fmt.Errorf("%w: a PING of %d bytes", ErrProtocol, len(body))
		}
		return nil, c.command("PONG", body[2:])
	case "SUBSCRIBE":
		return append([]byte{1}, body...), nil
	case "CANCEL":
		return append([]byte{0}, body...), nil
	case "ERROR":
		return nil, refused(body)
	}
	return nil, nil // PONG, and commands of later versions
}

// WriteMessage sends one message.
func (c *Conn) WriteMessage(frames ...[]byte) error {
	return c.write(func(wire []byte) []byte {
		for i, f := range frames {
			flags := byte(0)
			if i < len(frames)-1 {
				flags = flagMore
			}
			wire = c.appendFrame(wire, flags, f)
		}
		return wire
	})
}

// command sends a command once the handshake is over.
func (c *Conn) command(name string, body []byte) error {
	return c.write(func(wire []byte) []byte { return c.appendFrame(wire, flagCommand, command(name, body)) })
}

// appendFrame encodes a frame for the mechanism; c.mu is held.
func (c *Conn) appendFrame(wire []byte, flags byte, body []byte) []byte {
	if c.session == nil {
		return appendFrame(wire, flags, body)
	}
	return c.session.appendFrame(wire, flags, body)
}

// Subscribe asks a publisher for the topics with a prefix; "" is all.
func (c *Conn) Subscribe(prefix string) error {
	// The message form works with every version.
	return c.WriteMessage(append([]byte{1}, prefix...))
}

// write sends what encode appends; the order of encoding is the order on the wire.
func (c *Conn) write(encode func([]byte) []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	wire := encode(c.out)
	c.out = kept(wire)
	err := c.raw.SetWriteDeadline(time.Now().Add(writeTime))
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
