package trust

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// numbered is a secret whose bytes are first, first+1, ...
func numbered(first byte) (s Secret) {
	for i := range s.raw {
		s.raw[i] = first + byte(i)
	}
	return s
}

func ring(t *testing.T, secrets ...Secret) *Ring {
	t.Helper()
	r, err := NewRing(secrets...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestHandshakeVectors: two builds that say or prove otherwise are two fleets.
func TestHandshakeVectors(t *testing.T) {
	s := numbered(0)
	fixed := func(self string, nonce byte) []byte {
		c := challenge([]Secret{s}, self)
		copy(c[nonceAt:], bytes.Repeat([]byte{nonce}, nonceSize))
		return c
	}
	d, l := fixed("decode-0@7", 0xd0), fixed("prefill-0@9", 0x1e)
	proof := prove(s, ofListener, d, l)
	for _, v := range []struct {
		name string
		got  []byte
		want string
	}{
		{"challenge", d, hex.EncodeToString([]byte("xpyd-kv wants a fleet secret 1\n")) + "01" + "3238efab00000000" +
			"7966b09540ab5e3280a50f478af1a7336a6d761da0626a97ba07791b29d35f38" + strings.Repeat("d0", 32)},
		{"listener's proof", proof, "d4806cd41e94e6e58d8b377a29dfd00e7e81b5b5b6a36f09fd8d0160e6efe31e"},
		{"dialler's proof", prove(s, ofDialler, d, l, proof), "ee4fd0257d4de7d05d2eab2d5e64545003165429f3d840eb91398b2861da868b"},
	} {
		if got := hex.EncodeToString(v.got); got != v.want {
			t.Errorf("%s is\n%s, want\n%s", v.name, got, v.want)
		}
	}
}

// script is a peer that says what it says, whatever it hears.
type script struct {
	io.Reader
	heard bytes.Buffer
}

func (s *script) Write(b []byte) (int, error) { return s.heard.Write(b) }

func says(parts ...[]byte) *script { return &script{Reader: bytes.NewReader(slices.Concat(parts...))} }

// pair is a connection's two ends, which hold what is written as sockets do.
func pair(t *testing.T) (net.Conn, net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	for _, c := range []net.Conn{a, b} {
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	return a, b
}

// meet lets two rings prove themselves to each other.
func meet(t *testing.T, dialler, listener *Ring) (d, l Proven, derr, lerr error) {
	t.Helper()
	a, b := pair(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		l, lerr = listener.Accept(b, b, "prefill-0@9", nil)
		b.Close()
	}()
	d, derr = dialler.Dial(a, a, "decode-0@7", nil)
	a.Close()
	<-done
	return d, l, derr, lerr
}

func TestHandshake(t *testing.T) {
	one, two, other := numbered(0), numbered(32), numbered(64)
	f := func(name string, dialler, listener *Ring, ids [2]string) {
		t.Helper()
		d, l, derr, lerr := meet(t, dialler, listener)
		if ids == ([2]string{}) {
			if derr != nil || lerr != nil || !d.Is("prefill-0@9") || !l.Is("decode-0@7") || d.Is("prefill-0@8") || l == d {
				t.Errorf("%s: %v, %v", name, derr, lerr)
			}
			return
		}
		for i, err := range []error{derr, lerr} {
			var s *Stranger
			if !errors.As(err, &s) || s.Wrong || s.Said != nil || s.Ours != ids[i] || s.Theirs != ids[1-i] {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	f("one secret", ring(t, one), ring(t, one), [2]string{})
	f("the dialler has a newer one", ring(t, two, one), ring(t, one), [2]string{})
	f("the listener has a newer one", ring(t, one), ring(t, two, one), [2]string{})
	f("both have two", ring(t, two, one), ring(t, one, two), [2]string{})
	f("only the older one is shared", ring(t, other, one), ring(t, two, one), [2]string{})
	f("none is shared", ring(t, one), ring(t, two), [2]string{one.ID(), two.ID()})
	f("none of two is shared", ring(t, two, one), ring(t, other), [2]string{two.ID() + "+" + one.ID(), other.ID()})
}

// TestWrongProof: who names a secret and does not have it, at either end.
func TestWrongProof(t *testing.T) {
	s := numbered(0)
	r := ring(t, s)
	wrong := func(err error) {
		t.Helper()
		var e *Stranger
		if !errors.As(err, &e) || !e.Wrong || e.Ours != s.ID() || e.Theirs != s.ID() {
			t.Errorf("%v", err)
		}
		if strings.Contains(err.Error(), s.Reveal()) {
			t.Errorf("the secret shows in %v", err)
		}
	}
	named := challenge([]Secret{s}, "eve@1")
	_, err := r.Dial(says(named, make([]byte, proofSize)), io.Discard, "decode-0@7", nil)
	wrong(err)
	_, err = r.Accept(says(named, make([]byte, proofSize)), io.Discard, "prefill-0@9", nil)
	wrong(err)

	// The listener proves before the dialler does: what it shows opens nothing.
	a := says(named)
	if _, err = r.Accept(a, a, "prefill-0@9", nil); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
	shown := a.heard.Bytes()[challengeSize:]
	_, err = r.Accept(says(named, shown), io.Discard, "prefill-0@9", nil)
	wrong(err)
	_, err = r.Dial(says(a.heard.Bytes()), io.Discard, "decode-0@7", nil) // a listener's words, on another connection
	wrong(err)
}

// tee keeps what passes.
type tee struct {
	net.Conn
	said []byte
}

func (c *tee) Write(b []byte) (int, error) {
	c.said = append(c.said, b...)
	return c.Conn.Write(b)
}

// TestReplayed: what one connection has carried opens no other, at either end, nor does
// what an end has said itself.
func TestReplayed(t *testing.T) {
	r := ring(t, numbered(0))
	p, q := pair(t)
	a, b := &tee{Conn: p}, &tee{Conn: q}
	done := make(chan error, 1)
	go func() {
		_, err := r.Accept(b, b, "prefill-0@9", nil)
		done <- err
	}()
	_, err := r.Dial(a, a, "decode-0@7", nil)
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	for name, said := range map[string][]byte{"dialler": a.said, "listener": b.said} {
		var e *Stranger
		if _, err := r.Accept(bytes.NewReader(said), io.Discard, "prefill-0@9", nil); !errors.As(err, &e) || !e.Wrong {
			t.Errorf("the %s's words are accepted: %v", name, err)
		}
		if _, err := r.Dial(bytes.NewReader(said), io.Discard, "decode-0@7", nil); !errors.As(err, &e) || !e.Wrong {
			t.Errorf("the %s's words are believed: %v", name, err)
		}
	}
	// An echo says what it hears: the challenge, and, before a listener, its proof.
	var e *Stranger
	var heard bytes.Buffer
	if _, err := r.Dial(&heard, &heard, "decode-0@7", nil); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("an echo is a listener: %v", err)
	}
	heard.Reset()
	heard.Write(challenge(r.Secrets(), "prefill-0@9"))
	if _, err := r.Accept(&echo{Buffer: &heard}, &heard, "prefill-0@9", nil); !errors.As(err, &e) || !e.Wrong {
		t.Errorf("an echo is a dialler: %v", err)
	}
}

// echo leaves a listener's challenge out, so that its own proof is what it reads next.
type echo struct {
	*bytes.Buffer
	read int
}

func (e *echo) Read(b []byte) (int, error) {
	if e.read == challengeSize {
		e.Next(challengeSize)
	}
	n, err := e.Buffer.Read(b)
	e.read += n
	return n, err
}

// TestEveryBit: a bit that is not as it was said leaves nobody believing, wherever it is.
func TestEveryBit(t *testing.T) {
	r := ring(t, numbered(0))
	for at := range challengeSize + proofSize {
		for _, bit := range []byte{1, 0x80} {
			a, b := pair(t)
			flip := &flipper{Conn: a, at: at, bit: bit}
			done := make(chan error, 1)
			go func() {
				_, err := r.Accept(b, b, "prefill-0@9", nil)
				b.Close()
				done <- err
			}()
			_, derr := r.Dial(flip, flip, "decode-0@7", nil)
			a.Close()
			if lerr := <-done; lerr == nil {
				t.Fatalf("byte %d of the dialler's, bit %x: believed (%v)", at, bit, derr)
			}
		}
	}
}

// flipper changes one bit of what is written.
type flipper struct {
	net.Conn
	at  int
	bit byte
}

func (c *flipper) Write(b []byte) (int, error) {
	b = bytes.Clone(b)
	if c.at >= 0 && c.at < len(b) {
		b[c.at] ^= c.bit
	}
	c.at -= len(b)
	return c.Conn.Write(b)
}

// TestTruncated: an end that hangs up early leaves an error, never a proof.
func TestTruncated(t *testing.T) {
	r := ring(t, numbered(0))
	whole := slices.Concat(challenge(r.Secrets(), "eve@1"), make([]byte, proofSize-1))
	for n := range len(whole) + 1 {
		if _, err := r.Accept(bytes.NewReader(whole[:n]), io.Discard, "prefill-0@9", nil); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("%d bytes: %v", n, err)
		}
		if _, err := r.Dial(bytes.NewReader(whole[:n]), io.Discard, "decode-0@7", nil); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
}

// TestOtherTongues: who says something else gets our line, which its error shows.
func TestOtherTongues(t *testing.T) {
	r := ring(t, numbered(0), numbered(32))
	f := func(said string, answered bool) {
		t.Helper()
		var e *Stranger
		c := says([]byte(said))
		if _, err := r.Accept(c, c, "prefill-0@9", []byte("more")); !errors.As(err, &e) || !strings.HasPrefix(said, string(e.Said)) || e.Ours != r.IDs() {
			t.Errorf("%q: %v", said, err)
		}
		if answered {
			c.Read(make([]byte, 1))
			answer := bytes.NewReader(c.heard.Bytes())
			line, err := Line(answer)
			if err != nil || string(line) != Greeting {
				t.Errorf("%q is answered by %q, %v", said, line, err)
			}
			if ids, err := Named(answer); err != nil || ids != r.IDs() {
				t.Errorf("%q hears of %q, %v", said, ids, err)
			}
		} else if c.heard.Len() > 0 {
			t.Errorf("%q is answered by %q", said, c.heard.Bytes())
		}
		if _, err := r.Dial(says([]byte(said)), io.Discard, "decode-0@7", nil); !errors.As(err, &e) || !strings.HasPrefix(said, string(e.Said)) {
			t.Errorf("%q: %v", said, err)
		}
	}
	f("xpyd-kv 1-2\n", true)
	f("GET / HTTP/1.1\r\n\r\n", true)
	f(strings.Repeat("x", 100), false)
	f("xpyd-kv wants a fleet secret 2\n", true)
}

// FuzzHandshake: whatever a peer says, it is believed only with a proof that it cannot
// make up, and nothing that is read is read twice.
func FuzzHandshake(f *testing.F) {
	s := numbered(0)
	c := challenge([]Secret{s, numbered(32)}, "eve@1")
	f.Add(c)
	f.Add(slices.Concat(c, make([]byte, proofSize)))
	f.Add([]byte("xpyd-kv 1-2\n"))
	f.Add([]byte(Greeting))
	f.Fuzz(func(t *testing.T, said []byte) {
		r := ring(t, s)
		for _, do := range []func(io.Reader) (Proven, error){
			func(in io.Reader) (Proven, error) { return r.Accept(in, io.Discard, "prefill-0@9", nil) },
			func(in io.Reader) (Proven, error) { return r.Dial(in, io.Discard, "decode-0@7", nil) },
		} {
			in := bytes.NewReader(said)
			if _, err := do(in); err == nil {
				t.Errorf("%x is believed", said)
			}
			if read := len(said) - in.Len(); read > challengeSize+proofSize {
				t.Errorf("%d bytes are read", read)
			}
		}
		if c, err := readRest(bytes.NewReader(said)); err == nil && (!bytes.Equal(c[countAt:], said[:challengeSize-countAt]) || idsOf(c) == "") {
			t.Errorf("%x is read as %x", said, c)
		}
	})
}
