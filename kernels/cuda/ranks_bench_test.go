//go:build cuda && cgo && linux

package cuda_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// TestRanksSpeed prints figures of ranks, which share a GPU or have one each. XPYD_CUDA_BENCH names
// what to run: "steps" of two beside one rank in turn, "reduce" the all-reduce alone beside its limit, "push"
// blocks between unequal numbers of ranks, "70b" a layer of a 70B shape with FP8 weights, of 64, on two ranks,
// "70b16" with bf16 weights; "70b:40" with 40 layers, "70b:40@4" on four ranks.
func TestRanksSpeed(t *testing.T) {
	what := strings.Fields(os.Getenv("XPYD_CUDA_BENCH"))
	if len(what) == 0 {
		t.Skip("XPYD_CUDA_BENCH is not set")
	}
	if inOwnProcess(t) {
		return
	}
	for _, w := range what {
		name, by, _ := strings.Cut(w, "@")
		name, layers, _ := strings.Cut(name, ":")
		switch name {
		case "steps":
			stepRatios(t)
		case "reduce":
			reduceTimes(t)
		case "push":
			pushSpeeds(t)
		case "70b", "70b16":
			n, ranks := 64, 2
			if layers != "" {
				if _, err := fmt.Sscan(layers, &n); err != nil {
					t.Fatal(err)
				}
			}
			if by != "" {
				if _, err := fmt.Sscan(by, &ranks); err != nil {
					t.Fatal(err)
				}
			}
			layerTime(t, n, ranks, name == "70b")
		default:
			t.Fatalf("no figure %q", w)
		}
	}
}

// decoding is a batch that decodes, one step after the other, two under way.
type decoding struct {
	b      launcher
	length int
	halves [2][]kernels.Seq
	step   int
	last   time.Time
}

func newDecoding(t *testing.T, b launcher, batch, length int) *decoding {
	d := &decoding{b: b, length: length}
	var seqs []kernels.Seq
	next := int32(0)
	for i := range batch {
		q := kernels.Seq{Tokens: []int32{int32(i)}, Pos: length, Samples: []kernels.Sample{{TopP: 1, Repetition: 1, Logprobs: -1}}}
		for range (length + 256) / 16 {
			q.Blocks = append(q.Blocks, next*7919%int32(b.Blocks()))
			next++
		}
		fill := make([]int32, length)
		for j := range fill {
			fill[j] = int32((i*7919 + j*104729) % b.Arch().Vocab)
		}
		if i < 8 { // the others attend to what lies there: any finite rows do
			mustStep(t, b, kernels.Seq{Tokens: fill, Blocks: q.Blocks})
		}
		seqs = append(seqs, q)
	}
	d.halves = [2][]kernels.Seq{slices.Clone(seqs), slices.Clone(seqs)}
	return d
}

// run has steps run, and returns the milliseconds of each after the first few.
func (d *decoding) run(t *testing.T, steps int) (ms []float64) {
	const warm = 5
	for i := range steps + warm + 1 {
		half := d.halves[i%2]
		for j := range half {
			if half[j].Pos, half[j].After = d.length-100+d.step%200, 0; i > 0 {
				half[j].After = j + 1
			}
		}
		d.step++
		if mustLaunch(t, d.b, half...); i == 0 {
			continue
		}
		mustAwait(t, d.b)
		now := time.Now()
		if i > warm {
			ms = append(ms, float64(now.Sub(d.last).Microseconds())/1000)
		}
		d.last = now
	}
	mustAwait(t, d.b)
	return ms
}

// tp is a figure's name, which says whether the ranks had a GPU each, and exchanged through NCCL, and
// that without peer access.
func tp(format string, args ...any) string {
	name := "tp."
	if os.Getenv(ranksApart) != "" {
		name = "tp.apart."
	}
	if os.Getenv("XPYD_CUDA_EXCHANGE") != "" {
		name = "tp.nccl."
		if os.Getenv("NCCL_P2P_DISABLE") != "" {
			name = "tp.nccl_shm."
		}
	}
	return name + fmt.Sprintf(format, args...)
}

