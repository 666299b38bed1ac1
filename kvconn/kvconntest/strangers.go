package kvconntest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// recorded is what both ends of a session's first connection say up to their hellos.
func recorded(t *testing.T, f Factory, w *World, ch *Chaos) (receiver, sender []byte) {
	t.Helper()
	recording := Record(ch)
	f.friend(t, w, "recorded", 0)
	all := recording()
	for _, r := range all {
		switch {
		case r.Conn != all[0].Conn || !slices.Contains([]Step{Challenged, Proved, Banner, Hello}, r.Step):
		case r.To == ToSender:
			receiver = append(receiver, r.Bytes...)
		default:
			sender = append(sender, r.Bytes...)
		}
	}
	if n := challengeSize + proofSize; len(receiver) <= n || len(sender) <= n {
		t.Fatalf("%d and %d bytes were recorded", len(receiver), len(sender))
	}
	return receiver, sender
}

// refuses wants the sender to hang up on a connection without a frame, and to count why.
func (w *World) refuses(t *testing.T, c *RawConn, field string) {
	t.Helper()
	check(t, c.SetDeadline(time.Now().Add(patience*w.SConfig.HandshakeTimeout)))
	if f, err := c.Next(); err == nil {
		t.Errorf("answered by %s", f.Step)
	}
	w.counted(t, field)
}

func (w *World) counted(t *testing.T, field string) {
	t.Helper()
	if !w.within(w.SConfig.HandshakeTimeout/2, func() bool { return w.Value(w.SMetrics, refusals, field) > 0 }) {
		t.Errorf("no refusal for %s was counted in time", field)
	}
}

// rawConn dials the sender, and says nothing yet.
func (w *World) rawConn(t *testing.T, tr kvconn.Transport) *RawConn {
	t.Helper()
	c, err := tr.Dial(context.Background(), w.Addr)
	check(t, err)
	t.Cleanup(func() { c.Close() })
	check(t, c.SetDeadline(time.Now().Add(patience*w.SConfig.HandshakeTimeout)))
	return NewRawConn(c)
}

// proven reads the listener's challenge, proof and banner.
func (c *RawConn) proven(t *testing.T) (theirs, proof []byte) {
	t.Helper()
	theirs, proof, err := c.challenged()
	check(t, err)
	c.r.ReadString('\n')
	return theirs, proof
}

// replayedProof: all that a receiver has said once, said again.
func replayedProof(t *testing.T, f Factory, w *World, ch *Chaos) {
	said, _ := recorded(t, f, w, ch)
	c := w.rawConn(t, ch.Transport)
	c.Write(said[:challengeSize])
	c.proven(t)
	c.Write(said[challengeSize:])
	w.refuses(t, c, "fleet_secret")
	f.friend(t, w, "after", 64)
}

// impostor serves one connection with do, and returns what comes of opening a session
// there, which must fail in half the time of a handshake.
func (w *World) impostor(t *testing.T, f Factory, ch *Chaos, expect kvconn.PeerID, do func(c *RawConn)) error {
	t.Helper()
	return w.dialImpostor(t, f, ch, w.RConfig.HandshakeTimeout/2, func(addr string) error {
		_, err := w.Receiver.Open(t.Context(), addr, expect)
		return err
	}, do)
}

// dialImpostor serves one connection with do, while open has to be done within limit.
func (w *World) dialImpostor(t *testing.T, f Factory, ch *Chaos, limit time.Duration, open func(addr string) error, do func(c *RawConn)) error {
	t.Helper()
	_, _, addr := f.transport(t)
	ln, err := ch.Transport.Listen(addr)
	check(t, err)
	var peer sync.WaitGroup
	peer.Go(func() {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(patience * w.RConfig.HandshakeTimeout))
		c := NewRawConn(conn)
		do(c)
		io.Copy(io.Discard, c.r) // until the receiver hangs up
	})
	start := w.Clock.Now()
	err = open(ln.Addr().String())
	if took := w.Clock.Since(start); took > limit {
		t.Errorf("only known after %v", took)
	}
	ln.Close()
	peer.Wait()
	return err
}

