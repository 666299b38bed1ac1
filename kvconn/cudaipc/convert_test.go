//go:build linux

package cudaipc_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// of is a pool's layout in another dtype and block size.
func of(dtype kvlayout.DType, bt int) func(l *kvlayout.Layout) {
	return func(l *kvlayout.Layout) {
		*l = kvlayout.Plain(3, 2, 8, bt, dtype)
	}
}

// A bf16 prefill pushes into a decode whose KV is FP8, and so on: each form arrives in
// each other to the bit, whatever the block sizes and where prompts end, all by pushes.
func TestConverts(t *testing.T) {
	dtypes := []kvlayout.DType{kvlayout.BF16, kvlayout.F16, kvlayout.F8E4M3}
	for _, from := range dtypes {
		for _, to := range dtypes {
			for _, bt := range [][2]int{{16, 16}, {1, 256}, {256, 1}, {48, 16}, {5, 3}, {3, 5}} {
				if from == to {
					continue
				}
				t.Run(fmt.Sprintf("%s to %s, blocks of %d from %d", from, to, bt[0], bt[1]), func(t *testing.T) {
					t.Parallel()
					r, s := fakegpu.New(t, kvconntest.ReceiverBlocks, of(to, bt[0])), fakegpu.New(t, kvconntest.SenderBlocks, of(from, bt[1]))
					between(t, r, s, kvconntest.Converts, func(w *kvconntest.World, _ fakegpu.GPU) {
						w.Convert()
						fetchLengths(t, w, "converted")
					})
				})
			}
		}
	}
}

// A bit that flips in prefill's pool after the append does not get a good digest by
// being converted, also where blocks go whole.
func TestSpoiledSourceIsConverted(t *testing.T) {
	for _, bt := range []int{8, 16, 3} {
		r := fakegpu.New(t, kvconntest.ReceiverBlocks, of(kvlayout.F8E4M3, bt))
		s := fakegpu.New(t, kvconntest.SenderBlocks, of("bf16", 8))
		between(t, r, s, kvconntest.Converts, func(w *kvconntest.World, s fakegpu.GPU) {
			w.Convert()
			answer := w.Answer
			w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *kvconntest.Source) {
				if held, ok := src.Spans(1, 8, 8, nil); ok {
					s.Spoil(1, held[0].Block)
				}
				answer(ctx, o, src)
			}
			err := w.Fetch(t.Context(), w.Spec("spoiled", 1, 37, 0))
			if kvconn.OutcomeOf(err, "") != ticket.Corrupt || !errors.Is(err, kvconn.ErrDigest) {
				t.Errorf("blocks of %d: %v, want corrupt by digest", bt, err)
			}
		})
	}
}

// Where the device may not put rows together, a pair of two dtypes has no session
// between devices, and is told why: another way says that the host converts. Where
// one side does not allow it, there is none at all.
func TestConvertsNot(t *testing.T) {
	r, s := fakegpu.New(t, kvconntest.ReceiverBlocks, of(kvlayout.F8E4M3, 16)), fakegpu.New(t, kvconntest.SenderBlocks, of("bf16", 16))
	for _, c := range []struct {
		refill  bool
		tune    func(r, s *kvconn.Config)
		outcome ticket.Outcome
		why     string
	}{
		{false, kvconntest.Converts, ticket.Refused, "the peer's KV rows are f8e4m3, ours bf16"},
		{true, func(r, s *kvconn.Config) { r.Convert = true }, ticket.Incompatible, "dtype"},
	} {
		tr, err := open(r, s, c.refill)
		if err != nil {
			t.Fatal(err)
		}
		fakegpu.Run(t, r, s, tr, c.tune, func(w *kvconntest.World) {
			_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
			if kvconn.OutcomeOf(err, "") != c.outcome || !strings.Contains(err.Error(), c.why) {
				t.Errorf("opened: %v", err)
			}
			// A pair that will never do is tried again and again: it must cost nothing that stays.
			w.Until("what was refused comes back", func() bool { return w.Value(w.RMetrics, "xpyd_kvconn_mapped_pools", "") == 0 })
		})
	}
}
