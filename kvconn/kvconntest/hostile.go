package kvconntest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
)

// mallory is a receiver without scruples: its frames are well sealed, and say
// what it likes.
type mallory struct {
	t    *testing.T
	w    *World
	tr   kvconn.Transport
	self kvconn.PeerID // which it proves to be
	ctl  *RawConn
	bulk []*RawConn
	key  [16]byte
}

// mallory dials the sender and shakes hands as its peers do.
func (w *World) mallory(t *testing.T, tr kvconn.Transport, bulk int) *mallory {
	t.Helper()
	for try := 0; ; try++ {
		m, err := w.greeted(t, tr, bulk)
		if err == nil {
			return m
		}
		m.close()
		// Who says nothing for PeerSilence has no session to bind to: on a real clock a
		// loaded machine can take that long between two frames.
		if w.Clock == nil || try == 4 {
			t.Fatal(err)
		}
	}
}

func (w *World) greeted(t *testing.T, tr kvconn.Transport, bulk int) (*mallory, error) {
	t.Helper()
	id := w.RConfig.Identity
	id.ID = "mallory"
	m := &mallory{t: t, w: w, tr: tr, self: id.PeerID}
	m.ctl = m.dial()
	m.send(m.ctl, Hello, HelloBody(wireVersion, wireVersion, 1, uint8(bulk), [16]byte{}, id))
	f, err := m.ctl.Next()
	if err != nil || f.Step != Hello {
		return m, fmt.Errorf("hello: %s, %v", f.Step, err)
	}
	m.key = HelloSession(f.Body)
	m.send(m.ctl, Ready, nil)
	for n := range bulk {
		c := m.dial()
		m.bulk = append(m.bulk, c)
		m.send(c, Bind, BindBody(m.key, uint32(n)))
		if f, err := c.Next(); err != nil || f.Step != Bound {
			return m, fmt.Errorf("bound: %s, %v", f.Step, err)
		}
	}
	return m, nil
}

func (m *mallory) dial() *RawConn {
	m.t.Helper()
	c := NewRawConn(m.w.Raw(m.tr))
	check(m.t, c.SetDeadline(time.Now().Add(patience*m.w.RConfig.HandshakeTimeout)))
	if _, err := c.Greet(m.self, wireBanner); err != nil {
		m.t.Fatal(err)
	}
	return c
}

// send may fail: the victim may have had enough.
func (m *mallory) send(c *RawConn, step Step, body []byte) { c.Send(step, body) }

// ticket asks for n tokens into blocks from 0 on.
func (m *mallory) ticket(id uint64, n int) {
	m.send(m.ctl, Ticket, m.ticketBody(id, n))
}

func (m *mallory) ticketBody(id uint64, n int) Body {
	dest := make([]kvconn.Dest, (n+3)/4)
	return TicketBody(id, [16]byte{1}, 4, Prompt(1, n), n, dest, nil)
}

// shutOut wants the victim to hang up within limit, with or without pings on
// the control connection meanwhile.
func (m *mallory) shutOut(c net.Conn, limit time.Duration, pings bool) {
	m.t.Helper()
	buf := make([]byte, 4096)
	for start := m.w.Clock.Now(); m.w.Clock.Since(start) < limit; {
		c.SetReadDeadline(time.Now().Add(m.w.SConfig.KeepAlive))
		_, err := c.Read(buf)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		if err != nil && pings && m.ctl.Send(Ping, nil) != nil {
			return
		}
	}
	m.t.Errorf("still connected after %v", limit)
}

func (m *mallory) close() {
	m.ctl.Close()
	for _, c := range m.bulk {
		c.Close()
	}
}

