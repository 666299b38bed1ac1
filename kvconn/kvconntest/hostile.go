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

// mallory is a hostile receiver: its frames are well sealed, and say what it likes.
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
		// A peer that is silent for PeerSilence loses its session before the bind: on a real
		// clock a loaded machine can take that long between two frames.
		if w.Clock == nil || try == 4 {
			t.Fatal(err)
		}
	}
}

func (w *World) greeted(t *testing.T, tr kvconn.Transport, bulk int) (*mallory, error) {
	t.Helper()
	m := &mallory{t: t, w: w, tr: tr, self: kvconn.PeerID{ID: "mallory", Epoch: w.RConfig.Identity.Epoch}}
	m.ctl = m.dial()
	if err := m.hello(m.ctl, uint8(bulk)); err != nil {
		return m, err
	}
	for n := range bulk {
		c := m.dial()
		m.bulk = append(m.bulk, c)
		c.Send(Bind, BindBody(m.key, uint32(n)))
		if f, err := c.Next(); err != nil || f.Step != Bound {
			return m, fmt.Errorf("bound: %s, %v", f.Step, err)
		}
	}
	return m, nil
}

// dial proves to be self. What is sent afterwards may fail: the victim may have had enough.
func (m *mallory) dial() *RawConn {
	m.t.Helper()
	c := m.w.rawConn(m.t, m.tr)
	_, err := c.Greet(m.self, wireBanner)
	check(m.t, err)
	return c
}

// hello opens a session that waits for so many bulk connections.
func (m *mallory) hello(c *RawConn, bulk uint8) error {
	id := m.w.RConfig.Identity
	id.PeerID = m.self
	c.Send(Hello, HelloBody(wireVersion, wireVersion, 1, bulk, [16]byte{}, id))
	f, err := c.Next()
	if err != nil || f.Step != Hello {
		return fmt.Errorf("hello: %s, %v", f.Step, err)
	}
	m.key = HelloSession(f.Body)
	return c.Send(Ready, nil)
}

// ticket asks for n tokens into blocks from 0 on.
func (m *mallory) ticket(id uint64, n int) { m.ctl.Send(Ticket, ticketBody(id, n)) }

func ticketBody(id uint64, n int) Body {
	return TicketBody(id, [16]byte{1}, 4, Prompt(1, n), n, make([]kvconn.Dest, (n+3)/4), nil)
}

// accepted asks for 9 tokens and waits until the sender has accepted the ticket.
func (m *mallory) accepted() {
	m.ticket(1, 9)
	m.ctl.Expect(Accepted)
}

// shutOut wants the victim to hang up within limit, with or without pings on the
// control connection meanwhile.
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

// says sends one control frame.
func says(step Step, body Body) func(m *mallory) {
	return func(m *mallory) { m.ctl.Send(step, body) }
}

// ticketWith sends a ticket with another number in one place.
func ticketWith(at int, v uint32) func(m *mallory) {
	b := ticketBody(1, 9)
	binary.LittleEndian.PutUint32(b[at:], v)
	return says(Ticket, b)
}

// ticketNamed is a ticket of block size 4 and 9 positions up to its tokens.
func ticketNamed(name string) Body {
	return append(Body(nil).U64(1), make([]byte, 32)...).U32(1000, 4, 9).Str(name, "", "")
}

// receiverCase is what a receiver does to a sender, which must hang up unless it is legal.
type receiverCase struct {
	name  string
	legal bool
	mute  bool // sends no pings afterwards; the others do, not to be silent
	do    func(m *mallory)
}

