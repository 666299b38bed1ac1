//go:build cuda && cgo && linux

package cuda_test

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kernels/kerneltest"
)

// ranksApart has these tests give each rank a GPU of its own. Otherwise all ranks share one.
const ranksApart = "XPYD_CUDA_APART"

func rankDevices(n int) []int {
	d := make([]int, n)
	for i := range d {
		if os.Getenv(ranksApart) != "" {
			d[i] = i
		}
	}
	return d
}

// rankCounts leaves out of a list of numbers of ranks those for which there are not enough GPUs.
func rankCounts(t *testing.T, list ...int) (here []int) {
	t.Helper()
	for _, n := range list {
		if gpus := cuda.Devices(); os.Getenv(ranksApart) != "" && n > gpus {
			t.Logf("%d ranks are left out: %s is set, and there are %d GPUs", n, ranksApart, gpus)
			continue
		}
		here = append(here, n)
	}
	if here == nil {
		t.Errorf("none of %v ranks is left", list)
	}
	return here
}

// inOwnProcess runs the test in a process of its own: CUDA must load all code when it starts, and
// does so only if it is told before.
func inOwnProcess(t *testing.T) (done bool) {
	t.Helper()
	if os.Getenv("CUDA_MODULE_LOADING") == "EAGER" {
		return false
	}
	run := "^" + t.Name() + "$"
	if _, part, ok := strings.Cut(flag.Lookup("test.run").Value.String(), "/"); ok {
		run += "/" + part
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, os.Args[0], "-test.v", "-test.run", run)
	c.Env = append(os.Environ(), "CUDA_MODULE_LOADING=EAGER", "CUDA_DEVICE_MAX_CONNECTIONS=32")
	out, err := c.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
	return true
}

