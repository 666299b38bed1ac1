//go:build linux

package cudaipc_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/cudaipc"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// openRanks is a transport between two pools of several ranks.
func openRanks[S kernels.PeerOpener](t testing.TB, r *fakegpu.Ranks, s []S) kvconn.Transport {
	rows, _ := r.Layout().Uniform()
	tr, err := cudaipc.New(r.List, s, rows.Heads, true, "")
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// ranksPair is pair for so many ranks of the sender and of the receiver, whose blocks have bt
// positions at the sender.
func ranksPair(from, to, bt int) func(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
	return func(t testing.TB) (kvconn.Transport, kvconntest.GPUs) {
		r := fakegpu.NewRanks(t, to, kvconntest.ReceiverBlocks, 0, nil)
		s := fakegpu.NewRanks(t, from, kvconntest.SenderBlocks, time.Millisecond, func(l *kvlayout.Layout) { l.BlockTokens = bt })
		return openRanks(t, r, s.List), kvconntest.GPUs{Receiver: r, Sender: s}
	}
}

// TestRanks is the suite with unequal numbers of ranks of 2 heads, which are kept by two ranks each
// where there are four. Blocks of one size, and those that are put together anew. All faults for
// 2 to 4, but under the race detector.
func TestRanks(t *testing.T) {
	for _, c := range []struct{ from, to, bt int }{{2, 1, 4}, {2, 4, 4}, {4, 2, 6}} {
		t.Run(fmt.Sprintf("%d to %d, blocks of %d", c.from, c.to, c.bt), func(t *testing.T) {
			kvconntest.Run(t, kvconntest.Factory{Device: ranksPair(c.from, c.to, c.bt), Shrink: 2, AtOnce: 48, Few: c.to != 4 || kvconntest.UnderRace})
		})
	}
}

// TestRanksProcesses is TestProcesses with unequal numbers of ranks.
func TestRanksProcesses(t *testing.T) {
	t.Parallel()
	kvconntest.Processes(t, ranksFactory)
}

var ranksFactory = kvconntest.Factory{Device: ranksPair(2, 4, 4), Shrink: 2, AtOnce: 48}

// Every pair of numbers of ranks moves every head once to each rank that has it, whatever the
// block sizes and dtypes; all of it by pushes.
func TestRanksShapes(t *testing.T) {
	for _, heads := range []int{1, 2, 8} {
		for _, from := range []int{1, 2, 4, 8} {
			for _, to := range []int{1, 2, 4, 8} {
				for _, c := range []struct {
					from, to kvlayout.DType
					bt       [2]int
				}{{kvlayout.F32, kvlayout.F32, [2]int{4, 4}}, {kvlayout.F8E4M3, kvlayout.F8E4M3, [2]int{16, 16}}, {kvlayout.BF16, kvlayout.F8E4M3, [2]int{16, 16}}, {kvlayout.BF16, kvlayout.BF16, [2]int{5, 3}}} {
					t.Run(fmt.Sprintf("%d heads, %d ranks to %d, %s to %s, blocks of %d to %d", heads, from, to, c.from, c.to, c.bt[0], c.bt[1]), func(t *testing.T) {
						t.Parallel()
						shape := func(dtype kvlayout.DType, bt int) func(*kvlayout.Layout) {
							return func(l *kvlayout.Layout) { *l = kvlayout.Plain(3, heads, 8, bt, dtype) }
						}
						r := fakegpu.NewRanks(t, to, kvconntest.ReceiverBlocks, 0, shape(c.to, c.bt[1]))
						s := fakegpu.NewRanks(t, from, kvconntest.SenderBlocks, 0, shape(c.from, c.bt[0]))
						var opened pushes
						tune := kvconntest.Converts
						if c.from == c.to {
							tune = nil
						}
						fakegpu.Run(t, r, s, openRanks(t, r, opened.of(s.List)), tune, func(w *kvconntest.World) {
							if c.from != c.to {
								w.Convert()
							}
							fetchLengths(t, w, "ranks")
						})
						opened.once(t, r)
					})
				}
			}
		}
	}
}

// pushes counts how often each head of each of the receiver's ranks was pushed.
type pushes struct{ list []*rankPushes }

type rankPushes struct {
	kernels.Peer
	handle string
	heads  int // of the sender's rank
	cuts   map[kernels.Cut]int
}

func (p *rankPushes) Push(a *kernels.Push) error {
	p.cuts[a.Cut.Or(p.heads)]++
	return p.Peer.Push(a)
}

type rankOpener struct {
	*kerneltest.FakeGPU
	heads int
	all   *pushes
}

func (o rankOpener) OpenPeer(handle, flags []byte) (kernels.Peer, error) {
	p, err := o.FakeGPU.OpenPeer(handle, flags)
	if err != nil {
		return nil, err
	}
	own := &rankPushes{Peer: p, handle: string(handle), heads: o.heads, cuts: map[kernels.Cut]int{}}
	o.all.list = append(o.all.list, own)
	return own, nil
}

// of are the sender's ranks, which have as many heads each.
func (p *pushes) of(ranks []*kerneltest.FakeGPU) (list []rankOpener) {
	for _, g := range ranks {
		list = append(list, rankOpener{g, g.Heads(), p})
	}
	return list
}

// once checks that each push went to each head of each rank once.
func (p *pushes) once(t *testing.T, r *fakegpu.Ranks) {
	t.Helper()
	for rank, g := range r.List {
		e, err := g.Export()
		if err != nil {
			t.Fatal(err)
		}
		times := map[int]int{}
		for _, to := range p.list {
			for cut, n := range to.cuts {
				for h := cut.To; h < cut.To+cut.Count && to.handle == string(e.Handle); h++ {
					times[h] += n
				}
			}
		}
		for h := range g.Heads() {
			if times[h] != times[0] || times[h] == 0 {
				t.Errorf("rank %d: head %d was pushed %d times, head 0 %d", rank, h, times[h], times[0])
			}
		}
		if len(times) != g.Heads() {
			t.Errorf("rank %d: %d heads were pushed, it has %d", rank, len(times), g.Heads())
		}
	}
	if want := kvlayout.MostPairs(g0(r), 64, len(r.List)); len(p.list) > want {
		t.Errorf("%d peers were opened, at most %d are needed", len(p.list), want)
	}
}

func g0(r *fakegpu.Ranks) int { return r.Layout().Resolve()[0].Heads }

// The fence: a revoke waits for the rank whose device is slowest. Nothing is looked at before all
// ranks' parts have landed.
func TestRanksRevokeWaits(t *testing.T) {
	for _, slow := range []int{0, 1} {
		r := fakegpu.NewRanks(t, 1, kvconntest.ReceiverBlocks, 0, nil)
		s := fakegpu.NewRanks(t, 2, kvconntest.SenderBlocks, 0, nil)
		fakegpu.Run(t, r, s, openRanks(t, r, s.List), nil, func(w *kvconntest.World) { w.RevokeWaits(t, s.List[slow].Stop) })
	}
}

// A push of which one rank's part has landed is not believed.
func TestRanksLandTogether(t *testing.T) {
	for _, slow := range []int{0, 1} {
		r := fakegpu.NewRanks(t, 1, kvconntest.ReceiverBlocks, 0, nil)
		s := fakegpu.NewRanks(t, 2, kvconntest.SenderBlocks, 0, nil)
		s.List[slow].Delay = 60 * time.Millisecond
		fakegpu.Run(t, r, s, openRanks(t, r, s.List), nil, func(w *kvconntest.World) {
			if err := w.Fetch(t.Context(), w.Spec("slow", 1, 37, 0)); err != nil {
				t.Fatal(err)
			}
			if n := w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", ""); n > 0 {
				t.Errorf("%v blocks were looked at too early", n)
			}
		})
	}
}

