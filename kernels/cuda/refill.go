//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/xpyd/xpyd/kernels"
)

// maxRefills bounds the blocks of one call. Longer lists take several; the last sets the
// flag.
const maxRefills = 1 << 13

// refill is Push for a peer whose blocks are laid out differently.
func (p *peer) refill(a *kernels.Push) error {
	if a.Layers != 1 || len(a.Blocks) > 0 || a.AfterStep || a.Engine != kernels.Auto && a.Engine != kernels.Kernel {
		return fmt.Errorf("kernels/cuda: refill of %d layers, %d whole blocks, by engine %d, after the step: %t", a.Layers, len(a.Blocks), a.Engine, a.AfterStep)
	}
	if err := p.b.layers32(a.FirstLayer, a.Layers, len(a.Refills), a.CTAs); err != nil {
		return err
	}
	sources := make([]C.xk_held, len(a.Sources))
	for i, s := range a.Sources {
		if !fits32(s.FirstPos, s.Rows) {
			return fmt.Errorf("kernels/cuda: refill from %+v", s)
		}
		sources[i] = C.xk_held{block: C.int32_t(s.Block), first_pos: C.int32_t(s.FirstPos), rows: C.int32_t(s.Rows)}
	}
	refills := make([]C.xk_refill, len(a.Refills))
	for i, r := range a.Refills {
		if !fits32(r.FirstPos, r.Rows, r.First, r.Count) || r.First > len(sources) || r.Count > len(sources)-r.First {
			return fmt.Errorf("kernels/cuda: refill of %+v from %d blocks", r, len(sources))
		}
		refills[i] = C.xk_refill{block: C.int32_t(r.Block), first_pos: C.int32_t(r.FirstPos), rows: C.int32_t(r.Rows), first: C.int32_t(r.First), count: C.int32_t(r.Count)}
	}
	// Check the sources that no refill names: the library never sees them.
	if last := a.Refills[len(a.Refills)-1]; last.First+last.Count != len(sources) {
		return fmt.Errorf("kernels/cuda: %d sources, the refills use %d", len(sources), last.First+last.Count)
	}
	cut := a.Cut.Or(p.b.rows.Heads)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.b.closed {
		return errClosed
	}
	for len(refills) > 0 {
		n := 0 // refills of this call, and their sources
		for n < len(refills) && n < maxRefills && refills[n].first+refills[n].count-refills[0].first <= 2*maxRefills {
			n++
		}
		n = max(n, 1)
		from, end := refills[0].first, refills[n-1].first+refills[n-1].count
		if end <= from {
			return fmt.Errorf("kernels/cuda: refills of sources %d to %d", from, end)
		}
		args := C.xk_refill_args{layer: C.int32_t(a.FirstLayer), n_sources: end - from, n_refills: C.int32_t(n),
			from_head: C.int32_t(cut.From), to_head: C.int32_t(cut.To), heads: C.int32_t(cut.Count), ctas: C.int32_t(a.CTAs), line: C.int32_t(a.Line)}
		if n == len(refills) {
			args.value = C.uint64_t(a.Value)
		}
		for i := range refills[:n] {
			refills[i].first -= from
		}
		err := p.b.move("xk_refill_push", func() C.int32_t {
			return C.api_refill_push(p.b.lib.api, p.at, &args, (*C.xk_held)(unsafe.Pointer(&sources[from])), &refills[0])
		})
		if err != nil {
			return err
		}
		refills = refills[n:]
	}
	return nil
}

// fits32 reports whether all values are in 0 .. 2^31-1.
func fits32(v ...int) bool {
	for _, n := range v {
		if uint(n) > 1<<31-1 {
			return false
		}
	}
	return true
}