func openRanks(t testing.TB, a arch.Config, w kernels.Weights, n int, opt cuda.Options) *cuda.Ranks {
	t.Helper()
	if opt.Blocks == 0 {
		opt.Blocks = 64
	}
	if opt.MaxSeqs == 0 {
		opt.MaxSeqs = 16
	}
	opt.FP16, opt.Devices = opt.FP16 || inFP16(), rankDevices(n)
	b, err := cuda.NewRanks(a, w, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// divides reports whether n ranks can have a model.
func divides(a arch.Config, n int) bool {
	return a.Heads%n == 0 && (a.KVHeads%n == 0 || n%a.KVHeads == 0)
}

// The all-reduce alone: every rank has the sum of all, in the order of the ranks, to the bit, and
// the same norm, for few rows and many, again and again.
func TestRanksReduce(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	for _, n := range rankCounts(t, 2, 4, 8) {
		for _, hidden := range []int{512, 4096, 8192} {
			t.Run(fmt.Sprintf("%d ranks of %d", n, hidden), func(t *testing.T) {
				a := shape(1, hidden, 512, 8, 8, 64, 512)
				b := openRanks(t, a, randomWeights(a, 1), n, cuda.Options{Blocks: 160})
				r := rand.New(rand.NewPCG(7, uint64(n)))
				for _, rows := range []int{1, 2, 3, 64, 301, 2048} {
					if rows <= 301 || n*hidden <= 8192 { // the host needs seconds for more
						checkReduce(t, b.Reduce, r, n, hidden, rows)
					}
				}
			})
		}
	}
}

// The same by ranks that run one after the other, with barriers that say that all have come: so a
// sanitizer, under which kernels that wait for each other would wait for ever, sees all that the
// kernels do, and what they make is checked. Both ways of adding up.
func TestRanksSignalled(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	for _, n := range rankCounts(t, 2, 4, 8) {
		for _, hidden := range []int{512, 4096, 8192} {
			a := shape(1, hidden, 512, 8, 8, 64, 512)
			b := openRanks(t, a, randomWeights(a, 1), n, cuda.Alone(cuda.Options{Blocks: 160, NoGraphs: true, MaxTokens: 64}))
			for _, rows := range []int{1, 3, 40} { // 40 of 4,096 are added up by one rank each
				checkReduce(t, b.ReduceSignalled, rand.New(rand.NewPCG(7, uint64(n))), n, hidden, rows)
			}
		}
	}
}

func checkReduce(t *testing.T, reduce func(which, rows int, partial, x, xn []byte) error, r *rand.Rand, n, hidden, rows int) {
	t.Helper()
	size := 2
	if inFP16() {
		size = 4
	}
	value := func(p []byte, i int) float32 {
		if size == 4 {
			return math.Float32frombits(binary.LittleEndian.Uint32(p[4*i:]))
		}
		return math.Float32frombits(uint32(binary.LittleEndian.Uint16(p[2*i:])) << 16)
	}
	put := func(p []byte, i int, v float32) {
		bits := math.Float32bits(v)
		if size == 4 {
			binary.LittleEndian.PutUint32(p[4*i:], bits)
			return
		}
		binary.LittleEndian.PutUint16(p[2*i:], uint16((bits+0x7fff+bits>>16&1)>>16))
	}
	each := rows * hidden
	partial, x, xn := make([]byte, n*each*size), make([]byte, n*each*size), make([]byte, n*each*2)
	for i := range n * each {
		put(partial, i, (r.Float32()-0.5)*3)
	}
	for i := range each {
		v := (r.Float32() - 0.5) * 9
		for rank := range n {
			put(x, rank*each+i, v)
		}
	}
	want := make([]byte, each*size)
	for i := range each {
		sum := value(partial, i)
		for rank := 1; rank < n; rank++ {
			sum += value(partial, rank*each+i)
		}
		put(want, i, value(x, i)+sum)
	}
	for repeat := range 6 {
		got := slices.Clone(x)
		if err := reduce(repeat%2, rows, partial, got, xn); err != nil {
			t.Fatal(err)
		}
		sameReduced(t, n, rows, hidden, got, xn, want, value)
	}
}

func sameReduced(t *testing.T, n, rows, hidden int, x, xn, want []byte, value func([]byte, int) float32) {
	t.Helper()
	each := rows * hidden
	size := len(want) / each
	for rank := range n {
		if got := x[rank*each*size : (rank+1)*each*size]; !slices.Equal(got, want) {
			for i := range each {
				if value(got, i) != value(want, i) {
					t.Fatalf("%d rows: rank %d has %v at row %d, column %d; want %v", rows, rank, value(got, i), i/hidden, i%hidden, value(want, i))
				}
			}
		}
		if !slices.Equal(xn[rank*each*2:(rank+1)*each*2], xn[:each*2]) {
			t.Fatalf("%d rows: rank %d has another norm than rank 0", rows, rank)
		}
	}
}

// Logits of several ranks beside the CPU's, within what one rank's may be off: decoding as graphs,
// chunks among other sequences, a whole prompt; KV heads of one rank each, and of several.
func TestRanksLogits(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	const prompt = 301
	for name, a := range families() {
		w := randomWeights(a, 7)
		tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), prompt, a.Vocab)
		var want, one [][]float32
		for _, n := range rankCounts(t, 2, 4) {
			if !divides(a, n) {
				continue
			}
			t.Run(fmt.Sprintf("%s by %d", name, n), func(t *testing.T) {
				opt := cuda.Options{Blocks: 64}
				if want == nil {
					want = forced(t, openCPU(t, a, w, 64, 16), tokens, []int{1}, 0)
					one = forced(t, open(t, a, w, opt), tokens, []int{1}, 0)
				}
				b := openRanks(t, a, w, n, opt)
				for _, run := range []struct {
					chunks []int
					beside int
				}{{[]int{1}, 0}, {[]int{3, 14, 1, 7, 100, 17}, 4}, {[]int{prompt}, 9}} {
					worst, single := 0.0, 0.0
					got := forced(t, b, tokens, run.chunks, run.beside)
					for i, pos := 0, 0; i < len(got); i++ {
						pos = min(pos+run.chunks[i%len(run.chunks)], prompt)
						e := relative(got[i], want[pos-1])
						if !(e <= tolerance()) {
							t.Fatalf("chunks of %v: logits after %d tokens are off by %.4f", run.chunks, pos, e)
						}
						worst, single = max(worst, e), max(single, relative(one[pos-1], want[pos-1]))
					}
					t.Logf("chunks of %v, %d beside: worst %.5f; one rank decoding %.5f", run.chunks, run.beside, worst, single)
				}
			})
		}
	}
}

