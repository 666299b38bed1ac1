package kvconntest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// eve is a hostile sender. Its methods run on a goroutine of their own; their failures
// show in the receiver's outcome.
type eve struct {
	w    *World
	ln   net.Listener
	ctx  context.Context // of all connections
	ctl  *RawConn
	bulk *RawConn
	busy bool // bulk, with something else than beats
	key  [16]byte

	id     uint64 // of the ticket
	secret [16]byte
	spec   kvconn.TicketSpec
	stale  string // why the receiver must have dropped a unit; "": it need not
}

// greet is the sender's half of a handshake, with one bulk connection.
func (e *eve) greet() error {
	var err error
	if e.ctl, err = e.accept(); err != nil {
		return err
	}
	if _, err = e.ctl.Expect(Hello); err != nil {
		return err
	}
	if err = e.ctl.Send(Hello, e.hello(2)); err != nil {
		return err
	}
	if _, err = e.ctl.Expect(Ready); err != nil {
		return err
	}
	if e.bulk, err = e.accept(); err != nil {
		return err
	}
	f, err := e.bulk.Expect(Bind)
	if err != nil {
		return err
	}
	taken := min(1, binary.LittleEndian.Uint32(f.Body[32:])) // 1 if memory is offered
	return e.bulk.Send(Bound, []byte{byte(taken)})
}

func (e *eve) identity() kvconn.Identity {
	id := e.w.SConfig.Identity
	id.ID = "eve"
	return id
}

// hello is eve's, in the role 1 of a receiver or 2 of a sender.
func (e *eve) hello(role uint8) Body {
	return HelloBody(wireVersion, wireVersion, role, 1, e.key, e.identity())
}

func (e *eve) accept() (*RawConn, error) {
	c, err := e.ln.Accept()
	if err != nil {
		return nil, err
	}
	context.AfterFunc(e.ctx, func() { c.Close() })
	r := NewRawConn(c)
	if err = r.Welcome(e.identity().PeerID, wireBanner); err == nil {
		_, err = r.r.ReadString('\n')
	}
	return r, err
}

// next waits for a ticket.
func (e *eve) next() error {
	f, err := e.ctl.Expect(Ticket)
	if err == nil {
		e.id, e.secret = binary.LittleEndian.Uint64(f.Body), [16]byte(f.Body[8:24])
	}
	return err
}

// listen answers pings, and resends with again, until the receiver has had enough.
func (e *eve) listen(again func()) {
	for {
		f, err := e.ctl.Next()
		switch {
		case err != nil:
			return
		case f.Step == Ping:
			e.ctl.Send(Pong, nil)
			if !e.busy {
				e.bulk.Send(Beat, nil)
			}
		case f.Step == Resend && again != nil:
			again()
		case f.Step == Revoke:
			e.ctl.Send(RevokeAck, f.Body)
		}
	}
}

// head is a unit's head, to be bent.
type head struct {
	ticket, tag  uint64
	layer, index uint32
	block        int32
	generation   uint32
	rows, heads  uint32
}

func (e *eve) unit(layer, index int, bend func(h *head, rows *[]byte)) Body {
	l := e.w.RConfig.Identity.Layout
	g := layerOf(l, layer)
	first := index * l.BlockTokens
	n := min(l.BlockTokens, len(e.spec.Tokens)-first)
	rows, sums := make([]byte, g.PackedBytes(n)), make([]uint64, g.Heads)
	src := &Source{Layout: l, Seed: Seed(e.spec.Tokens)}
	src.Load(layer, index, first, n, rows, sums)
	d := e.spec.Dest[index]
	h := head{e.id, UnitTag(e.secret, e.key, e.id), uint32(layer), uint32(index), d.Block, d.Generation, uint32(n), uint32(g.Heads)}
	if bend != nil {
		bend(&h, &rows)
	}
	return append(Body(nil).U64(h.ticket, h.tag).U32(h.layer, h.index, uint32(h.block), h.generation, h.rows, h.heads).U64(sums...), rows...)
}

// send sends one bent unit.
func (e *eve) send(layer, index int, bend func(h *head, rows *[]byte)) {
	e.bulk.Send(Unit, e.unit(layer, index, bend))
}

// all sends every unit as it should be, and the commit.
func (e *eve) all() {
	e.ctl.Send(Accepted, Body(nil).U64(e.id))
	e.eachUnit(func(l, i int) { e.send(l, i, nil) })
	e.commit()
}

