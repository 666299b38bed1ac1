package kerneltest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/links"
	"github.com/xpyd/xpyd/kvlayout"
)

// FakeGPU is a pool on a fake device: memory that other processes of this user open by
// its handle. Another goroutine carries pushes out, later and slowly: half of every block
// and then the other half, so that a block believed or reused too early is torn. A killed
// process stops in the midst of a push, as a GPU's context does; so does a stopped one,
// where a GPU goes on.
//
// Like a device's kernels it wants all layers alike. It implements kernels.Exporter,
// kernels.PeerOpener, kernels.HostMover and, by fakeNCCL, kernels.Linker.
type FakeGPU struct {
	// Delay is how long a push takes. Set it before the first one.
	Delay time.Duration
	// Refuse, when set, is OpenPeer's error.
	Refuse error
	// NoLinks, when set, is why there is no NCCL.
	NoLinks error

	layout      kvlayout.Layout
	layers      []kvlayout.Layer
	blocks      int
	rows, flags *memfd.Memory
	guest       bool   // flags are another rank's
	view        device // of rows

	moves             sync.WaitGroup // to and from host memory, under way
	gathers, scatters lane

	stop  atomic.Pointer[stop]
	tears atomic.Bool
	// aborts is closed when links may end, stall when their transfers may; nil: at once.
	aborts, stall atomic.Pointer[chan struct{}]
	broken        atomic.Pointer[error] // of transfers
	nccl          *fakeNCCL
	links         *links.Group

	mu    sync.Mutex
	busy  map[int32]int           // source blocks of pushes under way
	flips map[kernels.Landed]bool // Layer and Block only: spoiled before the next Verify
}

// device is a pool's memory: rows of each layer's blocks, then a digest a head,
// then how many rows those cover.
type device struct {
	kvlayout.Rows
	layers, blocks int
	mem            []byte
}

func (d device) size() int { return d.layers * d.blocks * (d.BlockBytes() + d.DigestBytes() + 8) }

func (d device) block(layer int, block int32) []byte {
	size := d.BlockBytes()
	return d.mem[(layer*d.blocks+int(block))*size:][:size:size]
}

// note is a block's digests and then its fill, 8 bytes each.
func (d device) note(layer int, block int32) []byte {
	size := d.DigestBytes() + 8
	return d.mem[d.layers*d.blocks*d.BlockBytes()+(layer*d.blocks+int(block))*size:][:size:size]
}

// has reports whether the pool has a layer and a block.
func (d device) has(layer int, block int32) bool {
	return layer >= 0 && layer < d.layers && block >= 0 && int(block) < d.blocks
}

// NewFakeGPU makes a pool of empty blocks. Close it.
func NewFakeGPU(l kvlayout.Layout, blocks int) (*FakeGPU, error) { return newFakeGPU(l, blocks, nil) }

// NewFakeRanks makes the pools of so many ranks of a layout, with one file of flags. Close the
// first of them last.
func NewFakeRanks(l kvlayout.Layout, ranks, blocks int) (list []*FakeGPU, err error) {
	parts, err := l.Ranks(ranks)
	if err != nil {
		return nil, fmt.Errorf("fake GPU: %w", err)
	}
	var flags *memfd.Memory
	for _, part := range parts {
		g, err := newFakeGPU(part, blocks, flags)
		if err != nil {
			for _, g := range slices.Backward(list) {
				err = errors.Join(err, g.Close())
			}
			return nil, err
		}
		flags, list = g.flags, append(list, g)
	}
	return list, nil
}

