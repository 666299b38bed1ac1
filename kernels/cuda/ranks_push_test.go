//go:build cuda && cgo && linux

package cuda_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kvlayout"
)

// end is a pool of one or several ranks.
type end struct {
	kernels.Backend
	kernels.Verifier
	ranks []*cuda.Backend
}

// openEnd opens a pool of n ranks on these devices.
func openEnd(t testing.TB, a arch.Config, opt cuda.Options, devices []int) end {
	t.Helper()
	opt.MaxTokens, opt.MaxSeqs, opt.NoGraphs = 256, 4, true
	if len(devices) == 1 {
		opt.Device = devices[0]
		b, err := cuda.NewRandom(a, 1, opt)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Close() })
		return end{b, b, []*cuda.Backend{b}}
	}
	opt.Devices = devices
	b, err := cuda.NewRandomRanks(a, 1, cuda.Alone(opt)) // which nothing here computes with
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	e := end{b, b, nil}
	for i := range devices {
		e.ranks = append(e.ranks, b.Rank(i))
	}
	return e
}

// joined are the peers of two pools: one for each pair of ranks with heads in common.
type joined struct {
	to    end
	pairs []kvlayout.Pair
	peers []kernels.Peer
	cuts  []kernels.Cut
	value uint64
}

func join(t testing.TB, from, to end) *joined {
	t.Helper()
	heads := from.Layout().Resolve()[0].Heads
	pairs, err := kvlayout.Pairs(heads, len(from.ranks), len(to.ranks))
	if err != nil {
		t.Fatal(err)
	}
	j := &joined{to: to, pairs: pairs}
	for _, p := range pairs {
		peer, err := from.ranks[p.From].OpenLocal(to.ranks[p.To])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := peer.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
		cut := kernels.Cut{From: p.FromHead, To: p.ToHead, Count: p.Heads}
		if p.Heads == from.ranks[p.From].Layout().Resolve()[0].Heads && p.Heads == to.ranks[p.To].Layout().Resolve()[0].Heads {
			cut = kernels.Cut{}
		}
		j.peers, j.cuts = append(j.peers, peer), append(j.cuts, cut)
	}
	return j
}

// launch begins a push of all ranks, each pair with a line of its own.
func (j *joined) launch(t testing.TB, a kernels.Push) {
	t.Helper()
	j.value++
	ctas := a.CTAs
	for i, p := range j.peers {
		a.Line, a.Value, a.Cut = 3+i, j.value, j.cuts[i]
		if busy := j.busy(j.pairs[i].From); ctas > 0 {
			a.CTAs = max(ctas/busy, 1)
		}
		if err := p.Push(&a); err != nil {
			t.Fatalf("%+v: %v", j.pairs[i], err)
		}
	}
}

// busy is how many ranks a rank pushes to.
func (j *joined) busy(from int) (n int) {
	for _, p := range j.pairs {
		if p.From == from {
			n++
		}
	}
	return n
}

func (j *joined) landed(t testing.TB) {
	t.Helper()
	for i := range j.peers {
		if err := j.to.ranks[0].AwaitFlag(soon(t), 3+i, j.value); err != nil {
			t.Fatal(err)
		}
	}
}

// otherDevices are those of the other end's n ranks: the last GPU, unless each has its own.
func otherDevices(n int) []int {
	d := rankDevices(n)
	for i := range d {
		if gpus := cuda.Devices(); os.Getenv(ranksApart) == "" && gpus > 1 {
			d[i] = gpus - 1
		}
	}
	return d
}

