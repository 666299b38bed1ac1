package worker_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/cudaipc"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
	"github.com/xpyd/xpyd/prefill"
)

// gpuEnd is a worker's KV on a fake GPU: it gives by its server and collects by its
// receiver, over cudaipc alone. There is no engine: rows are what a prompt's seed makes.
type gpuEnd struct {
	*decode.Service
	t       testing.TB
	gpu     *kerneltest.FakeGPU
	device  gpuDevice // gpu, or what moves in its place
	layout  kvlayout.Layout
	cache   *kvcache.Cache
	recv    *kvconn.Receiver
	server  *kvconn.Server
	peer    kvconn.PeerID
	addr    string
	hang    context.CancelFunc // ends its server as a crash would
	ln      net.Listener
	through atomic.Int64 // blocks that came through the host
}

// gpuDevice is what the transport knows of a GPU.
type gpuDevice interface {
	kernels.Exporter
	kernels.PeerOpener
}

// gpuPool is the fake as decode's backend.
type gpuPool struct {
	*kerneltest.FakeGPU
	e *gpuEnd
}

func (p gpuPool) Layout() kvlayout.Layout { return p.e.layout }
func (p gpuPool) Arch() arch.Config       { return arch.Config{Vocab: 100} }
func (p gpuPool) Verify(ctx context.Context, landed []kernels.Landed) ([]bool, error) {
	return p.e.device.Verify(ctx, landed)
}
func (p gpuPool) Scatter(layer int, block int32, row, n int, src []byte) {
	p.e.through.Add(1)
	p.FakeGPU.Scatter(layer, block, row, n, src)
}

func (p gpuPool) Gate() (kernels.Gate, error) { return kernels.NewHostGate(p.e.layout.Layers()), nil }

const gpuTokens = 192 // of a prompt; the pools have room for three

func newGPUEnd(t *testing.T, name string, blockTokens int) *gpuEnd {
	t.Helper()
	l := kvlayout.Plain(3, 2, 8, blockTokens, "bf16")
	return openGPUEnd(t, name, l, 3*gpuTokens/blockTokens, func(g *kerneltest.FakeGPU) gpuDevice { return g })
}

// openGPUEnd makes a worker's KV with a pool of that many blocks.
func openGPUEnd(t testing.TB, name string, l kvlayout.Layout, blocks int, device func(*kerneltest.FakeGPU) gpuDevice) *gpuEnd {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	e := &gpuEnd{t: t, peer: kvconn.PeerID{ID: name, Epoch: 1}, layout: l}
	var err error
	e.gpu, err = kerneltest.NewFakeGPU(l, blocks)
	must(err)
	e.device = device(e.gpu)
	pool := gpuPool{e.gpu, e}
	e.cache, err = kvcache.New(kvcache.Config{Blocks: blocks, BlockTokens: l.BlockTokens, Fingerprint: "m", Numerics: "n"})
	must(err)
	cfg := kvconn.DefaultConfig()
	cfg.Identity = kvconn.Identity{PeerID: e.peer, ModelFingerprint: "m", TokenizerFingerprint: "t", Numerics: "n",
		Layout: e.layout}
	cfg.Shared = kvconn.DevicePool(cfg.Identity.Layout, blocks)
	// Nothing here is about silence, and a starved machine is silent.
	cfg.PeerSilence, cfg.AcceptTimeout, cfg.HandshakeTimeout, cfg.DialTimeout = patience, patience, patience, patience
	log := slog.New(slog.DiscardHandler)
	transport, err := cudaipc.New([]gpuDevice{e.device}, []gpuDevice{e.device}, l.Resolve()[0].Heads, true, "")
	must(err)
	metrics, err := kvconn.NewMetrics(prometheus.NewRegistry())
	must(err)
	e.recv, err = kvconn.NewReceiver(cfg, transport, log, metrics)
	must(err)
	e.Service = decode.New(decode.DefaultConfig(blocks), e.recv, e.cache, pool, log)
	peers, err := tier.NewPeers(tier.PeersConfig{LoadTimeout: patience, FetchBlocks: blocks, GiveBlocks: blocks, BlockBytes: int64(e.layout.Layers() * e.layout.Resolve()[0].BlockBytes())},
		e.cache, nil, nil, log, prometheus.NewRegistry())
	must(err)
	pcfg := prefill.DefaultConfig()
	pcfg.GiveTime = patience
	pcfg.Give = func(ctx context.Context, a prefill.Asked) ([]int32, func(), error) {
		blocks, release, err := peers.Give(ctx, &tier.Asked{Peer: a.Peer.ID, Trusted: a.Private, Tokens: a.Tokens, Salt: a.Salt, Bytes: a.Bytes})
		if err != nil {
			err = prefill.ErrNotCached
		}
		return blocks, release, err
	}
	gives := prefill.New(pcfg, nil, pool, e.layout, log)
	metrics, err = kvconn.NewMetrics(prometheus.NewRegistry())
	must(err)
	e.server, err = kvconn.NewServer(cfg, log, metrics)
	must(err)
	e.ln, err = transport.Listen("")
	must(err)
	e.addr = e.ln.Addr().String()
	ctx, hang := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := e.server.Serve(ctx, e.ln, gives); err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	})
	e.hang = hang
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		err := e.recv.Close(ctx)
		e.Close()
		hang()
		serving.Wait()
		gives.Close()
		if err := errors.Join(err, e.cache.Check(), e.gpu.Close()); err != nil {
			t.Error(err)
		}
	})
	return e
}