// newFakeGPU makes a pool with these flags, or with its own.
func newFakeGPU(l kvlayout.Layout, blocks int, flags *memfd.Memory) (*FakeGPU, error) {
	rows, ok := l.Uniform()
	if err := l.Validate(); err != nil {
		return nil, fmt.Errorf("fake GPU: %w", err)
	}
	if !ok {
		return nil, fmt.Errorf("fake GPU: a pool of %v", l)
	}
	g := &FakeGPU{layout: l, layers: l.Resolve(), blocks: blocks, busy: map[int32]int{}, flips: map[kernels.Landed]bool{}}
	g.view = device{Rows: rows, layers: len(g.layers), blocks: blocks}
	g.nccl = newFakeNCCL(g)
	g.links = links.New(g.nccl)
	var err error
	if g.rows, err = memfd.New("xpyd-fake-gpu", g.view.size()); err != nil {
		return nil, err
	}
	g.view.mem = g.rows.Bytes
	if g.flags, g.guest = flags, flags != nil; g.guest {
		return g, nil
	}
	if g.flags, err = memfd.New("xpyd-fake-flags", kernels.FlagLines*kernels.FlagStride); err != nil {
		return nil, errors.Join(err, g.rows.Close())
	}
	return g, nil
}

// Close frees the pool. Peers that have it open keep the memory.
func (g *FakeGPU) Close() error {
	g.moves.Wait()
	if g.guest {
		return g.rows.Close()
	}
	return errors.Join(g.rows.Close(), g.flags.Close())
}

// Heads is how many the pool has.
func (g *FakeGPU) Heads() int { return g.view.Heads }

// Rows is the memory of all rows: blocks of a layer one behind the other, layer
// after layer.
func (g *FakeGPU) Rows() []byte { return g.view.mem[:len(g.layers)*g.blocks*g.view.BlockBytes()] }

// Append writes a block's rows from 0 on, and their digests, as a step does.
func (g *FakeGPU) Append(layer int, block int32, firstPos, rows int, packed []byte) {
	g.Scatter(layer, block, 0, rows, packed)
	sums := make([]uint64, g.view.Heads)
	kernels.DigestRows(&g.layers[layer], firstPos, rows, packed, sums)
	g.SetDigest(layer, block, rows, sums)
}

// Busy reports whether a push under way reads the block.
func (g *FakeGPU) Busy(block int32) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.busy[block] > 0
}

// rot flips the bit that Spoil asked for, if any.
func (g *FakeGPU) rot(layer int, block int32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if at := (kernels.Landed{Layer: layer, Block: block}); g.flips[at] {
		delete(g.flips, at)
		g.view.block(layer, block)[0] ^= 1
	}
}

// stop is where a push or a move waits half-way.
type stop struct{ begun, on chan struct{} }

// Stop has the next push or move of this device wait half-way: begun is closed when it
// does, and it goes on after the first call of on.
func (g *FakeGPU) Stop() (begun <-chan struct{}, on func()) {
	s := &stop{make(chan struct{}), make(chan struct{})}
	g.stop.Store(s)
	return s.begun, sync.OnceFunc(func() { close(s.on) })
}

// halfway is between the two halves of a push or move.
func (g *FakeGPU) halfway() {
	if s := g.stop.Swap(nil); s != nil {
		close(s.begun)
		<-s.on
	}
}

// Spoil flips a bit of a block: of the receiver's once it has landed, before it
// is verified; of the sender's when it is pushed, long after its append.
func (g *FakeGPU) Spoil(layer int, block int32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.flips[kernels.Landed{Layer: layer, Block: block}] = true
}

// Gather implements kernels.Pool.
func (g *FakeGPU) Gather(layer int, block int32, row, n int, dst []byte) {
	g.view.Copy(dst, n, 0, g.view.block(layer, block), g.view.BlockTokens, row, n)
}

// Scatter implements kernels.Pool.
func (g *FakeGPU) Scatter(layer int, block int32, row, n int, src []byte) {
	g.view.Copy(g.view.block(layer, block), g.view.BlockTokens, row, src, n, 0, n)
}

// Digest implements kernels.Pool.
func (g *FakeGPU) Digest(layer int, block int32, dst []uint64) {
	note := g.view.note(layer, block)
	for h := range g.view.Heads {
		dst[h] = binary.LittleEndian.Uint64(note[8*h:])
	}
}

// SetDigest implements kernels.Pool.
func (g *FakeGPU) SetDigest(layer int, block int32, filled int, digest []uint64) {
	note := g.view.note(layer, block)
	for h, d := range digest {
		binary.LittleEndian.PutUint64(note[8*h:], d)
	}
	setFilled(note[g.view.DigestBytes():], filled)
}

