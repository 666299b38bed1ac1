package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kernels"
)

// peerSource brings the first upto tokens of a prompt as a peer would, in the way that
// the test says, once; afterwards it has nothing.
type peerSource struct {
	r    *rig
	rows [][]byte // of the prefix, layer by layer, block by block
	upto int
	act  func(c *peerComing)
	all  sync.WaitGroup
	lost atomic.Pointer[peerComing]

	coming *peerComing // the engine's goroutine's
}

// peerComing implements engine.Arriving.
type peerComing struct {
	s     *peerSource
	gate  *kernels.HostGate
	table []int32
	wake  func()
	begun atomic.Bool
	over  chan struct{}
	good  int
	lost  bool
}

const peerOwner = "peer/fetch-1"

func (s *peerSource) Bring(_ kvcache.Chain, _, table []int32, from, _ int, ended func()) (engine.Arriving, bool) {
	if s.coming != nil || from > 0 {
		return nil, from == 0 && !s.coming.Over()
	}
	c := &peerComing{s: s, gate: kernels.NewHostGate(s.r.backend.Layout().Layers()), table: slices.Clone(table[:s.upto/s.r.cache.BlockTokens()]), wake: ended, over: make(chan struct{})}
	s.coming = c
	s.r.cache.Retain(c.table, peerOwner)
	s.all.Go(func() { s.act(c) })
	return c, false
}

func (c *peerComing) Move() kernels.Arrival { return c.gate }
func (c *peerComing) Upto() int             { return c.s.upto }
func (c *peerComing) Begun() bool           { return c.begun.Load() }
func (c *peerComing) Good() (int, bool)     { <-c.over; return c.good, c.lost }
func (c *peerComing) Over() bool {
	select {
	case <-c.over:
		return true
	default:
		return false
	}
}

// land writes a layer's rows, garbage from block wrong on.
func (c *peerComing) land(layer, wrong int) {
	for i, id := range c.table {
		rows := c.s.rows[layer*len(c.table)+i]
		if i >= wrong {
			rows = bytes.Repeat([]byte{0xa5}, len(rows))
		}
		c.s.r.backend.Scatter(layer, id, 0, c.s.r.cache.BlockTokens(), rows)
	}
}

func (c *peerComing) open(layers int) {
	c.gate.Open(layers)
	c.begun.Store(true)
	c.wake()
}

// end says how many tokens are good. If the blocks are lost, the peer goes on writing
// there.
func (c *peerComing) end(good int, lost bool) {
	if c.good, c.lost = good, lost; lost {
		c.s.r.cache.Quarantine(c.table, peerOwner)
		c.s.lost.Store(c)
	} else {
		c.s.r.cache.ReleaseAll(peerOwner)
	}
	c.gate.Open(c.s.r.backend.Layout().Layers())
	close(c.over)
	c.wake()
}

// onStep has the peer write where it no longer should. No step may wait for what has not
// begun to arrive.
func (s *peerSource) onStep(step *kernels.Step) error {
	if c := s.coming; len(step.Arrivals) > 0 && !c.Begun() && !c.Over() {
		return errors.New("a step waits for a peer that has given nothing")
	}
	if c := s.lost.Load(); c != nil {
		for layer := range s.r.backend.Layout().Layers() {
			c.land(layer, 0)
		}
	}
	return nil
}

const voidedText = `# HELP xpyd_engine_voided_prefixes_total Prefixes that were on their way when their request was placed, and did not come, or were not what their digests say: what steps had computed with them was dropped, and computed again.
# TYPE xpyd_engine_voided_prefixes_total counter
xpyd_engine_voided_prefixes_total %d
`

