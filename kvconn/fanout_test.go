package kvconn_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

const fanSeed, fanPositions, fanBlocks = 7, 90, 23

// fan is one sender whose handler gathers tickets, and receivers for them.
type fan struct {
	t     *testing.T
	tr    *kvconntest.Memory
	out   chan *kvconn.Outgoing
	src   *kvconntest.Source
	recvs []*kvconn.Receiver
	stop  func()
}

func (f *fan) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	f.out <- o
	<-o.Done()
}

func newFan(t *testing.T) *fan {
	t.Helper()
	f := &fan{t: t, tr: kvconntest.NewMemory(4 << 10), out: make(chan *kvconn.Outgoing, 8), src: &kvconntest.Source{Layout: kvconntest.Layout(), Seed: fanSeed}}
	m, err := kvconn.NewMetrics(nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg := kvconn.DefaultConfig()
	cfg.Identity = kvconn.Identity{PeerID: kvconn.PeerID{ID: "p", Epoch: 1}, Layout: kvconntest.Layout()}
	srv, err := kvconn.NewServer(cfg, slog.New(slog.NewTextHandler(io.Discard, nil)), m)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := f.tr.Listen("p")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := srv.Serve(ctx, ln, f); err != nil {
			t.Error(err)
		}
	})
	f.stop = func() {
		for _, r := range f.recvs {
			if err := r.Close(ctx); err != nil {
				t.Error(err)
			}
		}
		cancel()
		wg.Wait()
	}
	return f
}

// held is a sink that waits for a channel before each store.
type held struct {
	kvconn.Sink
	until chan struct{}
}

func (s *held) Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error {
	<-s.until
	return s.Sink.Store(layer, dst, row, rows, firstPos, packed, digests)
}

// ask opens one more receiver, with blocks of bt tokens, and sends its ticket.
// It returns the sender's end of it too.
func (f *fan) ask(bt int, until chan struct{}, have []bool) (*kvconn.Incoming, *kvconn.Outgoing, func() error) {
	f.t.Helper()
	m, err := kvconn.NewMetrics(nil)
	if err != nil {
		f.t.Fatal(err)
	}
	layout := kvconntest.Layout()
	layout.BlockTokens = bt
	cfg := kvconn.DefaultConfig()
	cfg.Identity = kvconn.Identity{PeerID: kvconn.PeerID{ID: fmt.Sprint("d", len(f.recvs)), Epoch: 1}, Layout: layout}
	r, err := kvconn.NewReceiver(cfg, f.tr, slog.New(slog.NewTextHandler(io.Discard, nil)), m)
	if err != nil {
		f.t.Fatal(err)
	}
	f.recvs = append(f.recvs, r)
	s, err := r.Open(f.t.Context(), "p", kvconn.PeerID{})
	if err != nil {
		f.t.Fatal(err)
	}
	blocks := (fanPositions + bt - 1) / bt
	pool := kvconntest.NewPool(layout, blocks)
	dest := pool.Dest(0, blocks)
	sink := pool.Sink(dest)
	if until != nil {
		sink = &held{sink, until}
	}
	in, err := s.Request(f.t.Context(), kvconn.TicketSpec{Positions: fanPositions, Dest: dest, Sink: sink, Have: have})
	if err != nil {
		f.t.Fatal(err)
	}
	return in, <-f.out, func() error {
		if _, err := in.Wait(f.t.Context()); err != nil {
			return err
		}
		return pool.Check(fanSeed, dest, fanPositions, func(layer, index int) bool { return have != nil && have[index] })
	}
}

// pushAll pushes everything, layer by layer.
func pushAll(f *kvconn.Fanout) {
	for l := range kvconntest.Layout().Layers() {
		for i := range fanBlocks {
			f.Push(l, []int{i})
		}
	}
}

func fanBubble(t *testing.T, run func(f *fan)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := newFan(t)
		run(f)
		f.stop()
	})
}

