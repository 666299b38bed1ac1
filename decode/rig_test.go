package decode_test

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine/handoff"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

const (
	blocks, blockTokens = 16, 4
	vocab               = 100
)

var layout = kvlayout.Plain(2, 2, 2, blockTokens, "f32")

// fill makes the rows that a prompt has at these positions.
func fill(dst []byte, seed int32, layer, firstPos, n int) {
	for part := range 2 * layout.Resolve()[0].Heads {
		for i := range n {
			row := dst[(part*n+i)*layout.Resolve()[0].RowBytes(0):]
			binary.LittleEndian.PutUint64(row, uint64(seed)<<40|uint64(layer)<<32|uint64(part)<<24|uint64(firstPos+i))
		}
	}
}

// pool is decode's memory.
type pool struct {
	stall  chan struct{} // when set, a Scatter waits for it
	noGate error         // what Gate returns

	mu      sync.Mutex
	rows    map[[2]int]string // layer, block
	digests map[[2]int]uint64 // of KV head 0
	stores  int
}

func (*pool) Layout() kvlayout.Layout { return layout }

func (*pool) Arch() arch.Config { return arch.Config{Vocab: vocab} }

func (*pool) Gather(int, int32, int, int, []byte) {}

func (*pool) Digest(int, int32, []uint64) {}

func (*pool) CopyBlock(dst, src int32, firstPos, n int) {}

func (p *pool) Scatter(layer int, block int32, row, n int, src []byte) {
	if p.stall != nil {
		<-p.stall
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rows[[2]int{layer, int(block)}] = string(src)
	p.stores++
}

func (p *pool) SetDigest(layer int, block int32, filled int, digest []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.digests[[2]int{layer, int(block)}] = digest[0]
}

// has reports whether the blocks hold a prompt's rows.
func (p *pool) has(table []int32, seed int32, positions int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for layer := range layout.Layers() {
		for i, b := range table {
			n := min(blockTokens, positions-i*blockTokens)
			want, sums := make([]byte, layout.Resolve()[0].PackedBytes(n)), make([]uint64, layout.Resolve()[0].Heads)
			fill(want, seed, layer, i*blockTokens, n)
			kernels.DigestRows(&layout.Resolve()[layer], i*blockTokens, n, want, sums)
			if at := [2]int{layer, int(b)}; p.rows[at] != string(want) || p.digests[at] != sums[0] {
				return false
			}
		}
	}
	return true
}

// source is prefill's memory of one prompt.
type source struct {
	seed  int32
	wrong bool // its rows do not agree with their digests
}

func (s *source) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	fill(dst, s.seed, layer, firstPos, rows)
	kernels.DigestRows(&layout.Resolve()[layer], firstPos, rows, dst, digests)
	if s.wrong {
		dst[0] ^= 1
	}
	return nil
}

// rig is a decode service and a prefill that answers as the test says.
type rig struct {
	*decode.Service
	t      *testing.T
	chaos  *kvconntest.Chaos
	cache  *kvcache.Cache
	pool   *pool
	recv   *kvconn.Receiver
	server *kvconn.Server
	addr   string
	log    *slog.Logger
	stop   context.CancelFunc // of the server

	answer func(ctx context.Context, o *kvconn.Outgoing) // of prefill; set before a Fetch
}

var self = kvconn.PeerID{ID: "prefill-0", Epoch: 1}

func identity(peer kvconn.PeerID) kvconn.Identity {
	return kvconn.Identity{PeerID: peer, ModelFingerprint: "m", TokenizerFingerprint: "t", Numerics: "n",
		Layout: layout}
}