// failing is a rank whose peers take no push while fails is set, or cannot be opened.
type failing struct {
	*kerneltest.FakeGPU
	push, open error
}

type failingPeer struct {
	kernels.Peer
	f *failing
}

func (f *failing) OpenPeer(handle, flags []byte) (kernels.Peer, error) {
	if f.open != nil {
		return nil, f.open
	}
	p, err := f.FakeGPU.OpenPeer(handle, flags)
	return failingPeer{p, f}, err
}

func (p failingPeer) Push(a *kernels.Push) error {
	if err := p.f.push; err != nil {
		return err
	}
	return p.Peer.Push(a)
}

// When the second rank of a sender cannot begin its part, the first one's is over before the blocks
// are anybody else's; the next ticket is right, and was not looked at too early.
func TestRanksPartFails(t *testing.T) {
	r := fakegpu.NewRanks(t, 1, kvconntest.ReceiverBlocks, 0, nil)
	s := fakegpu.NewRanks(t, 2, kvconntest.SenderBlocks, 0, nil)
	s.List[0].Delay = 30 * time.Millisecond
	second := &failing{FakeGPU: s.List[1]}
	tr := openRanks(t, r, []kernels.PeerOpener{s.List[0], second})
	fakegpu.Run(t, r, s, tr, nil, func(w *kvconntest.World) {
		for range 3 {
			second.push = errors.New("out of memory")
			err := w.Fetch(t.Context(), w.Spec("fails", 1, 37, 0))
			if kvconn.OutcomeOf(err, "") != ticket.Corrupt || !strings.Contains(err.Error(), "out of memory") {
				t.Fatalf("the push was to fail: %v", err)
			}
			second.push = nil
			if err := w.Fetch(t.Context(), w.Spec("works", 2, 37, 0)); err != nil {
				t.Fatal(err)
			}
		}
		if n := w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", ""); n > 0 {
			t.Errorf("%v blocks were looked at too early", n)
		}
	})
}

