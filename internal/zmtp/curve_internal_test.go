package zmtp

import (
	"bytes"
	"crypto/ecdh"
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"
)

// fixed is the private key of 32 bytes n.
func fixed(t testing.TB, n byte) *ecdh.PrivateKey {
	t.Helper()
	k, err := ecdh.X25519().NewPrivateKey(bytes.Repeat([]byte{n}, keyBytes))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// exchange is a handshake whose keys are known: 1 and 2 are long-term, of server
// and client, 3 and 4 of the connection, of client and server.
type exchange struct {
	server, client           *ecdh.PrivateKey
	shortClient, shortServer *ecdh.PrivateKey
	doors                    []Door
	keys                     *Keys
	cookie                   []byte
}

func newExchange(t testing.TB) *exchange {
	x := &exchange{server: fixed(t, 1), client: fixed(t, 2), shortClient: fixed(t, 3), shortServer: fixed(t, 4)}
	x.doors = []Door{{Key: fixed(t, 9)}, {Key: x.server, Clients: []*ecdh.PublicKey{x.client.PublicKey()}}}
	x.keys = &Keys{Own: x.client, Server: x.server.PublicKey()}
	for n := range byte(cookieBytes) {
		x.cookie = append(x.cookie, n)
	}
	return x
}

func agreed(t testing.TB, ours, theirs *ecdh.PrivateKey) *[keyBytes]byte {
	t.Helper()
	key, err := agree(ours, theirs.PublicKey())
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// golden is what libzmq said (scripts/zmq_interop.py, record_curve), by name.
func golden(t testing.TB) func(line, command string) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/curve-libzmq.hex")
	if err != nil {
		t.Fatal(err)
	}
	lines := map[string][]byte{}
	for line := range strings.Lines(string(text)) {
		name, data, _ := strings.Cut(strings.TrimSpace(line), " ")
		if lines[name], err = hex.DecodeString(data); err != nil {
			t.Fatal(err)
		}
	}
	return func(line, command string) []byte {
		t.Helper()
		if command == "" {
			return lines[line]
		}
		name, body, err := splitCommand(lines[line])
		if err != nil || name != command {
			t.Fatalf("%s is %q, %v", line, name, err)
		}
		return body
	}
}

// TestCurveGolden: what libzmq says is understood, and said alike where nothing
// in it is random.
func TestCurveGolden(t *testing.T) {
	x, recorded := newExchange(t), golden(t)
	for _, end := range []struct {
		name string
		cfg  Config
	}{{"server", Config{Keys: x.keys}}, {"client", Config{Doors: func() []Door { return nil }}}} {
		if minor, err := readGreeting(bytes.NewReader(recorded(end.name+".greeting", "")), &end.cfg); minor != 1 || err != nil {
			t.Errorf("%s: %d, %v", end.name, minor, err)
		}
	}
	t.Run("server", func(t *testing.T) {
		short, cookie, err := openWelcome(recorded("server.welcome", "WELCOME"), agreed(t, x.shortClient, x.server))
		if err != nil || len(cookie) != cookieBytes {
			t.Fatal(err)
		}
		key, err := agree(x.shortClient, short)
		if err != nil {
			t.Fatal(err)
		}
		ready := recorded("server.ready", "READY")
		meta, n, err := openReady(ready, key)
		var p Peer
		if err != nil || n != 1 || parseReady(meta, &p) != nil || p.Type != Pub {
			t.Fatalf("%+v %d %v", p, n, err)
		}
		if again := appendReady(nil, meta, key, n); !bytes.Equal(again, ready) {
			t.Errorf("our READY is %x, libzmq's %x", again, ready)
		}
		s := &session{key: *key, fromPeer: nonceToClient, heard: n}
		like := &session{key: *key, toPeer: nonceToClient, sent: n}
		for i, want := range []struct {
			flags byte
			size  int
		}{{flagMore, 9}, {flagMore, 8}, {0, 300}} {
			sealed := recorded("server.message"+string(rune('0'+i)), "")
			flags, out, err := s.open(nil, sealed)
			if err != nil || flags != want.flags || len(out) != want.size {
				t.Fatalf("%d: flags %d, %q, %v", i, flags, out, err)
			}
			if again := like.appendFrame(nil, flags, out); !bytes.Equal(again, appendFrame(nil, 0, sealed)) {
				t.Errorf("our MESSAGE is %x, libzmq's %x", again, sealed)
			}
		}
	})
	t.Run("client", func(t *testing.T) {
		h, err := openHello(recorded("client.hello", "HELLO"), x.doors)
		if err != nil || h.n != 1 || h.door != &x.doors[1] {
			t.Fatalf("%+v %v", h, err)
		}
		key, err := agree(x.shortServer, h.short)
		if err != nil {
			t.Fatal(err)
		}
		i, err := openInitiate(recorded("client.initiate", "INITIATE"), x.cookie, h, x.shortServer, key)
		var p Peer
		if err != nil || i.n != 2 || !i.client.Equal(x.client.PublicKey()) || parseReady(i.meta, &p) != nil || p.Type != Sub {
			t.Fatalf("%+v %v", p, err)
		}
		s := &session{key: *key, fromPeer: nonceToServer, heard: i.n}
		flags, out, err := s.open(nil, recorded("client.message0", ""))
		if err != nil || flags != flagCommand && flags != 0 || !bytes.HasSuffix(out, []byte("kv")) {
			t.Errorf("%d %q %v", flags, out, err)
		}
	})
}

// commands are the four of a handshake, and then a message of the client.
func (x *exchange) commands(t testing.TB, meta []byte) (hello, welcome, initiate, ready, message []byte) {
	t.Helper()
	toServer := agreed(t, x.shortClient, x.server)
	key := agreed(t, x.shortClient, x.shortServer)
	vouch, err := appendVouch(nil, x.keys, x.shortClient.PublicKey(), x.shortServer.PublicKey())
	if err != nil {
		t.Fatal(err)
	}
	s := &session{key: *key, toPeer: nonceToServer, sent: 2}
	return appendHello(nil, x.shortClient.PublicKey(), toServer, 1),
		appendWelcome(nil, x.shortServer.PublicKey(), x.cookie, toServer),
		appendInitiate(nil, x.cookie, vouch, meta, x.client.PublicKey(), key, 2),
		appendReady(nil, meta, key, 1),
		s.appendFrame(nil, flagMore, meta)
}

// TestCurveEachBit: a handshake's command with one bit changed, cut or longer is
// refused, wherever that is; only HELLO's padding and INITIATE's end say nothing.
func TestCurveEachBit(t *testing.T) {
	x := newExchange(t)
	hello, welcome, initiate, ready, _ := x.commands(t, []byte("metadata"))
	toServer, key := agreed(t, x.shortClient, x.server), agreed(t, x.shortClient, x.shortServer)
	h, err := openHello(hello, x.doors)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		b    []byte
		free [2]int
		open func([]byte) error
	}{
		{"HELLO", hello, [2]int{2, 74}, func(b []byte) error { _, err := openHello(b, x.doors); return err }},
		{"WELCOME", welcome, [2]int{}, func(b []byte) error { _, _, err := openWelcome(b, toServer); return err }},
		{"INITIATE", initiate, [2]int{}, func(b []byte) error { _, err := openInitiate(b, x.cookie, h, x.shortServer, key); return err }},
		{"READY", ready, [2]int{}, func(b []byte) error { _, _, err := openReady(b, key); return err }},
	} {
		if err := c.open(c.b); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		for i := range c.b {
			// The highest bit of a public key does not count.
			if i >= c.free[0] && i < c.free[1] || c.name == "HELLO" && i == 74+keyBytes-1 {
				continue
			}
			b := bytes.Clone(c.b)
			b[i] ^= 1 << (i % 8)
			if err := c.open(b); !errors.Is(err, ErrProtocol) && !errors.Is(err, ErrKey) {
				t.Errorf("%s with byte %d changed: %v", c.name, i, err)
			}
			if err := c.open(c.b[:i]); !errors.Is(err, ErrProtocol) {
				t.Errorf("%s of %d bytes: %v", c.name, i, err)
			}
		}
		if err := c.open(append(bytes.Clone(c.b), 0)); err == nil {
			t.Errorf("%s with a byte more", c.name)
		}
	}
}

