package zmtp_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/zmtp"
)

func publisher(t *testing.T) *zmtp.Publisher {
	t.Helper()
	p, err := zmtp.ListenPublisher("127.0.0.1:0", zmtp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func dial(t *testing.T, addr net.Addr, cfg zmtp.Config) *zmtp.Conn {
	t.Helper()
	c, err := zmtp.Dial(context.Background(), addr.String(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

func TestPublish(t *testing.T) {
	p := publisher(t)
	c := dial(t, p.Addr(), zmtp.Config{Type: zmtp.Sub})
	if err := c.Subscribe("kv"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no subscriber", func() bool { return p.Subscribers() == 1 })
	big := bytes.Repeat([]byte("x"), 300_000)
	p.Publish([]byte("other"), []byte("not ours"))
	p.Publish([]byte("kv@1"), nil, big)
	got, err := c.ReadMessage(nil)
	if err != nil || len(got) != 3 || string(got[0]) != "kv@1" || len(got[1]) != 0 || !bytes.Equal(got[2], big) {
		t.Fatalf("%d frames, %v", len(got), err)
	}
	if c.Peer().Type != zmtp.Pub || c.Peer().Minor != 1 {
		t.Errorf("peer %+v", c.Peer())
	}
	c.Close()
	eventually(t, "the subscriber stays", func() bool { return p.Subscribers() == 0 })
}

// TestSlowSubscriber: publishing neither waits for a subscriber that does not
// read, nor keeps all for it.
func TestSlowSubscriber(t *testing.T) {
	p := publisher(t)
	c := dial(t, p.Addr(), zmtp.Config{Type: zmtp.Sub})
	if err := c.Subscribe(""); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no subscriber", func() bool { return p.Subscribers() == 1 })
	m := make([]byte, 1<<20)
	for range 300 {
		p.Publish(m)
	}
	if p.Dropped() == 0 {
		t.Error("300 MiB are kept")
	}
}

func TestRouter(t *testing.T) {
	r, err := zmtp.ListenRouter("127.0.0.1:0", zmtp.Config{}, func(p zmtp.Peer, f [][]byte, reply func(...[]byte) error) error {
		if len(f) != 2 {
			return errors.New("not ours")
		}
		return reply(f[0], append([]byte("for "), p.Identity...), f[1])
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	c := dial(t, r.Addr(), zmtp.Config{Type: zmtp.Dealer, Identity: []byte("me")})
	if err := c.WriteMessage(nil, []byte("question")); err != nil {
		t.Fatal(err)
	}
	got, err := c.ReadMessage(nil)
	if err != nil || len(got) != 3 || string(got[1]) != "for me" || string(got[2]) != "question" {
		t.Fatalf("%q, %v", got, err)
	}
	if err := c.WriteMessage([]byte("bad")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.ReadMessage(nil); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !strings.Contains(err.Error(), "reset") {
		t.Errorf("a handler's error leaves the connection: %v", err)
	}
}

// tape is a peer that says what it has to say whatever it hears.
type tape struct {
	net.Conn // deadlines and addresses
	r        *bytes.Reader
}

func (t tape) Read(b []byte) (int, error)  { return t.r.Read(b) }
func (t tape) Write(b []byte) (int, error) { return len(b), nil }

// play is a SUB socket that hears wire.
func play(wire []byte) (*zmtp.Conn, error) {
	ours, _ := net.Pipe()
	return zmtp.NewConn(tape{ours, bytes.NewReader(wire)}, zmtp.Config{Type: zmtp.Sub, MaxMessage: 1 << 16, MaxFrames: 4})
}

// answer plays bytes to a SUB socket and returns what it makes of them.
func answer(wire []byte, read int) error {
	c, err := play(wire)
	if err != nil {
		return err
	}
	defer c.Close()
	for range read {
		if _, err := c.ReadMessage(nil); err != nil {
			return err
		}
	}
	return nil
}

func greet(major, minor byte, mechanism string) string {
	g := make([]byte, 64)
	g[0], g[9], g[10], g[11] = 0xff, 0x7f, major, minor
	copy(g[12:], mechanism)
	return string(g)
}

const readyPub = "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"

func TestRefuses(t *testing.T) {
	ok := greet(3, 0, "NULL") + readyPub
	for name, c := range map[string]struct {
		wire string
		want error
	}{
		"http":                 {"HTTP/1.1 400 Bad Request\r\n\r\n", zmtp.ErrProtocol},
		"version 2":            {greet(2, 0, "NULL"), zmtp.ErrProtocol},
		"plain":                {greet(3, 1, "PLAIN"), zmtp.ErrMechanism},
		"cut greeting":         {ok[:40], io.ErrUnexpectedEOF},
		"message first":        {greet(3, 1, "NULL") + "\x00\x01x", zmtp.ErrProtocol},
		"error":                {greet(3, 1, "NULL") + "\x04\x0a\x05ERROR\x03no!", zmtp.ErrRefused},
		"partner":              {greet(3, 1, "NULL") + strings.Replace(readyPub, "PUB", "SUB", 1), zmtp.ErrPartner},
		"cut metadata":         {greet(3, 1, "NULL") + "\x04\x0a\x05READY\x0bSoc", zmtp.ErrProtocol},
		"flags":                {ok + "\x10\x00", zmtp.ErrProtocol},
		"command that goes on": {ok + "\x05\x02\x01x", zmtp.ErrProtocol},
		"large":                {ok + "\x02\x00\x00\x00\x00\x00\x01\x00\x01", zmtp.ErrTooLarge},
		"huge":                 {ok + "\x02\xff\xff\xff\xff\xff\xff\xff\xff", zmtp.ErrTooLarge},
		"large in parts":       {ok + "\x03\x00\x00\x00\x00\x00\x00\xff\xff" + strings.Repeat("x", 0xffff) + "\x00\x02xx", zmtp.ErrTooLarge},
		"frames":               {ok + strings.Repeat("\x01\x00", 9), zmtp.ErrTooLarge},
		"torn":                 {ok + "\x00\x05ab", io.ErrUnexpectedEOF},
		"torn between frames":  {ok + "\x01\x01a", io.ErrUnexpectedEOF},
		"long ping":            {ok + "\x04\x1a\x04PING\x00\x01" + strings.Repeat("c", 19), zmtp.ErrProtocol},
		"end":                  {ok + "\x00\x01a", io.EOF},
	} {
		if err := answer([]byte(c.wire), 2); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// TestGolden: what libzmq's PUB socket sent to a subscriber, byte for byte.
func TestGolden(t *testing.T) {
	for _, name := range []string{"pub-libzmq.hex"} {
		text, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		wire, err := hex.DecodeString(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		c, err := play(wire)
		if err != nil {
			t.Fatal(err)
		}
		got, err := c.ReadMessage(nil)
		if err != nil || len(got) != 3 || string(got[0]) != "kv-events" || len(got[1]) != 8 || got[1][7] != 7 || len(got[2]) != 300 {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
}

// TestSilence: a peer that does not answer PING is given up, one that does is
// not.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		go func() {
			go io.WriteString(theirs, greet(3, 1, "NULL")+readyPub)
			io.ReadFull(theirs, make([]byte, 64+len(readyPub)))
			buf := make([]byte, 64)
			n, _ := theirs.Read(buf) // PING with its time to live
			if string(buf[:n]) != "\x04\x07\x04PING\x00\x64" {
				t.Errorf("asked %q", buf[:n])
			}
			io.WriteString(theirs, "\x04\x05\x04PONG")
			io.Copy(io.Discard, theirs)
		}()
		c, err := zmtp.NewConn(ours, zmtp.Config{Type: zmtp.Sub, Silence: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		_, err = c.ReadMessage(nil)
		if took := time.Since(start); !errors.Is(err, zmtp.ErrSilent) || took != 15*time.Second {
			t.Errorf("%v after %v", err, took)
		}
		c.Close()
		theirs.Close()
	})
}

func TestPong(t *testing.T) {
	ours, theirs := net.Pipe()
	go func() {
		c, err := zmtp.NewConn(ours, zmtp.Config{Type: zmtp.Sub})
		if err == nil {
			c.ReadMessage(nil)
			c.Close()
		}
	}()
	defer theirs.Close()
	go io.WriteString(theirs, greet(3, 1, "NULL")+readyPub+"\x04\x0a\x04PING\x00\x01abc")
	if _, err := io.ReadFull(theirs, make([]byte, 64+len(readyPub))); err != nil {
		t.Fatal(err)
	}
	pong := make([]byte, 10)
	if _, err := io.ReadFull(theirs, pong); err != nil || string(pong) != "\x04\x08\x04PONGabc" {
		t.Errorf("%q %v", pong, err)
	}
}

func FuzzConn(f *testing.F) {
	ok := greet(3, 1, "NULL") + readyPub
	f.Add([]byte(ok + "\x01\x02kv\x00\x03abc"))
	f.Add([]byte(ok + "\x04\x0a\x04PING\x00\x01abc\x04\x0e\x09SUBSCRIBEkv"))
	f.Add([]byte(greet(3, 0, "NULL") + "\x04\x0a\x05ERROR\x03no!"))
	f.Fuzz(func(t *testing.T, wire []byte) {
		if err := answer(wire, 64); err == nil && len(wire) < 64 {
			t.Error("no greeting, no error")
		}
	})
}