// Through NCCL logits and draws have the bits that they have over peer memory: decoding as graphs,
// chunks among other sequences, a whole prompt of several gatherings. Needs a GPU a rank.
func TestRanksExchange(t *testing.T) {
	if os.Getenv(ranksApart) == "" {
		t.Skip(ranksApart + " is not set")
	}
	if inOwnProcess(t) {
		return
	}
	for _, n := range rankCounts(t, 2, 4) {
		for name, a := range families() {
			if !divides(a, n) {
				continue
			}
			w := randomWeights(a, 7)
			tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), 301, a.Vocab)
			var want [][][]float32
			for _, exchange := range []string{"", "nccl"} {
				t.Setenv("XPYD_CUDA_EXCHANGE", exchange)
				b := openRanks(t, a, w, n, cuda.Options{})
				if by := map[string]string{"": "peer memory", "nccl": "NCCL"}[exchange]; b.Exchange() != by {
					t.Fatalf("%d ranks exchange through %s, want %s", n, b.Exchange(), by)
				}
				for i, chunks := range [][]int{{1}, {3, 14, 1, 7, 100, 17}, {301}} {
					got := forced(t, b, tokens, chunks, 3*i)
					if exchange == "" {
						want = append(want, got)
						continue
					}
					for j := range got {
						if !sameBits(got[j], want[i][j]) {
							t.Fatalf("%s by %d, chunks of %v: logits %d differ, by %.5f", name, n, chunks, j, relative(got[j], want[i][j]))
						}
					}
				}
				if err := b.Close(); err != nil {
					t.Error(err)
				}
			}
			t.Logf("%s by %d: the same bits", name, n)
		}
	}
}

// The same step has the same bits on every run, as graphs or not, with dependent launches or
// without.
func TestRanksRunsAreEqual(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 3)
	tokens := randomTokens(rand.New(rand.NewPCG(1, 1)), 200, a.Vocab)
	for _, n := range rankCounts(t, 2, 4) {
		var want [][]float32
		for i, opt := range []cuda.Options{{}, {}, {NoGraphs: true, NoPDL: true}} {
			got := forced(t, openRanks(t, a, w, n, opt), tokens, []int{64, 1, 1, 1, 9}, 0)
			if want == nil {
				want = got
			}
			for j := range want {
				if !sameBits(got[j], want[j]) {
					t.Fatalf("%d ranks, variant %d: logits of chunk %d differ", n, i, j)
				}
			}
		}
	}
}

// FP8 weights, as a checkpoint has them, beside the CPU's logits with those values; FP8 KV beside
// bf16 KV of as many ranks; both together run.
func TestRanksFP8(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	const prompt = 200
	for _, name := range []string{"llama gqa4 128", "qwen2 gqa7 64", "llama gqa8 128"} {
		a := families()[name]
		plain := randomWeights(a, 7)
		f8, widened := kerneltest.F8Weights(plain)
		tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), prompt, a.Vocab)
		want := forced(t, openCPU(t, a, widened, 64, 16), tokens, []int{1}, 0)
		for _, n := range rankCounts(t, 2, 4) {
			if !divides(a, n) {
				continue
			}
			t.Run(fmt.Sprintf("%s by %d", name, n), func(t *testing.T) {
				near := func(what string, b kernels.Backend, chunks []int, want [][]float32, tolerance float64) {
					t.Helper()
					worst, pos := 0.0, 0
					for i, got := range forced(t, b, tokens, chunks, 0) {
						pos = min(pos+chunks[i%len(chunks)], prompt)
						worst = max(worst, relative(got, want[pos-1]))
					}
					if !(worst <= tolerance) {
						t.Errorf("%s: off by %.4f", what, worst)
					}
					t.Logf("%s: %.5f", what, worst)
				}
				w8 := openRanks(t, a, f8, n, cuda.Options{WeightsFP8: true})
				near("FP8 weights, one by one", w8, []int{1}, want, tolerance())
				near("FP8 weights, chunks", w8, []int{33, 17, 64, 86}, want, a8Tolerance)
				bf16 := forced(t, openRanks(t, a, plain, n, cuda.Options{}), tokens, []int{1}, 0)
				near("FP8 KV, one by one", openRanks(t, a, plain, n, cuda.Options{KVFP8: true}), []int{1}, bf16, kv8Tolerance)
				near("both, chunks", openRanks(t, a, plain, n, cuda.Options{KVFP8: true, WeightsFP8: true}), []int{50, 50, 1}, bf16, w8Tolerance)
			})
		}
	}
}

