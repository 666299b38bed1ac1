//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"errors"

	"github.com/xpyd/xpyd/kernels"
)

var errHeld = errors.New("the step's draws wait for Draw")

// masks are those of one step's draws. What they hold may come after the step's launch.
type masks struct {
	pinned []uint32   // what the device reads: one behind the other
	list   [][]uint32 // the callers'
	of     []int32    // by sample: which of the list; -1: none
	err    error      // of Draw
}

func (m *masks) reset() {
	clear(m.list)
	m.list, m.of = m.list[:0], m.of[:0]
}

// add notes a draw's mask, which it can share with the draw before it in its sequence (nil: there
// is none). It reports whether there is room.
func (m *masks) add(p, before *kernels.Sample) bool {
	switch {
	case p.Mask == nil:
		m.of = append(m.of, -1)
		return true
	case before != nil && before.Mask != nil && same(p.Mask, before.Mask):
		m.of = append(m.of, m.of[len(m.of)-1])
		return true
	}
	m.list = append(m.list, p.Mask)
	m.of = append(m.of, int32(len(m.list)-1))
	return len(m.list)*len(p.Mask) <= len(m.pinned)
}

// ofSamples is of, padded to n samples.
func (m *masks) ofSamples(n int) []int32 {
	for len(m.of) < n {
		m.of = append(m.of, -1)
	}
	return m.of
}

// fill copies the masks to where the device reads them.
func (m *masks) fill() {
	at := 0
	for _, words := range m.list {
		at += copy(m.pinned[at:], words)
	}
}

// Draw implements kernels.Holder.
func (b *Backend) Draw() { _ = b.drawHeld() } // Await tells

func (b *Backend) drawHeld() error {
	s := b.held
	if s == nil {
		return errors.New("draw: no step is held")
	}
	b.held = nil
	s.masks.fill()
	s.masks.err = b.lib.call("xk_step_draw", func() C.int32_t { return C.api_step_draw(b.lib.api, b.ctx) })
	return s.masks.err
}

var _ kernels.Holder = (*Backend)(nil)