// copies checks that every rank has, of every block, what the pool of all heads has: also a head
// that several keep.
func copies(t *testing.T, what string, e end) {
	t.Helper()
	all := &e.Layout().Resolve()[0]
	n := all.BlockTokens
	whole, sums := make([]byte, all.BlockBytes()), make([]uint64, all.Heads)
	for layer := range e.Layout().Layers() {
		for block := range int32(e.Blocks()) {
			e.Gather(layer, block, 0, n, whole)
			e.Digest(layer, block, sums)
			for i, b := range e.ranks {
				l := &b.Layout().Resolve()[layer]
				got, want, its := make([]byte, l.BlockBytes()), make([]byte, l.BlockBytes()), make([]uint64, l.Heads)
				kvlayout.CopyHeads(l, want, n, 0, all, whole, n, 0, n)
				b.Gather(layer, block, 0, n, got)
				b.Digest(layer, block, its)
				if !bytes.Equal(got, want) || !slices.Equal(its, sums[l.FirstHead:l.FirstHead+l.Heads]) {
					t.Fatalf("%s: layer %d block %d of rank %d is not what the pool has", what, layer, block, i)
				}
			}
		}
	}
}

// Pushes between pools of any two numbers of ranks bring, byte for byte, what they bring between two
// of one rank, to every rank that has a head, and touch nothing else: of whole blocks, by kernels
// and the copy engine.
func TestRanksPush(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	counts := rankCounts(t, 1, 2, 4)
	every := map[string]bool{"4 heads of 128, 16 tokens": true, "4 heads of 128 in FP8": true, "1 head of 256, 16 tokens": true} // others: 1 to 2, 2 to 1
	for name, g := range geometries() {
		for _, from := range counts {
			for _, to := range counts {
				if !divides(g.arch, from) || !divides(g.arch, to) || !every[name] && from+to != 3 {
					continue
				}
				t.Run(fmt.Sprintf("%s, %d to %d", name, from, to), func(t *testing.T) {
					opt := cuda.Options{BlockTokens: g.blockTokens, KVFP8: g.fp8, Blocks: 24}
					src := openEnd(t, g.arch, opt, rankDevices(from))
					opt.Blocks = 40
					dst := openEnd(t, g.arch, opt, otherDevices(to))
					j := join(t, src, dst)
					noise(src, 1)
					noise(dst, 2)
					image, want := imageOf(src), imageOf(dst) // which depend on no rank: TestRanksPool
					r := rand.New(rand.NewPCG(3, 4))
					layers := g.arch.Layers
					for i, a := range []kernels.Push{
						{FirstLayer: layers - 1, Layers: 1, Engine: kernels.Kernel, CTAs: 16}, {Layers: layers, Engine: kernels.Kernel}, {Layers: layers, Engine: kernels.Copy},
						{Layers: 1, Engine: kernels.Auto, CTAs: 3}, {Layers: layers, Engine: kernels.Kernel, CTAs: 1},
					} {
						n := []int{1, 17, 24, 9, 24}[i]
						blocks := r.Perm(24)
						for k, to := range r.Perm(40)[:n] {
							a.Blocks = append(a.Blocks, kernels.BlockPair{Src: int32(blocks[k]), Dst: int32(to)})
						}
						j.launch(t, a)
						j.landed(t)
						want = want.moved(image, 40, 24, a.FirstLayer, a.Layers, a.Blocks)
						want.same(t, fmt.Sprintf("push %d", i), dst)
						copies(t, fmt.Sprintf("push %d", i), dst)
					}
					image.same(t, "source", src)
				})
			}
		}
	}
}

// fill writes a prompt's rows into the first blocks, with their digests, as a step does.
func (e end) fill(t *testing.T, positions int, seed uint64) (held []kvlayout.Held) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 9))
	layers := e.Layout().Resolve()
	bt := e.Layout().BlockTokens
	sums := make([]uint64, layers[0].Heads)
	for layer := range layers {
		l := &layers[layer]
		for first := 0; first < positions; first += bt {
			n, block := min(bt, positions-first), int32(first/bt)
			if layer == 0 {
				held = append(held, kvlayout.Held{Block: block, FirstPos: first, Rows: n})
			}
			packed := make([]byte, l.PackedBytes(n))
			l.Parts(packed, n, func(_, _ int, rows, scales []byte) {
				for i := range rows {
					if rows[i] = byte(r.Uint32()); len(scales) > 0 {
						rows[i] &= 0xbf // no NaN
					} else if i%2 == 1 {
						rows[i] = 0x3c + rows[i]&0x83 // of some size
					}
				}
				for i := range scales {
					if scales[i] = byte(r.Uint32()); i%4 == 3 {
						scales[i] = 0x3c
					}
				}
			})
			e.Scatter(layer, block, 0, n, packed)
			clear(sums)
			kernels.DigestRows(l, first, n, packed, sums)
			e.SetDigest(layer, block, n, sums)
		}
	}
	return held
}