// newRig must be closed inside the bubble.
func newRig(t *testing.T, change func(*decode.Config, *kvconn.Config)) *rig {
	t.Helper()
	r := &rig{t: t, chaos: kvconntest.NewChaos(kvconntest.NewMemory(1 << 16)),
		pool: &pool{rows: map[[2]int]string{}, digests: map[[2]int]uint64{}}}
	r.answer = r.serve
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	log := slog.New(slog.DiscardHandler)
	r.log = log
	var err error
	r.cache, err = kvcache.New(kvcache.Config{Blocks: blocks, BlockTokens: blockTokens, Fingerprint: "m", Numerics: "n"})
	must(err)
	metrics, err := kvconn.NewMetrics(prometheus.NewRegistry())
	must(err)
	cfg, dcfg := kvconn.DefaultConfig(), decode.DefaultConfig(blocks)
	cfg.Identity = identity(kvconn.PeerID{ID: "decode-0", Epoch: 1})
	if change != nil {
		change(&dcfg, &cfg)
	}
	r.recv, err = kvconn.NewReceiver(cfg, r.chaos, log, metrics)
	must(err)
	scfg := kvconn.DefaultConfig()
	scfg.BatchBytes = 1                                  // a frame for each block of a layer, so that faults hit single ones
	scfg.Identity, scfg.Unchecked = identity(self), true // which says nothing alone
	metrics, err = kvconn.NewMetrics(prometheus.NewRegistry())
	must(err)
	r.server, err = kvconn.NewServer(scfg, log, metrics)
	must(err)
	ln, err := r.chaos.Listen("")
	must(err)
	r.addr = ln.Addr().String()
	ctx, stop := context.WithCancel(t.Context())
	r.stop = stop
	go func() {
		if err := r.server.Serve(ctx, ln, r); err != nil {
			t.Error(err)
		}
	}()
	r.Service = decode.New(dcfg, r.recv, r.cache, r.pool, log)
	return r
}

func (r *rig) OnTicket(ctx context.Context, o *kvconn.Outgoing) { r.answer(ctx, o) }

// serve is a good prefill.
func (r *rig) serve(ctx context.Context, o *kvconn.Outgoing) {
	t := o.Ticket()
	src := &source{seed: t.Tokens[0]}
	if o.Accept(src) != nil {
		return
	}
	r.push(o)
	o.Commit(r.draft(o))
	<-o.Done()
}

func (r *rig) push(o *kvconn.Outgoing) {
	all := make([]int, len(o.Ticket().Dest))
	for i := range all {
		all[i] = i
	}
	for layer := range layout.Layers() {
		o.Push(layer, all)
	}
}

// draft is what a good prefill drew.
func (r *rig) draft(o *kvconn.Outgoing) []byte {
	d := &handoff.Draft{Cached: 1, QueueUS: 2000, ComputeUS: 3000}
	if o.Ticket().LeaseID == "" {
		order, err := handoff.ParseOrder(o.Ticket().First)
		if err != nil {
			r.t.Error(err)
			return nil
		}
		d.First = make([]kernels.Sampled, order.N)
		for i := range d.First {
			d.First[i].Token = int32(i)
		}
	}
	b, err := d.Encode()
	if err != nil {
		r.t.Error(err)
	}
	return b
}

func claim(addr string, seed int32, n int) *decode.Claim {
	c := &decode.Claim{Addr: addr, Peer: self, Link: ticket.NewLink(), RequestID: "r", Owner: "r#1/0",
		Order: handoff.Order{N: 2, Logprobs: -1, PromptLogprobs: -1, Of: 1}}
	for i := range n {
		c.Tokens = append(c.Tokens, (seed+int32(i))%vocab)
	}
	return c
}

// fails checks a Fetch's outcome.
func (r *rig) fails(ctx context.Context, c *decode.Claim, want ticket.Outcome) {
	r.t.Helper()
	pre, _, err := r.Fetch(ctx, c)
	var e *decode.Error
	if !errors.As(err, &e) || e.Outcome != want || pre != nil {
		r.t.Errorf("fetch: %+v, %v, want %s", pre, err, want)
	}
}

// clean checks that nothing is held a second later.
func (r *rig) clean() {
	r.t.Helper()
	time.Sleep(time.Second)
	if h := r.cache.Holders(); len(h) > 0 {
		r.t.Errorf("held: %+v", h)
	}
	if l := append(r.recv.Ledger(), r.server.Ledger()...); len(l) > 0 {
		r.t.Errorf("tickets: %+v", l)
	}
	if err := r.cache.Check(); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) close() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.recv.Close(ctx); err != nil {
		r.t.Error(err)
	}
	r.Close()
	r.stop()
}

// bubble runs f on a fresh rig under a fake clock.
func bubble(t *testing.T, change func(*decode.Config, *kvconn.Config), f func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, change)
		f(r)
		r.close()
	})
}