func (e *eve) eachUnit(do func(layer, index int)) {
	for l := range e.w.SConfig.Identity.Layout.Layers() {
		for i := range e.spec.Dest {
			do(l, i)
		}
	}
}

func (e *eve) commit() {
	e.ctl.Send(Commit, Body(nil).U64(e.id).U32(9).Str("commit of "+e.spec.RequestID))
}

func (e *eve) sent(round uint32) {
	e.bulk.Send(Sent, Body(nil).U64(e.id, UnitTag(e.secret, e.key, e.id)).U32(round))
}

// bent sends a bent unit of layer 1, then everything as it should be. The receiver must
// have dropped the first for the reason given, before any sink saw it.
func bent(stale string, bend func(h *head, rows *[]byte)) func(e *eve) {
	return bentAt(1, 0, stale, bend)
}

func bentAt(layer, index int, stale string, bend func(h *head, rows *[]byte)) func(e *eve) {
	return func(e *eve) {
		e.send(layer, index, bend)
		e.stale = stale
		e.all()
	}
}

func wrongRows(_ *head, rows *[]byte) { (*rows)[5] ^= 1 }

// senderCase is what a sender does with a ticket of 9 tokens, 3 blocks in each of 3 layers,
// and the outcome that the ticket must have.
type senderCase struct {
	name string
	want ticket.Outcome
	do   func(e *eve)
}