// hostileReceivers are what a receiver does to a sender. Each must end with
// the victim hanging up, unless it says that it is legal.
var hostileReceivers = []struct {
	name  string
	legal bool
	mute  bool // it says nothing more; the others go on with pings, so that silence does not end them
	do    func(m *mallory)
}{
	{name: "ticket-twice", do: func(m *mallory) { m.ticket(7, 9); m.ticket(7, 9) }},
	{name: "ticket-replayed-after-its-end", do: func(m *mallory) {
		m.ticket(1, 9)
		m.ctl.Expect(Commit)
		m.send(m.ctl, Received, Body(nil).U64(1))
		m.ticket(1, 9)
	}},
	{name: "ticket-id-goes-back", do: func(m *mallory) { m.ticket(math.MaxUint64, 9); m.ticket(1, 9) }},
	{name: "ticket-of-2^32-positions", do: func(m *mallory) {
		b := m.ticketBody(1, 9)
		binary.LittleEndian.PutUint32(b[48:], math.MaxUint32)
		m.send(m.ctl, Ticket, b)
	}},
	{name: "ticket-of-no-positions", do: func(m *mallory) {
		b := m.ticketBody(1, 9)
		binary.LittleEndian.PutUint32(b[48:], 0)
		m.send(m.ctl, Ticket, b)
	}},
	{name: "ticket-of-block-size-0", do: func(m *mallory) {
		b := m.ticketBody(1, 9)
		binary.LittleEndian.PutUint32(b[44:], 0)
		m.send(m.ctl, Ticket, b)
	}},
	{name: "ticket-of-another-block-size", do: func(m *mallory) {
		m.send(m.ctl, Ticket, TicketBody(1, [16]byte{}, 3, nil, 9, make([]kvconn.Dest, 3), nil))
	}},
	{name: "ticket-with-2^32-tokens", do: func(m *mallory) {
		m.send(m.ctl, Ticket, append(Body(nil).U64(1), make([]byte, 32)...).U32(1000, 4, 9).Str("", "", "").U32(math.MaxUint32))
	}},
	{name: "ticket-with-2^31-blocks", do: func(m *mallory) {
		m.send(m.ctl, Ticket, append(Body(nil).U64(1), make([]byte, 32)...).U32(1000, 4, 9).Str("", "", "").U32(0, 1<<31))
	}},
	{name: "ticket-with-a-short-have", do: func(m *mallory) {
		m.send(m.ctl, Ticket, TicketBody(1, [16]byte{}, 4, nil, 9, make([]kvconn.Dest, 3), []byte{1}))
	}},
	{name: "ticket-with-a-long-name", do: func(m *mallory) {
		m.send(m.ctl, Ticket, append(Body(nil).U64(1), make([]byte, 32)...).U32(1000, 4, 9).Str(string(make([]byte, 4097)), "", "").U32(0, 0, 0))
	}},
	{name: "resend-overlapping", do: func(m *mallory) { m.resend(9, [][2]uint32{{0, 3}, {2, 1}}) }},
	{name: "resend-descending", do: func(m *mallory) { m.resend(9, [][2]uint32{{5, 1}, {1, 1}}) }},
	{name: "resend-of-nothing", do: func(m *mallory) { m.resend(9, [][2]uint32{{0, 0}}) }},
	{name: "resend-past-the-end", do: func(m *mallory) { m.resend(9, [][2]uint32{{8, 2}}) }},
	{name: "resend-around-2^32", do: func(m *mallory) { m.resend(9, [][2]uint32{{math.MaxUint32, 2}}) }},
	{name: "resend-with-2^31-runs", do: func(m *mallory) {
		m.ticket(1, 9)
		m.ctl.Expect(Accepted)
		m.send(m.ctl, Resend, Body(nil).U64(1).U32(1, 1<<31))
	}},
	{name: "resend-storm", do: func(m *mallory) {
		m.ticket(1, 9)
		m.ctl.Expect(Accepted)
		for n := range uint32(5000) { // nobody reads the bulk connection
			m.send(m.ctl, Resend, Body(nil).U64(1).U32(n+1, 1, 0, 9))
			for _, l := range m.w.Server.Ledger() {
				if l.Missing > 5*9 {
					m.t.Errorf("%d units wait to be sent, the ticket has 9", l.Missing)
					return
				}
			}
		}
	}},
	{name: "resend-of-what-was-not-pushed", do: func(m *mallory) {
		m.hold(0)
		m.resend(9, [][2]uint32{{0, 4}})
	}},
	{name: "received-before-commit", do: func(m *mallory) {
		m.hold(0)
		m.ticket(1, 9)
		m.ctl.Expect(Accepted)
		m.send(m.ctl, Received, Body(nil).U64(1))
	}},
	{name: "frames-of-the-other-direction", do: func(m *mallory) { m.send(m.ctl, Commit, Body(nil).U64(1).U32(0).Str("")) }},
	{name: "unit-on-control", do: func(m *mallory) { m.send(m.ctl, Unit, make([]byte, 40)) }},
	{name: "unknown-frame", do: func(m *mallory) { m.send(m.ctl, 99, nil) }},
	{name: "hello-again", do: func(m *mallory) {
		m.send(m.ctl, Hello, HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, m.w.RConfig.Identity))
	}},
	{name: "bind-on-control", do: func(m *mallory) { m.send(m.ctl, Bind, BindBody(m.key, 0)) }},
	{name: "frame-of-another-version", do: func(m *mallory) { m.ctl.Version++; m.send(m.ctl, Ping, nil); m.ctl.Version-- }},
	{name: "frame-out-of-sequence", do: func(m *mallory) { m.ctl.Out++; m.send(m.ctl, Ping, nil) }},
	{name: "frame-repeated", do: func(m *mallory) { m.send(m.ctl, Ping, nil); m.ctl.Out--; m.send(m.ctl, Ping, nil) }},
	{name: "frame-of-4-GiB", mute: true, do: func(m *mallory) { m.raw(math.MaxUint32, nil) }},
	{name: "frame-over-its-bound", mute: true, do: func(m *mallory) { m.raw(64<<10+1, make([]byte, 64<<10+1)) }},
	{name: "frame-not-sealed", do: func(m *mallory) { m.ctl.Write(bytes.Repeat([]byte{1, 20, 3}, 20)) }},
	{name: "note-with-a-tail", do: func(m *mallory) { m.send(m.ctl, Revoke, make([]byte, 9)) }},
	{name: "bytes-on-bulk", do: func(m *mallory) { m.bulk[0].Write([]byte{0}) }},
	{name: "silence", mute: true, do: func(m *mallory) {}},
	{name: "pings-unread", mute: true, do: func(m *mallory) { m.flood() }},
	{name: "half-a-frame-drop-by-drop", mute: true, do: func(m *mallory) {
		frame := Frame{Version: wireVersion, Step: Ticket, Seq: m.ctl.Out, Body: m.ticketBody(1, 9)}.Bytes()
		for _, b := range frame[:len(frame)/2] { // each byte in time, the whole never
			if _, err := m.ctl.Write([]byte{b}); err != nil {
				return
			}
		}
	}},
	{name: "unknown-tickets", legal: true, do: func(m *mallory) {
		m.send(m.ctl, Revoke, Body(nil).U64(1<<63))
		m.send(m.ctl, Received, Body(nil).U64(1<<63))
		m.send(m.ctl, Resend, Body(nil).U64(1<<63).U32(1, 1, 0, 1<<20))
		if f, err := m.ctl.Expect(RevokeAck); err != nil || !bytes.Equal(f.Body, Body(nil).U64(1<<63)) {
			m.t.Errorf("revoke of an unknown ticket: %v", err)
		}
	}},
}

