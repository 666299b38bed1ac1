//go:build cuda && cgo && linux

package cuda_test

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// TestPushBeside prints what pushing a prompt's KV layer by layer costs the prompt:
// an 8k prompt of Llama-3-8B's shape in chunks of 2,048, two chunks under way, on
// each GPU by itself, with nobody, somebody and a peer told of each layer. Needs two
// GPUs and XPYD_CUDA_PUSH=1.
func TestPushBeside(t *testing.T) {
	if os.Getenv("XPYD_CUDA_PUSH") == "" {
		t.Skip("XPYD_CUDA_PUSH is not set")
	}
	opt := cuda.Options{MaxTokens: 2048, MaxSeqs: 64, Blocks: 4096}
	src, err := cuda.NewRandom(llama8B(), 1, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	opt.Device = 1
	dst, err := cuda.NewRandom(llama8B(), 1, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	peer, err := src.OpenLocal(dst)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close(soon(t))
	const length, chunk = 8192, 2048
	scattered, straight := make([]int32, length/16), make([]int32, length/16)
	for i := range scattered {
		scattered[i], straight[i] = int32(i*1283%src.Blocks()), int32(i)
	}
	tokens := make([]int32, length)
	for i := range tokens {
		tokens[i] = int32(i * 104729 % src.Arch().Vocab)
	}
	number := uint64(0)
	// onLayer tells what a step does with its layers; nil: nobody hears of them.
	type onLayer func(first int, blocks []int32) func(layer int)
	quiet := func(int, []int32) func(int) { return func(int) {} }
	push := func(engine kernels.Engine, ctas int) onLayer {
		return func(first int, blocks []int32) func(int) {
			var pairs []kernels.BlockPair
			for _, b := range blocks {
				pairs = append(pairs, kernels.BlockPair{Src: b, Dst: b})
			}
			return func(layer int) {
				number++
				if err := peer.Push(&kernels.Push{FirstLayer: layer, Layers: 1, Blocks: pairs, Value: number, Engine: engine, CTAs: ctas}); err != nil {
					t.Error(err)
				}
			}
		}
	}
	run := func(name string, b *cuda.Backend, table []int32, on onLayer) {
		var all, device, idle, calls []float64
		for round := range 6 {
			at := time.Now()
			us, gap := 0.0, 0.0
			await := func(first bool) {
				mustAwait(t, b)
				d, i, err := b.LastStepTime()
				if err != nil {
					t.Fatal(err)
				}
				if us += d; !first {
					gap += i
				}
			}
			for pos := 0; pos < length; pos += chunk {
				st := &kernels.Step{Seqs: []kernels.Seq{{Tokens: tokens[pos : pos+chunk], Pos: pos, Blocks: table}}}
				if pos+chunk == length {
					st.Seqs[0].Samples = []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}
				}
				if on != nil {
					f := on(pos/16, table[pos/16:(pos+chunk)/16])
					st.OnLayer = func(layer int) {
						begin := time.Now()
						f(layer)
						calls = append(calls, float64(time.Since(begin).Microseconds()))
					}
				}
				if err := b.Launch(st); err != nil {
					t.Fatal(err)
				}
				if pos > 0 {
					await(pos == chunk)
				}
			}
			await(false)
			if round >= 2 {
				all, device, idle = append(all, time.Since(at).Seconds()*1e3), append(device, us/1e3), append(idle, gap)
			}
			if err := peer.Drain(soon(t)); err != nil {
				t.Fatal(err)
			}
		}
		slices.Sort(all)
		slices.Sort(device)
		slices.Sort(idle)
		slices.Sort(calls)
		call := 0.0
		if len(calls) > 0 {
			call = calls[len(calls)/2]
		}
		fmt.Printf("BESIDE %-44s host %8.2f ms  device %8.2f ms  idle between steps %7.1f us  call %5.0f us\n", name, all[len(all)/2], device[len(device)/2], idle[len(idle)/2], call)
	}
	for range 2 {
		run("GPU 1, nobody", dst, scattered, nil)
		run("GPU 0, nobody", src, scattered, nil)
		run("GPU 0, told of layers", src, scattered, quiet)
		for _, n := range []int{0, 16, 8, 4, 2} {
			run(fmt.Sprintf("GPU 0, kernel, %d CTAs, scattered", n), src, scattered, push(kernels.Kernel, n))
		}
		run("GPU 0, copy engine, scattered", src, scattered, push(kernels.Copy, 0))
		run("GPU 0, copy engine, one run", src, straight, push(kernels.Copy, 0))
	}
}
