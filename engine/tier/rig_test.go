package tier

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/shared"
	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/engine/tier/store"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// What levels have is called here as their packages do.
type Eviction = host.Eviction

const (
	LRU, LFU, S3FIFO             = host.LRU, host.LFU, host.S3FIFO
	IOAuto, IOPread              = ssd.IOAuto, ssd.IOPread
	tierHost, tierSSD, tierStore = host.Name, ssd.Name, shared.Name
	page, headerSize             = level.Page, level.HeaderSize
	probeFirst, probeLast        = level.ProbeFirst, level.ProbeLast
	ssdSlots                     = 32 // records of a segment, of the SSD that config makes
)

// testConfig is a Config and its levels'.
type testConfig struct {
	Config
	HostBytes   int64
	Eviction    Eviction
	Dir         string // of an SSD; "": none
	DirBytes    int64
	DirIO       ssd.IO
	DirTimeout  time.Duration
	Store       store.Store // nil: none
	StoreWrites bool
}

// levels makes the levels; files of the SSD have faults in between.
func (c testConfig) levels(f *faults) Config {
	c.Host = host.Config{Bytes: c.HostBytes, Eviction: c.Eviction}
	if c.Dir != "" {
		one := ssd.Config{Dir: c.Dir, Bytes: c.DirBytes, IO: c.DirIO, Timeout: c.DirTimeout}
		if f != nil {
			one.Wrap = f.wrap
		}
		c.Levels = append(c.Levels, one)
	}
	if c.Store != nil {
		c.Levels = append(c.Levels, shared.Config{Store: c.Store, Writes: c.StoreWrites})
	}
	return c.Config
}

// memPool is a pool of plain memory.
type memPool struct {
	layout kvlayout.Layout
	mu     sync.Mutex
	rows   [][]byte   // by layer and block
	sums   [][]uint64 // the same
	blocks int
}

func newMemPool(blocks, blockTokens int) *memPool {
	return newMemPoolOf(kvlayout.Plain(3, 2, 4, blockTokens, "f32"), blocks)
}

func newMemPoolOf(l kvlayout.Layout, blocks int) *memPool {
	layers := l.Resolve()
	p := &memPool{layout: l, blocks: blocks, rows: make([][]byte, l.Layers()*blocks), sums: make([][]uint64, l.Layers()*blocks)}
	for i := range p.rows {
		p.rows[i], p.sums[i] = make([]byte, layers[i/blocks].BlockBytes()), make([]uint64, layers[i/blocks].Heads)
	}
	return p
}

func (p *memPool) Layout() kvlayout.Layout { return p.layout }
func (p *memPool) Blocks() int             { return p.blocks }

func (p *memPool) whole(row, n int) {
	if row != 0 || n != p.layout.BlockTokens {
		panic("tiers move whole blocks")
	}
}

func (p *memPool) Gather(layer int, block int32, row, n int, dst []byte) {
	p.whole(row, n)
	p.mu.Lock()
	defer p.mu.Unlock()
	copy(dst, p.rows[layer*p.blocks+int(block)])
}

func (p *memPool) Scatter(layer int, block int32, row, n int, src []byte) {
	p.whole(row, n)
	p.mu.Lock()
	defer p.mu.Unlock()
	copy(p.rows[layer*p.blocks+int(block)], src)
}

func (p *memPool) Digest(layer int, block int32, dst []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	copy(dst, p.sums[layer*p.blocks+int(block)])
}

func (p *memPool) SetDigest(layer int, block int32, filled int, digest []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	copy(p.sums[layer*p.blocks+int(block)], digest)
}

func (p *memPool) CopyBlock(dst, src int32, firstPos, n int) { panic("not of tiers") }

// rig is a cache with tiers under it, and prompts whose rows are made from
// their tokens, as a model's are.
type rig struct {
	t     *testing.T
	pool  *memPool
	dev   *fakeDevice // nil: the pool is host memory
	cache *kvcache.Cache
	tiers *Tiers
	reg   *prometheus.Registry
	prio  int8 // of what is computed
	dir   string
	faults
	levelsOf
}

// levelsOf are the levels as they are.
type levelsOf struct {
	host  *host.Memory
	disk  *ssd.Disk      // nil: none
	store *shared.Shared // nil: none
}

func levelsIn(t *Tiers) (of levelsOf) {
	of.host = t.host
	for _, l := range t.below {
		switch one := l.Level.(type) {
		case *ssd.Disk:
			of.disk = one
		case *shared.Shared:
			of.store = one
		}
	}
	return of
}

