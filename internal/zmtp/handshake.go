package zmtp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"strings"
)

// greetingBytes is the size of the greeting: signature, version, mechanism, as-server, filler.
const greetingBytes = 64

// Mechanisms.
const (
	mechanismNull  = "NULL"
	mechanismCurve = "CURVE"
)

// mechanism returns the one that this end speaks; there is no negotiation.
func (c *Config) mechanism() string {
	if c.Doors != nil || c.Keys != nil {
		return mechanismCurve
	}
	return mechanismNull
}

func greeting(c *Config) []byte {
	g := make([]byte, greetingBytes)
	g[0], g[9] = 0xff, 0x7f
	g[10], g[11] = 3, 1
	copy(g[12:32], c.mechanism())
	if c.Doors != nil {
		g[32] = 1 // as server
	}
	return g
}

// readGreeting returns the peer's minor version. It checks the most telling bytes first, so
// that a stranger is refused after ten bytes.
func readGreeting(r io.Reader, c *Config) (minor int, err error) {
	var g [greetingBytes]byte
	if _, err := io.ReadFull(r, g[:10]); err != nil {
		return 0, cut(err)
	}
	if g[0] != 0xff || g[9]&1 == 0 {
		return 0, fmt.Errorf("%w: no signature", ErrProtocol)
	}
	if _, err := io.ReadFull(r, g[10:11]); err != nil {
		return 0, cut(err)
	}
	if g[10] < 3 {
		return 0, fmt.Errorf("%w: the peer speaks version %d", ErrProtocol, g[10])
	}
	if _, err := io.ReadFull(r, g[11:]); err != nil {
		return 0, cut(err)
	}
	if name := bytes.TrimRight(g[12:32], "\x00"); string(name) != c.mechanism() {
		return 0, fmt.Errorf("%w: it speaks %q, not %s", ErrMechanism, name, c.mechanism())
	}
	if c.Doors != nil && g[32]&1 != 0 {
		return 0, fmt.Errorf("%w: two servers", ErrProtocol)
	}
	return int(g[11]), nil
}

const (
	propType     = "Socket-Type"
	propIdentity = "Identity"
)

// readyBody is the metadata of READY: names and values with their lengths.
func readyBody(c *Config) []byte {
	var b []byte
	put := func(name string, value []byte) {
		b = append(append(b, byte(len(name))), name...)
		b = append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
	}
	put(propType, []byte(c.Type))
	if len(c.Identity) > 0 {
		put(propIdentity, c.Identity)
	}
	return b
}

// parseReady reads the metadata; unknown names are skipped.
func parseReady(b []byte, p *Peer) error {
	for len(b) > 0 {
		n := 1 + int(b[0])
		if n == 1 || len(b) < n+4 {
			return fmt.Errorf("%w: metadata is cut", ErrProtocol)
		}
		name, size := string(b[1:n]), binary.BigEndian.Uint32(b[n:])
		b = b[n+4:]
		if uint64(size) > uint64(len(b)) {
			return fmt.Errorf("%w: metadata is cut", ErrProtocol)
		}
		value := b[:size]
		b = b[size:]
		// Names are case-insensitive.
		switch {
		case strings.EqualFold(name, propType):
			p.Type = Type(value)
		case strings.EqualFold(name, propIdentity):
			if len(value) > 255 {
				return fmt.Errorf("%w: an identity of %d bytes", ErrProtocol, len(value))
			}
			p.Identity = bytes.Clone(value)
		}
	}
	return nil
}

// maxReady bounds each of the peer's commands until it may send messages.
const maxReady = 4 << 10

// shake exchanges greetings and the mechanism's commands.
func (c *Conn) shake() error {
	if _, err := c.raw.Write(greeting(&c.cfg)); err != nil {
		return err
	}
	minor, err := readGreeting(c.in, &c.cfg)
	if err != nil {
		return err
	}
	c.peer.Minor = minor
	switch {
	case c.cfg.Doors != nil:
		err = c.curveServer(c.cfg.Doors())
	case c.cfg.Keys != nil:
		err = c.curveClient(c.cfg.Keys)
	default:
		err = c.null()
	}
	if err != nil {
		return err
	}
	if !slices.Contains(partners[c.cfg.Type], c.peer.Type) {
		return fmt.Errorf("%w: ours is %s, its is %q", ErrPartner, c.cfg.Type, c.peer.Type)
	}
	return nil
}

// null exchanges READY.
func (c *Conn) null() error {
	if err := c.sendCommand("READY", readyBody(&c.cfg)); err != nil {
		return err
	}
	body, err := c.expect("READY")
	if err != nil {
		return err
	}
	if err := parseReady(body, &c.peer); err != nil {
		return err
	}
	return c.admit()
}

// sendCommand sends a command of the handshake.
func (c *Conn) sendCommand(name string, body []byte) error {
	_, err := c.raw.Write(appendFrame(nil, flagCommand, command(name, body)))
	return err
}

// expect returns the body of the handshake's next command.
func (c *Conn) expect(want string) ([]byte, error) {
	flags, body, err := readFrame(c.in, nil, maxReady)
	if err != nil {
		return nil, cut(err)
	}
	if flags&flagCommand == 0 {
		return nil, fmt.Errorf("%w: a message before %s", ErrProtocol, want)
	}
	name, rest, err := splitCommand(body)
	switch {
	case err != nil:
		return nil, err
	case name == "ERROR":
		return nil, refused(rest)
	case name != want:
		return nil, fmt.Errorf("%w: command %q before %s", ErrProtocol, name, want)
	}
	return rest, nil
}

// refused returns the error of an ERROR command: a reason with its length.
func refused(body []byte) error {
	if len(body) == 0 || int(body[0]) != len(body)-1 {
		return fmt.Errorf("%w: an ERROR without a reason", ErrProtocol)
	}
	return fmt.Errorf("%w: %q", ErrRefused, body[1:])
}
