package worker_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine/enginetest"
	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// ahead is a prompt that is placed while another end gives its prefix.
type ahead struct {
	*decode.Coming
	e     *gpuEnd
	seed  int32
	table []int32
	ended chan error
}

const aheadOwner = "request"

// bring places a prompt whose first tokens another end shall give.
func (e *gpuEnd) bring(from *gpuEnd, seed int32) *ahead {
	e.t.Helper()
	a := &ahead{e: e, seed: seed, ended: make(chan error, 1)}
	p := &decode.Prefix{Addr: from.addr, Peer: from.peer, RequestID: "r", Owner: fmt.Sprint("peer/fetch-", seed), Tokens: gpuPrompt(seed),
		Upto: gpuTokens, Least: 16, Most: gpuTokens / e.layout.BlockTokens, Deadline: time.Now().Add(patience)}
	way, err := e.Prepare(e.t.Context(), p)
	if err != nil || way == nil {
		e.t.Fatal(way, err)
	}
	chain := e.cache.NewChain("")
	chain.Extend(gpuPrompt(seed))
	table, n, err := e.cache.Reserve(&chain, gpuTokens, e.cache.BlocksFor(gpuTokens), 0, time.Now(), aheadOwner)
	if err != nil {
		e.t.Fatal(err)
	}
	a.table = table
	a.Coming = way.Bring(p, table, n, func() {}, func(_ int, err error) { a.ended <- err })
	return a
}

// step waits for layers as a step does, and checks what it would see of each.
func (a *ahead) step() {
	a.e.t.Helper()
	gate := a.Move().(interface{ AwaitLayer(layer int) })
	bt := a.e.layout.BlockTokens
	wrong := make([]bool, len(a.table))
	got := make([]byte, a.e.layout.Resolve()[0].BlockBytes())
	for layer := range a.e.layout.Layers() {
		gate.AwaitLayer(layer)
		for i, block := range a.table {
			a.e.gpu.Gather(layer, block, 0, bt, got)
			wrong[i] = wrong[i] || !bytes.Equal(got, a.e.rows(a.seed, layer, i*bt, bt))
		}
	}
	good, _ := a.Good()
	for i := range good / bt {
		if wrong[i] {
			a.e.t.Errorf("a step has seen wrong rows in block %d, and %d tokens are said to be good", i, good)
		}
	}
}

// over checks the end.
func (a *ahead) over(tokens int, lost bool, want ticket.Outcome) {
	a.e.t.Helper()
	good, gone := a.Good()
	err := <-a.ended
	outcome := ticket.Outcome("")
	var e *decode.Error
	if errors.As(err, &e) {
		outcome = e.Outcome
	}
	if good != tokens || gone != lost || outcome != want {
		a.e.t.Errorf("%d tokens are good, lost %t, %v; want %d, %t, %q", good, gone, err, tokens, lost, want)
	}
	a.e.cache.ReleaseAll(aheadOwner)
}

// TestGiveAhead: like TestGiveBack, into the blocks of a prompt whose step is already launched.
// The rows that a step has seen are right up to where Good says.
func TestGiveAhead(t *testing.T) {
	f := func(name string, do func(t *testing.T, d, p *gpuEnd)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, p := newGPUEnd(t, "decode", 16), newGPUEnd(t, "prefill", 16)
			d.compute(1, gpuTokens)
			do(t, d, p)
			d.clean()
			p.clean()
		})
	}
	f("whole", func(_ *testing.T, d, p *gpuEnd) {
		a := p.bring(d, 1)
		a.step()
		a.over(gpuTokens, false, "")
		p.has(1, gpuTokens)
	})
	f("the rest", func(_ *testing.T, d, p *gpuEnd) {
		p.compute(1, 96)
		a := p.bring(d, 1)
		a.step()
		a.over(gpuTokens, false, "")
		p.has(1, gpuTokens)
	})
	f("evicted meanwhile", func(_ *testing.T, d, p *gpuEnd) {
		d.cache.Clear()
		a := p.bring(d, 1)
		a.step()
		a.over(0, false, ticket.Refused)
		p.has(1, 0)
	})
	f("a bit flips on the way", func(_ *testing.T, d, p *gpuEnd) {
		const flipped = 5
		p.compute(1, gpuTokens) // to know the blocks
		table, _ := enginetest.HoldPrefix(p.cache, gpuPrompt(1)[:gpuTokens], "", "look")
		p.cache.Release(table, "look")
		p.cache.Clear()
		all := p.cache.Stats().Blocks
		order := firstFree(t, p.cache, all)
		p.gpu.Spoil(1, order[flipped])
		a := p.bring(d, 1)
		if a.table[flipped] != order[flipped] {
			t.Fatalf("block %d is at %d, not %d", flipped, a.table[flipped], order[flipped])
		}
		a.step()
		a.over(flipped*16, false, "") // what was written twice may have been read between
		p.has(1, gpuTokens)           // and is right now
	})
	f("decode's GPU stands still", func(t *testing.T, d, p *gpuEnd) {
		begun, on := d.gpu.Stop()
		defer on()
		a := p.bring(d, 1)
		begins(t, begun)
		d.hang()
		a.step()
		a.over(0, true, ticket.Dead)
		if n := p.cache.Stats().Quarantined; n != gpuTokens/16 { // its GPU still can
			t.Errorf("%d blocks are quarantined, want all", n)
		}
		p.compute(2, gpuTokens) // the other blocks
		on()
		p.quarantineEnds()
		p.has(1, 0)
		p.has(2, gpuTokens)
	})
}

// firstFree is the order in which a pool's blocks are given out.
func firstFree(t *testing.T, c *kvcache.Cache, n int) []int32 {
	t.Helper()
	ids, err := c.Alloc(n, "look")
	if err != nil {
		t.Fatal(err)
	}
	c.Release(ids, "look") // the last goes first, so they come in the same order again
	again, err := c.Alloc(n, "look")
	if err != nil {
		t.Fatal(err)
	}
	c.Release(again, "look")
	return again
}