var hostileReceivers = []receiverCase{
	{name: "ticket-twice", do: func(m *mallory) { m.ticket(7, 9); m.ticket(7, 9) }},
	{name: "ticket-replayed-after-its-end", do: func(m *mallory) {
		m.ticket(1, 9)
		m.ctl.Expect(Commit)
		m.ctl.Send(Received, Body(nil).U64(1))
		m.ticket(1, 9)
	}},
	{name: "ticket-id-goes-back", do: func(m *mallory) { m.ticket(math.MaxUint64, 9); m.ticket(1, 9) }},
	{name: "ticket-of-2^32-positions", do: ticketWith(48, math.MaxUint32)},
	{name: "ticket-of-no-positions", do: ticketWith(48, 0)},
	{name: "ticket-of-block-size-0", do: ticketWith(44, 0)},
	{name: "ticket-of-another-block-size", do: says(Ticket, TicketBody(1, [16]byte{}, 3, nil, 9, make([]kvconn.Dest, 3), nil))},
	{name: "ticket-with-2^32-tokens", do: says(Ticket, ticketNamed("").U32(math.MaxUint32))},
	{name: "ticket-with-2^31-blocks", do: says(Ticket, ticketNamed("").U32(0, 1<<31))},
	{name: "ticket-with-a-short-have", do: says(Ticket, TicketBody(1, [16]byte{}, 4, nil, 9, make([]kvconn.Dest, 3), []byte{1}))},
	{name: "ticket-with-a-long-name", do: says(Ticket, ticketNamed(string(make([]byte, 4097))).U32(0, 0, 0))},
	{name: "resend-overlapping", do: func(m *mallory) { m.resend([][2]uint32{{0, 3}, {2, 1}}) }},
	{name: "resend-descending", do: func(m *mallory) { m.resend([][2]uint32{{5, 1}, {1, 1}}) }},
	{name: "resend-of-nothing", do: func(m *mallory) { m.resend([][2]uint32{{0, 0}}) }},
	{name: "resend-past-the-end", do: func(m *mallory) { m.resend([][2]uint32{{8, 2}}) }},
	{name: "resend-around-2^32", do: func(m *mallory) { m.resend([][2]uint32{{math.MaxUint32, 2}}) }},
	{name: "resend-with-2^31-runs", do: func(m *mallory) {
		m.accepted()
		m.ctl.Send(Resend, Body(nil).U64(1).U32(1, 1<<31))
	}},
	{name: "resend-storm", do: func(m *mallory) {
		m.accepted()
		for n := range uint32(5000) { // nobody reads the bulk connection
			m.ctl.Send(Resend, Body(nil).U64(1).U32(n+1, 1, 0, 9))
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
		m.resend([][2]uint32{{0, 4}})
	}},
	{name: "received-before-commit", do: func(m *mallory) {
		m.hold(0)
		m.accepted()
		m.ctl.Send(Received, Body(nil).U64(1))
	}},
	{name: "frames-of-the-other-direction", do: says(Commit, Body(nil).U64(1).U32(0).Str(""))},
	{name: "unit-on-control", do: says(Unit, make([]byte, 40))},
	{name: "unknown-frame", do: says(99, nil)},
	{name: "hello-again", do: func(m *mallory) {
		m.ctl.Send(Hello, HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, m.w.RConfig.Identity))
	}},
	{name: "bind-on-control", do: func(m *mallory) { m.ctl.Send(Bind, BindBody(m.key, 0)) }},
	{name: "frame-of-another-version", do: func(m *mallory) { m.ctl.Version++; m.ctl.Send(Ping, nil); m.ctl.Version-- }},
	{name: "frame-out-of-sequence", do: func(m *mallory) { m.ctl.Out++; m.ctl.Send(Ping, nil) }},
	{name: "frame-repeated", do: func(m *mallory) { m.ctl.Send(Ping, nil); m.ctl.Out--; m.ctl.Send(Ping, nil) }},
	{name: "frame-of-4-GiB", mute: true, do: func(m *mallory) { m.ctl.Write(m.ctl.ofLength(math.MaxUint32, Ping, nil)) }},
	{name: "frame-over-its-bound", mute: true, do: says(Ping, make([]byte, 64<<10+1))},
	{name: "frame-not-sealed", do: func(m *mallory) { m.ctl.Write(bytes.Repeat([]byte{1, 20, 3}, 20)) }},
	{name: "note-with-a-tail", do: says(Revoke, make([]byte, 9))},
	{name: "bytes-on-bulk", do: func(m *mallory) { m.bulk[0].Write([]byte{0}) }},
	{name: "silence", mute: true, do: func(m *mallory) {}},
	{name: "pings-unread", mute: true, do: func(m *mallory) {
		for n := 0; n < 200_000 && m.ctl.Send(Ping, nil) == nil; n++ {
		}
	}},
	{name: "half-a-frame-drop-by-drop", mute: true, do: func(m *mallory) {
		frame := m.ctl.frame(Ticket, ticketBody(1, 9))
		drip(m.ctl, frame[:len(frame)/2], 0) // each byte in time, the whole never
	}},
	{name: "unknown-tickets", legal: true, do: func(m *mallory) {
		m.ctl.Send(Revoke, Body(nil).U64(1<<63))
		m.ctl.Send(Received, Body(nil).U64(1<<63))
		m.ctl.Send(Resend, Body(nil).U64(1<<63).U32(1, 1, 0, 1<<20))
		if f, err := m.ctl.Expect(RevokeAck); err != nil || !bytes.Equal(f.Body, Body(nil).U64(1<<63)) {
			m.t.Errorf("revoke of an unknown ticket: %v", err)
		}
	}},
}