// With BatchInvariant logits have the same bits whatever the batch and the chunks; how many
// ranks there are is part of the numerics, and only there.
func TestRanksInvariant(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	const n = 900
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 7)
	tokens := randomTokens(rand.New(rand.NewPCG(11, 1)), n, a.Vocab)
	for _, ranks := range rankCounts(t, 2, 4) {
		b := openRanks(t, a, w, ranks, cuda.Options{Blocks: 260, MaxSeqs: 80, MaxTokens: 2300, BatchInvariant: true})
		if name := b.Info().Numerics; !strings.Contains(name, fmt.Sprintf("-invariant-2-tp%d-", ranks)) {
			t.Errorf("numerics %q", name)
		}
		want := ends(t, b, tokens, []int{16}, 0)
		same := 0
		for _, run := range []struct {
			chunks []int
			beside int
		}{{[]int{512}, 6}, {append([]int{785}, slices.Repeat([]int{1}, n)...), 63}, {[]int{3, 29, 128, 127, 1, 64}, 2}} {
			for pos, l := range ends(t, b, tokens, run.chunks, run.beside) {
				if w, ok := want[pos]; ok {
					if same++; !sameBits(l, w) {
						t.Fatalf("%d ranks, %d beside: logits after %d tokens differ, by %.5f", ranks, run.beside, pos, relative(l, w))
					}
				}
			}
		}
		if same < 4 {
			t.Errorf("%d logits were compared", same)
		}
	}
	if name := openRanks(t, a, w, 2, cuda.Options{}).Info().Numerics; strings.Contains(name, "tp") {
		t.Errorf("numerics %q of ranks whose bits depend on the batch anyway", name)
	}
}

// Steps that overlap draw what steps that wait for each other draw, and report their layers.
func TestRanksOverlap(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 3)
	for _, n := range rankCounts(t, 2, 4) {
		for _, opt := range []cuda.Options{{}, {NoGraphs: true}} {
			b := openRanks(t, a, w, n, opt)
			overlapEqualsSteps(t, b, fmt.Sprintf("%d ranks, %+v", n, opt))
			overlappingChunks(t, b)
		}
	}
}

