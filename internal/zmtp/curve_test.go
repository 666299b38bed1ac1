package zmtp_test

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/zmtp"
)

// key is a private key that is the same in each run.
func key(t *testing.T, n byte) *ecdh.PrivateKey {
	t.Helper()
	k, err := ecdh.X25519().NewPrivateKey(bytes.Repeat([]byte{n}, 32))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// doors has one for key server, that opens to key client.
func doors(t *testing.T, server, client byte) func() []zmtp.Door {
	d := []zmtp.Door{{Key: key(t, server), Clients: []*ecdh.PublicKey{key(t, client).PublicKey()}}}
	return func() []zmtp.Door { return d }
}

func keys(t *testing.T, server, client byte) *zmtp.Keys {
	return &zmtp.Keys{Own: key(t, client), Server: key(t, server).PublicKey()}
}

func curved(t *testing.T, cfg zmtp.Config) *zmtp.Publisher {
	t.Helper()
	p, err := zmtp.ListenPublisher("127.0.0.1:0", cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func TestCurvePublish(t *testing.T) {
	p := curved(t, zmtp.Config{Doors: doors(t, 1, 2)})
	c := dial(t, p.Addr(), zmtp.Config{Type: zmtp.Sub, Keys: keys(t, 1, 2)})
	if c.Peer().Type != zmtp.Pub || c.Peer().Minor != 1 {
		t.Errorf("peer %+v", c.Peer())
	}
	if err := c.Subscribe("kv"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no subscriber", func() bool { return p.Subscribers() == 1 })
	big := bytes.Repeat([]byte("x"), 300_000)
	for n := range 3 {
		p.Publish([]byte("other"), []byte("not ours"))
		p.Publish([]byte("kv"), nil, append([]byte{byte(n)}, big...))
		got, err := c.ReadMessage(nil)
		if err != nil || len(got) != 3 || string(got[0]) != "kv" || len(got[1]) != 0 || got[2][0] != byte(n) || !bytes.Equal(got[2][1:], big) {
			t.Fatalf("%d frames, %v", len(got), err)
		}
	}
}

func TestCurveRouter(t *testing.T) {
	r, err := zmtp.ListenRouter("127.0.0.1:0", zmtp.Config{Doors: doors(t, 1, 2)}, func(p zmtp.Peer, f [][]byte, reply func(...[]byte) error) error {
		return reply(append([]byte("for "), p.Identity...), f[0])
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	c := dial(t, r.Addr(), zmtp.Config{Type: zmtp.Dealer, Identity: []byte("me"), Keys: keys(t, 1, 2)})
	if err := c.WriteMessage([]byte("question")); err != nil {
		t.Fatal(err)
	}
	if got, err := c.ReadMessage(nil); err != nil || len(got) != 2 || string(got[0]) != "for me" || string(got[1]) != "question" {
		t.Fatalf("%q, %v", got, err)
	}
}

// TestCurveRefuses: nobody without both keys gets in, nobody is taken for another
// server, and neither end makes do with NULL.
func TestCurveRefuses(t *testing.T) {
	null := (*zmtp.Keys)(nil)
	open := func() []zmtp.Door { return nil }
	for _, c := range []struct {
		name   string
		doors  func() []zmtp.Door
		keys   *zmtp.Keys
		ours   error // the client's
		theirs error // the server's
	}{
		{"another client's key", doors(t, 1, 2), keys(t, 1, 3), zmtp.ErrRefused, zmtp.ErrKey},
		{"another server's key", doors(t, 1, 2), keys(t, 4, 2), zmtp.ErrRefused, zmtp.ErrKey},
		{"no doors", open, keys(t, 1, 2), zmtp.ErrRefused, zmtp.ErrKey},
		{"NULL client", doors(t, 1, 2), null, zmtp.ErrMechanism, zmtp.ErrMechanism},
		{"NULL server", nil, keys(t, 1, 2), zmtp.ErrMechanism, zmtp.ErrMechanism},
	} {
		failed := make(chan error, 1)
		p := curved(t, zmtp.Config{Doors: c.doors, Refused: func(err error) { failed <- err }})
		conn, err := zmtp.Dial(context.Background(), p.Addr().String(), zmtp.Config{Type: zmtp.Sub, Keys: c.keys})
		if err == nil {
			conn.Close()
		}
		if !errors.Is(err, c.ours) {
			t.Errorf("%s: the client has %v, want %v", c.name, err, c.ours)
		}
		if err := <-failed; !errors.Is(err, c.theirs) {
			t.Errorf("%s: the server has %v, want %v", c.name, err, c.theirs)
		}
	}
}

// TestCurveRotation: while two doors are there clients come in by either, with the
// keys of that one alone; who is in stays in.
func TestCurveRotation(t *testing.T) {
	var now atomic.Pointer[[]zmtp.Door]
	set := func(list ...func() []zmtp.Door) {
		var all []zmtp.Door
		for _, d := range list {
			all = append(all, d()...)
		}
		now.Store(&all)
	}
	old, next := doors(t, 1, 2), doors(t, 3, 4)
	set(old)
	p := curved(t, zmtp.Config{Doors: func() []zmtp.Door { return *now.Load() }})
	try := func(k *zmtp.Keys, want error) {
		t.Helper()
		c, err := zmtp.Dial(context.Background(), p.Addr().String(), zmtp.Config{Type: zmtp.Sub, Keys: k})
		if err == nil {
			c.Close()
		}
		if !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
	first := dial(t, p.Addr(), zmtp.Config{Type: zmtp.Sub, Keys: keys(t, 1, 2)})
	try(keys(t, 3, 4), zmtp.ErrRefused)
	set(next, old)
	try(keys(t, 1, 2), nil)
	try(keys(t, 3, 4), nil)
	try(keys(t, 1, 4), zmtp.ErrRefused)
	try(keys(t, 3, 2), zmtp.ErrRefused)
	set(next)
	try(keys(t, 1, 2), zmtp.ErrRefused)
	try(keys(t, 3, 4), nil)
	later := dial(t, p.Addr(), zmtp.Config{Type: zmtp.Sub, Keys: keys(t, 3, 4)})
	for _, c := range []*zmtp.Conn{first, later} {
		if err := c.Subscribe(""); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "both are in", func() bool { return p.Subscribers() == 2 })
	p.Judge()
	eventually(t, "who came in by the older one is out", func() bool { return p.Subscribers() == 1 })
	p.Publish([]byte("topic"))
	if f, err := later.ReadMessage(nil); err != nil || string(f[0]) != "topic" {
		t.Errorf("who came in by the newer one: %q, %v", f, err)
	}
	if _, err := first.ReadMessage(nil); err == nil {
		t.Error("who is out hears more")
	}
}

// posted is an end of a pipe whose writes do not wait for a reader.
type posted struct {
	net.Conn
	post chan []byte
	gone chan struct{}
	once *sync.Once
}

// pipe is a connection in memory.
func pipe() (a, b net.Conn) {
	a, b = net.Pipe()
	return post(a), post(b)
}

func post(c net.Conn) net.Conn {
	p := posted{c, make(chan []byte, 64), make(chan struct{}), &sync.Once{}}
	go func() {
		for {
			select {
			case b := <-p.post:
				c.Write(b)
			case <-p.gone:
				return
			}
		}
	}()
	return p
}

func (p posted) SetDeadline(t time.Time) error      { return p.SetReadDeadline(t) }
func (p posted) SetWriteDeadline(t time.Time) error { return nil }

func (p posted) Write(b []byte) (int, error) {
	select {
	case p.post <- bytes.Clone(b):
		return len(b), nil
	case <-p.gone:
		return 0, net.ErrClosed
	}
}

func (p posted) Close() error {
	p.once.Do(func() { close(p.gone) })
	return p.Conn.Close()
}

// tap copies what comes from a connection.
type tap struct {
	net.Conn
	heard *bytes.Buffer
}

func (t tap) Read(b []byte) (int, error) {
	n, err := t.Conn.Read(b)
	t.heard.Write(b[:n])
	return n, err
}

// pair is both ends of a connection, and what the subscriber hears.
func pair(t *testing.T) (pub, sub *zmtp.Conn, heard *bytes.Buffer) {
	t.Helper()
	ours, theirs := pipe()
	heard = &bytes.Buffer{}
	done := make(chan error, 1)
	go func() {
		var err error
		pub, err = zmtp.NewConn(ours, zmtp.Config{Type: zmtp.Pub, Doors: doors(t, 1, 2), Silence: 10 * time.Second})
		done <- err
	}()
	sub, err := zmtp.NewConn(tap{theirs, heard}, zmtp.Config{Type: zmtp.Sub, Keys: keys(t, 1, 2), Silence: 10 * time.Second})
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	return pub, sub, heard
}

// TestCurveSilence: signs of life are asked for and given within CURVE.
func TestCurveSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pub, sub, heard := pair(t)
		go pub.ReadMessage(nil) // answers
		go sub.ReadMessage(nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		before := heard.Len()
		if err := pub.WriteMessage([]byte("prompt")); err != nil {
			t.Errorf("after a minute of silence: %v", err)
		}
		synctest.Wait()
		if heard.Len() == before || strings.Contains(heard.String(), "prompt") || strings.Contains(heard.String(), "PONG") {
			t.Errorf("plain on the wire: %q", heard)
		}
		pub.Close()
		sub.Close()
	})
}

// TestCurveReplay: a frame that was heard before, or out of order, or changed,
// ends the connection, and so does a plain one.
func TestCurveReplay(t *testing.T) {
	for name, c := range map[string]struct {
		change func(frames [][]byte) [][]byte
		good   int // messages before the end
	}{
		"as it was":    {func(f [][]byte) [][]byte { return f }, 3},
		"again":        {func(f [][]byte) [][]byte { return [][]byte{f[0], f[0]} }, 1},
		"out of order": {func(f [][]byte) [][]byte { return [][]byte{f[1], f[0]} }, 1},
		"one bit":      {func(f [][]byte) [][]byte { f[1][len(f[1])-1] ^= 1; return f }, 1},
		"the nonce":    {func(f [][]byte) [][]byte { f[1][17] ^= 1; return f }, 1},
		"plain":        {func(f [][]byte) [][]byte { return [][]byte{f[0], []byte("\x00\x05plain")} }, 1},
		"short":        {func(f [][]byte) [][]byte { return [][]byte{f[0], []byte("\x00\x0f\x07MESSAGE1234567")} }, 1},
		"more":         {func(f [][]byte) [][]byte { f[1][0] |= 1; return f }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			cut := &cutter{}
			server, client := pipe()
			cut.Conn = client
			done := make(chan *zmtp.Conn)
			go func() {
				c, err := zmtp.NewConn(server, zmtp.Config{Type: zmtp.Pub, Doors: doors(t, 1, 2)})
				if err != nil {
					t.Error(err)
				}
				done <- c
			}()
			sub, err := zmtp.NewConn(cut, zmtp.Config{Type: zmtp.Sub, Keys: keys(t, 1, 2)})
			if err != nil {
				t.Fatal(err)
			}
			defer sub.Close()
			pub := <-done
			defer pub.Close()
			var frames [][]byte
			for n := range 3 {
				pub.WriteMessage([]byte{byte(n)})
				f := make([]byte, 2+8+8+16+1+1)
				if _, err := io.ReadFull(client, f); err != nil {
					t.Fatal(err)
				}
				frames = append(frames, f)
			}
			cut.more = bytes.NewReader(bytes.Join(c.change(frames), nil))
			good := 0
			for {
				_, err = sub.ReadMessage(nil)
				if err != nil {
					break
				}
				good++
			}
			if good != c.good || name != "as it was" && !errors.Is(err, zmtp.ErrProtocol) {
				t.Errorf("%d messages, want %d, then %v", good, c.good, err)
			}
		})
	}
}

// cutter hears what it is given once that is there.
type cutter struct {
	net.Conn
	more io.Reader
}

func (c *cutter) Read(b []byte) (int, error) {
	if c.more != nil {
		return c.more.Read(b)
	}
	return c.Conn.Read(b)
}

// TestCurveBounds: what is announced as larger than allowed is refused before it
// is stored, also where one frame fits and all do not.
func TestCurveBounds(t *testing.T) {
	p := curved(t, zmtp.Config{Doors: doors(t, 1, 2)})
	for _, sizes := range [][]int{{1 << 16}, {1 << 15, 1<<15 + 1}} {
		c := dial(t, p.Addr(), zmtp.Config{Type: zmtp.Sub, Keys: keys(t, 1, 2), MaxMessage: 1<<16 - 1})
		if err := c.Subscribe(""); err != nil {
			t.Fatal(err)
		}
		eventually(t, "no subscriber", func() bool { return p.Subscribers() == 1 })
		var frames [][]byte
		for _, n := range sizes {
			frames = append(frames, make([]byte, n))
		}
		p.Publish(frames...)
		if _, err := c.ReadMessage(nil); !errors.Is(err, zmtp.ErrTooLarge) {
			t.Errorf("%v: %v", sizes, err)
		}
		c.Close()
		eventually(t, "the subscriber stays", func() bool { return p.Subscribers() == 0 })
	}
}

func BenchmarkPublish(b *testing.B) {
	for _, curve := range []bool{false, true} {
		b.Run(fmt.Sprintf("curve=%t", curve), func(b *testing.B) {
			ours, theirs := pipe()
			sub, pub := zmtp.Config{Type: zmtp.Sub}, zmtp.Config{Type: zmtp.Pub}
			if curve {
				t := &testing.T{}
				sub.Keys, pub.Doors = keys(t, 1, 2), doors(t, 1, 2)
			}
			done := make(chan *zmtp.Conn)
			go func() {
				c, _ := zmtp.NewConn(ours, pub)
				done <- c
			}()
			c, err := zmtp.NewConn(theirs, sub)
			if err != nil {
				b.Fatal(err)
			}
			p := <-done
			defer p.Close()
			defer c.Close()
			m := make([]byte, 16<<10)
			b.SetBytes(int64(len(m)))
			go func() {
				for p.WriteMessage(m) == nil {
				}
			}()
			var frames [][]byte
			for b.Loop() {
				if frames, err = c.ReadMessage(frames); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
