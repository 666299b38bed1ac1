package tcp_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

// slab is a pool without digests: the benchmark measures the connector, one
// copy on each side included, and not the hash of a backend.
type slab struct{ mem []byte }

func (s *slab) at(index, n int) []byte { return s.mem[index*n%(len(s.mem)-n+1):][:n] }

func (s *slab) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	copy(dst, s.at(index, len(dst)))
	return nil
}

func (s *slab) Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error {
	copy(s.at(int(dst), len(packed)), packed)
	return nil
}

type pushAll struct{ src *slab }

func (h pushAll) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	if o.Accept(h.src) != nil {
		return
	}
	all := make([]int, len(o.Ticket().Dest))
	for i := range all {
		all[i] = i
	}
	for l := range o.Peer().Layout.Layers() {
		o.Push(l, all)
	}
	o.Commit(nil)
	<-o.Done()
}

// BenchmarkLoopback moves 256 MiB a ticket in units of 16 KiB: 32 layers of
// 512 blocks of 16 tokens, 8 heads, rows of 64 bytes.
func BenchmarkLoopback(b *testing.B) {
	for _, conns := range []int{1, 2, 4} {
		b.Run(fmt.Sprintf("conns=%d", conns), func(b *testing.B) { loopback(b, conns) })
	}
}

func loopback(b *testing.B, conns int) {
	fatal := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	const blocks, layers = 512, 32
	cfg := kvconntest.Config("decode", 1)
	cfg.BulkConns = conns
	cfg.TicketTimeout = kvconn.DefaultConfig().TicketTimeout
	cfg.Identity.Layout = kvconn.Layout{BlockTokens: 16, Groups: []kvconn.Group{{Kind: "full", Layers: layers, KVHeads: 8, HeadDim: 32, RowBytes: 64, DType: "bf16"}}}
	tr, err := tcp.New(tcp.DefaultConfig())
	fatal(err)
	m, err := kvconn.NewMetrics(nil)
	fatal(err)
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	srv, err := kvconn.NewServer(cfg, log, m)
	fatal(err)
	r, err := kvconn.NewReceiver(cfg, tr, log, m)
	fatal(err)
	ln, err := tr.Listen("127.0.0.1:0")
	fatal(err)
	ctx, cancel := context.WithCancel(b.Context())
	var wg sync.WaitGroup
	wg.Go(func() { srv.Serve(ctx, ln, pushAll{&slab{make([]byte, 8<<20)}}) })
	defer wg.Wait()
	defer cancel()
	defer r.Close(b.Context())
	s, err := r.Open(ctx, ln.Addr().String(), kvconn.PeerID{})
	fatal(err)
	dest := make([]kvconn.Dest, blocks)
	for i := range dest {
		dest[i].Block = int32(i)
	}
	b.SetBytes(256 << 20)
	sink := &slab{make([]byte, 8<<20)}
	for b.Loop() {
		in, err := s.Request(ctx, kvconn.TicketSpec{Tokens: make([]int32, 16*blocks), Dest: dest, Sink: sink})
		fatal(err)
		_, err = in.Wait(ctx)
		fatal(err)
	}
}
