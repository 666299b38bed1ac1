package kvconntest

import (
	"bytes"
	"context"
	"sync"
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// GPU is one end's pool in the memory of a fake device, which tests can look at.
type GPU interface {
	Layout() kvlayout.Layout // of memory of its own
	// Shared describes the pool, of which RankRows is the memory of a rank.
	Shared() *kvconn.Shared
	RankRows(rank int) []byte
	// Append writes a block's rows from 0 on, with their digests, as a step does.
	Append(layer int, block int32, firstPos, rows int, packed []byte)
	VerifyPushed(ctx context.Context, layer int, blocks []kvconn.PushedBlock) (good []bool, err error)
	Busy(block int32) bool        // a push under way reads it
	Spoil(layer int, block int32) // flips a bit when it has landed, before it is verified
}

// GPUs are the two ends' pools, of ReceiverBlocks and SenderBlocks. In the suite the
// receiver has the Plain layout; the sender's blocks may have another size. A case that
// changes a layout does not use them.
type GPUs struct{ Receiver, Sender GPU }

// Sizes of the two pools of a world.
const (
	ReceiverBlocks = 256
	SenderBlocks   = 1024
)

// transport makes the transport under test, and notes its pools.
func (f Factory) transport(t testing.TB) (g Factory, tr kvconn.Transport, addr string) {
	if f.Device == nil {
		tr, addr = f.New(t)
		return f, tr, addr
	}
	tr, f.gpus = f.Device(t)
	return f, tr, ""
}

// World makes one world of the factory, for a transport's own cases that wait for no
// deadline.
func (f Factory) World(t testing.TB, tune func(r, s *kvconn.Config)) *World {
	t.Helper()
	f.Shrink, f.stretch = max(f.Shrink, 1), 1
	f, tr, addr := f.transport(t)
	return newWorld(t, tr, addr, f, f.patient(tune))
}

// shares tells whether the sender writes into the receiver's blocks.
func (f Factory) shares() bool { return !f.private && (f.Memory != nil || f.Device != nil) }

// ShareGPU makes the device's memory the pool's.
func (p *Pool) ShareGPU(g GPU) *kvconn.Shared {
	d := g.Shared()
	p.gpu, p.mem, p.layers, p.shared = g, nil, d.Layers, true
	p.ranks = nil
	layouts, err := p.layout.Ranks(max(d.Ranks, 1))
	if err != nil {
		panic(err) // the device has made them
	}
	for _, l := range layouts {
		p.ranks = append(p.ranks, l.Resolve())
	}
	return d
}

// VerifyPushed implements kvconn.DeviceSink.
func (s *poolSink) VerifyPushed(ctx context.Context, layer int, blocks []kvconn.PushedBlock) ([]bool, error) {
	good, err := s.p.gpu.VerifyPushed(ctx, layer, blocks)
	if err != nil {
		return nil, err
	}
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	for i, b := range blocks {
		if !good[i] {
			continue
		}
		s.p.stores++
		s.p.pushed++
		s.p.held(s, b.Block)
		s.p.stored[poolKey{layer, b.Block}] = true
	}
	return good, nil
}

// gpuBlocks hands out the blocks of the sender's device.
type gpuBlocks struct {
	gpu GPU

	mu   sync.Mutex
	free []int32
}

func newGPUBlocks(g GPU) *gpuBlocks {
	b := &gpuBlocks{gpu: g}
	for n := range int32(SenderBlocks) {
		b.free = append(b.free, n)
	}
	return b
}

func (b *gpuBlocks) acquire() (int32, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.free) == 0 {
		return 0, false
	}
	n := b.free[0]
	b.free = b.free[1:]
	return n, true
}

// release takes a block back and overwrites it, as another prompt would.
func (b *gpuBlocks) release(l kvlayout.Layout, block int32) {
	for layer, r := range l.Resolve() {
		b.gpu.Append(layer, block, 0, l.BlockTokens, bytes.Repeat([]byte{byte(block)}, r.BlockBytes()))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.free = append(b.free, block)
}

// Block implements kvconn.BlockSource for worlds with GPUs, whose pool gets the rows
// when they are asked for.
func (s *Source) Block(layer, index, firstPos, rows int) (int32, bool) {
	return s.appended(layer, index, firstPos, rows, true)
}

// Spans implements kvconn.SpanSource for worlds with GPUs, whose pool gets the rows of a
// block when some of them are first asked for.
func (s *Source) Spans(layer, firstPos, rows int, to []kvlayout.Held) ([]kvlayout.Held, bool) {
	bt := s.Layout.BlockTokens
	for i := firstPos / bt; i*bt < firstPos+rows; i++ {
		n := min(bt, s.positions-i*bt)
		block, ok := s.appended(layer, i, i*bt, n, false) // a step appends once
		if !ok {
			return to, false
		}
		to = append(to, kvlayout.Held{Block: block, FirstPos: i * bt, Rows: n})
	}
	return to, true
}

// appended returns the device's block for an index, and appends the rows of the layer if
// they are not there yet, or again.
func (s *Source) appended(layer, index, firstPos, rows int, again bool) (block int32, ok bool) {
	if s.pool == nil {
		return 0, false
	}
	l := layerOf(s.Layout, layer)
	packed := make([]byte, l.PackedBytes(rows))
	if err := s.Load(layer, index, firstPos, rows, packed, make([]uint64, l.Heads)); err != nil {
		return 0, false // Load will be asked, and say so
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if block, ok = s.blocks[index]; !ok {
		if block, ok = s.pool.acquire(); !ok {
			return 0, false
		}
		s.blocks[index] = block
	}
	if at := (poolKey{layer, block}); again || !s.rows[at] {
		s.rows[at] = true
		s.pool.gpu.Append(layer, block, firstPos, rows, packed)
	}
	return block, true
}

// giveBack frees the device's blocks; needs mu. To free one that a push still reads is
// misuse.
func (s *Source) giveBack() {
	for index, block := range s.blocks {
		if s.pool.gpu.Busy(block) {
			s.misuse++
		}
		s.pool.release(s.Layout, block)
		delete(s.blocks, index)
	}
}