// hold makes the sender push only the first layers, up to and with last, of
// mallory's tickets; rows of later ones must not be read.
func (m *mallory) hold(last int) {
	w := m.w
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *Source) {
		if o.Peer().ID != "mallory" {
			w.Compute(ctx, o, src)
			return
		}
		src.Hook = func(layer, index int) error {
			if layer > last {
				m.t.Errorf("layer %d block %d was read before it was pushed", layer, index)
			}
			return nil
		}
		if o.Accept(src) != nil {
			return
		}
		for l := range last + 1 {
			o.Push(l, []int{0, 1, 2})
		}
		<-ctx.Done()
	}
}

func (m *mallory) resend(tokens int, runs [][2]uint32) {
	m.ticket(1, tokens)
	m.ctl.Expect(Accepted)
	b := Body(nil).U64(1).U32(1, uint32(len(runs)))
	for _, r := range runs {
		b = b.U32(r[0], r[1])
	}
	m.send(m.ctl, Resend, b)
}

// raw sends a ping whose header claims a length.
func (m *mallory) raw(length uint32, body []byte) {
	b := append(make([]byte, headerSize), body...)
	b[0], b[1] = wireVersion, byte(Ping)
	binary.LittleEndian.PutUint32(b[4:], length)
	binary.LittleEndian.PutUint32(b[8:], m.ctl.Out)
	Seal(b)
	m.ctl.Write(b)
}

// flood sends pings and reads no pong.
func (m *mallory) flood() {
	for range 200_000 {
		if err := m.ctl.Send(Ping, nil); err != nil {
			return
		}
	}
}

