package kvconntest

import (
	"bytes"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// thief is a receiver that shares memory with its victim and lies about it. It
// describes the first half of its blocks only: what lies behind them is inside
// the memory and no business of the victim's.
type thief struct {
	*mallory
	fd     int
	mem    []byte
	blocks int // described
	layers []kvconn.Span
}

const thiefBlocks = 16

func (w *World) thief(t *testing.T, f Factory, tr kvconn.Transport) *thief {
	t.Helper()
	layout := w.RConfig.Identity.Layout
	p := NewPool(layout, 2*thiefBlocks)
	self := kvconn.PeerID{ID: "thief", Epoch: w.RConfig.Identity.Epoch}
	th := &thief{mallory: &mallory{t: t, w: w, tr: tr, self: self}, blocks: thiefBlocks}
	d := p.Share(func(size int) (int, []byte) {
		th.fd, th.mem = f.Memory(t, size)
		return th.fd, th.mem
	})
	th.layers = d.Layers
	for i := range th.mem {
		th.mem[i] = abandoned
	}
	return th
}

// hello makes a session with so many bulk connections to come.
func (th *thief) hello(bulk uint8) {
	th.t.Helper()
	id := th.w.RConfig.Identity
	id.PeerID = th.self
	th.ctl = NewRawConn(th.w.Raw(th.tr))
	th.greet(th.ctl)
	th.send(th.ctl, Hello, HelloBody(wireVersion, wireVersion, 1, bulk, [16]byte{}, id))
	f, err := th.ctl.Next()
	if err != nil || f.Step != Hello {
		th.t.Fatalf("hello: %s, %v", f.Step, err)
	}
	th.key = HelloSession(f.Body)
	th.send(th.ctl, Ready, nil)
}

func (th *thief) greet(c *RawConn) {
	th.t.Helper()
	check(th.t, c.SetDeadline(time.Now().Add(patience*th.w.RConfig.HandshakeTimeout)))
	_, err := c.Greet(th.self, wireBanner)
	check(th.t, err)
}

// bind offers the memory, if offer says so, as a segment that bend may change,
// and returns the answer.
func (th *thief) bind(index uint32, offer bool, bend func(size *uint64, blocks *uint32, layers []kvconn.Span) []kvconn.Span) Step {
	th.t.Helper()
	_ = th.ctl.Send(Ping, nil) // who is silent while a slow machine handshakes is taken for dead
	conn := th.w.Raw(th.tr)
	c := NewRawConn(conn)
	th.mallory.bulk = append(th.mallory.bulk, c)
	th.greet(c)
	if offer {
		hold, _, err := conn.(kvconn.SharedConn).Offer(&kvconn.Shared{FD: th.fd})
		check(th.t, err)
		th.t.Cleanup(func() { hold.Close() })
	}
	size, blocks, layers := uint64(len(th.mem)), uint32(th.blocks), slices.Clone(th.layers)
	if bend != nil {
		layers = bend(&size, &blocks, layers)
	}
	b := append(Body(nil), th.key[:]...).U32(index).U64(size).U32(blocks, uint32(len(layers)))
	for _, l := range layers {
		b = b.U64(uint64(l.Offset), uint64(l.Stride))
	}
	if len(layers) > 0 {
		b = b.U32(0) // no grant
	}
	th.send(c, Bind, b)
	f, err := c.Next()
	if err != nil {
		return Refuse // hung up on: the victim would not read it
	}
	return f.Step
}

// ask sends a ticket for 9 tokens into three blocks.
func (th *thief) ask(id uint64, blocks ...int32) {
	var dest []kvconn.Dest
	for _, b := range blocks {
		dest = append(dest, kvconn.Dest{Block: b, Generation: 1})
	}
	th.send(th.ctl, Ticket, TicketBody(id, [16]byte{1}, 4, Prompt(1, 9), 9, dest, nil))
}

// unwritten checks that no byte of the memory has changed.
func (th *thief) unwritten() {
	th.t.Helper()
	if n := len(th.mem) - bytes.Count(th.mem, []byte{abandoned}); n > 0 {
		th.t.Errorf("%d bytes were written", n)
	}
}

// released waits until the victim has nothing of ours mapped.
func (th *thief) released() {
	th.t.Helper()
	mapped := func() float64 { return th.w.Value(th.w.SMetrics, "xpyd_kvconn_mapped_pools", "") }
	for start := th.w.Clock.Now(); mapped() > 0; time.Sleep(th.w.RConfig.KeepAlive / 4) {
		if th.w.Clock.Since(start) > th.w.RConfig.PeerSilence+th.w.long(time.Second) {
			th.t.Errorf("%v pools are still mapped", mapped())
			return
		}
	}
}

// falseSegments are descriptions that do not fit the memory or the layout.
var falseSegments = []struct {
	name  string
	offer bool
	bend  func(size *uint64, blocks *uint32, l []kvconn.Span) []kvconn.Span
}{
	{"smaller-than-the-memory", true, func(size *uint64, _ *uint32, l []kvconn.Span) []kvconn.Span { *size -= 4096; return l }},
	{"larger-than-the-memory", true, func(size *uint64, _ *uint32, l []kvconn.Span) []kvconn.Span { *size += 4096; return l }},
	{"of-2^47-bytes", true, func(size *uint64, _ *uint32, l []kvconn.Span) []kvconn.Span { *size = 1 << 47; return l }},
	{"more-blocks-than-fit", true, func(_ *uint64, n *uint32, l []kvconn.Span) []kvconn.Span { *n *= 64; return l }},
	{"of-2^31-blocks", true, func(_ *uint64, n *uint32, l []kvconn.Span) []kvconn.Span { *n = 1 << 31; return l }},
	{"layer-behind-the-end", true, func(size *uint64, _ *uint32, l []kvconn.Span) []kvconn.Span { l[2].Offset = int64(*size); return l }},
	{"layer-below-zero", true, func(_ *uint64, _ *uint32, l []kvconn.Span) []kvconn.Span { l[0].Offset = -1; return l }},
	{"stride-under-a-block", true, func(_ *uint64, _ *uint32, l []kvconn.Span) []kvconn.Span { l[1].Stride--; return l }},
	{"stride-of-2^63", true, func(_ *uint64, _ *uint32, l []kvconn.Span) []kvconn.Span { l[1].Stride = math.MinInt64; return l }},
	{"fewer-layers", true, func(_ *uint64, _ *uint32, l []kvconn.Span) []kvconn.Span { return l[:2] }},
	{"without-memory", false, nil},
}

// elsewhere are blocks that are not the segment's.
var elsewhere = []struct {
	name  string
	block int32
}{{"behind-the-segment", thiefBlocks}, {"of-2^31", math.MaxInt32}, {"below-zero", -1}}

func hostileSharedCases(run func(name string, body caseFunc)) {
	for _, c := range falseSegments {
		run("hostile/segment/"+c.name, func(t *testing.T, f Factory, w *World, ch *Chaos) {
			th := w.thief(t, f, ch.Transport)
			defer th.close()
			th.hello(1)
			if got := th.bind(0, c.offer, c.bend); got != Refuse {
				t.Errorf("bind is answered by %s", got)
			}
			th.unwritten()
			th.released()
			f.friend(t, w, "after", 64)
		})
	}
	for _, c := range elsewhere {
		run("hostile/block/"+c.name, func(t *testing.T, f Factory, w *World, ch *Chaos) {
			th := w.thief(t, f, ch.Transport)
			defer th.close()
			th.hello(1)
			if got := th.bind(0, true, nil); got != Bound {
				t.Fatalf("bind is answered by %s", got)
			}
			th.ask(1, 1, c.block, 2)
			th.shutOut(th.ctl, 2*w.SConfig.PeerSilence, true)
			th.unwritten()
			th.close()
			th.released()
			f.friend(t, w, "after", 64)
		})
	}
	run("hostile/block/asked-for-by-a-receiver", foreignBlock)
	run("hostile/segment/second-one", secondSegment)
}

// foreignBlock: a receiver of ours that is told of a block that is not the
// pool's gets no byte, and an error of its own making.
func foreignBlock(t *testing.T, f Factory, w *World, ch *Chaos) {
	s, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
	check(t, err)
	spec := w.Spec("foreign", 1, 8, 0)
	spec.Dest = []kvconn.Dest{{Block: 0, Generation: 1}, {Block: 256, Generation: 1}}
	in, err := s.Request(t.Context(), spec)
	check(t, err)
	if _, err := in.Wait(t.Context()); !f.as(kvconn.OutcomeOf(err, ""), ticket.Corrupt) {
		t.Errorf("want corrupt or dead, have %v", err)
	}
	check(t, in.Revoke(t.Context()))
	if n := w.Pool.Stores(); n > 0 {
		t.Errorf("%d blocks were taken", n)
	}
	f.friend(t, w, "after", 64)
}

// secondSegment: a session has one pool. The blocks of the first are written,
// the second is refused and not kept.
func secondSegment(t *testing.T, f Factory, w *World, ch *Chaos) {
	th := w.thief(t, f, ch.Transport)
	defer th.close()
	th.hello(2)
	if got := th.bind(0, true, nil); got != Bound {
		t.Fatalf("bind is answered by %s", got)
	}
	if got := th.bind(1, true, nil); got != Refuse {
		t.Errorf("a second pool is answered by %s", got)
	}
	th.unwritten()
	if got := th.bind(1, false, func(size *uint64, blocks *uint32, _ []kvconn.Span) []kvconn.Span {
		*size, *blocks = 0, 0
		return nil
	}); got != Bound {
		t.Fatalf("the second connection without a pool is answered by %s", got)
	}
	th.ask(1, 3, 4, 5)
	if _, err := th.ctl.Expect(Commit); err != nil {
		t.Error(err)
	}
	th.send(th.ctl, Received, Body(nil).U64(1))
	w.Empty(w.RConfig.PeerSilence)
	if bytes.Count(th.mem, []byte{abandoned}) == len(th.mem) {
		t.Error("nothing was written into the first pool")
	}
	th.close()
	th.released()
}
