package kvconn

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// countSink stores nothing and returns what it is told to.
type countSink struct {
	stores int
	err    error
	inside chan struct{} // when set, Store says it is in, then waits
	leave  chan struct{}
}

func (s *countSink) Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error {
	if s.inside != nil {
		s.inside <- struct{}{}
		<-s.leave
	}
	s.stores++
	return s.err
}

// lonely makes a session without connections, and one ticket of 2 layers and
// 2 blocks in it, of which the second has one row.
func lonely(t *testing.T, sink Sink) (*Session, *Incoming) {
	t.Helper()
	m, err := NewMetrics(nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.Identity.Layout = kvlayout.Plain(2, 2, 1, 2, kvlayout.F32)
	s := &Session{half: newHalf(&cfg, slog.New(slog.NewTextHandler(io.Discard, nil)), m, SideReceiver, cfg.Identity, [16]byte{}, nil),
		layers: cfg.Identity.Layout.Resolve(), edge: m.edges.open(cfg.Identity.ID), bulk: make([]*frameConn, 1), beats: make([]atomic.Int64, 1), tickets: map[uint64]*Incoming{}}
	s.out = make(chan message, 64)
	s.ctx, s.cancel = context.WithCancel(t.Context())
	t.Cleanup(s.cancel)
	in, err := s.Request(t.Context(), TicketSpec{Positions: 3, Dest: []Dest{{10, 5}, {11, 6}}, Sink: sink})
	if err != nil {
		t.Fatal(err)
	}
	return s, in
}

// onUnit lets one unit arrive.
func onUnit(t *testing.T, s *Session, u *unitHead, digests []uint64, rows []byte) {
	t.Helper()
	b := encode(beginFrame(nil, 1, typeUnit), u)
	for _, d := range digests {
		b = putU64(b, d)
	}
	b = append(b, rows...)
	endFrame(b, 0, 0)
	f := newBulkConn(&stubConn{r: bytes.NewReader(b)}, 1<<10)
	f.version = 1
	typ, head, err := f.next()
	if err == nil {
		err = (&intake{s: s, f: f}).units(typ, head)
	}
	if err != nil {
		t.Error(err)
	}
}

// Whatever a unit says of itself is checked against the ticket before the
// sink hears of it.
func TestStaleUnits(t *testing.T) {
	sink := &countSink{}
	s, in := lonely(t, sink)
	good := func() (unitHead, []uint64, []byte) {
		return unitHead{Ticket: in.id, Tag: in.tag, Layer: 1, Index: 0, Block: 10, Generation: 5, Rows: 2, Heads: 2}, make([]uint64, 2), make([]byte, 32)
	}
	f := func(name string, change func(u *unitHead, d *[]uint64, b *[]byte)) {
		t.Helper()
		u, d, b := good()
		change(&u, &d, &b)
		onUnit(t, s, &u, d, b)
		if sink.stores != 0 {
			t.Errorf("%s: stored", name)
			sink.stores = 0
		}
	}
	f("unknown ticket", func(u *unitHead, d *[]uint64, b *[]byte) { u.Ticket++ })
	f("wrong tag", func(u *unitHead, d *[]uint64, b *[]byte) { u.Tag++ })
	f("old generation", func(u *unitHead, d *[]uint64, b *[]byte) { u.Generation-- })
	f("other block", func(u *unitHead, d *[]uint64, b *[]byte) { u.Block = 11 })
	f("other index", func(u *unitHead, d *[]uint64, b *[]byte) { u.Index = 1 })
	f("layer out of range", func(u *unitHead, d *[]uint64, b *[]byte) { u.Layer = 2 })
	f("index out of range", func(u *unitHead, d *[]uint64, b *[]byte) { u.Index = 1 << 31 })
	f("rows", func(u *unitHead, d *[]uint64, b *[]byte) { u.Rows = 1 })
	f("digests", func(u *unitHead, d *[]uint64, b *[]byte) { *d = (*d)[:1] })
	f("short rows", func(u *unitHead, d *[]uint64, b *[]byte) { *b = (*b)[:31] })
	u, d, b := good()
	onUnit(t, s, &u, d, b)
	if sink.stores != 1 {
		t.Fatalf("the good unit: %d stores", sink.stores)
	}
	onUnit(t, s, &u, d, b)
	if sink.stores != 1 {
		t.Error("a repeated unit was stored")
	}
	if set := in.Stored(); set.Len() != 1 || !set.Has(1, 0) || set.Has(0, 0) || set.Has(2, 0) {
		t.Error("stored set is wrong")
	}
	if err := in.Revoke(t.Context()); err != nil {
		t.Fatal(err)
	}
	u.Layer = 0
	onUnit(t, s, &u, d, b)
	if sink.stores != 1 {
		t.Error("stored after the fence")
	}
}

// Revoke waits for the store that runs, and only for that.
func TestRevokeWaitsForStore(t *testing.T) {
	sink := &countSink{inside: make(chan struct{}), leave: make(chan struct{})}
	s, in := lonely(t, sink)
	stored := make(chan struct{})
	go func() {
		u := unitHead{Ticket: in.id, Tag: in.tag, Block: 10, Generation: 5, Rows: 2, Heads: 2}
		onUnit(t, s, &u, make([]uint64, 2), make([]byte, 32))
		close(stored)
	}()
	<-sink.inside
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := in.Revoke(ctx); err == nil {
		t.Error("revoke returned while a store was running")
	}
	close(sink.leave)
	if err := in.Revoke(t.Context()); err != nil {
		t.Error(err)
	}
	<-stored
}

// Failures of the sink end the ticket with their own outcome.
func TestSinkErrors(t *testing.T) {
	f := func(err error, want ticket.Outcome) {
		t.Helper()
		s, in := lonely(t, &countSink{err: err})
		u := unitHead{Ticket: in.id, Tag: in.tag, Block: 10, Generation: 5, Rows: 2, Heads: 2}
		for range 1 + DefaultConfig().Resends {
			onUnit(t, s, &u, make([]uint64, 2), make([]byte, 32))
		}
		if _, got := in.Wait(t.Context()); OutcomeOf(got, "") != want || !errors.Is(got, err) {
			t.Errorf("%v: %v", err, got)
		}
	}
	f(errors.New("disk on fire"), ticket.Corrupt)
	f(&Error{Outcome: ticket.NoSpace, Err: errors.New("gone")}, ticket.NoSpace)
	f(ErrDigest, ticket.Corrupt)
}

// Losing frames on the control connection cannot pass unseen: see frame
// sequence numbers. Losing units is told by marks, or by time.
func TestLostUnitsAreAskedFor(t *testing.T) {
	s, in := lonely(t, &countSink{})
	<-s.out // the ticket
	in.onCommit(&commit{ID: in.id})
	in.onSent(0, 0)
	m, ok := (<-s.out).(*resend)
	if !ok || m.Round != 1 || len(m.Runs) != 1 || m.Runs[0] != (run{0, 4}) {
		t.Fatalf("%+v", m)
	}
	in.onSent(0, 0) // a mark of the old round says nothing
	if len(s.out) != 0 {
		t.Error("asked again for an old mark")
	}
	late := time.Now().Add(2 * s.cfg.RepairTimeout)
	beat := func(at time.Time) {
		for n := range s.beats {
			s.beats[n].Store(at.UnixNano())
		}
	}
	in.keepTime(late) // no beat: the sender is busy with other tickets
	beat(late.Add(-3 * s.cfg.KeepAlive))
	in.keepTime(late) // it was idle, and may be busy since
	if len(s.out) != 0 {
		t.Error("asked again while the sender may be busy")
	}
	beat(late.Add(-s.cfg.KeepAlive))
	in.keepTime(late)
	if m, ok := (<-s.out).(*resend); !ok || m.Round != 2 {
		t.Error("not asked again when the marks were lost")
	}
}

// A mark that does not come from the ticket's holder says nothing.
func TestForgedMark(t *testing.T) {
	s, in := lonely(t, &countSink{})
	<-s.out // the ticket
	in.onCommit(&commit{ID: in.id})
	s.onSent(&sent{ID: in.id, Tag: in.tag + 1}, 0)
	if len(s.out) != 0 {
		t.Error("asked for blocks again because of a forged mark")
	}
	s.onSent(&sent{ID: in.id, Tag: in.tag}, 0)
	if len(s.out) != 1 {
		t.Error("the true mark was not heard")
	}
}