func setFilled(note []byte, rows int) { binary.LittleEndian.PutUint64(note, uint64(rows)) }

// CopyBlock implements kernels.Pool.
func (g *FakeGPU) CopyBlock(dst, src int32, firstPos, n int) {
	for layer := range g.layers {
		rows := make([]byte, g.view.PackedBytes(n))
		g.Gather(layer, src, 0, n, rows)
		g.Append(layer, dst, firstPos, n, rows)
	}
}

// handleOf is a handle: process and descriptor, for /proc, and the shape.
func (g *FakeGPU) handleOf() []byte {
	return fmt.Appendf(nil, "fake %d %d %d %s", os.Getpid(), g.rows.FD, g.blocks, g.layout.Encode())
}

// Export implements kernels.Exporter.
func (g *FakeGPU) Export() (kernels.Export, error) {
	return kernels.Export{Handle: g.handleOf(), FD: g.flags.FD, Bytes: g.flags.Size}, nil
}

func flagOf(flags []byte, line int) *uint64 {
	return (*uint64)(unsafe.Pointer(&flags[line*kernels.FlagStride]))
}

// Flag implements kernels.Exporter.
func (g *FakeGPU) Flag(line int) uint64 { return atomic.LoadUint64(flagOf(g.flags.Bytes, line)) }

// AwaitFlag implements kernels.Exporter.
func (g *FakeGPU) AwaitFlag(ctx context.Context, line int, value uint64) error {
	for g.Flag(line) < value {
		select {
		case <-ctx.Done():
			return fmt.Errorf("flag %d is %d, want %d: %w", line, g.Flag(line), value, kernels.ErrLate)
		case <-time.After(50 * time.Microsecond):
		}
	}
	return nil
}

// ClearFlag implements kernels.Exporter.
func (g *FakeGPU) ClearFlag(line int) error {
	atomic.StoreUint64(flagOf(g.flags.Bytes, line), 0)
	return nil
}

// Verify implements kernels.Exporter.
func (g *FakeGPU) Verify(ctx context.Context, landed []kernels.Landed) ([]bool, error) {
	good := make([]bool, len(landed))
	sums, stored := make([]uint64, g.view.Heads), make([]uint64, g.view.Heads)
	for i, b := range landed {
		if !g.view.has(b.Layer, b.Block) || b.Rows < 1 || b.Rows > g.view.BlockTokens {
			return nil, fmt.Errorf("verify %+v: out of range", b)
		}
		g.rot(b.Layer, b.Block)
		rows := make([]byte, g.view.PackedBytes(b.Rows))
		g.Gather(b.Layer, b.Block, 0, b.Rows, rows)
		kernels.DigestRows(&g.layers[b.Layer], b.FirstPos, b.Rows, rows, sums)
		g.Digest(b.Layer, b.Block, stored)
		filled := binary.LittleEndian.Uint64(g.view.note(b.Layer, b.Block)[g.view.DigestBytes():])
		good[i] = slices.Equal(sums, stored) && filled == uint64(b.Rows)
	}
	return good, nil
}