// Blocks of other sizes and dtypes are assembled between any two numbers of ranks as they are between
// two of one rank, byte for byte, with digests that are right.
func TestRanksRefill(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	const positions = 151
	a := shape(2, 512, 64, 8, 4, 128, 64)
	counts := rankCounts(t, 1, 2, 4)
	for _, c := range []struct {
		name         string
		from, to     int // positions of a block
		fromFP8, kv8 bool
	}{{"blocks of 5 from 16", 16, 5, false, false}, {"blocks of 16 from 5", 5, 16, false, false}, {"FP8 blocks of 32 from bf16", 16, 32, false, true}, {"bf16 blocks from FP8", 16, 16, true, false}} {
		t.Run(c.name, func(t *testing.T) {
			var want image
			for _, from := range counts {
				for _, to := range counts {
					t.Run(fmt.Sprintf("%d to %d", from, to), func(t *testing.T) {
						src := openEnd(t, a, cuda.Options{BlockTokens: c.from, KVFP8: c.fromFP8, Blocks: 40}, rankDevices(from))
						dst := openEnd(t, a, cuda.Options{BlockTokens: c.to, KVFP8: c.kv8, Blocks: 40}, otherDevices(to))
						j := join(t, src, dst)
						noise(dst, 2)
						held := src.fill(t, positions, 5)
						var refills []kvlayout.Refill
						for first := 0; first < positions; first += c.to {
							rows := min(c.to, positions-first)
							of, end := first/c.from, (first+rows-1)/c.from
							refills = append(refills, kvlayout.Refill{Block: int32(39 - first/c.to), FirstPos: first, Rows: rows, First: of, Count: end - of + 1})
						}
						for layer := range a.Layers {
							j.launch(t, kernels.Push{FirstLayer: layer, Layers: 1, Engine: kernels.Kernel, CTAs: 16, Sources: held, Refills: refills})
							j.landed(t)
							var landed []kernels.Landed
							for _, r := range refills {
								landed = append(landed, kernels.Landed{Layer: layer, Block: r.Block, FirstPos: r.FirstPos, Rows: r.Rows})
							}
							good, err := dst.Verify(soon(t), landed)
							if err != nil || slices.Contains(good, false) {
								t.Fatalf("%s, %d to %d: layer %d: %v, %v", c.name, from, to, layer, good, err)
							}
						}
						if want.rows == nil {
							want = imageOf(dst)
						}
						want.same(t, fmt.Sprintf("%s, %d to %d", c.name, from, to), dst)
						copies(t, c.name, dst)
					})
				}
			}
		})
	}
}

// A push that names heads that are not there, or pools that do not suit, is refused.
func TestRanksPushRefused(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	a := shape(2, 512, 64, 8, 4, 128, 64)
	src := openEnd(t, a, cuda.Options{Blocks: 4}, rankDevices(1))
	dst := openEnd(t, a, cuda.Options{Blocks: 4}, []int{0, 0})
	p, err := src.ranks[0].OpenLocal(dst.ranks[1])
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	noise(dst, 2)
	want := imageOf(dst)
	for _, cut := range []kernels.Cut{{}, {From: 3, Count: 2}, {To: 1, Count: 2}, {From: -1, Count: 1}, {To: -1, Count: 1}, {Count: 3}, {Count: -1}, {From: 1}, {From: 1 << 31, Count: 1}, {Count: 1 << 32}} {
		if err := p.Push(&kernels.Push{Layers: 1, Blocks: []kernels.BlockPair{{Src: 0, Dst: 0}}, Cut: cut}); err == nil {
			t.Errorf("%+v: pushed", cut)
		}
	}
	want.same(t, "a refused push", dst)
}