// TestPeerArrives: a prompt whose prefix comes from a peer answers as if all had been
// computed, whenever its step is launched and whatever comes of the prefix; nobody
// waits for it before it has begun, and blocks that are lost are used no more. So does a stream
// that goes on behind an answer begun elsewhere.
func TestPeerArrives(t *testing.T) {
	const layers, length, upto, begun = 3, 100, 64, 60
	f := func(name string, cached, voided int, act func(c *peerComing)) {
		for _, kind := range []string{"decode", "prefill", "rows", "resumed"} {
			t.Run(name+", "+kind, func(t *testing.T) {
				prefills, resumed := kind == "prefill" || kind == "rows", kind == "resumed"
				synctest.Test(t, func(t *testing.T) {
					s := &peerSource{upto: upto, act: act}
					r := newRig(t, config(), enginetest.Config{Layers: layers, Blocks: 40}, s.onStep)
					s.r = r
					p := prompt(rng(), length)
					req := request(p, 6)
					if resumed {
						req = request(p[:length-begun], begun+6)
					}
					req.IgnoreEOS = true
					want := r.generate(req)
					before := make([]output, 1)
					if resumed {
						before[0].tokens, before[0].sampled = want[0].tokens[:begun:begun], want[0].sampled[:begun:begun]
						req.Given = []engine.Given{{Tokens: before[0].tokens}}
						p = slices.Concat(req.Prompt, before[0].tokens)
					}
					ids, n := enginetest.HoldPrefix(r.cache, p[:upto], "", "look")
					if n != upto {
						t.Fatalf("%d tokens cached", n)
					}
					s.rows = r.gather(ids, upto)
					r.cache.Release(ids, "look")
					r.cache.Clear()
					req.Source = s
					told := 0
					if prefills {
						req.PrefillOnly, req.RowsOnly = true, kind == "rows"
						req.OnBlocks = func(layer int, ready []engine.Ready) {
							for _, b := range ready {
								told = max(told, b.FirstPos+b.Rows)
								got := make([]byte, r.backend.Layout().Resolve()[0].PackedBytes(b.Rows))
								if r.backend.Gather(layer, b.Block, 0, b.Rows, got); b.Index < len(ids) && !bytes.Equal(got, s.rows[layer*len(ids)+b.Index]) {
									t.Errorf("wrong rows of block %d, layer %d are told of", b.Index, layer)
								}
							}
						}
					}
					h := r.submit(req)
					synctest.Wait()
					other := request(prompt(rand.New(rand.NewPCG(1, 1)), 20), 4)
					same(t, "beside it", r.generate(other), aloneOn(t, enginetest.New(enginetest.Config{Layers: layers}), 0, other), false)
					out, info, err := collectAfter(h, before)
					if err != nil {
						t.Fatal(err)
					}
					if prefills {
						n := 1
						if kind == "rows" {
							n = 0
						}
						want[0].tokens, want[0].finish = want[0].tokens[:n], out[0].finish
						h.Release()
						if told != length {
							t.Errorf("it was told of %d tokens' rows", told)
						}
					}
					same(t, "the prompt", out, want, false)
					if n, want := h.CachedTokens(), min(cached, len(req.Prompt)); n != want || info != nil && info.CachedTokens != n {
						t.Errorf("%d tokens cached, want %d", n, want)
					}
					r.done(h)
					s.all.Wait()
					if c := s.lost.Load(); c != nil {
						r.cache.Unquarantine(c.table, peerOwner)
					}
					if err := testutil.GatherAndCompare(r.reg, strings.NewReader(fmt.Sprintf(voidedText, voided)), "xpyd_engine_voided_prefixes_total"); err != nil {
						t.Error(err)
					}
					r.close()
				})
			})
		}
	}
	f("all at once", upto, 0, func(c *peerComing) {
		for layer := range layers {
			c.land(layer, 99)
		}
		c.end(upto, false)
	})
	f("layer by layer", upto, 0, func(c *peerComing) {
		time.Sleep(time.Nanosecond) // until the engine has gone to sleep over it, as below
		for layer := range layers {
			c.land(layer, 99)
			c.open(layer + 1)
			time.Sleep(time.Nanosecond)
		}
		c.end(upto, false)
	})
	f("nothing comes", 0, 1, func(c *peerComing) {
		time.Sleep(time.Nanosecond)
		c.end(0, false)
	})
	f("half of it comes", 32, 1, func(c *peerComing) {
		for layer := range layers {
			c.land(layer, 2)
		}
		c.end(32, false)
	})
	f("wrong behind a step", 32, 1, func(c *peerComing) {
		c.land(0, 99)
		c.open(1)
		time.Sleep(time.Nanosecond)
		for layer := 1; layer < layers; layer++ {
			c.land(layer, 2)
		}
		c.open(2)
		time.Sleep(time.Nanosecond)
		c.end(32, false)
	})
	f("lost before a step", 0, 1, func(c *peerComing) {
		time.Sleep(time.Nanosecond)
		c.land(0, 0)
		c.end(0, true)
	})
	f("lost behind a step", 0, 1, func(c *peerComing) {
		c.land(0, 99)
		c.open(1)
		time.Sleep(time.Nanosecond)
		c.end(0, true)
	})
}

// TestBehindAnother: a request whose prefix another request has begun to bring waits for
// that; requests queued after it do not.
func TestBehindAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const upto = 64
		hold := make(chan struct{})
		s := &peerSource{upto: upto, act: func(c *peerComing) {
			<-hold
			c.end(0, false)
		}}
		r := newRig(t, config(), enginetest.Config{Blocks: 40}, nil)
		s.r = r
		p := prompt(rng(), 100)
		want := alone(t, 0, request(p, 6))
		var both [2]*engine.Handle
		for i := range both {
			req := request(p, 6)
			req.Source = s
			both[i] = r.submit(req)
			synctest.Wait()
		}
		other := request(prompt(rand.New(rand.NewPCG(1, 1)), 20), 4)
		same(t, "behind them", r.generate(other), alone(t, 0, other), false)
		synctest.Wait() // the loop publishes what runs after it has delivered
		if st := r.Stats(); st.Running != 1 || st.Waiting != 1 {
			t.Errorf("%+v", st)
		}
		close(hold)
		for _, h := range both {
			out, _, err := collect(h, 1)
			if err != nil {
				t.Error(err)
			}
			same(t, "the prompt", out, want, false)
			r.done(h)
		}
		s.all.Wait()
		r.close()
	})
}