// OpenPeer implements kernels.PeerOpener.
func (g *FakeGPU) OpenPeer(handle, flags []byte) (kernels.Peer, error) {
	if g.Refuse != nil {
		return nil, g.Refuse
	}
	if len(handle) > kernels.MaxHandle {
		return nil, errors.New("fake GPU: handle too long")
	}
	var pid, fd, blocks int
	var shape string
	if n, err := fmt.Sscanf(string(handle), "fake %d %d %d %s", &pid, &fd, &blocks, &shape); n != 4 || err != nil {
		return nil, fmt.Errorf("fake GPU: handle %q", handle)
	}
	l, err := kvlayout.Decode([]byte(shape))
	if err != nil {
		return nil, fmt.Errorf("fake GPU: handle %q: %w", handle, err)
	}
	theirs, ok := l.Uniform()
	if !ok || !refills(g.layout, l) || len(flags) < kernels.FlagLines*kernels.FlagStride || blocks < 1 {
		return nil, fmt.Errorf("fake GPU: the peer's pool %q is not like ours", handle)
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", pid, fd), os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", kernels.ErrNoPeerAccess, err)
	}
	defer f.Close()
	p := &fakePeer{g: g, flags: flags, to: device{Rows: theirs, layers: l.Layers(), blocks: blocks}, pushes: make(chan fakePush, 256)}
	if st, err := f.Stat(); err != nil || st.Size() < int64(p.to.size()) {
		return nil, fmt.Errorf("fake GPU: the peer's memory is too short: %v", err)
	}
	if p.to.mem, err = unix.Mmap(int(f.Fd()), 0, p.to.size(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("fake GPU: map: %w", err)
	}
	p.stream.Go(p.pushAll)
	return p, nil
}

// fakePeer is an opened pool; its stream is a goroutine.
type fakePeer struct {
	g      *FakeGPU
	flags  []byte
	to     device // mem is mapped until Close
	pushes chan fakePush
	stream sync.WaitGroup

	mu     sync.Mutex
	closed bool
	last   *fakePending // the newest push; nil: there was none
}

type fakePush struct {
	kernels.Push
	over *fakePending
}

// Push implements kernels.Peer.
func (p *fakePeer) Push(push *kernels.Push) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errors.New("fake GPU: push to a closed peer")
	}
	own, theirs := p.g.view, p.to
	if err := p.checkCut(push); err != nil {
		return err
	}
	if len(push.Refills) > 0 && own.Rows == theirs.Rows {
		return errors.New("fake GPU: refill of a peer of our own shape")
	} else if len(push.Refills) > 0 {
		if err := CheckRefills(push, own.Rows, theirs.Rows, own.layers, own.blocks, theirs.blocks); err != nil {
			return fmt.Errorf("fake GPU: %w", err)
		}
	} else if push.Cut == (kernels.Cut{}) && own.Rows != theirs.Rows {
		return fmt.Errorf("fake GPU: whole blocks of %+v into %+v", own.Rows, theirs.Rows)
	}
	for _, b := range push.Blocks {
		if !own.has(push.FirstLayer, b.Src) || !theirs.has(push.FirstLayer+push.Layers-1, b.Dst) {
			return fmt.Errorf("fake GPU: push of layer %d, blocks %+v: out of range", push.FirstLayer, b)
		}
	}
	if push.Line < 0 || push.Line >= kernels.FlagLines {
		return fmt.Errorf("fake GPU: line %d", push.Line)
	}
	f := fakePush{*push, &fakePending{make(chan struct{})}}
	f.Blocks, f.Sources, f.Refills = slices.Clone(push.Blocks), slices.Clone(push.Sources), slices.Clone(push.Refills)
	p.g.use(f.sources(), 1)
	p.last = f.over
	p.pushes <- f
	return nil
}

// sources are the blocks of ours that the push reads.
func (f *fakePush) sources() (blocks []int32) {
	for _, b := range f.Blocks {
		blocks = append(blocks, b.Src)
	}
	for _, s := range f.Sources {
		blocks = append(blocks, s.Block)
	}
	return blocks
}

func (g *FakeGPU) use(blocks []int32, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, b := range blocks {
		if g.busy[b] += n; g.busy[b] == 0 {
			delete(g.busy, b)
		}
	}
}

// pushAll carries pushes out, one after the other.
func (p *fakePeer) pushAll() {
	for f := range p.pushes {
		for layer := f.FirstLayer; layer < f.FirstLayer+f.Layers; layer++ {
			for _, b := range f.sources() {
				p.g.rot(layer, b)
			}
		}
		time.Sleep(p.g.Delay / 2)
		f.eachBlock(func(layer int, b kernels.BlockPair) { p.copyHalf(&f, layer, b, 0) })
		p.refill(&f, 0)
		p.g.halfway()
		time.Sleep(p.g.Delay / 2)
		f.eachBlock(func(layer int, b kernels.BlockPair) {
			p.copyHalf(&f, layer, b, 1)
			p.copyNote(&f, layer, b)
		})
		p.refill(&f, 1)
		p.seal(&f)
		if f.Value != 0 {
			atomic.StoreUint64(flagOf(p.flags, f.Line), f.Value)
		}
		p.g.use(f.sources(), -1)
		close(f.over.done)
	}
}