// hold makes the sender push only the layers up to last of mallory's tickets; rows of
// later ones must not be read.
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

func (m *mallory) resend(runs [][2]uint32) {
	m.accepted()
	b := Body(nil).U64(1).U32(1, uint32(len(runs)))
	for _, r := range runs {
		b = b.U32(r[0], r[1])
	}
	m.ctl.Send(Resend, b)
}

// ofLength is a frame whose header claims a length.
func (c *RawConn) ofLength(n uint32, step Step, body []byte) []byte {
	b := c.frame(step, body)
	binary.LittleEndian.PutUint32(b[4:], n)
	Seal(b)
	return b
}

// drip writes byte by byte, until it fails.
func drip(c net.Conn, b []byte, pause time.Duration) {
	for i := range b {
		if _, err := c.Write(b[i : i+1]); err != nil {
			return
		}
		time.Sleep(pause)
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

// run runs the case beside a friend, who notices nothing.
func (c receiverCase) run(t *testing.T, f Factory, w *World, ch *Chaos) {
	f.friend(t, w, "before", 0)
	m := w.mallory(t, ch.Transport, 1)
	defer m.close()
	var friend sync.WaitGroup
	friend.Go(func() {
		for n := range 4 {
			f.friend(t, w, "beside it", 8+8*n)
		}
	})
	c.do(m)
	if !c.legal {
		m.shutOut(m.ctl, 2*w.SConfig.PeerSilence, !c.mute)
	}
	friend.Wait()
	m.close()
	w.Empty(w.RConfig.PeerSilence + w.long(time.Second))
	f.friend(t, w, "after", 64)
}

// helloAs sends a hello of a range of versions, a role and a number of bulk connections.
func helloAs(lo, hi, role, bulk uint8) func(m *mallory, c *RawConn) {
	return func(m *mallory, c *RawConn) {
		c.Send(Hello, HelloBody(lo, hi, role, bulk, [16]byte{}, m.w.RConfig.Identity))
	}
}

// handshakeCase is what a receiver does on a new connection; it never gets as far as a session.
type handshakeCase struct {
	name string
	do   func(m *mallory, c *RawConn)
}

var hostileHandshakes = []handshakeCase{
	{"hello-of-a-sender", helloAs(wireVersion, wireVersion, 2, 1)},
	{"hello-of-another-range", helloAs(1, 2, 1, 1)},
	{"hello-with-no-bulk", helloAs(wireVersion, wireVersion, 1, 0)},
	{"hello-with-255-bulk", helloAs(wireVersion, wireVersion, 1, 255)},
	{"hello-with-2^31-layers", func(m *mallory, c *RawConn) {
		c.Send(Hello, HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, manyLayers(m.w.RConfig.Identity)))
	}},
	{"hello-with-2^32-groups", func(m *mallory, c *RawConn) {
		b := HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, kvconn.Identity{})
		binary.LittleEndian.PutUint32(b[len(b)-8:], math.MaxUint32)
		c.Send(Hello, b)
	}},
	{"ticket-first", func(m *mallory, c *RawConn) { c.Send(Ticket, ticketBody(1, 9)) }},
	{"bind-without-a-key", func(m *mallory, c *RawConn) { c.Send(Bind, BindBody([16]byte{}, 0)) }},
	{"nothing-after-hello", helloAs(wireVersion, wireVersion, 1, 1)},
	{"no-bulk-connections", func(m *mallory, c *RawConn) {
		m.hello(c, 2)
		m.w.within(2*m.w.SConfig.HandshakeTimeout, func() bool { return c.Send(Ping, nil) != nil })
	}},
	{"ticket-before-bulk", func(m *mallory, c *RawConn) {
		m.hello(c, 1)
		c.Send(Ticket, ticketBody(1, 9))
		m.shutOut(c, 2*m.w.SConfig.KeepAlive, false) // at once, not when the connection is late
	}},
	{"bind-with-another-key", func(m *mallory, c *RawConn) {
		m.hello(c, 1) // a session that waits for its connection
		m.refused([16]byte{}, 0)
	}},
	{"bind-elsewhere", func(m *mallory, c *RawConn) { m.second(c, 7) }},
	{"bind-twice", func(m *mallory, c *RawConn) { m.second(c, 0) }},
}

