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
	// onLayer is what a step does with its layers; nil: nothing.
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
	type variant struct {
		name  string
		b     *cuda.Backend
		table []int32
		on    onLayer
	}
	variants := []variant{
		{"GPU 1, nobody", dst, scattered, nil},
		{"GPU 0, nobody", src, scattered, nil},
		{"GPU 0, told of layers", src, scattered, quiet},
		{"GPU 0, kernel, all CTAs, scattered", src, scattered, push(kernels.Kernel, 0)},
		{"GPU 0, kernel, 16 CTAs, scattered", src, scattered, push(kernels.Kernel, 16)},
		{"GPU 0, kernel, 4 CTAs, scattered", src, scattered, push(kernels.Kernel, 4)},
		{"GPU 0, copy engine, scattered", src, scattered, push(kernels.Copy, 0)},
		{"GPU 0, copy engine, one run", src, straight, push(kernels.Copy, 0)},
	}
	var all, device, calls [8][]float64
	once := func(n int, count bool) {
		v := &variants[n]
		at, us := time.Now(), 0.0
		await := func() {
			mustAwait(t, v.b)
			d, _, err := v.b.LastStepTime()
			if err != nil {
				t.Fatal(err)
			}
			us += d
		}
		for pos := 0; pos < length; pos += chunk {
			st := &kernels.Step{Seqs: []kernels.Seq{{Tokens: tokens[pos : pos+chunk], Pos: pos, Blocks: v.table}}}
			if pos+chunk == length {
				st.Seqs[0].Samples = []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}
			}
			if v.on != nil {
				f := v.on(pos/16, v.table[pos/16:(pos+chunk)/16])
				st.OnLayer = func(layer int) {
					begin := time.Now()
					f(layer)
					calls[n] = append(calls[n], float64(time.Since(begin).Microseconds()))
				}
			}
			if err := v.b.Launch(st); err != nil {
				t.Fatal(err)
			}
			if pos > 0 {
				await()
			}
		}
		await()
		if count {
			all[n], device[n] = append(all[n], time.Since(at).Seconds()*1e3), append(device[n], us/1e3)
		}
		if err := peer.Drain(soon(t)); err != nil {
			t.Fatal(err)
		}
	}
	for round := range 5 {
		for n := range variants {
			time.Sleep(400 * time.Millisecond) // a GPU at its power limit is slower for a while
			once(n, round > 0)
		}
	}
	median := func(l []float64) float64 {
		if slices.Sort(l); len(l) == 0 {
			return 0
		}
		return l[len(l)/2]
	}
	for n, v := range variants {
		fmt.Printf("BESIDE %-40s host %8.2f ms  device %8.2f ms (%.2f to %.2f)  call %5.0f us\n", v.name, median(all[n]), median(device[n]), device[n][0], device[n][len(device[n])-1], median(calls[n]))
	}
}
