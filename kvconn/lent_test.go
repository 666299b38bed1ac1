package kvconn

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// viewSink counts what it is asked to verify.
type viewSink struct {
	countSink
	verified int
	errs     []error // of the next calls; then nil
}

func (s *viewSink) View(layer int, dst int32, row, rows int) ([]byte, bool) {
	return make([]byte, 16*rows), true
}

func (s *viewSink) Verify(layer int, dst int32, row, rows, firstPos int, digests []uint64) error {
	s.verified++
	if len(s.errs) > 0 {
		err := s.errs[0]
		s.errs = s.errs[1:]
		return err
	}
	return nil
}

// A block that was asked for again may be written twice by a peer that has our
// memory: the second writing replaces what the first was verified for.
func TestSecondWritingIsVerified(t *testing.T) {
	sink := &viewSink{errs: []error{ErrDigest}}
	s, in := lonely(t, sink)
	s.lent = &lent{gone: make(chan struct{})}
	u := unitHead{Ticket: in.id, Tag: in.tag, Layer: 1, Block: 10, Generation: 5, Rows: 2, Heads: 2}
	for n, want := range []int{1, 2, 3} { // wrong; good; written once more
		if stale := in.placed(&u, make([]uint64, 2)); stale != "" || sink.verified != want {
			t.Errorf("writing %d: stale %q, verified %d times", n+1, stale, sink.verified)
		}
	}
	u.Layer = 0
	for range 2 { // nobody asked for this one again
		in.placed(&u, make([]uint64, 2))
	}
	if sink.verified != 4 {
		t.Errorf("a block that was not asked for again was verified %d times", sink.verified-3)
	}
}

// A ticket may name any block; only those of the mapped pool are written.
func TestPlacedInsideThePool(t *testing.T) {
	layout := kvlayout.Plain(2, 2, 1, 2, kvlayout.F32)
	size := layout.Resolve()[0].BlockBytes()
	p := &peerPool{mem: make([]byte, 6*size),
		seg: Shared{Bytes: int64(6 * size), Blocks: 3, Layers: []Span{{0, int64(size)}, {int64(3 * size), int64(size)}}}}
	var err error
	if p.regions, err = p.seg.regions(layout); err != nil {
		t.Fatal(err)
	}
	f := func(layer int, block int32, want bool) {
		t.Helper()
		defer func() {
			if r := recover(); r != nil {
				t.Errorf("layer %d block %d: %v", layer, block, r)
			}
		}()
		if run, ok := p.block(layer, 0, block); ok != want || ok && (len(run) != size || cap(run) != size) {
			t.Errorf("layer %d block %d: %t, %d bytes", layer, block, ok, len(run))
		}
	}
	f(0, 0, true)
	f(1, 2, true)
	f(0, 3, false) // layer 1's
	f(1, 3, false)
	f(1, 1<<31-1, false)
	f(0, -1, false)
	f(2, 0, false)
	f(-1, 0, false)
}

// A proof that is there counts also when there is no time left.
func TestProofBeforeDeadline(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	there, not := make(chan struct{}), make(chan struct{})
	close(there)
	for range 100 {
		if proven(ctx, there, not) != nil || proven(ctx, not, there) != nil || proven(ctx, there, nil) != nil {
			t.Fatal("a proof was not seen")
		}
	}
	if proven(ctx, not, not) == nil {
		t.Error("proven without a proof")
	}
}

// deviceSink finds every pushed block good.
type deviceSink struct {
	countSink
	seen []PushedBlock
}

func (s *deviceSink) VerifyPushed(_ context.Context, layer int, blocks []PushedBlock) ([]bool, error) {
	s.seen = append(s.seen, blocks...)
	return slices.Repeat([]bool{true}, len(blocks)), nil
}