// When the second rank cannot reach the peer, the session is refused, the error names the ranks, and
// what the first had opened is closed: the peer knows that it has its memory for itself.
func TestRanksNoAccess(t *testing.T) {
	r := fakegpu.NewRanks(t, 1, kvconntest.ReceiverBlocks, 0, nil)
	s := fakegpu.NewRanks(t, 2, kvconntest.SenderBlocks, 0, nil)
	second := &failing{FakeGPU: s.List[1], open: fmt.Errorf("%w: GPU 0 and 1", kernels.ErrNoPeerAccess)}
	fakegpu.Run(t, r, s, openRanks(t, r, []kernels.PeerOpener{s.List[0], second}), nil, func(w *kvconntest.World) {
		_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
		if kvconn.OutcomeOf(err, "") != ticket.Refused || !strings.Contains(err.Error(), "rank 1 to rank 0 of 1") || !strings.Contains(err.Error(), "GPU 0 and 1") {
			t.Errorf("opened: %v", err)
		}
		w.Until("the peer lets go", func() bool { return w.Value(w.RMetrics, "xpyd_kvconn_mapped_pools", "") == 0 })
	})
}

// A bit that flips in a rank's pool after the append is found, whichever rank it is.
func TestRanksSpoiledSource(t *testing.T) {
	for _, rank := range []int{0, 1} {
		r := fakegpu.NewRanks(t, 1, kvconntest.ReceiverBlocks, 0, nil)
		s := fakegpu.NewRanks(t, 2, kvconntest.SenderBlocks, 0, nil)
		fakegpu.Run(t, r, s, openRanks(t, r, s.List), nil, func(w *kvconntest.World) {
			w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *kvconntest.Source) {
				if block, ok := src.Block(1, 2, 8, 4); ok {
					s.List[rank].Spoil(1, block)
				}
				w.Compute(ctx, o, src)
			}
			if err := w.Fetch(t.Context(), w.Spec("spoiled", 1, 18, 0)); err != nil {
				t.Error(err)
			}
			if n := w.Value(w.RMetrics, "xpyd_kvconn_corrupt_units_total", ""); n != 1 {
				t.Errorf("rank %d: %v corrupt blocks were found, want 1", rank, n)
			}
		})
	}
}
