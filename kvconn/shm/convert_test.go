//go:build linux

package shm_test

import (
	"fmt"
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvlayout"
)

// TestConverts: rows are converted on their way between unequal numbers of ranks, over shared memory
// and over the sockets, whatever the block sizes and where prompts end.
func TestConverts(t *testing.T) {
	for _, dtypes := range [][2]kvlayout.DType{{kvlayout.F8E4M3, kvlayout.BF16}, {kvlayout.BF16, kvlayout.F8E4M3}, {kvlayout.F32, kvlayout.F16}} {
		for _, ranks := range [][2]int{{1, 4}, {4, 1}, {2, 4}, {4, 2}, {1, 1}} {
			for _, bt := range [][2]int{{4, 4}, {16, 4}, {3, 5}} {
				for _, alloc := range []func(testing.TB, int) (int, []byte){memory, nil} {
					t.Run(fmt.Sprintf("%s to %s, %d to %d ranks, blocks of %d to %d, shared %t", dtypes[0], dtypes[1], ranks[0], ranks[1], bt[0], bt[1], alloc != nil), func(t *testing.T) {
						t.Parallel()
						f := kvconntest.Factory{New: transport, Memory: alloc, SenderRanks: ranks[0], Ranks: ranks[1]}
						w := f.World(t, func(r, s *kvconn.Config) {
							kvconntest.Converts(r, s)
							s.Identity.Layout = kvlayout.Plain(3, 2, 16, bt[0], dtypes[0])
							r.Identity.Layout = kvlayout.Plain(3, 2, 16, bt[1], dtypes[1])
						})
						defer w.Close()
						w.Convert()
						for n, positions := range []int{1, bt[1], bt[1] + 1, 67} {
							spec := w.Spec("converted", int32(n), positions, 0)
							if err := w.Fetch(t.Context(), spec); err != nil {
								t.Errorf("%d positions: %v", positions, err)
							}
							w.Pool.Reclaim(spec.Dest)
						}
						if w.Pool.Stores() == 0 {
							t.Error("nothing was stored")
						}
					})
				}
			}
		}
	}
}