// A notice of a push names blocks of its ticket, under their generations, once;
// anything else is dropped, and the rest of the notice taken.
func TestPushedIsAddressed(t *testing.T) {
	sink := &deviceSink{}
	s, in := lonely(t, sink)
	s.lent = &lent{gone: make(chan struct{})}
	f := func(name string, layer uint32, want int, blocks ...pushedBlock) {
		t.Helper()
		sink.seen = nil
		stale := in.pushed(&landing{Ticket: in.id, Tag: in.tag, Number: 1, Layer: layer, Blocks: blocks})
		if len(sink.seen) != want || (stale == "") != (want == len(blocks)) {
			t.Errorf("%s: %d of %d blocks were taken, want %d: %q", name, len(sink.seen), len(blocks), want, stale)
		}
	}
	good, last := pushedBlock{0, 10, 5}, pushedBlock{1, 11, 6}
	f("another block", 0, 0, pushedBlock{0, 11, 5})
	f("an old generation", 0, 0, pushedBlock{0, 10, 4})
	f("an index too many", 0, 0, pushedBlock{2, 10, 5})
	f("an index of 2^32", 0, 0, pushedBlock{1<<32 - 1, 10, 5})
	f("a layer too many", 2, 0, good)
	f("a layer of 2^32", 1<<32-1, 0, good)
	f("a block below zero", 0, 0, pushedBlock{0, -1, 5})
	f("one of two", 0, 1, pushedBlock{0, 11, 5}, last)
	if want := (PushedBlock{Block: 11, FirstPos: 2, Rows: 1}); len(sink.seen) != 1 || sink.seen[0] != want {
		t.Errorf("verified %+v, want %+v", sink.seen, want)
	}
	f("the same again", 0, 0, last)
	f("twice at once", 0, 1, good, good)
	f("both", 1, 2, good, last)
	in.end(ticket.Cancelled, errRevoked)
	if stale := in.pushed(&landing{Ticket: in.id, Tag: in.tag, Number: 1, Blocks: []pushedBlock{good}}); stale != "ended" {
		t.Errorf("after a revoke: %q", stale)
	}
}

// ringHold is memory between two pools, whose pushes come when they are let.
type ringHold struct {
	stuckHold
	asked chan uint64 // the numbers that were asked for
	come  chan struct{}
	freed atomic.Int64
}

func (h *ringHold) Receive(_ context.Context, number uint64, _ int) error {
	h.asked <- number
	<-h.come
	return nil
}

func (h *ringHold) Place(context.Context, uint64, int, []Placement) error { return nil }
func (h *ringHold) Free(uint64)                                           { h.freed.Add(1) }
func (h *ringHold) Forget()                                               {}
func (h *ringHold) Ready(context.Context) error                           { return nil }
func (h *ringHold) Ahead() int                                            { return pushesAhead }

const pushesAhead = 4

// Pushes through a ring are received several at a time, not more, and freed.
func TestReceivesAhead(t *testing.T) {
	s, in := lonely(t, &deviceSink{})
	hold := &ringHold{asked: make(chan uint64), come: make(chan struct{})}
	s.lent = &lent{hold: hold, gone: make(chan struct{})}
	r := &intake{s: s, f: &frameConn{}, ahead: make(chan struct{}, hold.Ahead())}
	go func() {
		for n := range uint64(2 * pushesAhead) {
			body := encode(nil, &landing{Ticket: in.id, Tag: in.tag, Number: n + 1, Blocks: []pushedBlock{{0, 10, 5}}})
			if err := r.onPushed(body); err != nil {
				t.Error(err)
			}
		}
	}()
	for range pushesAhead {
		<-hold.asked
	}
	for range pushesAhead {
		select {
		case n := <-hold.asked:
			t.Errorf("push %d is received with %d under way", n, pushesAhead)
		default:
		}
		hold.come <- struct{}{}
		<-hold.asked // the next takes its place
	}
	close(hold.come)
	r.landing.Wait()
	if n := hold.freed.Load(); n != 2*pushesAhead {
		t.Errorf("%d pushes were freed", n)
	}
}

// stuckHold is of a peer that is gone, and of a device that does not let go.
type stuckHold struct{}

func (stuckHold) Wait(context.Context) error { return nil }
func (stuckHold) Close() error               { return fmt.Errorf("device: %w", ErrStuck) }

// An end that a device holds up is counted, and the peer's place is free again.
func TestStuckHold(t *testing.T) {
	m, err := NewMetrics(nil)
	if err != nil {
		t.Fatal(err)
	}
	r := &Receiver{m: m, log: slog.New(slog.DiscardHandler), lent: 1}
	m.mapped.WithLabelValues(string(SideReceiver)).Inc()
	l := &lent{hold: stuckHold{}, gone: make(chan struct{})}
	r.awaitReturn(t.Context(), l)
	<-l.gone
	if n, mapped := testutil.ToFloat64(m.stuck), testutil.ToFloat64(m.mapped); n != 1 || mapped != 0 || r.lent != 0 {
		t.Errorf("%v stuck, %v mapped, %d lent", n, mapped, r.lent)
	}
}