// unproven wants an error that names the secrets.
func unproven(t *testing.T, err error, theirs string) {
	t.Helper()
	d := differs(t, err, ticket.Incompatible, "fleet_secret")
	if d.Ours != idOf(fleetSecret) || !strings.HasPrefix(d.Theirs, theirs) {
		t.Errorf("want the peer's %s, have %v", theirs, err)
	}
	if strings.Contains(err.Error(), secretOf(fleetSecret).Reveal()) {
		t.Errorf("the secret shows in %v", err)
	}
}

// replayedAnswer: all that a sender has said once, said to another connection.
func replayedAnswer(t *testing.T, f Factory, w *World, ch *Chaos) {
	_, said := recorded(t, f, w, ch)
	err := w.impostor(t, f, ch, w.SConfig.Identity.PeerID, func(c *RawConn) {
		c.r.Discard(challengeSize)
		c.Write(said)
	})
	unproven(t, err, idOf(fleetSecret))
	f.friend(t, w, "after", 64)
}

// reflected: the sender's own proof, of this connection and of another one, sent back.
func reflected(t *testing.T, f Factory, w *World, ch *Chaos) {
	eve := kvconn.PeerID{ID: "eve", Epoch: 1}
	ask := func(challenge []byte) (c *RawConn, theirs, proof []byte) {
		c = w.rawConn(t, ch.Transport)
		c.Write(challenge)
		theirs, proof = c.proven(t)
		return c, theirs, proof
	}
	c, theirs, proof := ask(Challenge(fleetSecret, eve)) // a challenge holds nothing secret: anybody can make one
	o, _, another := ask(theirs)
	o.Write(slices.Concat(another, []byte(wireBanner)))
	w.refuses(t, o, "fleet_secret")
	c.Write(slices.Concat(proof, []byte(wireBanner)))
	w.refuses(t, c, "fleet_secret")
	f.friend(t, w, "after", 64)
}

// echoed: a listener that says what it hears.
func echoed(t *testing.T, f Factory, w *World, ch *Chaos) {
	err := w.impostor(t, f, ch, kvconn.PeerID{}, func(c *RawConn) {
		b, _ := c.read(challengeSize)
		c.Write(append(b, b[:proofSize]...))
	})
	unproven(t, err, idOf(fleetSecret))
	f.friend(t, w, "after", 64)
}

// named: a peer that names the fleet's secret and does not have it, at either end.
func named(t *testing.T, f Factory, w *World, ch *Chaos) {
	eve := kvconn.PeerID{ID: "eve", Epoch: 1}
	pretend := Challenge(fleetSecret, eve)
	err := w.impostor(t, f, ch, kvconn.PeerID{}, func(c *RawConn) {
		theirs, _ := c.read(challengeSize)
		c.Write(slices.Concat(pretend, Prove(otherSecret, "listener", theirs, pretend)))
	})
	unproven(t, err, idOf(fleetSecret)+", and a wrong proof")
	c := w.rawConn(t, ch.Transport)
	c.Write(pretend)
	theirs, proof := c.proven(t)
	c.Write(slices.Concat(Prove(otherSecret, "dialler", pretend, theirs, proof), []byte(wireBanner)))
	w.refuses(t, c, "fleet_secret")
	f.friend(t, w, "after", 64)
}

// passedOn: an impostor at the address of a worker that is gone passes on what another
// proves, and puts the gone worker's name into its hello.
func passedOn(t *testing.T, f Factory, w *World, ch *Chaos) {
	gone := kvconn.PeerID{ID: "prefill-9", Epoch: 7}
	err := w.impostor(t, f, ch, gone, func(c *RawConn) {
		far := w.rawConn(t, ch.Transport)
		var up sync.WaitGroup
		up.Go(func() { io.Copy(far, c.r) })
		theirs, proof, err := far.challenged()
		if err == nil {
			c.Write(slices.Concat(theirs, proof))
			var banner string
			if banner, err = far.r.ReadString('\n'); err == nil {
				io.WriteString(c, banner)
			}
		}
		hello, e := far.Next()
		if err == nil && e == nil {
			c.Write(Frame{Version: hello.Version, Step: Hello, Seq: hello.Seq, Body: renamed(hello.Body, gone)}.Bytes())
			io.Copy(c, far.r)
		}
		far.Close()
		c.Close()
		up.Wait()
	})
	if d := differs(t, err, ticket.Incompatible, "identity"); d.Theirs != gone.String() {
		t.Errorf("want the peer's %s, have %v", gone, err)
	}
	f.friend(t, w, "after", 64)
}