// second takes a whole session and binds one more bulk connection to it.
func (m *mallory) second(c *RawConn, index uint32) {
	c.Close()
	o := m.w.mallory(m.t, m.tr, 1)
	defer o.close()
	o.refused(o.key, index)
}

// refused dials a bulk connection whose bind must be refused.
func (m *mallory) refused(key [16]byte, index uint32) {
	m.t.Helper()
	c := m.dial()
	defer c.Close()
	c.Send(Bind, BindBody(key, index))
	if f, err := c.Next(); err != nil || f.Step != Refuse {
		m.t.Errorf("bind %x to %d: %s, %v", key, index, f.Step, err)
	}
}

// manyLayers claims 2^31 of them.
func manyLayers(id kvconn.Identity) kvconn.Identity {
	id.Layout.Groups = slices.Clone(id.Layout.Groups)
	id.Layout.Groups[0].Heads.Count = 1 << 31
	return id
}

func (h handshakeCase) run(t *testing.T, f Factory, w *World, ch *Chaos) {
	m := &mallory{t: t, w: w, tr: ch.Transport, self: w.RConfig.Identity.PeerID}
	c := m.dial()
	defer c.Close()
	h.do(m, c)
	m.shutOut(c, 2*w.SConfig.HandshakeTimeout, false)
	f.friend(t, w, "after", 64)
}

// restarted: a receiver that comes again as another run ends its former one.
func restarted(t *testing.T, f Factory, w *World, ch *Chaos) {
	m := w.mallory(t, ch.Transport, 1)
	defer m.close()
	m.hold(0)
	m.accepted()
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

// slowloris: many connections that say a byte now and then do not keep a friend out,
// and are gone when the handshake's time is over.
func slowloris(t *testing.T, f Factory, w *World, ch *Chaos) {
	m := &mallory{t: t, w: w, tr: ch.Transport}
	id := w.RConfig.Identity
	var drips sync.WaitGroup
	for n := range 40 {
		c := w.rawConn(t, ch.Transport)
		drips.Go(func() {
			defer c.Close()
			start := w.Clock.Now()
			words := Challenge(fleetSecret, id.PeerID)
			if n%2 > 0 { // of a member: slow only then
				words = c.frame(Hello, HelloBody(wireVersion, wireVersion, 1, 1, [16]byte{}, id))
				if _, err := c.Greet(id.PeerID, wireBanner); err != nil {
					words = nil
				}
			}
			drip(c, words, w.SConfig.KeepAlive/4)
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
		run("hostile/receiver/"+c.name, c.run)
	}
	for _, c := range hostileHandshakes {
		run("hostile/handshake/"+c.name, c.run)
	}
	run("hostile/handshake/slowloris", slowloris)
	run("hostile/handshake/restarted", restarted)
}