// Each block of a layer is loaded once, however many receivers there are, of
// which one has some already and one comes late.
func TestFanoutLoadsOnce(t *testing.T) {
	fanBubble(t, func(f *fan) {
		fo := kvconn.NewFanout(f.src, 1<<20)
		have := make([]bool, fanBlocks)
		have[0], have[5] = true, true
		var checks []func() error
		var outs []*kvconn.Outgoing
		accept := func(have []bool) {
			t.Helper()
			_, o, check := f.ask(4, nil, have)
			if err := fo.Accept(o); err != nil {
				t.Fatal(err)
			}
			checks, outs = append(checks, check), append(outs, o)
		}
		accept(nil)
		accept(have)
		fo.Push(0, []int{0, 1, 2})
		accept(nil)
		synctest.Wait()
		pushAll(fo)
		_, other, _ := f.ask(8, nil, nil)
		if err := fo.Accept(other); err == nil {
			t.Error("a receiver with other blocks was accepted")
		}
		other.Fail(ticket.Refused, "another shape")
		for n, check := range checks {
			outs[n].Commit(nil)
			if err := check(); err != nil {
				t.Errorf("receiver %d: %v", n, err)
			}
		}
		synctest.Wait() // the senders' ends, too
		want := fanBlocks * kvconntest.Layout().Layers()
		if got, _ := f.src.Loads(); got < want || got > want+3 { // the late one has missed up to three
			t.Errorf("%d loads, want %d", got, want)
		}
		if k := fo.Kept(); k != 0 {
			t.Errorf("%d bytes are kept at the end", k)
		}
	})
}

// A receiver that takes nothing neither stalls the others nor makes more be
// kept than the budget; when it goes on it gets what was dropped.
func TestFanoutSlow(t *testing.T) {
	fanBubble(t, func(f *fan) {
		const budget = 3000 // of a block of a layer, 512 bytes, five
		fo := kvconn.NewFanout(f.src, budget)
		until := make(chan struct{})
		_, slow, slowCheck := f.ask(4, until, nil)
		_, a, aCheck := f.ask(4, nil, nil)
		_, b, bCheck := f.ask(4, nil, nil)
		for _, o := range []*kvconn.Outgoing{slow, a, b} {
			if err := fo.Accept(o); err != nil {
				t.Fatal(err)
			}
			o.Commit(nil)
		}
		start := time.Now()
		pushAll(fo)
		for _, check := range []func() error{aCheck, bCheck} {
			if err := check(); err != nil {
				t.Error(err)
			}
		}
		if took := time.Since(start); took > 0 {
			t.Errorf("the others took %v", took)
		}
		if k := fo.Kept(); k > budget {
			t.Errorf("%d bytes are kept", k)
		}
		close(until)
		if err := slowCheck(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if k := fo.Kept(); k != 0 {
			t.Errorf("%d bytes are kept at the end", k)
		}
	})
}

// A receiver that is gone is waited for by nobody, and nothing is kept for it.
func TestFanoutDead(t *testing.T) {
	fanBubble(t, func(f *fan) {
		fo := kvconn.NewFanout(f.src, 1<<20)
		gone, o, _ := f.ask(4, nil, nil)
		_, a, aCheck := f.ask(4, nil, nil)
		_, b, bCheck := f.ask(4, nil, nil)
		for _, o := range []*kvconn.Outgoing{o, a, b} {
			if err := fo.Accept(o); err != nil {
				t.Fatal(err)
			}
		}
		fo.Push(0, []int{0, 1})
		synctest.Wait()
		if err := gone.Revoke(f.t.Context()); err != nil {
			t.Fatal(err)
		}
		pushAll(fo)
		a.Commit(nil)
		b.Commit(nil)
		for _, check := range []func() error{aCheck, bCheck} {
			if err := check(); err != nil {
				t.Error(err)
			}
		}
		synctest.Wait() // the senders' ends, too
		want := fanBlocks * kvconntest.Layout().Layers()
		if got, _ := f.src.Loads(); got != want {
			t.Errorf("%d loads, want %d", got, want)
		}
		if k := fo.Kept(); k != 0 {
			t.Errorf("%d bytes are kept at the end", k)
		}
		if _, o, _ := f.ask(4, nil, nil); o != nil {
			o.Fail(ticket.Late, "x")
			if err := fo.Accept(o); kvconn.OutcomeOf(err, "") != ticket.Late {
				t.Errorf("accept of a ticket that is over: %v", err)
			}
		}
	})
}

// A load that fails ends every receiver that wanted it, as it would one.
func TestFanoutLoadFails(t *testing.T) {
	fanBubble(t, func(f *fan) {
		f.src.Hook = func(layer, index int) error {
			if layer == 1 && index == 2 {
				return kvconn.ErrDigest
			}
			return nil
		}
		fo := kvconn.NewFanout(f.src, 1<<20)
		var checks []func() error
		for range 2 {
			_, o, check := f.ask(4, nil, nil)
			if err := fo.Accept(o); err != nil {
				t.Fatal(err)
			}
			checks = append(checks, check)
		}
		pushAll(fo)
		for _, check := range checks {
			if err := check(); kvconn.OutcomeOf(err, "") != ticket.Corrupt {
				t.Errorf("%v", err)
			}
		}
	})
}
