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

// Map implements kvconn.SharedConn: it opens the peer's pool on our device.
func (c *conn) Map(s *kvconn.Shared, b []byte) (_ kvconn.Window, err error) {
	g, err := decodeGrant(b)
	if err == nil {
		err = g.describes(s)
	}
	if err != nil {
		return nil, err
	}
	t, err := c.Take()
	if err != nil {
		return nil, err
	}
	flags, err := t.Map(g.FlagBytes)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cudaipc: flags: %w", err), t.End())
	}
	peer, err := c.d.opener.OpenPeer(g.handle, flags)
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(flags), t.End())
	}
	w := &window{peer: peer, line: int(g.Line), block: g.BlockBytes, flags: flags, lent: t}
	if !c.d.refill {
		return plain{w}, nil
	}
	return w, nil
}

// plain is a window without Refill.
type plain struct{ kvconn.LayersWindow }

// window is the peer's pool as our device reaches it.
type window struct {
	peer  kernels.Peer
	line  int
	block int64 // bytes of one layer's
	flags []byte
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

// engine chooses what copies blocks of this many bytes.
func engine(pairs []kernels.BlockPair, bytes int64) kernels.Engine {
	runs := int64(1)
	for i := range pairs[1:] {
		if a, b := pairs[i], pairs[i+1]; b.Src != a.Src+1 || b.Dst != a.Dst+1 {
			runs++
		}
	}
	if runs <= mostRuns && int64(len(pairs))*bytes/runs >= longRun {
		return kernels.Copy
	}
	return kernels.Kernel
}

// Push implements kvconn.DeviceWindow.
func (w *window) Push(layer int, moves []kvconn.Move) (uint64, error) {
	pairs := pairsOf(moves)
	p := &kernels.Push{FirstLayer: layer, Layers: 1, Blocks: pairs, Engine: engine(pairs, w.block), CTAs: pushCTAs}
	return w.launch(p)
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

// launch starts a push under the next number.
func (w *window) launch(p *kernels.Push) (uint64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	number := w.launched + 1
	p.Line, p.Value = w.line, number
	if err := w.peer.Push(p); err != nil {
		return 0, err
	}
	w.launched = number
	return number, nil
}

// patience bounds one drain or close of the device. A drain that takes longer is
// started again: only its end proves anything.
const patience = 10 * time.Second

// Await implements kvconn.DeviceWindow.
func (w *window) Await(number uint64) error {
	for {
		w.mu.Lock()
		over, launched := number <= w.drained, w.launched
		w.mu.Unlock()
		if over {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := w.peer.Drain(ctx)
		cancel()
		switch {
		case err == nil:
			w.mu.Lock()
			w.drained = max(w.drained, launched)
			w.mu.Unlock()
		case !errors.Is(err, kernels.ErrLate):
			return err
		}
	}
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
	if err := w.peer.Close(ctx); err != nil {
		return fmt.Errorf("cudaipc: close the peer's pool: %w", err)
	}
	w.closed = true
	return errors.Join(unix.Munmap(w.flags), w.lent.End())
}