// What the kernels of ranks do, one rank after the other, without their waits: for compute-sanitizer,
// under which ranks that share a GPU may wait for longer than the watchdog allows.
func TestRanksAlone(t *testing.T) {
	if inOwnProcess(t) {
		return
	}
	a := families()["llama gqa4 128"]
	for _, n := range rankCounts(t, 2, 4) {
		for _, opt := range []cuda.Options{{NoGraphs: true}, {NoGraphs: true, KVFP8: !inFP16(), WeightsFP8: !inFP16()}} {
			b := openRanks(t, a, randomWeights(a, 1), n, cuda.Alone(opt))
			for _, tokens := range []int{1, 3, 17, 130} {
				mustStep(t, b, kernels.Seq{Tokens: make([]int32, tokens), Blocks: []int32{0, 1, 2, 3, 4, 5, 6, 7, 8}, WantLogits: true,
					Samples: []kernels.Sample{{Temperature: 1, TopP: 0.9, TopK: 5, Repetition: 1, Logprobs: 2}}})
			}
		}
	}
}

// pushSpeeds are of Llama-3-8B's KV between unequal numbers of ranks: all ranks of a side on one GPU,
// the two sides on two where there are two. Beside them the copy engine's speed between the two GPUs
// for blocks that lie in a row.
func pushSpeeds(t *testing.T) {
	a := shape(32, 512, 64, 32, 8, 128, 4096)
	const blocks, n = 600, 512 // of 64 KiB a layer
	var pairs, runs []kernels.BlockPair
	r := rand.New(rand.NewPCG(1, 2))
	to := r.Perm(blocks)
	for i, from := range r.Perm(blocks)[:n] {
		pairs = append(pairs, kernels.BlockPair{Src: int32(from), Dst: int32(to[i])})
		runs = append(runs, kernels.BlockPair{Src: int32(i), Dst: int32(i)})
	}
	bytes := float64(n) * 64 * 1024
	where := "pushes"
	if cuda.Devices() < 2 {
		where = "pushes_here" // within one GPU
	}
	rate := 0.0
	for _, c := range [][2]int{{1, 1}, {1, 2}, {2, 1}, {2, 2}, {2, 4}, {4, 2}, {1, 4}, {4, 1}, {4, 4}} {
		src := openEnd(t, a, cuda.Options{Blocks: blocks}, make([]int, c[0]))
		others := make([]int, c[1])
		for i := range others {
			others[i] = max(cuda.Devices()-1, 0)
		}
		dst := openEnd(t, a, cuda.Options{Blocks: blocks}, others)
		j := join(t, src, dst)
		speed := func(push kernels.Push) []float64 {
			var all []float64
			for i := range 13 {
				began := time.Now()
				j.launch(t, push)
				j.landed(t)
				if i > 2 {
					all = append(all, bytes*float64(push.Layers)/float64(time.Since(began).Nanoseconds()))
				}
			}
			slices.Sort(all)
			return all
		}
		if c == [2]int{1, 1} {
			v := speed(kernels.Push{Layers: a.Layers, Blocks: runs, Engine: kernels.Copy})
			rate = median(v)
			fmt.Fprintf(os.Stdout, "PUSH the copy engine, %d blocks in a row: %.0f GB/s\n", n, rate)
		}
		whole := speed(kernels.Push{Layers: a.Layers, Blocks: pairs, Engine: kernels.Kernel, CTAs: 32})
		one := speed(kernels.Push{Layers: 1, Blocks: pairs, Engine: kernels.Kernel, CTAs: 16})
		resultBeside(fmt.Sprintf("tp.%s.%dto%d", where, c[0], c[1]), "GB/s", median(whole), whole, "the copy engine, blocks in a row", rate)
		resultBeside(fmt.Sprintf("tp.%s.%dto%d_layer", where, c[0], c[1]), "GB/s", median(one), one, "the copy engine, blocks in a row", rate)
	}
}