// hostileSenders send units one by one, or none.
var hostileSenders = []senderCase{
	{"old-generation", ticket.Done, bent("address", func(h *head, _ *[]byte) { h.generation-- })},
	{"next-generation", ticket.Done, bent("address", func(h *head, _ *[]byte) { h.generation++ })},
	{"another-block", ticket.Done, bent("address", func(h *head, _ *[]byte) { h.block++ })},
	{"block-outside-the-pool", ticket.Done, bent("address", func(h *head, _ *[]byte) { h.block = math.MaxInt32 })},
	{"block-below-zero", ticket.Done, bent("address", func(h *head, _ *[]byte) { h.block = -1 })},
	{"layer-of-2^31", ticket.Done, bent("address", func(h *head, _ *[]byte) { h.layer = 1 << 31 })},
	{"index-of-2^32", ticket.Done, bent("address", func(h *head, _ *[]byte) { h.index = math.MaxUint32 })},
	{"another-tag", ticket.Done, bent("tag", func(h *head, _ *[]byte) { h.tag ^= 1 })},
	{"no-tag", ticket.Done, bent("tag", func(h *head, _ *[]byte) { h.tag = 0 })},
	{"ticket-of-2^63", ticket.Done, bent("unknown", func(h *head, _ *[]byte) { h.ticket = 1 << 63 })},
	{"no-rows", ticket.Corrupt, bent("", func(h *head, rows *[]byte) { h.rows, *rows = 0, nil })},
	{"rows-of-2^32", ticket.Done, bent("address", func(h *head, _ *[]byte) { h.rows = math.MaxUint32 })},
	{"fewer-rows", ticket.Done, bent("address", func(h *head, rows *[]byte) { h.rows, *rows = 3, (*rows)[:len(*rows)*3/4] })},
	{"short-rows", ticket.Done, bent("address", func(h *head, rows *[]byte) { *rows = (*rows)[:len(*rows)-1] })},
	{"long-last-block", ticket.Done, bentAt(1, 2, "", func(h *head, rows *[]byte) { h.rows, *rows = 4, make([]byte, 4*len(*rows)) })},
	{"more-heads", ticket.Done, bent("address", func(h *head, _ *[]byte) { h.heads = 3 })},
	// Of layer 0, which has two: the frame is as long as it should be.
	{"fewer-heads", ticket.Done, bentAt(0, 0, "address", func(h *head, rows *[]byte) { h.heads, *rows = 1, (*rows)[8:] })},
	{"heads-of-2^32", ticket.Corrupt, bent("", func(h *head, _ *[]byte) { h.heads = math.MaxUint32 })},
	{"unit-without-a-head", ticket.Corrupt, func(e *eve) { e.bulk.Send(Unit, make([]byte, 39)); e.all() }},
	{"unit-a-thousand-times", ticket.Done, func(e *eve) {
		for range 1000 {
			e.send(0, 0, nil)
		}
		e.all()
	}},
	{"wrong-rows-once", ticket.Done, bent("", wrongRows)},
	{"wrong-rows-always", ticket.Corrupt, func(e *eve) {
		wrong := func() { e.send(1, 0, wrongRows) }
		e.ctl.Send(Accepted, Body(nil).U64(e.id))
		wrong()
		e.listen(wrong)
	}},
	{"swapped-rows", ticket.Corrupt, func(e *eve) { // right bytes, right digests, other coordinates
		swap := func() {
			e.send(0, 0, func(h *head, _ *[]byte) {
				h.index, h.block, h.generation = 1, e.spec.Dest[1].Block, e.spec.Dest[1].Generation
			})
		}
		swap()
		e.listen(swap)
	}},
	{"commit-and-no-rows", ticket.Corrupt, func(e *eve) { e.commit(); e.listen(nil) }},
	{"commit-and-marks-only", ticket.Corrupt, func(e *eve) {
		round := uint32(0)
		e.commit()
		e.sent(round)
		e.listen(func() { round++; e.sent(round) })
	}},
	{"marks-of-other-rounds", ticket.Done, func(e *eve) {
		for r := range uint32(100) {
			e.sent(math.MaxUint32 - r)
		}
		e.bulk.Send(Sent, Body(nil).U64(e.id, 1).U32(0))
		e.all()
	}},
	{"never-accepted", ticket.Late, func(e *eve) { e.listen(nil) }},
	{"accepted-and-nothing-more", ticket.Late, func(e *eve) { e.ctl.Send(Accepted, Body(nil).U64(e.id)); e.listen(nil) }},
	{"a-unit-drop-by-drop", ticket.Late, func(e *eve) {
		var wg sync.WaitGroup
		frame := e.bulk.frame(Unit, e.unit(0, 0, nil))
		e.busy = true
		wg.Go(func() { drip(e.bulk, frame[:len(frame)-1], e.w.RConfig.PeerSilence/4) })
		e.listen(nil)
		wg.Wait()
	}},
	{"failed-as-done", ticket.Corrupt, func(e *eve) { e.ctl.Send(Failed, Body(nil).U64(e.id).Str("done", "")) }},
	{"failed-as-nonsense", ticket.Corrupt, func(e *eve) { e.ctl.Send(Failed, Body(nil).U64(e.id).Str("nonsense", "")) }},
	{"commit-of-4-GiB", ticket.Corrupt, func(e *eve) { e.ctl.Send(Commit, Body(nil).U64(e.id).U32(9, math.MaxUint32)) }},
	{"commit-twice", ticket.Done, func(e *eve) {
		e.commit()
		e.ctl.Send(Commit, Body(nil).U64(e.id).U32(9).Str("another"))
		e.all()
	}},
	{"acknowledges-what-nobody-revoked", ticket.Done, func(e *eve) {
		e.ctl.Send(RevokeAck, Body(nil).U64(e.id))
		e.ctl.Send(RevokeAck, Body(nil).U64(1<<63))
		e.all()
	}},
	{"notes-of-unknown-tickets", ticket.Done, func(e *eve) {
		e.ctl.Send(Accepted, Body(nil).U64(1<<63))
		e.ctl.Send(Commit, Body(nil).U64(1<<63).U32(0).Str(""))
		e.ctl.Send(Failed, Body(nil).U64(1<<63).Str("dead", ""))
		for range 1000 {
			e.ctl.Send(Goaway, nil)
			e.ctl.Send(Pong, nil)
		}
		e.all()
	}},
	{"ticket-to-a-receiver", ticket.Corrupt, func(e *eve) { e.ctl.Send(Ticket, make([]byte, 100)) }},
	{"ping-to-a-receiver", ticket.Corrupt, func(e *eve) { e.ctl.Send(Ping, nil) }},
	{"unit-on-control", ticket.Corrupt, func(e *eve) { e.ctl.Send(Unit, e.unit(0, 0, nil)) }},
	{"commit-on-bulk", ticket.Corrupt, func(e *eve) { e.bulk.Send(Commit, Body(nil).U64(e.id).U32(9).Str("")) }},
	{"placed-without-memory", ticket.Corrupt, func(e *eve) { e.bulk.Send(51, e.unit(0, 0, func(_ *head, rows *[]byte) { *rows = nil })) }},
	{"unit-over-its-bound", ticket.Corrupt, func(e *eve) { e.bulk.Send(Unit, make([]byte, 1<<16)) }},
	{"frame-of-4-GiB-on-bulk", ticket.Corrupt, func(e *eve) {
		e.bulk.Write(e.bulk.ofLength(math.MaxUint32, Unit, e.unit(0, 0, nil)))
	}},
	{"version-of-tomorrow-on-bulk", ticket.Corrupt, func(e *eve) { e.bulk.Version++; e.all() }},
	{"noise-on-bulk", ticket.Corrupt, func(e *eve) { e.bulk.Write(bytes.Repeat([]byte{0xa5}, 64)) }},
	{"hangs-up-inside-a-unit", ticket.Dead, func(e *eve) {
		b := e.bulk.frame(Unit, e.unit(0, 0, nil))
		e.bulk.Write(b[:len(b)-7])
		e.bulk.Close()
	}},
	{"silence", ticket.Dead, func(e *eve) { e.ctl.Expect(Ticket) }}, // there is no other: it only reads
	{"replays-a-former-ticket", ticket.Done, replays},
}

