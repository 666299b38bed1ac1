package worker_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/internal/nap"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvlayout"
)

// idleGPU is a GPU that does nothing in no time: what is pushed has landed, and all of
// it is good. What is left is the hosts' work.
type idleGPU struct {
	*kerneltest.FakeGPU
	pushes, verifies atomic.Int64
}

func (g *idleGPU) AwaitFlag(ctx context.Context, line int, value uint64) error {
	return nap.Until(ctx, func() bool { return g.Flag(line) >= value })
}

func (g *idleGPU) Verify(_ context.Context, landed []kernels.Landed) ([]bool, error) {
	g.verifies.Add(1)
	return slices.Repeat([]bool{true}, len(landed)), nil
}

func (g *idleGPU) OpenPeer(handle, flags []byte) (kernels.Peer, error) {
	p, err := g.FakeGPU.OpenPeer(handle, flags)
	return idlePeer{p, g, flags}, err
}

type idlePeer struct {
	kernels.Peer
	g     *idleGPU
	flags []byte
}

func (p idlePeer) Push(push *kernels.Push) error {
	p.g.pushes.Add(1)
	const stride = 128 // of kerneltest's flags
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&p.flags[push.Line*stride])), push.Value)
	return nil
}

// BenchmarkCollect is what the hosts do when one worker fetches 8k tokens of 32 layers
// from another one's GPU, in blocks of 16: 16,384 units. The blocks are as shuffled as
// those of a pool that has been in use for a while.
func BenchmarkCollect(b *testing.B) {
	const tokens, blocks = 8192, 8192 / 16
	l := kvlayout.Plain(32, 8, 128, 16, "bf16")
	open := func(name string) (*gpuEnd, *idleGPU) {
		var g *idleGPU
		return openGPUEnd(b, name, l, 2*blocks, func(f *kerneltest.FakeGPU) gpuDevice {
			g = &idleGPU{FakeGPU: f}
			return g
		}), g
	}
	giver, from := open("giver")
	taker, to := open("taker")
	prompt := make([]int32, tokens)
	for i := range prompt {
		prompt[i] = rand.Int32N(100)
	}
	for _, e := range []*gpuEnd{giver, taker} { // shuffles what is free
		all, err := e.cache.Alloc(2*blocks, "all")
		if err != nil {
			b.Fatal(err)
		}
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		e.cache.Release(all, "all")
	}
	table, err := giver.cache.Alloc(blocks, "sequence")
	if err != nil {
		b.Fatal(err)
	}
	chain := giver.cache.NewChain("")
	chain.Extend(prompt)
	giver.cache.InsertChain(&chain, prompt, table, 0)
	giver.cache.Release(table, "sequence")
	collect := func() {
		n, err := taker.Collect(b.Context(), &decode.Prefix{Addr: giver.addr, Peer: giver.peer, RequestID: "r", Owner: "peer/fetch", Tokens: prompt,
			Upto: tokens, Least: 16, Most: blocks, Deadline: time.Now().Add(patience)})
		if n != tokens || err != nil {
			b.Fatalf("collected %d of %d tokens: %v", n, tokens, err)
		}
	}
	collect() // opens the session
	b.ReportAllocs()
	from.pushes.Store(0)
	to.verifies.Store(0)
	times := make([]time.Duration, 0, 1000)
	for b.Loop() {
		b.StopTimer()
		taker.clean()
		giver.clean()
		taker.cache.Clear()
		b.StartTimer()
		began := time.Now()
		collect()
		times = append(times, time.Since(began))
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[0].Microseconds())/1000, "ms-min")
	b.ReportMetric(float64(times[len(times)/2].Microseconds())/1000, "ms-p50")
	b.ReportMetric(float64(from.pushes.Load())/float64(b.N), "pushes/op")
	b.ReportMetric(float64(to.verifies.Load())/float64(b.N), "verifies/op")
}