// rows are those of a prompt's positions, all heads, K and V, packed.
func (e *gpuEnd) rows(seed int32, layer, first, n int) []byte {
	out := make([]byte, e.layout.Resolve()[0].PackedBytes(n))
	for part := range 2 * e.layout.Resolve()[0].Heads {
		for i := range n {
			row := out[(part*n+i)*e.layout.Resolve()[0].RowBytes(0):]
			binary.LittleEndian.PutUint64(row, uint64(seed)<<40|uint64(layer)<<32|uint64(part)<<24|uint64(first+i))
			binary.LittleEndian.PutUint64(row[8:], uint64(first+i)*0x9e3779b97f4a7c15)
		}
	}
	return out
}

func gpuPrompt(seed int32) (tokens []int32) {
	for i := range int32(gpuTokens) {
		tokens = append(tokens, (seed*31+i*7)%97)
	}
	return tokens
}

// compute leaves a prompt's first upto tokens in the pool and the index, as a decode
// worker leaves its answer.
func (e *gpuEnd) compute(seed int32, upto int) {
	e.t.Helper()
	bt := e.layout.BlockTokens
	table, err := e.cache.Alloc(upto/bt, "sequence")
	if err != nil {
		e.t.Fatal(err)
	}
	for i, block := range table {
		for layer := range e.layout.Layers() {
			e.gpu.Append(layer, block, i*bt, bt, e.rows(seed, layer, i*bt, bt))
		}
	}
	chain := e.cache.NewChain("")
	chain.Extend(gpuPrompt(seed)[:upto])
	e.cache.InsertChain(&chain, gpuPrompt(seed)[:upto], table, 0)
	e.cache.Release(table, "sequence")
}

// blockOf is the block of a computed prompt that has a position.
func (e *gpuEnd) blockOf(seed int32, position int) int32 {
	ids, _ := enginetest.HoldPrefix(e.cache, gpuPrompt(seed)[:gpuTokens], "", "look")
	defer e.cache.Release(ids, "look")
	return ids[position/e.layout.BlockTokens]
}

// has checks that the index has that many tokens of a prompt, with its rows.
func (e *gpuEnd) has(seed int32, tokens int) {
	e.t.Helper()
	bt := e.layout.BlockTokens
	ids, n := enginetest.HoldPrefix(e.cache, gpuPrompt(seed)[:gpuTokens], "", "look")
	defer e.cache.Release(ids, "look")
	if n != tokens {
		e.t.Errorf("%s has %d tokens of prompt %d, want %d", e.peer.ID, n, seed, tokens)
	}
	got := make([]byte, e.layout.Resolve()[0].BlockBytes())
	for i, block := range ids {
		for layer := range e.layout.Layers() {
			if e.gpu.Gather(layer, block, 0, bt, got); !bytes.Equal(got, e.rows(seed, layer, i*bt, bt)) {
				e.t.Fatalf("%s, prompt %d: layer %d of block %d has other rows", e.peer.ID, seed, layer, i)
			}
		}
	}
}

// collect fetches a prompt from another end; want "" is no error. After a failure it keeps nothing if
// the fence is slow, as on a starved machine.
func (e *gpuEnd) collect(ctx context.Context, from *gpuEnd, seed int32, tokens int, want ticket.Outcome) (got int) {
	e.t.Helper()
	got, err := e.Collect(ctx, &decode.Prefix{Addr: from.addr, Peer: from.peer, RequestID: "r", Owner: fmt.Sprint("peer/fetch-", seed), Tokens: gpuPrompt(seed),
		Upto: gpuTokens, Least: 16, Most: gpuTokens / e.layout.BlockTokens, Deadline: time.Now().Add(patience)})
	outcome := ticket.Outcome("")
	var failed *decode.Error
	if errors.As(err, &failed) {
		outcome = failed.Outcome
	}
	if got != tokens && (want == "" || got != 0) || outcome != want {
		e.t.Errorf("%s collected %d tokens of prompt %d, %v; want %d, %q", e.peer.ID, got, seed, err, tokens, want)
	}
	return got
}

// clean waits until nothing is held.
func (e *gpuEnd) clean() {
	e.t.Helper()
	soon(e.t, patience, func() error {
		if held, tickets := e.cache.Holders(), append(e.recv.Ledger(), e.server.Ledger()...); len(held)+len(tickets) > 0 {
			return fmt.Errorf("%s holds %+v, tickets %+v", e.peer.ID, held, tickets)
		}
		return nil
	})
}

// quarantineEnds waits until no block is in quarantine.
func (e *gpuEnd) quarantineEnds() {
	e.t.Helper()
	soon(e.t, patience, func() error {
		if n := e.cache.Stats().Quarantined; n > 0 {
			return fmt.Errorf("%d blocks are quarantined", n)
		}
		return nil
	})
}