// The pool is that of all heads: rows and digests go in and out as they do with one rank, and
// what was put in is what every rank computes with, also those that share a KV head.
func TestRanksPool(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	a := families()["llama gqa4 128"]
	w := randomWeights(a, 1)
	tokens := randomTokens(rand.New(rand.NewPCG(1, 2)), 40, a.Vocab)
	for _, n := range rankCounts(t, 2, 4) {
		for _, kv8 := range []bool{false, !inFP16()} {
			b, one := openRanks(t, a, w, n, cuda.Options{Blocks: 16, KVFP8: kv8}), open(t, a, w, cuda.Options{Blocks: 16, KVFP8: kv8})
			if b.Layout().String() != one.Layout().String() {
				t.Fatalf("layout %v, one rank's is %v", b.Layout(), one.Layout())
			}
			kerneltest.PoolBesideSteps(t, b)
			l := b.Layout().Resolve()[0]
			for _, x := range []kernels.Backend{b, one} {
				mustStep(t, x, kernels.Seq{Tokens: tokens[:32], Blocks: []int32{3, 4}})
			}
			for layer := range a.Layers {
				mine, theirs := make([]byte, l.BlockBytes()), make([]byte, l.BlockBytes())
				b.Gather(layer, 3, 0, 16, mine)
				one.Gather(layer, 3, 0, 16, theirs)
				for plane := range 2 {
					for h := range l.Heads {
						x, _ := l.Part(mine, 16, plane, h)
						y, _ := l.Part(theirs, 16, plane, h)
						if d := rowsDiffer(x, y, kv8); !(d < 0.05) {
							t.Errorf("%d ranks, layer %d: rows of plane %d, head %d differ by %.3f from one rank's", n, layer, plane, h, d)
						}
					}
				}
				d := make([]uint64, l.Heads)
				for i, block := range []int32{3, 4} {
					b.Gather(layer, block, 0, 16, mine)
					b.Scatter(layer, 10+int32(i), 0, 16, mine)
					part := make([]byte, l.PackedBytes(5))
					b.Gather(layer, block, 4, 5, part)
					b.Scatter(layer, 10+int32(i), 4, 5, part)
					b.Digest(layer, block, d)
					b.SetDigest(layer, 10+int32(i), 16, d)
				}
			}
			for i, block := range []int32{10, 11} {
				digestsMatch(t, b, block, 16*i, 16)
			}
			b.CopyBlock(12, 11, 16, 7)
			digestsMatch(t, b, 12, 16, 7)
			next := func(blocks ...int32) []float32 {
				return slices.Clone(mustStep(t, b, kernels.Seq{Tokens: tokens[32:40], Pos: 32, Blocks: blocks, WantLogits: true})[0].Logits)
			}
			if x, y := next(3, 4, 5), next(10, 11, 6); !sameBits(x, y) {
				t.Errorf("%d ranks: rows that were moved give other logits, by %.5f", n, relative(x, y))
			}
		}
	}
}

// rowsDiffer is ‖x-y‖/‖y‖ of packed rows; of FP8 ones without their scales, roughly.
func rowsDiffer(x, y []byte, fp8 bool) float64 {
	var got, want []float32
	for i := 0; i < len(x); i++ {
		if fp8 {
			got, want = append(got, kerneltest.FromE4M3(x[i])), append(want, kerneltest.FromE4M3(y[i]))
			continue
		}
		if i%2 == 1 {
			continue
		}
		v, w := binary.LittleEndian.Uint16(x[i:]), binary.LittleEndian.Uint16(y[i:])
		if inFP16() {
			got, want = append(got, half(v)), append(want, half(w))
			continue
		}
		got, want = append(got, math.Float32frombits(uint32(v)<<16)), append(want, math.Float32frombits(uint32(w)<<16))
	}
	return relative(got, want)
}

// half widens a normal fp16.
func half(v uint16) float32 {
	if v&0x7fff == 0 {
		return 0
	}
	return math.Float32frombits(uint32(v&0x8000)<<16 | (uint32(v&0x7fff)<<13 + 112<<23))
}

// Blocks go to host memory and come back, by each rank's part of the heads.
func TestRanksHostMoves(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	for name, g := range geometries() {
		for _, n := range rankCounts(t, 2, 4) {
			if !divides(g.arch, n) || g.fp8 && inFP16() {
				continue
			}
			t.Run(fmt.Sprintf("%s by %d", name, n), func(t *testing.T) {
				hostMoves(t, name, openRanks(t, g.arch, randomWeights(g.arch, 1), n, hostMoveOptions(g.blockTokens, g.fp8)))
			})
		}
	}
}

// Steps wait for blocks that arrive from host memory, and for gates, on every rank.
func TestRanksArrivals(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	a := families()["llama gqa2 8"]
	w := randomWeights(a, 1)
	for _, n := range rankCounts(t, 2, 4) {
		b, other := openRanks(t, a, w, n, arrivalOptions()), openRanks(t, a, w, n, arrivalOptions())
		arrivals(t, b)
		gates(t, b, other)
	}
}
