//go:build linux

package cudaipc_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/cudaipc"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
)

// tickets is a handler that leaves every ticket to the test.
type tickets chan *kvconn.Outgoing

func (h tickets) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	h <- o
	<-o.Done()
}

func configOf(id string, l kvconn.Layout) kvconn.Config {
	cfg := kvconn.DefaultConfig()
	cfg.Identity = kvconn.Identity{PeerID: kvconn.PeerID{ID: id, Epoch: 1}, Layout: l}
	cfg.PeerSilence, cfg.HandshakeTimeout = 30*time.Second, 30*time.Second // nobody is silent here, but the machine may be slow
	return cfg
}

// Several receivers, of two block sizes, some of which have blocks already, get the
// same rows from one device's pool. Each push reads them where they lie: nothing is
// gathered, and nothing goes through the host.
func TestFanout(t *testing.T) {
	const positions, seed = 51, 9
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	metrics := func() *kvconn.Metrics {
		m, err := kvconn.NewMetrics(nil)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	s := fakegpu.New(t, kvconntest.SenderBlocks, nil)
	s.Delay = time.Millisecond
	tr, err := cudaipc.New(s, s, true)
	if err != nil {
		t.Fatal(err)
	}
	srv, err := kvconn.NewServer(configOf("prefill", s.Layout()), log, metrics())
	if err != nil {
		t.Fatal(err)
	}
	ln, err := tr.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	asked := make(tickets, 8)
	wg.Go(func() {
		if err := srv.Serve(ctx, ln, asked); err != nil {
			t.Error(err)
		}
	})

	src := kvconntest.DeviceSource(s, seed, positions)
	fans := map[int]*kvconn.Fanout{4: kvconn.NewFanout(src, 1<<20), 6: kvconn.NewFanout(src, 1<<20)}
	outs, checks := []*kvconn.Outgoing{}, []func(){}
	for n, bt := range []int{4, 6, 4, 6, 6} {
		d := fakegpu.New(t, kvconntest.ReceiverBlocks, func(l *kvconn.Layout) { l.BlockTokens = bt })
		tr, err := cudaipc.New(d, d, true)
		if err != nil {
			t.Fatal(err)
		}
		pool := kvconntest.NewPool(d.Layout(), kvconntest.ReceiverBlocks)
		cfg := configOf(fmt.Sprint("decode-", n), d.Layout())
		cfg.Shared = pool.ShareGPU(d)
		recv, err := kvconn.NewReceiver(cfg, tr, log, metrics())
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := recv.Close(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		session, err := recv.Open(ctx, ln.Addr().String(), kvconn.PeerID{})
		if err != nil {
			t.Fatal(err)
		}
		dest := pool.Dest(3*n, (positions+bt-1)/bt)
		var have []bool
		if n > 2 {
			have = make([]bool, len(dest))
			have[0], have[2], have[3] = true, true, true
		}
		in, err := session.Request(ctx, kvconn.TicketSpec{Positions: positions, Dest: dest, Sink: pool.Sink(dest), Have: have})
		if err != nil {
			t.Fatal(err)
		}
		o := <-asked
		outs = append(outs, o)
		if n != 2 { // that one comes late
			if err := fans[bt].Accept(o); err != nil {
				t.Fatal(err)
			}
		}
		checks = append(checks, func() {
			if _, err := in.Wait(ctx); err != nil {
				t.Errorf("receiver %d: %v", n, err)
			}
			held := func(layer, index int) bool { return have != nil && have[index] }
			if err := pool.Check(seed, dest, positions, held); err != nil {
				t.Errorf("receiver %d: %v", n, err)
			}
			want := len(dest) * d.Layout().Layers()
			if have != nil {
				want -= 3 * d.Layout().Layers()
			}
			if pool.Pushed() != want || pool.Stores() != want {
				t.Errorf("receiver %d: %d blocks pushed of %d, want %d", n, pool.Pushed(), pool.Stores(), want)
			}
		})
	}
	for layer := range s.Layout().Layers() {
		for bt, f := range fans {
			for i := range (positions + bt - 1) / bt {
				f.Push(layer, []int{i})
			}
		}
	}
	if err := fans[4].Accept(outs[2]); err != nil {
		t.Fatal(err)
	}
	for _, o := range outs {
		o.Commit(nil)
	}
	for _, check := range checks {
		check()
	}
	for bt, f := range fans {
		if n := f.Kept(); n != 0 {
			t.Errorf("blocks of %d: %d bytes were gathered", bt, n)
		}
	}
}