// friend transfers, and must succeed; on a real clock, see tries.
func (f Factory) friend(t *testing.T, w *World, when string, first int) {
	t.Helper()
	if err := f.tries(w, 1, func(n int) error { return w.Fetch(t.Context(), w.Spec(when, int32(first+n), 18, first)) }); err != nil {
		t.Errorf("%s: %v", when, err)
		return
	}
	w.Pool.Reclaim(w.Pool.Dest(first, 5))
}

// hostileReceiver runs one of them beside a friend, who notices nothing.
func hostileReceiver(do func(m *mallory), legal, mute bool) caseFunc {
	return func(t *testing.T, f Factory, w *World, ch *Chaos) {
		f.friend(t, w, "before", 0)
		m := w.mallory(t, ch.Transport, 1)
		defer m.close()
		var friend sync.WaitGroup
		friend.Go(func() {
			for n := range 4 {
				f.friend(t, w, "beside it", 8+8*n)
			}
		})
		do(m)
		if !legal {
			m.shutOut(m.ctl, 2*w.SConfig.PeerSilence, !mute)
		}
		friend.Wait()
		m.close()
		w.Empty(w.RConfig.PeerSilence + w.long(time.Second))
		f.friend(t, w, "after", 64)
	}
}

// hostileHandshakes never get as far as a session.
var hostileHandshakes = []struct {
	name string
	do   func(m *mallory, c *RawConn)
}{
	{"hello-of-a-sender", func(m *mallory, c *RawConn) {
		c.Send(Hello, HelloBody(wireVersion, wireVersion, 2, 1, [16]byte{}, m.w.RConfig.Identity))
	}},
	{"hello-of-another-range", func(m *mallory, c *RawConn) {
		c.Send(Hello, HelloBody(1, 2, 1, 1, [16]byte{}, m.w.RConfig.Identity))
	}},
	{"hello-with-no-bulk", func(m *mallory, c *RawConn) {
		c.Send(Hello, HelloBody(wireVersion, wireVersion, 1, 0, [16]byte{}, m.w.RConfig.Identity))
	}},
	{"hello-with-255-bulk", func(m *mallory, c *RawConn) {
		c.Send(Hello, HelloBody(wireVersion, wireVersion, 1, 255, [16]byte{}, m.w.RConfig.Identity))
	}},
	{"hello-with-2^31-layers", func(m *mallory, c *RawConn) {
		id := m.w.RConfig.Identity
		id.Layout.Groups = slices.Clone(id.Layout.Groups)
		id.Layout.Groups[0].Heads.Count = 1 << 31
		c.Send(Hello, HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, id))
	}},
	{"hello-with-2^32-groups", func(m *mallory, c *RawConn) {
		b := HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, kvconn.Identity{})
		binary.LittleEndian.PutUint32(b[len(b)-8:], math.MaxUint32)
		c.Send(Hello, b)
	}},
	{"ticket-first", func(m *mallory, c *RawConn) { c.Send(Ticket, m.ticketBody(1, 9)) }},
	{"bind-without-a-key", func(m *mallory, c *RawConn) { c.Send(Bind, BindBody([16]byte{}, 0)) }},
	{"nothing-after-hello", func(m *mallory, c *RawConn) {
		c.Send(Hello, HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, m.w.RConfig.Identity))
	}},
	{"no-bulk-connections", func(m *mallory, c *RawConn) {
		c.Send(Hello, HelloBody(wireVersion, wireVersion, 1, 2, [16]byte{}, m.w.RConfig.Identity))
		c.Next()
		c.Send(Ready, nil)
		for start := m.w.Clock.Now(); m.w.Clock.Since(start) < 2*m.w.SConfig.HandshakeTimeout; time.Sleep(m.w.SConfig.KeepAlive) {
			if c.Send(Ping, nil) != nil {
				return
			}
		}
	}},
	{"ticket-before-bulk", func(m *mallory, c *RawConn) {
		c.Send(Hello, HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, m.w.RConfig.Identity))
		c.Next()
		c.Send(Ready, nil)
		c.Send(Ticket, m.ticketBody(1, 9))
		m.shutOut(c, 2*m.w.SConfig.KeepAlive, false) // at once, not when the connection is late
	}},
	{"bind-with-another-key", func(m *mallory, c *RawConn) {
		c.Send(Hello, HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, m.w.RConfig.Identity)) // a session that waits for its connection
		c.Next()
		c.Send(Ready, nil)
		b := m.dial()
		defer b.Close()
		b.Send(Bind, BindBody([16]byte{}, 0))
		if f, err := b.Next(); err != nil || f.Step != Refuse {
			m.t.Errorf("bind without the key: %s, %v", f.Step, err)
		}
	}},
	{"bind-elsewhere", func(m *mallory, c *RawConn) { m.second(c, 7) }},
	{"bind-twice", func(m *mallory, c *RawConn) { m.second(c, 0) }},
}