// resultBeside is result with what the figure stands beside, of the same run.
func resultBeside(name, unit string, value float64, sorted []float64, peer string, peerValue float64) {
	line, _ := json.Marshal(map[string]any{"name": name, "unit": unit, "value": value, "p1": sorted[0], "p99": sorted[len(sorted)*99/100], "runs": len(sorted), "peer": peer, "peer_value": peerValue})
	fmt.Fprintf(os.Stdout, "RESULT %s\n", line)
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// stepRatios has one rank and two decode in turn, in Llama-3-8B's shape.
func stepRatios(t *testing.T) {
	opt := cuda.Options{MaxTokens: 1024, MaxSeqs: 64, Blocks: 6000, Tune: true, FP16: inFP16(), WeightsFP8: os.Getenv("XPYD_CUDA_W8") != "", KVFP8: os.Getenv("XPYD_CUDA_KV8") != ""}
	one, err := cuda.NewRandom(llama8B(), 1, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	opt.Devices = rankDevices(2)
	two, err := cuda.NewRandomRanks(llama8B(), 1, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer two.Close()
	for _, batch := range []int{1, 8, 64} {
		x, y := newDecoding(t, one, batch, 1024), newDecoding(t, two, batch, 1024)
		var ones, twos, ratios []float64
		for range 9 {
			a, b := median(x.run(t, 40)), median(y.run(t, 40))
			ones, twos, ratios = append(ones, a), append(twos, b), append(ratios, b/a)
		}
		slices.Sort(ratios)
		fmt.Fprintf(os.Stdout, "STEP b%d: one rank %.3f ms, two %.3f\n", batch, median(ones), median(twos))
		resultBeside(tp("step_ratio.b%d", batch), "x", median(ratios), ratios, "one rank, ms", median(ones))
	}
}

// reduceTimes are of two ranks and four. The limit is an empty kernel of a graph, and the bytes that
// a rank reads and writes, at the bandwidth at which all ranks copy each other's rows at once.
func reduceTimes(t *testing.T) {
	const hidden = 4096
	const most = 8192 // rows
	for _, n := range rankCounts(t, 2, 4) {
		a := shape(1, hidden, 2048, 32, 8, 128, 4096)
		b, err := cuda.NewRandomRanks(a, 1, cuda.Options{MaxTokens: most, MaxSeqs: 16, Blocks: most/16 + 1, FP16: inFP16(), Devices: rankDevices(n)})
		if err != nil {
			t.Fatal(err)
		}
		times := func(what, rows, calls int) []float64 {
			us, err := b.ReduceTime(what, rows, calls, 20)
			if err != nil {
				t.Fatal(err)
			}
			slices.Sort(us)
			return us
		}
		empty := median(times(cuda.EmptyKernel, 1, 200))
		rate := 2 * float64(most) * hidden * 2 / (median(times(cuda.CopyRows, most, 20)) - empty) // bytes a microsecond
		fmt.Fprintf(os.Stdout, "REDUCE %d ranks: an empty kernel %.2f us; each copies at %.0f GB/s\n", n, empty, rate/1000)
		for _, size := range []struct {
			name string
			rows int
		}{{"8k", 1}, {"64k", 8}, {"1m", 128}, {"16m", 2048}} {
			us := times(cuda.AllReduce, size.rows, 200)
			name := tp("allreduce_us.%s", size.name)
			if n > 2 {
				name += fmt.Sprintf("_n%d", n)
			}
			bytes := float64(size.rows * hidden * 2 * (n + 2)) // of a rank: all partial rows, the residual stream there and back
			resultBeside(name, "us", median(us), us, "an empty kernel, and a rank's bytes at a copy's bandwidth", empty+bytes/rate)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
}

// layerTime is what a layer of a 70B shape adds to a decode step of several ranks, and, to tell what is the
// ranks' from what is the kernels', of one, with fewer layers.
func layerTime(t *testing.T, layers, several int, fp8 bool) {
	const few, some = 8, 24
	if gpus := cuda.Devices(); os.Getenv(ranksApart) != "" && several > gpus {
		t.Logf("%d ranks are left out: there are %d GPUs", several, gpus)
		return
	}
	rate := 0.0 // bytes a microsecond of a rank, as all copy at once
	step := func(n, ranks int) (ms [2]float64) {
		a := shape(n, 8192, 28672, 64, 8, 128, 128256)
		a.MaxPositions, a.RopeTheta, a.TiedHead = 8192, 500000, true
		opt := cuda.Options{MaxTokens: 1024, MaxSeqs: 64, Blocks: 700, WeightsFP8: fp8}
		var b launcher
		if ranks == 1 {
			one, err := cuda.NewRandom(a, 1, opt)
			if err != nil {
				t.Fatal(err)
			}
			defer one.Close()
			b = one
		} else {
			opt.Devices = rankDevices(ranks)
			all, err := cuda.NewRandomRanks(a, 1, opt)
			if err != nil {
				t.Fatal(err)
			}
			defer all.Close()
			us, err := all.ReduceTime(cuda.CopyRows, 1024, 20, 20)
			if err != nil {
				t.Fatal(err)
			}
			rate = 2 * 1024 * 8192 * 2 / median(us)
			b = all
		}
		for i, batch := range []int{1, 8} {
			ms[i] = median(newDecoding(t, b, batch, 1024).run(t, 60))
		}
		return ms
	}
	each := func(n, ranks int) (us [2]float64) {
		many, least := step(n, ranks), step(few, ranks)
		for i := range us {
			us[i] = (many[i] - least[i]) / float64(n-few) * 1000
			fmt.Fprintf(os.Stdout, "LAYER b%d, %d ranks: %d layers %.3f ms, %d layers %.3f ms: %.1f us a layer\n", []int{1, 8}[i], ranks, n, many[i], few, least[i], us[i])
		}
		return us
	}
	one, all := each(some, 1), each(layers, several)
	weights, name := float64(8192*10240+8192*8192+3*8192*28672), tp("layer_us.70b_w8")
	if !fp8 {
		weights, name = 2*weights, tp("layer_us.70b")
	}
	if several != 2 {
		name += fmt.Sprintf("_n%d", several)
	}
	fmt.Fprintf(os.Stdout, "LAYER: all ranks' weights at a copy's bandwidth, %.0f GB/s each: %.1f us\n", rate/1000, weights/float64(several)/rate)
	for i, batch := range []int{1, 8} {
		resultBeside(fmt.Sprintf("%s_b%d", name, batch), "us", all[i], []float64{all[i]}, "one rank with all of the layer", one[i])
	}
}