// renamed is a hello's body with another name: epoch u64, id string at byte 20.
func renamed(body []byte, id kvconn.PeerID) []byte {
	n := binary.LittleEndian.Uint32(body[28:])
	b := Body(bytes.Clone(body[:20])).U64(id.Epoch).Str(id.ID)
	return append(b, body[32+n:]...)
}

// bulkOfAnother: a member that has come by the key of another's session.
func bulkOfAnother(t *testing.T, f Factory, w *World, ch *Chaos) {
	m := w.mallory(t, ch.Transport, 1)
	defer m.close()
	m.self.ID = "eve"
	m.refused(m.key, 0)
	w.counted(t, "identity")
}

// diverted is a transport whose second connection, which memory goes with, ends at
// another address.
type diverted struct {
	kvconn.Transport
	addr    string // of the second
	dials   atomic.Int32
	offered atomic.Int32
}

func (d *diverted) Dial(ctx context.Context, addr string) (net.Conn, error) {
	if d.dials.Add(1) != 2 {
		return d.Transport.Dial(ctx, addr)
	}
	c, err := d.Transport.Dial(ctx, d.addr)
	if sc, ok := c.(kvconn.SharedConn); ok && err == nil {
		return offering{sc, d}, nil
	}
	return c, err
}

// offering counts what is offered.
type offering struct {
	kvconn.SharedConn
	d *diverted
}

func (o offering) Offer(s *kvconn.Shared) (kvconn.Hold, []byte, error) {
	o.d.offered.Add(1)
	return o.SharedConn.Offer(s)
}

// memoryForNobody: an impostor that takes over a worker's address between two connections
// of a session is offered no memory before it has proved itself, and learns no session's
// key.
func memoryForNobody(t *testing.T, f Factory, w *World, ch *Chaos) {
	d := &diverted{Transport: ch.Transport}
	m, err := kvconn.NewMetrics(nil)
	check(t, err)
	r, err := kvconn.NewReceiver(w.RConfig, d, slog.New(slog.DiscardHandler), m)
	check(t, err)
	defer r.Close(t.Context())
	heard := 0
	err = w.dialImpostor(t, f, ch, w.RConfig.HandshakeTimeout/2, func(addr string) error {
		d.addr = addr
		_, err := r.Open(t.Context(), w.Addr, kvconn.PeerID{})
		return err
	}, func(c *RawConn) {
		theirs, _ := c.read(challengeSize)
		pretend := Challenge(fleetSecret, w.SConfig.Identity.PeerID)
		c.Write(slices.Concat(pretend, Prove(otherSecret, "listener", theirs, pretend), []byte(wireBanner)))
		for ; ; heard++ {
			if _, err := c.r.ReadByte(); err != nil {
				return
			}
		}
	})
	unproven(t, err, idOf(fleetSecret)+", and a wrong proof")
	if n := d.offered.Load(); n > 0 || heard > 0 {
		t.Errorf("%d offers of memory and %d bytes for nobody", n, heard)
	}
}

// oldReceiver: a build that knows no secrets is told so in the line that its error shows.
func oldReceiver(t *testing.T, f Factory, w *World, ch *Chaos) {
	c := w.rawConn(t, ch.Transport)
	c.Write([]byte(wireBanner))
	start := w.Clock.Now()
	if line, err := c.r.ReadString('\n'); err != nil || line != wants {
		t.Errorf("told %q, %v", line, err)
	}
	if _, err := io.Copy(io.Discard, c.r); err != nil && !errors.Is(err, net.ErrClosed) && w.Clock.Since(start) > w.SConfig.HandshakeTimeout/2 {
		t.Error(err)
	}
	w.counted(t, "fleet_secret")
}

// oldSender: a build that knows no secrets says its banner at once, and hears the line.
func oldSender(t *testing.T, f Factory, w *World, ch *Chaos) {
	err := w.impostor(t, f, ch, kvconn.PeerID{}, func(c *RawConn) {
		c.Write([]byte(wireBanner))
		if line, err := c.r.ReadString('\n'); err != nil || line != wants {
			t.Errorf("told %q, %v", line, err)
		}
	})
	unproven(t, err, "(none)")
	f.friend(t, w, "after", 64)
}
