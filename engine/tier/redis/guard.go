package redis

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/xpyd/xpyd/engine/tier/store"
)

// The client library trusts the lengths that a server announces. A guard below it follows the
// reply stream (RESP 2) byte by byte: a reply longer than anything that we ask for ends the
// connection before the library has read its length.
const (
	maxLine     = 1 << 10 // bytes of a status, error, number or length
	maxElements = 1 << 16 // of one reply: what SCAN may give at once
	maxElement  = 1 << 10 // bytes of a string in an array
	maxDepth    = 2
)

var errReply = errors.New("not a reply to what was asked")

// guard is a connection whose incoming bytes are bounded.
type guard struct {
	net.Conn
	bounds
}

// Read implements net.Conn.
func (g *guard) Read(b []byte) (int, error) {
	if g.bad != nil {
		return 0, g.bad
	}
	n, err := g.Conn.Read(b)
	if good := g.follow(b[:n]); g.bad != nil {
		return good, nil // the replies before the bad one, never the end of its line
	}
	return n, err
}

// SetReadDeadline implements net.Conn. The library calls it for each reply, but the operation's
// deadline is set on the connection below.
func (g *guard) SetReadDeadline(time.Time) error { return nil }

// bounds follows one reply stream.
type bounds struct {
	maxValue int // bytes of a string outside arrays

	bad      error
	line     [32]byte // the beginning of the line that is being read
	lineLen  int
	skip     int   // bytes of a string, and its line's end, to come
	open     []int // elements that open arrays still lack
	elements int   // of this reply
}

// follow checks the next bytes and returns how many are good: fewer than all when it sets bad.
func (g *bounds) follow(b []byte) (good int) {
	for good < len(b) {
		if g.skip > 0 {
			n := min(g.skip, len(b)-good)
			good += n
			if g.skip -= n; g.skip == 0 {
				g.element()
			}
			continue
		}
		if c := b[good]; c == '\n' {
			g.bad = g.header(g.line[:min(g.lineLen, len(g.line))])
			g.lineLen = 0
		} else {
			if g.lineLen < len(g.line) {
				g.line[g.lineLen] = c
			}
			if g.lineLen++; g.lineLen > maxLine {
				g.bad = fmt.Errorf("%w: a line of more than %d bytes", errReply, maxLine)
			}
		}
		if g.bad != nil {
			return good
		}
		good++
	}
	return good
}

// header checks a whole line, or its beginning.
func (g *bounds) header(line []byte) error {
	if len(line) < 2 {
		return errReply
	}
	switch line[0] {
	case '+', '-', ':':
		g.element()
		return nil
	case '$':
		most := g.maxValue
		if len(g.open) > 0 {
			most = maxElement
		}
		n, ok := length(line[1:])
		switch {
		case !ok:
			return errReply
		case n < 0:
			g.element()
		case n > most:
			return fmt.Errorf("%w: %d bytes, at most %d", store.ErrForeign, n, most)
		default:
			g.skip = n + 2
		}
		return nil
	case '*':
		n, ok := length(line[1:])
		switch {
		case !ok:
			return errReply
		case n > maxElements-g.elements || n > 0 && len(g.open) == maxDepth:
			return fmt.Errorf("%w: an array of %d", errReply, n)
		case n > 0:
			g.elements += n
			g.open = append(g.open, n)
		default:
			g.element()
		}
		return nil
	}
	return fmt.Errorf("%w: it begins with %q", errReply, line[0])
}

// element ends one element of the innermost open array. The last one of the outermost array ends
// the reply.
func (g *bounds) element() {
	for len(g.open) > 0 {
		last := len(g.open) - 1
		if g.open[last]--; g.open[last] > 0 {
			return
		}
		g.open = g.open[:last]
	}
	g.elements = 0
}

// length reads "123\r" or "-1\r".
func length(b []byte) (n int, ok bool) {
	if len(b) < 2 || b[len(b)-1] != '\r' {
		return 0, false
	}
	b = b[:len(b)-1]
	if string(b) == "-1" {
		return -1, true
	}
	if len(b) > 12 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = 10*n + int(c-'0')
	}
	return n, true
}