// checkCut returns what is wrong with the heads of a push.
func (p *fakePeer) checkCut(push *kernels.Push) error {
	own, theirs, c := &p.g.view, &p.to, push.Cut
	if c == (kernels.Cut{}) {
		if own.Heads != theirs.Heads {
			return fmt.Errorf("fake GPU: push of all of %d heads to %d", own.Heads, theirs.Heads)
		}
		return nil
	}
	if c.Count < 1 || c.From < 0 || c.To < 0 || c.From > own.Heads-c.Count || c.To > theirs.Heads-c.Count {
		return fmt.Errorf("fake GPU: push of heads %+v of %d to %d", c, own.Heads, theirs.Heads)
	}
	if len(push.Refills) == 0 && (own.BlockTokens != theirs.BlockTokens || own.DType != theirs.DType) {
		return fmt.Errorf("fake GPU: blocks of %d %s into %d %s", own.BlockTokens, own.DType, theirs.BlockTokens, theirs.DType)
	}
	return nil
}

// copyHalf copies one half of a block or, of a cut one, the rows of one plane.
func (p *fakePeer) copyHalf(f *fakePush, layer int, b kernels.BlockPair, which int) {
	src, dst := p.g.view.block(layer, b.Src), p.to.block(layer, b.Dst)
	if f.Cut == (kernels.Cut{}) {
		half := len(src) / 2
		if which == 0 {
			copy(dst[:half], src)
		} else {
			copy(dst[half:], src[half:])
		}
		return
	}
	for h := range f.Cut.Count {
		for plane := which; plane < p.to.Planes; plane += 2 {
			rows, scales := p.g.view.Part(src, p.to.BlockTokens, plane, f.Cut.From+h)
			toRows, toScales := p.to.Part(dst, p.to.BlockTokens, plane, f.Cut.To+h)
			copy(toRows, rows)
			copy(toScales, scales)
		}
	}
}

// copyNote copies the digests of a block's heads, and how many rows they cover.
func (p *fakePeer) copyNote(f *fakePush, layer int, b kernels.BlockPair) {
	from, to, c := p.g.view.note(layer, b.Src), p.to.note(layer, b.Dst), f.Cut.Or(p.to.Heads)
	copy(to[8*c.To:8*(c.To+c.Count)], from[8*c.From:])
	copy(to[p.to.DigestBytes():], from[p.g.view.DigestBytes():])
}

// eachBlock calls do for the whole blocks of a push, layer by layer.
func (f *fakePush) eachBlock(do func(layer int, b kernels.BlockPair)) {
	for layer := f.FirstLayer; layer < f.FirstLayer+f.Layers; layer++ {
		for _, b := range f.Blocks {
			do(layer, b)
		}
	}
}

// Drain implements kernels.Peer.
func (p *fakePeer) Drain(ctx context.Context) error {
	p.mu.Lock()
	last := p.last
	p.mu.Unlock()
	return last.Wait(ctx)
}

// Close implements kernels.Peer.
func (p *fakePeer) Close(ctx context.Context) error {
	p.mu.Lock()
	first := !p.closed
	p.closed = true
	p.mu.Unlock()
	if first {
		close(p.pushes)
	}
	if err := p.Drain(ctx); err != nil {
		return err
	}
	p.stream.Wait()
	if p.to.mem == nil {
		return nil
	}
	err := unix.Munmap(p.to.mem)
	p.to.mem = nil
	return err
}

var (
	_ kernels.Exporter   = (*FakeGPU)(nil)
	_ kernels.PeerOpener = (*FakeGPU)(nil)
	_ kernels.HostMover  = (*FakeGPU)(nil)
)