// TestCurveLowOrder: with a public key of low order anybody could make a HELLO.
func TestCurveLowOrder(t *testing.T) {
	x := newExchange(t)
	for _, low := range [][]byte{make([]byte, keyBytes), append([]byte{1}, make([]byte, keyBytes-1)...)} {
		zero := [keyBytes]byte{}
		point := publicKey(low)
		if _, err := openHello(appendHello(nil, point, &zero, 1), x.doors); !errors.Is(err, ErrProtocol) {
			t.Errorf("%x: %v", low, err)
		}
	}
}

// TestCurveVouch: a vouch for another connection or another server is none.
func TestCurveVouch(t *testing.T) {
	x := newExchange(t)
	hello, _, _, _, _ := x.commands(t, nil)
	h, err := openHello(hello, x.doors)
	if err != nil {
		t.Fatal(err)
	}
	key := agreed(t, x.shortServer, x.shortClient)
	for name, c := range map[string]struct {
		short, server *ecdh.PrivateKey // of the vouch
		own           *ecdh.PrivateKey // who says it
		good          bool
	}{
		"as it should be":    {x.shortClient, x.server, x.client, true},
		"another connection": {fixed(t, 7), x.server, x.client, false},
		"another server":     {x.shortClient, fixed(t, 7), x.client, false},
		"another client":     {x.shortClient, x.server, fixed(t, 7), false},
	} {
		vouch, err := appendVouch(nil, &Keys{Own: c.own, Server: c.server.PublicKey()}, c.short.PublicKey(), x.shortServer.PublicKey())
		if err != nil {
			t.Fatal(err)
		}
		b := appendInitiate(nil, x.cookie, vouch, nil, x.client.PublicKey(), key, 2)
		if _, err := openInitiate(b, x.cookie, h, x.shortServer, key); (err == nil) != c.good {
			t.Errorf("%s: %v", name, err)
		}
	}
	vouch, err := appendVouch(nil, x.keys, x.shortClient.PublicKey(), x.shortServer.PublicKey())
	if err != nil {
		t.Fatal(err)
	}
	b := appendInitiate(nil, x.cookie, vouch, nil, x.client.PublicKey(), key, h.n)
	if _, err := openInitiate(b, x.cookie, h, x.shortServer, key); !errors.Is(err, ErrProtocol) {
		t.Errorf("a nonce for the second time: %v", err)
	}
}

