//go:build linux

package nccl_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/nccl"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

const rankDelay = 200 * time.Microsecond

// ranks is the transport between pools of several ranks, whose links are the first ranks'.
func ranks(t testing.TB, from, to int, change func(*kvlayout.Layout)) (kvconn.Transport, *fakegpu.Ranks, *fakegpu.Ranks) {
	r := fakegpu.NewRanks(t, to, kvconntest.ReceiverBlocks, rankDelay, change)
	s := fakegpu.NewRanks(t, from, kvconntest.SenderBlocks, rankDelay, change)
	return nccl.New(loopback{tcp.New(nil)}, r.Joined, s.Joined, r.Layout(), small), r, s
}

func ranksFactory(from, to int) kvconntest.Factory {
	f := factory
	f.Device = func(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
		tr, r, s := ranks(t, from, to, nil)
		return tr, kvconntest.GPUs{Receiver: r, Sender: s}
	}
	return f
}

// TestRanks is the suite with unequal numbers of ranks of 2 heads, which are kept by two ranks each
// where there are four. All faults for 2 to 4, but under the race detector.
func TestRanks(t *testing.T) {
	for _, c := range []struct{ from, to int }{{2, 1}, {2, 4}, {4, 2}} {
		t.Run(fmt.Sprintf("%d to %d", c.from, c.to), func(t *testing.T) {
			f := ranksFactory(c.from, c.to)
			f.Few = c.to != 4 || kvconntest.UnderRace
			kvconntest.Run(t, f)
		})
	}
}

// TestRanksProcesses is TestProcesses with ranks at this process's end.
func TestRanksProcesses(t *testing.T) {
	t.Parallel()
	kvconntest.Processes(t, ranksFactory(2, 4))
}

// Every pair of numbers of ranks has each head where it belongs, of every rank that keeps it, all of
// it by pushes; dtypes and block sizes take turns. One after the other: the ends of a link meet within
// some seconds, or not.
func TestRanksShapes(t *testing.T) {
	forms := []struct {
		dtype kvlayout.DType
		bt    int
	}{{kvlayout.F32, 4}, {kvlayout.F8E4M3, 16}, {kvlayout.BF16, 6}}
	turn := 0
	for _, heads := range []int{1, 2, 8} {
		for _, from := range []int{1, 2, 4, 8} {
			for _, to := range []int{1, 2, 4, 8} {
				c := forms[turn%len(forms)]
				turn++
				t.Run(fmt.Sprintf("%d heads, %d ranks to %d, %s", heads, from, to, c.dtype), func(t *testing.T) {
					tr, r, s := ranks(t, from, to, func(l *kvlayout.Layout) { *l = kvlayout.Plain(3, heads, 8, c.bt, c.dtype) })
					fakegpu.Run(t, r, s, tr, nil, func(w *kvconntest.World) {
						for n, positions := range []int{1, c.bt, c.bt + 1, 67} {
							if err := w.Fetch(t.Context(), w.Spec("shape", int32(n), positions, 0)); err != nil {
								t.Errorf("%d positions: %v", positions, err)
							}
						}
						if pushed, all := w.Pool.Pushed(), w.Pool.Stores(); pushed != all || all == 0 {
							t.Errorf("%d of %d blocks were pushed", pushed, all)
						}
					})
				})
			}
		}
	}
}

// A bit that flips in one rank's part of a block, at either end, is found and mended.
func TestRanksSpoiled(t *testing.T) {
	for _, where := range []string{"source", "destination"} {
		tr, r, s := ranks(t, 2, 4, nil)
		fakegpu.Run(t, r, s, tr, nil, func(w *kvconntest.World) {
			spec := w.Spec("spoiled", 1, 18, 0)
			if where == "destination" {
				r.Spoil(1, spec.Dest[2].Block)
			}
			w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *kvconntest.Source) {
				if block, ok := src.Block(1, 2, 8, 4); ok && where == "source" {
					s.Spoil(1, block)
				}
				w.Compute(ctx, o, src)
			}
			if err := w.Fetch(t.Context(), spec); err != nil {
				t.Error(err)
			}
			if c, l := corrupt(w), lost(w); c != 1 || l != 0 {
				t.Errorf("%s: %v blocks were corrupt and %v lost, want 1 and none", where, c, l)
			}
		})
	}
}

// A revoke waits until every rank has done with the blocks that are being copied.
func TestRanksRevokeWaits(t *testing.T) {
	for _, slow := range []int{0, 3} {
		tr, r, s := ranks(t, 1, 4, nil)
		fakegpu.Run(t, r, s, tr, nil, func(w *kvconntest.World) { w.RevokeWaits(t, r.List[slow].Stop) })
	}
}

// A rank without NCCL has the session refused, and another way taken.
func TestRanksNoNCCL(t *testing.T) {
	tr, r, s := ranks(t, 2, 2, nil)
	s.List[0].NoLinks = errSystem
	fakegpu.Run(t, r, s, tr, nil, func(w *kvconntest.World) {
		_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
		if kvconn.OutcomeOf(err, "") != ticket.Refused || !strings.Contains(err.Error(), errSystem.Error()) {
			t.Errorf("opened: %v", err)
		}
	})
}