// lane is what is under way to a level.
func (t *Tiers) lane(name string) *lane {
	for _, l := range t.below {
		if l.Name() == name {
			return l
		}
	}
	return nil
}

const identity = "model and numerics"

// patience bounds each wait for what must come: more than a starved machine takes,
// and less than the limit of go test, which would not say what hung.
const patience = 2 * time.Minute

// soon waits until f holds.
func soon(t testing.TB, what string, f func() bool) {
	t.Helper()
	for by := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(by) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// come waits for a channel's value, or its end.
func come[T any](t testing.TB, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		t.Errorf("not within %v: %s", patience, what)
	}
	return v
}

func config(dir string) testConfig {
	c := testConfig{Config: Config{Identity: identity, LoadTimeout: patience, LoadBlocks: 1 << 20}, HostBytes: 64 << 10, Dir: dir, DirBytes: 512 << 10, DirIO: ssdIO, DirTimeout: patience}
	if dir == "" {
		c.DirBytes = 0
	}
	return c
}

// newRig makes a pool of 64 blocks; a record of one unit has one page.
func newRig(t *testing.T, cfg testConfig) *rig { return newRigOf(t, cfg, 64, 16) }

func newRigOf(t *testing.T, cfg testConfig, blocks, blockTokens int) *rig {
	t.Helper()
	return newRigIn(t, cfg, newMemPool(blocks, blockTokens))
}

func newRigIn(t *testing.T, cfg testConfig, p *memPool) *rig {
	t.Helper()
	r := &rig{t: t, pool: p, reg: prometheus.NewRegistry(), dir: cfg.Dir}
	blocks, blockTokens := p.blocks, p.layout.BlockTokens
	unit := max(blockTokens, kvcache.Grain) / blockTokens
	var err error
	var pool Backend = r.pool
	if bulk {
		r.dev = &fakeDevice{fakePool: r.pool}
		pool = r.dev
	}
	if r.tiers, err = New(t.Context(), cfg.levels(&r.faults), pool, unit, slog.New(slog.DiscardHandler), r.reg); err != nil {
		t.Fatal(err)
	}
	r.levelsOf = levelsIn(r.tiers)
	index := kvcache.Config{Blocks: blocks, BlockTokens: blockTokens, Fingerprint: identity, Listener: r.tiers}
	r.tiers.Tune(&index)
	r.cache, err = kvcache.New(index)
	if err != nil {
		t.Fatal(err)
	}
	r.tiers.Attach(r.cache)
	t.Cleanup(func() { r.close() })
	return r
}

func (r *rig) close() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := r.tiers.Close(ctx); err != nil {
		r.t.Error(err)
	}
	if err := r.cache.Check(); err != nil {
		r.t.Error(err)
	}
	if held := r.cache.Holders(); len(held) > 0 {
		r.t.Errorf("still held: %+v", held)
	}
	r.tiers.mu.Lock()
	defer r.tiers.mu.Unlock()
	if n := r.tiers.taken; n != 0 {
		r.t.Errorf("loads that are over have %d blocks of what loads may have", n)
	}
}

// prompt n has tokens of its own after a part that it shares with n/4, n/16, …
func prompt(n, length int) []int32 {
	tokens := make([]int32, length)
	for i := range tokens {
		tokens[i] = int32(n>>(2*max(0, 3-i/32)))<<10 | int32(i)
	}
	return tokens
}

// fill writes a block's rows as a model would.
func (r *rig) fill(layer int, block int32, tokens []int32, pos int) {
	l := &r.pool.layout.Resolve()[layer]
	rows := make([]byte, l.BlockBytes())
	seed := uint64(layer)
	for _, t := range tokens[:pos+l.BlockTokens] {
		seed = seed*0x9e3779b97f4a7c15 + uint64(t) + 1
	}
	gen := rand.New(rand.NewPCG(seed, 1))
	for i := 0; i < len(rows); i += 8 {
		binary.LittleEndian.PutUint64(rows[i:], gen.Uint64())
	}
	sums := make([]uint64, l.Heads)
	kernels.DigestRows(l, pos, l.BlockTokens, rows, sums)
	r.pool.Scatter(layer, block, 0, l.BlockTokens, rows)
	r.pool.SetDigest(layer, block, l.BlockTokens, sums)
}