// replays serves one ticket, then sends its frames again before those of the next
// ticket, which is for the same blocks under new generations.
func replays(e *eve) {
	var old []Body
	e.eachUnit(func(l, i int) { old = append(old, e.unit(l, i, nil)) })
	former := e.id
	e.all()
	if e.next() != nil {
		return
	}
	for i := range e.spec.Dest {
		e.spec.Dest[i].Generation++ // the pool's, after Reclaim
	}
	for _, b := range old {
		e.bulk.Send(Unit, b) // of the ticket that is over
		b = bytes.Clone(b)
		binary.LittleEndian.PutUint64(b, e.id)
		e.bulk.Send(Unit, b) // of the new one, by the old one's tag
		binary.LittleEndian.PutUint64(b[8:], UnitTag(e.secret, e.key, e.id))
		e.bulk.Send(Unit, b) // of the new one, under the old generation
	}
	e.ctl.Send(RevokeAck, Body(nil).U64(former))
	e.all()
}

func (c senderCase) run(t *testing.T, f Factory, w *World, ch *Chaos) {
	_, _, addr := f.transport(t)
	ln, err := ch.Transport.Listen(addr)
	check(t, err)
	spec := w.Spec(c.name, 7, 9, 128)
	w.Quarantine = f.shares() // eve has our memory, and never lets go of it
	conns, hangUp := context.WithCancel(t.Context())
	defer hangUp()
	e := &eve{w: w, ln: ln, ctx: conns, key: [16]byte{1, 2, 3}, spec: spec}
	e.spec.Dest = slices.Clone(spec.Dest)
	var peers sync.WaitGroup
	peers.Go(func() {
		if e.greet() == nil && e.next() == nil {
			c.do(e)
			e.listen(nil)
		}
	})
	peers.Go(func() {
		for n := range 4 {
			f.friend(t, w, "beside it", 8*n)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience*w.RConfig.TicketTimeout)
	defer cancel()
	rounds := 1
	if c.name == "replays-a-former-ticket" {
		rounds = 2
	}
	for range rounds {
		if err := w.FetchFrom(ctx, ln.Addr().String(), kvconn.PeerID{ID: "eve"}, spec); !f.outcomeIs(kvconn.OutcomeOf(err, "untyped"), c.want) && !f.apart(err) { // eve joins nothing
			t.Errorf("want %s, have %v", c.want, err)
		}
		if c.want == ticket.Done {
			w.Pool.Reclaim(spec.Dest)
			spec = w.Spec(c.name, 7, 9, 128)
		}
	}
	w.Empty(w.RConfig.PeerSilence + w.long(time.Second))
	ln.Close()
	hangUp() // on a starved machine the receiver may have given up while eve still greets it
	peers.Wait()
	if n := w.Value(w.RMetrics, "xpyd_kvconn_stale_units_total", e.stale); e.stale != "" && n < 1 {
		t.Errorf("no unit was dropped for its %s", e.stale)
	}
}

func (e *eve) welcome(c *RawConn, banner string) { c.Welcome(e.identity().PeerID, banner) }

// met exchanges banners and reads the receiver's hello first.
func met(do func(e *eve, c *RawConn)) func(e *eve, c *RawConn) {
	return func(e *eve, c *RawConn) {
		e.welcome(c, wireBanner)
		c.r.ReadString('\n')
		c.Expect(Hello)
		do(e, c)
	}
}

// welcomed sees the receiver prove itself, and says something in place of a banner.
func welcomed(banner string) func(e *eve, c *RawConn) {
	return func(e *eve, c *RawConn) { e.welcome(c, banner) }
}

// outcomeIs reports whether an outcome is the wanted one. In real time a loaded machine may
// find a peer silent or late first.
func (f Factory) outcomeIs(got, want ticket.Outcome) bool {
	return got == want || !f.Bubble && (got == ticket.Dead || got == ticket.Late)
}

// greetingCase is what a sender says on a new connection; it never gets as far as a session.
type greetingCase struct {
	name string
	want ticket.Outcome
	do   func(e *eve, c *RawConn)
}

var hostileGreetings = []greetingCase{
	{"nothing", ticket.Late, func(e *eve, c *RawConn) {}},
	{"no-banner", ticket.Late, welcomed("")},
	{"endless-line", ticket.Incompatible, func(e *eve, c *RawConn) {
		c.r.Discard(challengeSize)
		c.Write(bytes.Repeat([]byte{'x'}, 1000))
	}},
	{"endless-banner", ticket.Incompatible, func(e *eve, c *RawConn) {
		e.welcome(c, "")
		c.r.ReadString('\n')
		c.Write(bytes.Repeat([]byte{'x'}, 1000))
	}},
	{"banner-of-2^31", ticket.Incompatible, welcomed("xpyd-kv 1-2147483648\n")},
	{"banner-upside-down", ticket.Incompatible, welcomed("xpyd-kv 2-1\n")},
	{"no-hello", ticket.Late, welcomed(wireBanner)},
	{"hello-drop-by-drop", ticket.Late, met(func(e *eve, c *RawConn) {
		drip(c, c.frame(Hello, e.hello(2)), e.w.RConfig.KeepAlive/4)
	})},
	{"hello-of-a-receiver", ticket.Incompatible, met(func(e *eve, c *RawConn) { c.Send(Hello, e.hello(1)) })},
	{"hello-of-another-range", ticket.Corrupt, met(func(e *eve, c *RawConn) {
		c.Send(Hello, HelloBody(1, 2, 2, 1, e.key, e.identity()))
	})},
	{"hello-with-2^31-layers", ticket.Corrupt, met(func(e *eve, c *RawConn) {
		c.Send(Hello, HelloBody(wireVersion, wireVersion, 2, 1, e.key, manyLayers(e.identity())))
	})},
	{"hello-with-a-tail", ticket.Corrupt, met(func(e *eve, c *RawConn) { c.Send(Hello, append(e.hello(2), 0)) })},
	{"refuse-as-nonsense", ticket.Corrupt, met(func(e *eve, c *RawConn) { c.Send(Refuse, Body(nil).Str("nonsense", "a", "b", "c")) })},
	{"commit-first", ticket.Corrupt, met(func(e *eve, c *RawConn) { c.Send(Commit, Body(nil).U64(1).U32(0).Str("")) })},
}

func (g greetingCase) run(t *testing.T, f Factory, w *World, ch *Chaos) {
	err := w.dialImpostor(t, f, ch, 2*w.RConfig.HandshakeTimeout, func(addr string) error {
		_, err := w.Receiver.Open(t.Context(), addr, kvconn.PeerID{})
		return err
	}, func(c *RawConn) { g.do(&eve{w: w}, c) })
	if !f.outcomeIs(kvconn.OutcomeOf(err, "untyped"), g.want) {
		t.Errorf("want %s, have %v", g.want, err)
	}
	var e *kvconn.Error
	if !errors.As(err, &e) || e.Phase != kvconn.PhaseHandshake {
		t.Errorf("not an error of the handshake: %v", err)
	}
	f.friend(t, w, "after", 64)
}

// hostileSenderCases runs hostileSenders, which send units, where the receiver shares no
// memory: alone.
func hostileSenderCases(alone, run func(name string, body caseFunc)) {
	for _, c := range hostileSenders {
		alone("hostile/sender/"+c.name, c.run)
	}
	for _, c := range hostileBatches {
		run("hostile/batch/"+c.name, c.run)
	}
	for _, c := range hostileGreetings {
		run("hostile/greeting/"+c.name, c.run)
	}
}