// begins waits until a GPU writes.
func begins(t *testing.T, writing <-chan struct{}) {
	t.Helper()
	select {
	case <-writing:
	case <-time.After(patience):
		t.Fatal("no GPU writes")
	}
}

// TestGiveBack: decode's GPU pushes what its pool has, its answer too, into prefill's pool when
// that asks for it, whole and verified. After any fault no wrong row is found, whole blocks
// stay, and nothing is held.
func TestGiveBack(t *testing.T) {
	f := func(name string, do func(t *testing.T, d, p *gpuEnd)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, p := newGPUEnd(t, "decode", 16), newGPUEnd(t, "prefill", 16)
			do(t, d, p)
			d.clean()
			p.clean()
			if n := d.through.Load() + p.through.Load(); n > 0 {
				t.Errorf("%d blocks came through the host", n)
			}
		})
	}
	for _, sizes := range [][3]int{{16, 16, 192}, {1, 16, 192}, {16, 1, 192}, {16, 64, 192}, {64, 16, 192}, {48, 32, 192}, {64, 48, 192}} {
		t.Run(fmt.Sprintf("blocks of %d from %d", sizes[1], sizes[0]), func(t *testing.T) {
			t.Parallel()
			d, p := newGPUEnd(t, "decode", sizes[0]), newGPUEnd(t, "prefill", sizes[1])
			d.compute(1, gpuTokens)
			p.collect(t.Context(), d, 1, sizes[2], "")
			p.has(1, sizes[2])
			p.clean()
			d.clean()
			if n := p.through.Load(); n > 0 {
				t.Errorf("%d blocks came through the host", n)
			}
		})
	}
	f("prefill has the turn before", func(_ *testing.T, d, p *gpuEnd) {
		d.compute(1, gpuTokens)
		p.compute(1, 96)
		p.collect(t.Context(), d, 1, 96, "")
		p.has(1, gpuTokens)
		p.collect(t.Context(), d, 1, 0, "") // there is nothing more
	})
	f("both ways at once", func(t *testing.T, d, p *gpuEnd) {
		d.compute(1, gpuTokens)
		p.compute(2, gpuTokens)
		var all sync.WaitGroup
		all.Go(func() { p.collect(t.Context(), d, 1, gpuTokens, "") })
		all.Go(func() { d.collect(t.Context(), p, 2, gpuTokens, "") })
		all.Wait()
		for _, e := range []*gpuEnd{d, p} {
			e.has(1, gpuTokens)
			e.has(2, gpuTokens)
		}
	})
	f("evicted meanwhile", func(_ *testing.T, d, p *gpuEnd) {
		d.compute(1, 128)
		p.collect(t.Context(), d, 1, 0, ticket.Refused)
		p.has(1, 0)
	})
	f("a bit flips on the way", func(_ *testing.T, d, p *gpuEnd) {
		d.compute(1, gpuTokens)
		for block := range int32(p.cache.Stats().Blocks) {
			p.gpu.Spoil(1, block) // whatever block it takes, once
		}
		p.collect(t.Context(), d, 1, gpuTokens, "")
		p.has(1, gpuTokens)
	})
	f("a bit of a late layer has flipped at decode", func(_ *testing.T, d, p *gpuEnd) {
		d.compute(1, gpuTokens)
		d.gpu.Spoil(2, d.blockOf(1, 130))
		p.has(1, p.collect(t.Context(), d, 1, 128, ticket.Corrupt))
	})
	f("the request leaves while decode's GPU writes", func(t *testing.T, d, p *gpuEnd) {
		d.compute(1, gpuTokens)
		begun, on := d.gpu.Stop()
		defer on()
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		var done sync.WaitGroup
		done.Go(func() { p.collect(ctx, d, 1, 0, ticket.Cancelled) })
		begins(t, begun)
		leave()
		done.Wait()
		if n := p.cache.Stats().Quarantined; n != gpuTokens/16 {
			t.Errorf("%d blocks are quarantined, want all", n)
		}
		p.compute(2, gpuTokens) // the other blocks
		p.compute(3, gpuTokens)
		on()
		p.quarantineEnds()
		p.has(1, 0)
		p.has(2, gpuTokens)
		p.has(3, gpuTokens)
		p.collect(t.Context(), d, 1, gpuTokens, "") // the next one gets it
		p.has(1, gpuTokens)
	})
	f("decode's server ends while its GPU writes", func(t *testing.T, d, p *gpuEnd) {
		d.compute(1, gpuTokens)
		begun, on := d.gpu.Stop()
		defer on()
		var done sync.WaitGroup
		done.Go(func() { p.collect(t.Context(), d, 1, 0, ticket.Dead) })
		begins(t, begun)
		d.hang()
		done.Wait()
		if n := p.cache.Stats().Quarantined; n != gpuTokens/16 { // its GPU still can
			t.Errorf("%d blocks are quarantined, want all", n)
		}
		on()
		p.has(1, 0)
		p.quarantineEnds()
	})
}
