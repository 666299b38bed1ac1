package redis

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/gomodule/redigo/redis"
)

// stream is a connection that has these bytes to give, and no more.
type stream struct {
	net.Conn
	r io.Reader
}

func (s stream) Read(b []byte) (int, error) { return s.r.Read(b) }
func (s stream) Close() error               { return nil }

// FuzzGuard: whatever a server sends, the library gets no string longer than
// it may be, and the guard says where replies end as the library does.
func FuzzGuard(f *testing.F) {
	for _, s := range []string{"+OK\r\n:1\r\n$3\r\nabc\r\n$-1\r\n", "*2\r\n$1\r\n0\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n", "-ERR no\r\n", "*0\r\n*-1\r\n", "$20\r\n", "*3\r\n*0\r\n:1\r\n*1\r\n+a\r\n", "$99999999999999999999\r\n", "*1\r\n*1\r\n*1\r\n:1\r\n", "$2\r\nab\n\n$9999\r\n"} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, b []byte, piece uint8) {
		g := &guard{Conn: stream{r: &pieces{bytes.NewReader(b), int(piece) + 1}}, bounds: bounds{maxValue: 16}}
		c := redis.NewConn(g, 0, 0)
		for {
			v, err := c.Receive()
			if _, ok := err.(redis.Error); err != nil && !ok {
				return
			}
			if len(g.open) > maxDepth || g.elements > maxElements {
				t.Fatalf("%d open arrays, %d elements", len(g.open), g.elements)
			}
			if s, ok := v.([]byte); ok && len(s) > 16 {
				t.Fatalf("%d bytes", len(s))
			}
		}
	})
}

// pieces reads a few bytes at a time.
type pieces struct {
	r io.Reader
	n int
}

func (p *pieces) Read(b []byte) (int, error) { return p.r.Read(b[:min(len(b), p.n)]) }

// TestGuardKeepsWhatIsGood: replies before a bad one in the same bytes arrive.
func TestGuardKeepsWhatIsGood(t *testing.T) {
	g := &guard{Conn: stream{r: bytes.NewReader([]byte("$1\r\nx\r\n$17\r\nyyyyyyyyyyyyyyyyy\r\n"))}, bounds: bounds{maxValue: 16}}
	c := redis.NewConn(g, 0, 0)
	if v, err := redis.String(c.Receive()); v != "x" || err != nil {
		t.Error(v, err)
	}
	if v, err := c.Receive(); v != nil || err == nil || errors.Is(err, io.EOF) {
		t.Error(v, err)
	}
}
