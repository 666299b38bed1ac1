//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/internal/nap"
	"github.com/xpyd/xpyd/kernels"
)

const (
	flagBytes  = int(C.XK_FLAG_LINES) * int(C.XK_FLAG_STRIDE)
	flagStride = int(C.XK_FLAG_STRIDE)
)

// A peer sets a flag both in the exporter's device memory and in a memory file of the host;
// the host polls the file. A kernel spinning on the device's half would hold a hardware
// queue, and could so keep decode's steps waiting for a peer that is slow or dead.
type exported struct {
	once  sync.Once
	flags *memfd.Memory
	err   error
}

// hostFlags are the flags of the host; ranks of one worker have the same.
func (b *Backend) hostFlags() (*memfd.Memory, error) {
	b.exported.once.Do(func() { b.exported.flags, b.exported.err = memfd.New("xpyd-kv-flags", flagBytes) })
	return b.exported.flags, b.exported.err
}

// Export implements kernels.Exporter.
func (b *Backend) Export() (kernels.Export, error) {
	if b.closed {
		return kernels.Export{}, errClosed
	}
	flags, err := b.hostFlags()
	if err != nil {
		return kernels.Export{}, err
	}
	e := kernels.Export{Handle: make([]byte, C.XK_HANDLE_BYTES), FD: flags.FD, Bytes: flags.Size}
	err = b.move("xk_export", func() C.int32_t { return C.api_export(b.lib.api, b.ctx, unsafe.Pointer(&e.Handle[0])) })
	if err != nil {
		return kernels.Export{}, err
	}
	return e, nil
}

// flagAt returns a line of the host's flags, or nil if there is no such line.
func (b *Backend) flagAt(line int) *uint64 {
	flags, err := b.hostFlags()
	if err != nil || line < 0 || line >= kernels.FlagLines {
		return nil
	}
	return (*uint64)(unsafe.Pointer(&flags.Bytes[line*flagStride]))
}

func noLine(line int) error {
	return fmt.Errorf("kernels/cuda: no flag line %d of %d", line, kernels.FlagLines)
}

// Flag implements kernels.Exporter; 0 where there is no such line.
func (b *Backend) Flag(line int) uint64 {
	if at := b.flagAt(line); at != nil {
		return atomic.LoadUint64(at)
	}
	return 0
}

// AwaitFlag implements kernels.Exporter.
func (b *Backend) AwaitFlag(ctx context.Context, line int, value uint64) error {
	at := b.flagAt(line)
	if at == nil {
		return noLine(line)
	}
	if err := nap.Until(ctx, func() bool { return atomic.LoadUint64(at) >= value }); err != nil {
		return fmt.Errorf("%w: flag %d is %d, not %d: %w", kernels.ErrLate, line, atomic.LoadUint64(at), value, err)
	}
	return nil
}

// ClearFlag implements kernels.Exporter.
func (b *Backend) ClearFlag(line int) error {
	at := b.flagAt(line)
	if b.closed || at == nil {
		return noLine(line)
	}
	if atomic.SwapUint64(at, 0) == kernels.FlagUnused {
		return nil // nor has a device set its own half
	}
	return b.move("xk_flag_clear", func() C.int32_t { return C.api_flag_clear(b.lib.api, b.ctx, C.int32_t(line)) })
}

// verifyTime bounds a Verify without a deadline.
const verifyTime = 10 * time.Second

// Verify implements kernels.Exporter. A context that is cancelled before its
// deadline is noticed before and after the launch, not during it.
func (b *Backend) Verify(ctx context.Context, landed []kernels.Landed) ([]bool, error) {
	if b.closed {
		return nil, errClosed
	}
	if len(landed) == 0 {
		return nil, nil
	}
	list := make([]C.xk_landed, len(landed))
	for i, e := range landed {
		if uint(e.Layer) > math.MaxInt32 || uint(e.FirstPos) > math.MaxInt32 || uint(e.Rows) > math.MaxInt32 {
			return nil, fmt.Errorf("kernels/cuda: verify %+v", e)
		}
		list[i] = C.xk_landed{layer: C.int32_t(e.Layer), block: C.int32_t(e.Block), first_pos: C.int32_t(e.FirstPos), rows: C.int32_t(e.Rows)}
	}
	left := verifyTime
	if d, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(d))
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", kernels.ErrLate, err)
	}
	good := make([]bool, len(list))
	err := b.move("xk_verify", func() C.int32_t {
		return C.api_verify(b.lib.api, b.ctx, &list[0], C.int32_t(len(list)), (*C.uint8_t)(unsafe.Pointer(&good[0])), C.int64_t(left))
	})
	if err != nil {
		return nil, err
	}
	return good, nil
}