// compute runs a prompt as the engine would: the blocks that the index has,
// and the rest made. It returns how many tokens the index had.
func (r *rig) compute(tokens []int32, salt, owner string) (int, error) {
	chain := r.cache.NewChain(salt)
	chain.Priority = r.prio
	chain.Extend(tokens)
	blocks := len(tokens) / r.cache.BlockTokens()
	table, hit, err := r.cache.Reserve(&chain, len(tokens), blocks, 0, time.Now(), owner)
	if err != nil {
		return 0, err
	}
	defer r.cache.ReleaseAll(owner)
	if err := r.right(table[:hit/r.cache.BlockTokens()], tokens); err != nil {
		return 0, err
	}
	for i := hit / r.cache.BlockTokens(); i < blocks; i++ {
		for layer := range r.pool.layout.Layers() {
			r.fill(layer, table[i], tokens, i*r.cache.BlockTokens())
		}
	}
	r.cache.InsertChain(&chain, tokens, table, hit)
	return hit, nil
}

// right says whether blocks have the rows that tokens make.
func (r *rig) right(table, tokens []int32) error {
	if len(table) == 0 {
		return nil
	}
	want := rig{pool: newMemPoolOf(r.pool.layout, 1)}
	for i, id := range table {
		for layer, l := range r.pool.layout.Resolve() {
			a, b := make([]byte, l.BlockBytes()), make([]byte, l.BlockBytes())
			want.fill(layer, 0, tokens, i*l.BlockTokens)
			want.pool.Gather(layer, 0, 0, l.BlockTokens, a)
			r.pool.Gather(layer, id, 0, l.BlockTokens, b)
			if !slices.Equal(a, b) {
				return fmt.Errorf("block %d of the prompt has wrong rows in layer %d", i, layer)
			}
		}
	}
	return nil
}

// run computes a prompt that the index must have n tokens of.
func (r *rig) run(tokens []int32, n int) {
	r.t.Helper()
	if hit, err := r.compute(tokens, "", "run"); err != nil || hit != n {
		r.t.Fatalf("%d of %d tokens were there, want %d: %v", hit, len(tokens), n, err)
	}
}

// load loads a prompt, n tokens of it.
func (r *rig) load(tokens []int32, n int) {
	r.t.Helper()
	if got := r.tiers.Load(r.t.Context(), tokens, "", len(tokens)); got != n {
		r.t.Fatalf("%d tokens loaded, want %d", got, n)
	}
}

// quiet waits until nothing is on its way into a tier, or out of one.
func (r *rig) quiet() {
	r.t.Helper()
	soon(r.t, "no unit waits", func() bool {
		return r.tiers.unsaved.Load() == 0 && !slices.ContainsFunc(r.tiers.below, func(l *lane) bool { return len(l.reads) > 0 })
	})
}

// sink brings what the pool has into every tier under Back, as filling the pool
// slowly and ending the worker do. The other policies need no help.
func (r *rig) sink() {
	r.t.Helper()
	if r.tiers.cfg.Write != Back {
		return
	}
	for n := 0; ; n++ {
		if _, err := r.cache.Alloc(1, "storm"); err != nil {
			break
		}
		if n%8 == 0 {
			r.quiet()
		}
	}
	r.cache.ReleaseAll("storm")
	r.quiet()
	if r.disk != nil {
		r.tiers.writeAll()
		r.quiet()
	}
}

// saved waits like quiet; a tier must then have n units.
func (r *rig) saved(tier string, n int) {
	r.t.Helper()
	r.quiet()
	for _, s := range r.tiers.Stats() {
		if s.Tier == tier && s.Units != n {
			r.t.Fatalf("%+v, want %d units in %s", r.tiers.Stats(), n, tier)
		}
	}
}

// value reads a counter.
func (r *rig) value(name, label string) float64 {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "xpyd_kvtier_"+name && (label == "" || m.GetLabel()[0].GetValue() == label) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// took loads a prompt and checks that n tokens came after exactly so long, in a bubble.
func (r *rig) took(tokens []int32, n int, want time.Duration) {
	r.t.Helper()
	began := time.Now()
	r.load(tokens, n)
	if d := time.Since(began); d != want {
		r.t.Errorf("%d tokens after %v, want %v", n, d, want)
	}
}

// record is a buffer for one record, aligned as O_DIRECT wants it.
func record() []byte {
	b := make([]byte, 2*page)
	off := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (page - 1)
	return b[off : off+page : off+page]
}