func FuzzHello(f *testing.F) {
	x := newExchange(f)
	hello, _, _, _, _ := x.commands(f, nil)
	f.Add(hello)
	f.Add(golden(f)("client.hello", "HELLO"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := openHello(b, x.doors)
		if err != nil {
			if h != nil {
				t.Error("something beside an error")
			}
			return
		}
		if again := appendHello(nil, h.short, h.key, h.n); !bytes.Equal(again[74:], b[74:]) {
			t.Errorf("%x is read, %x written", b, again)
		}
	})
}

func FuzzWelcome(f *testing.F) {
	x := newExchange(f)
	_, welcome, _, _, _ := x.commands(f, nil)
	key := agreed(f, x.shortClient, x.server)
	f.Add(welcome)
	f.Add(golden(f)("server.welcome", "WELCOME"))
	f.Fuzz(func(t *testing.T, b []byte) {
		short, cookie, err := openWelcome(b, key)
		if (err == nil) != (short != nil && len(cookie) == cookieBytes) {
			t.Errorf("%v %x %v", short, cookie, err)
		}
	})
}

// FuzzInitiate takes bytes as the command, and as the metadata of a good one,
// which strangers cannot make.
func FuzzInitiate(f *testing.F) {
	x := newExchange(f)
	hello, _, initiate, _, _ := x.commands(f, readyBody(&Config{Type: Sub}))
	h, err := openHello(hello, x.doors)
	if err != nil {
		f.Fatal(err)
	}
	key := agreed(f, x.shortServer, x.shortClient)
	f.Add(initiate)
	f.Add(golden(f)("client.initiate", "INITIATE"))
	f.Add(readyBody(&Config{Type: Dealer, Identity: []byte("me")}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if i, err := openInitiate(b, x.cookie, h, x.shortServer, key); (err == nil) != (i != nil) {
			t.Errorf("%v %v", i, err)
		}
		_, _, good, _, _ := x.commands(t, b)
		i, err := openInitiate(good, x.cookie, h, x.shortServer, key)
		if err != nil || !bytes.Equal(i.meta, b) || !i.client.Equal(x.client.PublicKey()) {
			t.Fatalf("metadata %x: %v %v", b, i, err)
		}
		var p Peer
		if parseReady(i.meta, &p) == nil && len(p.Identity) > 255 {
			t.Errorf("%+v", p)
		}
	})
}

func FuzzReady(f *testing.F) {
	x := newExchange(f)
	_, _, _, ready, _ := x.commands(f, readyBody(&Config{Type: Pub}))
	key := agreed(f, x.shortClient, x.shortServer)
	f.Add(ready)
	f.Fuzz(func(t *testing.T, b []byte) {
		if meta, n, err := openReady(b, key); err == nil && !bytes.Equal(appendReady(nil, meta, key, n), b) {
			t.Errorf("%x is not what it is read as", b)
		}
		_, _, _, good, _ := x.commands(t, b)
		if meta, n, err := openReady(good, key); err != nil || n != 1 || !bytes.Equal(meta, b) {
			t.Errorf("metadata %x: %x, %v", b, meta, err)
		}
	})
}

// FuzzMessage takes bytes as a frame, and as what a good one holds, flags first.
func FuzzMessage(f *testing.F) {
	x := newExchange(f)
	key := agreed(f, x.shortServer, x.shortClient)
	f.Add([]byte("\x01topic"))
	f.Add([]byte("\x02\x04PING\x00\x01abc"))
	f.Add(golden(f)("client.message0", ""))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &session{key: *key, fromPeer: nonceToServer, heard: 2}
		before := []byte("before")
		if flags, out, err := s.open(before, b); err == nil {
			to := &session{key: *key, toPeer: nonceToServer, sent: s.heard - 1}
			if again := to.appendFrame(nil, flags, out[len(before):]); !bytes.HasSuffix(again, b) {
				t.Errorf("%x is not what it is read as", b)
			}
		} else if string(out) != "before" || s.heard != 2 {
			t.Errorf("%q after %v", out, err)
		}
		to := &session{key: *key, toPeer: nonceToServer, sent: 6}
		var want byte
		if len(b) > 0 && b[0]&1 != 0 {
			want = flagMore
		} else if len(b) > 0 && b[0]&2 != 0 {
			want = flagCommand
		}
		wire := to.appendFrame(nil, want, b)
		flags, out, err := s.open(nil, wire[len(wire)-len(b)-sealing:])
		if err != nil || flags != want || !bytes.Equal(out, b) || s.heard != 7 {
			t.Errorf("%x: flags %d, %x, %v", b, flags, out, err)
		}
	})
}