// peer implements kernels.Peer.
type peer struct {
	b    *Backend
	view []byte // a local peer's flags; ours to unmap

	mu     sync.Mutex // of Push and Close
	closed bool
	at     *C.xk_peer // nil: fully closed
}

// OpenPeer implements kernels.PeerOpener.
func (b *Backend) OpenPeer(handle, flags []byte) (kernels.Peer, error) {
	if b.closed || len(handle) == 0 || len(flags) < flagBytes {
		return nil, fmt.Errorf("kernels/cuda: handle of %d bytes, flags of %d", len(handle), len(flags))
	}
	p := &peer{b: b}
	err := b.move("xk_peer_open", func() C.int32_t {
		return C.api_peer_open(b.lib.api, b.ctx, unsafe.Pointer(&handle[0]), C.int64_t(len(handle)), unsafe.Pointer(&flags[0]), C.int64_t(len(flags)), &p.at)
	})
	if err != nil {
		return nil, err
	}
	return p, nil
}

// OpenLocal is OpenPeer for a pool of this process. Close the peer before that pool.
func (b *Backend) OpenLocal(to *Backend) (kernels.Peer, error) {
	if b.closed || to.closed {
		return nil, errClosed
	}
	flags, err := to.hostFlags()
	if err != nil {
		return nil, err
	}
	p := &peer{b: b}
	if p.view, err = unix.Mmap(flags.FD, 0, int(flags.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("kernels/cuda: map flags: %w", err)
	}
	err = b.move("xk_peer_local", func() C.int32_t {
		return C.api_peer_local(b.lib.api, b.ctx, to.ctx, unsafe.Pointer(&p.view[0]), C.int64_t(len(p.view)), &p.at)
	})
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(p.view))
	}
	return p, nil
}

// Push implements kernels.Peer.
func (p *peer) Push(a *kernels.Push) error {
	if a.Line < 0 || a.Line >= kernels.FlagLines {
		return noLine(a.Line)
	}
	if !fits32(a.Cut.From, a.Cut.To, a.Cut.Count) || a.Cut.Count == 0 && a.Cut != (kernels.Cut{}) {
		return fmt.Errorf("kernels/cuda: push of heads %+v", a.Cut)
	}
	if len(a.Refills) > 0 {
		return p.refill(a)
	}
	if err := p.b.layers32(a.FirstLayer, a.Layers, len(a.Blocks), a.CTAs); err != nil {
		return err
	}
	args := C.xk_push_args{
		layer: C.int32_t(a.FirstLayer), n_layers: C.int32_t(a.Layers), n_pairs: C.int32_t(len(a.Blocks)),
		from_head: C.int32_t(a.Cut.From), to_head: C.int32_t(a.Cut.To), heads: C.int32_t(a.Cut.Count),
		engine: C.int32_t(a.Engine), ctas: C.int32_t(a.CTAs), after_step: flag(a.AfterStep), line: C.int32_t(a.Line), value: C.uint64_t(a.Value),
	}
	// kernels.BlockPair and xk_pair are both two int32.
	pairs := (*C.xk_pair)(unsafe.Pointer(unsafe.SliceData(a.Blocks)))
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.b.closed {
		return errClosed
	}
	return p.b.move("xk_push", func() C.int32_t { return C.api_push(p.b.lib.api, p.at, &args, pairs) })
}

// Drain implements kernels.Peer.
func (p *peer) Drain(ctx context.Context) error {
	var m *C.xk_mark
	p.mu.Lock()
	if p.at == nil || p.b.closed { // Close has drained
		p.mu.Unlock()
		return nil
	}
	err := p.b.move("xk_peer_mark", func() C.int32_t { return C.api_peer_mark(p.b.lib.api, p.at, &m) })
	p.mu.Unlock()
	if err != nil {
		return err
	}
	defer C.api_mark_free(p.b.lib.api, m)
	return await(ctx, p.b.reached(m))
}

// refuse has Push fail from now on.
func (p *peer) refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
}

// Close implements kernels.Peer.
func (p *peer) Close(ctx context.Context) error {
	p.refuse()
	if err := p.Drain(ctx); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.at == nil {
		return nil
	}
	if !p.b.closed { // closing the context closed its peers
		err := p.b.move("xk_peer_close", func() C.int32_t { return C.api_peer_close(p.b.lib.api, p.at) })
		if err != nil {
			return err
		}
	}
	p.at = nil
	if p.view != nil {
		return unix.Munmap(p.view)
	}
	return nil
}
