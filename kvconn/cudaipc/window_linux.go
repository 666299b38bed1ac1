package cudaipc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/local"
	"github.com/xpyd/xpyd/kvlayout"
)

// Map implements kvconn.SharedConn: it opens the peer's pool on our devices.
func (c *conn) Map(s *kvconn.Shared, b []byte) (_ kvconn.Window, err error) {
	g, err := decodeGrant(b)
	if err == nil {
		err = g.describes(s, c.d.heads)
	}
	var pairs []kvlayout.Pair
	if err == nil {
		pairs, err = kvlayout.Pairs(c.d.heads, len(c.d.openers), len(g.ranks))
	}
	if err == nil && len(pairs) > int(g.Lines) {
		err = fmt.Errorf("%w: %d lines of the flags for %d pairs of ranks", errGrant, g.Lines, len(pairs))
	}
	if err != nil {
		return nil, err
	}
	t, err := c.Take()
	if err != nil {
		return nil, err
	}
	flags, err := t.MapTimes(g.FlagBytes, len(pairs))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cudaipc: flags: %w", err), t.End())
	}
	w := &window{lent: t, flags: flags}
	busy := map[int]int{} // targets of each rank of ours
	for _, p := range pairs {
		busy[p.From]++
	}
	for i, p := range pairs {
		peer, err := c.d.openers[p.From].OpenPeer(g.ranks[p.To].handle, flags[i])
		if err != nil {
			return nil, errors.Join(w.named(p, g, err), w.Close())
		}
		cut := kernels.Cut{From: p.FromHead, To: p.ToHead, Count: p.Heads}
		_, own := share(c.d.heads, p.From, len(c.d.openers))
		if whole := p.Heads == own && p.Heads == int(g.ranks[p.To].Heads); whole {
			cut = kernels.Cut{}
		}
		w.to = append(w.to, target{peer, int(g.Line) + i, cut, g.ranks[p.To].BlockBytes, busy[p.From]})
	}
	for line := int(g.Line) + len(pairs); line < int(g.Line+g.Lines); line++ {
		kernels.SetFlag(flags[0], line, kernels.FlagUnused)
	}
	if !c.d.refill {
		return plain{w}, nil
	}
	return w, nil
}

// named says which ranks an error is of, where there are several.
func (w *window) named(p kvlayout.Pair, g *grant, err error) error {
	if len(w.flags) == 1 {
		return err
	}
	return fmt.Errorf("rank %d to rank %d of %d: %w", p.From, p.To, len(g.ranks), err)
}

// plain is a window without Refill.
type plain struct{ kvconn.LayersWindow }

// target is a rank of the peer's as one of our devices reaches it.
type target struct {
	peer  kernels.Peer
	line  int
	cut   kernels.Cut // zero: blocks go whole
	block int64       // bytes of one layer's
	ctas  int         // divides a push's among those of its device
}

// window is the peer's pool as our devices reach it.
type window struct {
	to    []target
	flags [][]byte // one of each target's
	lent  local.Taken

	mu       sync.Mutex // also keeps pushes in the order of their numbers
	launched uint64
	drained  uint64
	closed   bool
}

var (
	_ kvconn.RefillWindow = (*window)(nil)
	_ kvconn.LayersWindow = (*window)(nil)
)

// A push runs beside the next layer's computation, whose matrix kernels want every
// multiprocessor. So the copy engines take it, unless its runs of blocks are too short
// or too many to describe (0.7 microseconds each, of this goroutine). Then this many
// CTAs take it, which reach 88 % of NVLink's rate.
const (
	pushCTAs = 16
	longRun  = 64 << 10 // bytes on average
	mostRuns = 512
	// Nothing is computed beside layers that are complete already, and the copy
	// engines take blocks of 64 KiB only as fast as this host can describe them:
	// 61 to 97 GB/s from the call on, where 32 CTAs reach 355 of NVLink's 369.
	wholeCTAs = 32
)