// second takes a whole session and binds one more bulk connection to it.
func (m *mallory) second(c *RawConn, index uint32) {
	c.Close()
	o := m.w.mallory(m.t, m.tr, 1)
	defer o.close()
	b := o.dial()
	defer b.Close()
	b.Send(Bind, BindBody(o.key, index))
	if f, err := b.Next(); err != nil || f.Step != Refuse {
		m.t.Errorf("bind to %d: %s, %v", index, f.Step, err)
	}
}

func hostileHandshake(do func(m *mallory, c *RawConn)) caseFunc {
	return func(t *testing.T, f Factory, w *World, ch *Chaos) {
		m := &mallory{t: t, w: w, tr: ch.Transport, self: w.RConfig.Identity.PeerID}
		c := m.dial()
		defer c.Close()
		do(m, c)
		m.shutOut(c, 2*w.SConfig.HandshakeTimeout, false)
		f.friend(t, w, "after", 64)
	}
}

// restarted: a receiver that comes again as another run ends its former one.
func restarted(t *testing.T, f Factory, w *World, ch *Chaos) {
	m := w.mallory(t, ch.Transport, 1)
	defer m.close()
	m.hold(0)
	m.ticket(1, 9)
	m.ctl.Expect(Accepted)
	w.RConfig.Identity.Epoch = 2
	again := w.mallory(t, ch.Transport, 1)
	defer again.close()
	start := time.Now()
	m.shutOut(m.ctl, 2*w.SConfig.PeerSilence, true)
	if took := time.Since(start); f.Bubble && took > w.SConfig.PeerSilence/2 { // silence would end it too, later
		t.Errorf("the former run's session was over after %v", took)
	}
	w.Empty(w.RConfig.PeerSilence)
}

// slowloris: many connections that say a byte now and then do not keep a
// friend out, and are gone when the handshake's time is over.
func slowloris(t *testing.T, f Factory, w *World, ch *Chaos) {
	m := &mallory{t: t, w: w, tr: ch.Transport}
	id := w.RConfig.Identity
	frame := Frame{Version: wireVersion, Step: Hello, Body: HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, id)}.Bytes()
	var drips sync.WaitGroup
	for n := range 40 {
		c := NewRawConn(w.Raw(ch.Transport))
		drips.Go(func() {
			defer c.Close()
			start := w.Clock.Now()
			c.SetDeadline(time.Now().Add(patience * w.SConfig.HandshakeTimeout))
			words := Challenge(fleetSecret, id.PeerID)
			if n%2 > 0 { // of a member: slow only then
				words = frame
				if _, err := c.Greet(id.PeerID, wireBanner); err != nil {
					words = nil
				}
			}
			for _, b := range words {
				if _, err := c.Write([]byte{b}); err != nil {
					break
				}
				time.Sleep(w.SConfig.KeepAlive / 4)
				if w.Clock.Since(start) > 2*w.SConfig.HandshakeTimeout {
					break
				}
			}
			m.shutOut(c, 2*w.SConfig.HandshakeTimeout-w.Clock.Since(start), false) // also of one whose own deadline was first
			if took := w.Clock.Since(start); took > 2*w.SConfig.HandshakeTimeout {
				t.Errorf("shut out after %v", took)
			}
		})
	}
	for n := range 3 {
		f.friend(t, w, "beside them", 8*n)
	}
	drips.Wait()
}

func hostileReceiverCases(run func(name string, body caseFunc)) {
	for _, c := range hostileReceivers {
		run("hostile/receiver/"+c.name, hostileReceiver(c.do, c.legal, c.mute))
	}
	for _, c := range hostileHandshakes {
		run("hostile/handshake/"+c.name, hostileHandshake(c.do))
	}
	run("hostile/handshake/slowloris", slowloris)
	run("hostile/handshake/restarted", restarted)
}
