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
// describes the first half of its blocks only: what lies behind them is inside the
// memory and none of the victim's business.
type thief struct {
	*mallory
	fd     int
	mem    []byte
	ranks  int
	layers []kvconn.Span
}

const thiefBlocks = 16 // described

// thief opens a session that waits for so many bulk connections.
func (w *World) thief(t *testing.T, f Factory, tr kvconn.Transport, bulk uint8) *thief {
	t.Helper()
	layout := w.RConfig.Identity.Layout
	p := NewPool(layout, 2*thiefBlocks)
	self := kvconn.PeerID{ID: "thief", Epoch: w.RConfig.Identity.Epoch}
	th := &thief{mallory: &mallory{t: t, w: w, tr: tr, self: self}}
	d, err := p.Share(max(f.Ranks, 1), func(size int) (int, []byte) {
		th.fd, th.mem = f.Memory(t, size)
		return th.fd, th.mem
	})
	check(t, err)
	th.ranks, th.layers = f.Ranks, d.Layers
	for i := range th.mem {
		th.mem[i] = abandoned
	}
	th.ctl = th.dial()
	check(t, th.hello(th.ctl, bulk))
	return th
}

// segment is what a bind says of the memory.
type segment struct {
	size   uint64
	blocks uint32
	ranks  uint32
	layers []kvconn.Span
}

// bind offers the memory, if offer says so, as a segment that bend may change, and checks
// the reply, Bound or Refuse.
func (th *thief) bind(want Step, index uint32, offer bool, bend func(s *segment)) {
	th.t.Helper()
	_ = th.ctl.Send(Ping, nil) // not to seem dead while a slow machine handshakes
	c := th.dial()
	th.bulk = append(th.bulk, c)
	if offer {
		hold, _, err := c.Conn.(kvconn.SharedConn).Offer(&kvconn.Shared{FD: th.fd})
		check(th.t, err)
		th.t.Cleanup(func() { hold.Close() })
	}
	s := segment{uint64(len(th.mem)), thiefBlocks, uint32(max(th.ranks, 1)), slices.Clone(th.layers)}
	if bend != nil {
		bend(&s)
	}
	b := append(Body(nil), th.key[:]...).U32(index).U64(s.size).U32(s.blocks, uint32(len(s.layers)))
	for _, l := range s.layers {
		b = b.U64(uint64(l.Offset), uint64(l.Stride))
	}
	if len(s.layers) > 0 {
		b = b.U32(s.ranks, 0) // no grant
	}
	c.Send(Bind, b)
	f, err := c.Next()
	if err != nil {
		f.Step = Refuse // the victim hung up without reading it
	}
	if f.Step != want {
		th.t.Fatalf("bind of connection %d gets %s, want %s", index, f.Step, want)
	}
}

// ask sends a ticket for 9 tokens into three blocks.
func (th *thief) ask(id uint64, blocks ...int32) {
	var dest []kvconn.Dest
	for _, b := range blocks {
		dest = append(dest, kvconn.Dest{Block: b, Generation: 1})
	}
	th.ctl.Send(Ticket, TicketBody(id, [16]byte{1}, 4, Prompt(1, 9), 9, dest, nil))
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
	if !th.w.within(th.w.RConfig.PeerSilence+th.w.long(time.Second), func() bool { return mapped() == 0 }) {
		th.t.Errorf("%v pools are still mapped", mapped())
	}
}

// falseSegments are descriptions that do not fit the memory or the layout.
var falseSegments = []struct {
	name string
	bend func(s *segment)
}{
	{"smaller-than-the-memory", func(s *segment) { s.size -= 4096 }},
	{"larger-than-the-memory", func(s *segment) { s.size += 4096 }},
	{"of-2^47-bytes", func(s *segment) { s.size = 1 << 47 }},
	{"more-blocks-than-fit", func(s *segment) { s.blocks *= 64 }},
	{"of-2^31-blocks", func(s *segment) { s.blocks = 1 << 31 }},
	{"layer-behind-the-end", func(s *segment) { s.layers[2].Offset = int64(s.size) }},
	{"layer-below-zero", func(s *segment) { s.layers[0].Offset = -1 }},
	{"stride-under-a-block", func(s *segment) { s.layers[1].Stride-- }},
	{"stride-of-2^63", func(s *segment) { s.layers[1].Stride = math.MinInt64 }},
	{"of-no-rank", func(s *segment) { s.ranks = 0 }},
	{"of-more-ranks-than-layers-say", func(s *segment) { s.ranks *= 2 }},
	{"of-ranks-that-do-not-divide-the-heads", func(s *segment) {
		s.layers = slices.Repeat(s.layers[:len(s.layers)/int(s.ranks)], 3)
		s.ranks = 3
	}},
	{"of-2^31-ranks", func(s *segment) { s.ranks = 1 << 31 }},
	{"fewer-layers", func(s *segment) { s.layers = s.layers[:2] }},
	{"without-memory", nil},
}

// elsewhere are blocks that are not the segment's.
var elsewhere = []struct {
	name  string
	block int32
}{{"behind-the-segment", thiefBlocks}, {"of-2^31", math.MaxInt32}, {"below-zero", -1}}

func hostileSharedCases(run func(name string, body caseFunc)) {
	for _, c := range falseSegments {
		run("hostile/segment/"+c.name, func(t *testing.T, f Factory, w *World, ch *Chaos) {
			th := w.thief(t, f, ch.Transport, 1)
			defer th.close()
			th.bind(Refuse, 0, c.bend != nil, c.bend)
			th.unwritten()
			th.released()
			f.friend(t, w, "after", 64)
		})
	}
	for _, c := range elsewhere {
		run("hostile/block/"+c.name, func(t *testing.T, f Factory, w *World, ch *Chaos) {
			th := w.thief(t, f, ch.Transport, 1)
			defer th.close()
			th.bind(Bound, 0, true, nil)
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

// foreignBlock: a receiver asked for a block outside its pool gets no byte, and an
// error of its own making.
func foreignBlock(t *testing.T, f Factory, w *World, ch *Chaos) {
	spec := w.Spec("foreign", 1, 8, 0)
	spec.Dest = []kvconn.Dest{{Block: 0, Generation: 1}, {Block: 256, Generation: 1}}
	in := w.request(spec)
	if _, err := in.Wait(t.Context()); !f.outcomeIs(kvconn.OutcomeOf(err, ""), ticket.Corrupt) {
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
	th := w.thief(t, f, ch.Transport, 2)
	defer th.close()
	th.bind(Bound, 0, true, nil)
	th.bind(Refuse, 1, true, nil) // a second pool
	th.unwritten()
	th.bind(Bound, 1, false, func(s *segment) { *s = segment{} }) // without a pool
	written := func() bool { return bytes.Count(th.mem, []byte{abandoned}) < len(th.mem) }
	for id := uint64(1); !written(); id++ {
		if id > 50 { // which connection takes a unit is chance: the second, without a pool, may take all of a ticket
			t.Error("nothing was written into the first pool")
			break
		}
		th.ask(id, 3, 4, 5)
		if _, err := th.ctl.Expect(Commit); err != nil {
			t.Error(err)
			break
		}
		th.ctl.Send(Received, Body(nil).U64(id))
		w.Empty(w.RConfig.PeerSilence)
	}
	th.close()
	th.released()
}