// engine chooses what copies blocks to a target. Of cut ones every run is shorter than a block.
func (t *target) engine(pairs []kernels.BlockPair) kernels.Engine {
	if t.cut != (kernels.Cut{}) {
		return kernels.Kernel
	}
	runs := int64(1)
	for i := range pairs[1:] {
		if a, b := pairs[i], pairs[i+1]; b.Src != a.Src+1 || b.Dst != a.Dst+1 {
			runs++
		}
	}
	if runs <= mostRuns && int64(len(pairs))*t.block/runs >= longRun {
		return kernels.Copy
	}
	return kernels.Kernel
}

// Push implements kvconn.DeviceWindow.
func (w *window) Push(layer int, moves []kvconn.Move) (uint64, error) {
	return w.launch(&kernels.Push{FirstLayer: layer, Layers: 1, Blocks: pairsOf(moves), CTAs: pushCTAs})
}

// PushLayers implements kvconn.LayersWindow.
func (w *window) PushLayers(layer, layers int, moves []kvconn.Move) (uint64, error) {
	return w.launch(&kernels.Push{FirstLayer: layer, Layers: layers, Blocks: pairsOf(moves), Engine: kernels.Kernel, CTAs: wholeCTAs})
}

func pairsOf(moves []kvconn.Move) []kernels.BlockPair {
	pairs := make([]kernels.BlockPair, len(moves))
	for i, m := range moves {
		pairs[i] = kernels.BlockPair{Src: m.From, Dst: m.To}
	}
	return pairs
}

// Refill implements kvconn.RefillWindow.
func (w *window) Refill(layer int, blocks []kvlayout.Refill, sources []kvlayout.Held) (uint64, error) {
	return w.launch(&kernels.Push{FirstLayer: layer, Layers: 1, Engine: kernels.Kernel, CTAs: pushCTAs, Refills: blocks, Sources: sources})
}

// launch starts a push under the next number, from each of our ranks to each of the peer's
// that has heads in common with it. p's engine is Auto where it depends on the blocks.
func (w *window) launch(p *kernels.Push) (uint64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	number := w.launched + 1
	for i, t := range w.to {
		part := *p
		part.Line, part.Value, part.Cut, part.CTAs = t.line, number, t.cut, max(p.CTAs/t.ctas, 1)
		if part.Engine == kernels.Auto {
			part.Engine = t.engine(p.Blocks)
		}
		if err := t.peer.Push(&part); err != nil {
			if i > 0 { // the parts before it are under way: nobody may think that this push did not begin
				w.launched = number
				err = errors.Join(err, w.drain())
			}
			return 0, err
		}
	}
	w.launched = number
	return number, nil
}

// patience bounds one drain or close of the device. A drain that takes longer is
// started again: only its end proves anything.
const patience = 10 * time.Second

// Await implements kvconn.DeviceWindow.
func (w *window) Await(number uint64) error {
	w.mu.Lock()
	over, launched := number <= w.drained, w.launched
	w.mu.Unlock()
	if over {
		return nil
	}
	if err := w.drain(); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drained = max(w.drained, launched)
	return nil
}

// drain returns nil when nothing that was pushed before is under way.
func (w *window) drain() error {
	for _, t := range w.to {
		for err := kernels.ErrLate; err != nil; {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			err = t.peer.Drain(ctx)
			cancel()
			if err != nil && !errors.Is(err, kernels.ErrLate) {
				return err
			}
		}
	}
	return nil
}

// Close implements kvconn.Window. The peer is told only after its pool is unmapped; if
// that fails, it must go on assuming that we could write.
func (w *window) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, t := range w.to { // closing one twice is allowed
		if err := t.peer.Close(ctx); err != nil {
			return fmt.Errorf("cudaipc: close the peer's pool: %w", err)
		}
	}
	w.closed = true
	var err error
	for _, f := range w.flags {
		err = errors.Join(err, unix.Munmap(f))
	}
	return errors.Join(err, w.lent.End())
}
