//go:build cuda && cgo && linux

package cuda_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// Blocks go to host memory and into other blocks, and nothing else changes, at
// either end.
func TestHostMoves(t *testing.T) {
	for name, g := range geometries() {
		hostMoves(t, name, open(t, g.arch, randomWeights(g.arch, 1), hostMoveOptions(g.blockTokens, g.fp8)))
	}
}

func hostMoveOptions(blockTokens int, fp8 bool) cuda.Options {
	return cuda.Options{BlockTokens: blockTokens, KVFP8: fp8, MaxTokens: 256, MaxSeqs: 4, NoGraphs: true, Blocks: 50}
}

func hostMoves(t *testing.T, name string, b mover) {
	t.Helper()
	const units = 23
	blocks, blockTokens := b.Blocks(), b.Layout().BlockTokens
	noise(b, 1)
	want := imageOf(b)
	l := b.Layout()
	layers, run := l.Layers(), l.Resolve()[0].BlockBytes()
	// Block-first: a unit is all layers' rows, then their digests, between gaps.
	digestAt := layers * run
	unit := (digestAt+layers*l.Resolve()[0].Heads*8+15)/16*16 + 48
	mem, err := memfd.New("test-host", (units*unit+64+4095)/4096*4096)
	if err != nil {
		t.Fatal(err)
	}
	host, err := b.RegisterHost(mem.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(7, 8))
	for i := range mem.Bytes {
		mem.Bytes[i] = 0xa5
	}
	for round, e := range []kernels.Engine{kernels.Kernel, kernels.Copy, kernels.Auto, kernels.Kernel} {
		ctas := []int{1, 0, 4, 8}[round]
		first := round % layers
		n := layers - first
		var places, back []kernels.HostBlock
		perm := r.Perm(blocks)
		for i, u := range r.Perm(units) {
			at := int64(64 + u*unit)
			p := kernels.HostBlock{Block: int32(r.IntN(blocks)), Rows: at, Digests: at + int64(digestAt), Filled: blockTokens}
			places = append(places, p)
			p.Block = int32(perm[i])
			back = append(back, p)
		}
		m := kernels.HostMove{Memory: host, FirstLayer: first, Layers: n, Blocks: places, LayerStride: int64(run), DigestStride: int64(8 * l.Resolve()[0].Heads), Engine: e, CTAs: ctas}
		hostWant := bytes.Clone(mem.Bytes)
		for _, p := range places {
			for k := range n {
				i := (first+k)*blocks + int(p.Block)
				copy(hostWant[int(p.Rows)+k*run:], want.rows[i])
				for h, d := range want.digests[i] {
					for s := range 8 {
						hostWant[int(p.Digests)+(k*l.Resolve()[0].Heads+h)*8+s] = byte(d >> (8 * s))
					}
				}
			}
		}
		gather, err := b.GatherBlocks(&m)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := errors.Join(gather.Wait(soon(t)), gather.Wait(soon(t))); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !bytes.Equal(mem.Bytes, hostWant) {
			t.Fatalf("%s, engine %d: host memory is not what it should be", name, e)
		}
		next := image{slices.Clone(want.rows), slices.Clone(want.digests)}
		for i, p := range back {
			for k := range n {
				to, from := (first+k)*blocks+int(p.Block), (first+k)*blocks+int(places[i].Block)
				next.rows[to], next.digests[to] = want.rows[from], want.digests[from]
			}
		}
		want = next
		m.Blocks = back
		scatter, err := b.ScatterBlocks(&m)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := scatter.Wait(soon(t)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		want.same(t, name+": back", b)
	}
	if err := errors.Join(host.Close(), host.Close(), mem.Close()); err != nil {
		t.Error(err)
	}
	if _, err := b.GatherBlocks(&kernels.HostMove{Memory: host, Layers: 1, Blocks: make([]kernels.HostBlock, 1)}); err == nil {
		t.Error("moved to memory that is not registered any more")
	}
}

// Rows that came back from the host with their digests are good, whole blocks
// and partial ones; lists of more than one launch.
func TestHostMovesKeepDigests(t *testing.T) {
	a := families()["llama gqa2 8"]
	b := open(t, a, randomWeights(a, 1), cuda.Options{Blocks: 3100, BlockTokens: 8})
	l := b.Layout()
	r := rand.New(rand.NewPCG(1, 2))
	const n = 8*5 + 3
	mustStep(t, b, kernels.Seq{Tokens: randomTokens(r, n, a.Vocab), Blocks: []int32{0, 1, 2, 3, 4, 5}})
	unit := (l.Layers()*(l.Resolve()[0].BlockBytes()+8*l.Resolve()[0].Heads) + 15) / 16 * 16
	mem, err := memfd.New("test-host", (6*unit+4095)/4096*4096)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	host, err := b.RegisterHost(mem.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	m := kernels.HostMove{Memory: host, Layers: l.Layers(), LayerStride: int64(l.Resolve()[0].BlockBytes()), DigestStride: int64(8 * l.Resolve()[0].Heads)}
	for i := range 6 {
		at := int64(i * unit)
		m.Blocks = append(m.Blocks, kernels.HostBlock{Block: int32(i), Rows: at, Digests: at + int64(l.Layers()*l.Resolve()[0].BlockBytes())})
	}
	out, err := b.GatherBlocks(&m)
	if err == nil {
		err = out.Wait(soon(t))
	}
	if err != nil {
		t.Fatal(err)
	}
	var back []kernels.HostBlock
	var landed []kernels.Landed
	for i := range 3000 {
		p := m.Blocks[i%6]
		p.Block, p.Filled = int32(100+i), min(8, n-8*(i%6))
		back = append(back, p)
		for layer := range l.Layers() {
			landed = append(landed, kernels.Landed{Layer: layer, Block: p.Block, FirstPos: 8 * (i % 6), Rows: p.Filled})
		}
	}
	m.Blocks = back
	in, err := b.ScatterBlocks(&m)
	if err == nil {
		err = in.Wait(soon(t))
	}
	if err != nil {
		t.Fatal(err)
	}
	good, err := b.Verify(soon(t), landed)
	if err != nil || slices.Contains(good, false) {
		t.Fatalf("rows from the host: %v", err)
	}

	bad := func(name string, change func(m *kernels.HostMove)) {
		t.Helper()
		m := m
		m.Blocks = slices.Clone(m.Blocks[:2])
		change(&m)
		if p, err := b.GatherBlocks(&m); err == nil {
			p.Wait(soon(t))
			t.Errorf("%s: moved", name)
		}
	}
	bad("block", func(m *kernels.HostMove) { m.Blocks[1].Block = 3100 })
	bad("negative block", func(m *kernels.HostMove) { m.Blocks[1].Block = -1 })
	bad("filled", func(m *kernels.HostMove) { m.Blocks[1].Filled = 9 })
	bad("negative rows", func(m *kernels.HostMove) { m.Blocks[1].Rows = -16 })
	bad("crooked rows", func(m *kernels.HostMove) { m.Blocks[1].Rows += 8 })
	bad("rows past the end", func(m *kernels.HostMove) { m.Blocks[1].Rows = int64(len(mem.Bytes) - l.Resolve()[0].BlockBytes()) })
	bad("digests past the end", func(m *kernels.HostMove) { m.Blocks[1].Digests = int64(len(mem.Bytes)) - 8 })
	bad("huge rows", func(m *kernels.HostMove) { m.Blocks[1].Rows = 1<<63 - 16 })
	bad("huge stride", func(m *kernels.HostMove) { m.LayerStride = 1 << 62 })
	bad("negative stride", func(m *kernels.HostMove) { m.DigestStride = -8 })
	bad("crooked stride", func(m *kernels.HostMove) { m.LayerStride++ })
	bad("layers", func(m *kernels.HostMove) { m.FirstLayer = 1 })
	bad("CTAs", func(m *kernels.HostMove) { m.CTAs = 9 })
	bad("no memory", func(m *kernels.HostMove) { m.Memory = nil })
}

// arrivalRig has the backend have a prompt in blocks 0 .. arrivalBlocks-1 of 8; last
// draws what follows it from blocks with the same rows, and want is what it should draw.
func arrivalRig(t *testing.T, b mover) (last func(table []int32, arrivals ...kernels.Arrival) int32, want int32) {
	t.Helper()
	a := b.Arch()
	const length = 8 * arrivalBlocks
	tokens := randomTokens(rand.New(rand.NewPCG(1, 2)), length+1, a.Vocab)
	last = func(table []int32, arrivals ...kernels.Arrival) int32 {
		t.Helper()
		res, err := b.Step(&kernels.Step{Arrivals: arrivals, Seqs: []kernels.Seq{{Tokens: tokens[length:], Pos: length, Blocks: table,
			Samples: []kernels.Sample{{Position: length + 1, TopP: 1, Repetition: 1, Logprobs: -1}}}}})
		if err != nil {
			t.Fatal(err)
		}
		return res[0].Samples[0].Token
	}
	mustStep(t, b, kernels.Seq{Tokens: tokens[:length], Blocks: []int32{0, 1, 2, 3, 4}})
	return last, last([]int32{0, 1, 2, 3, 4, 5})
}

func arrivalOptions() cuda.Options {
	return cuda.Options{Blocks: 64, BlockTokens: 8, BatchInvariant: true}
}

func openForArrivals(t *testing.T) *cuda.Backend {
	t.Helper()
	a := families()["llama gqa2 8"]
	return open(t, a, randomWeights(a, 1), arrivalOptions())
}

const arrivalBlocks = 5

// Blocks that arrive layer by layer are what ScatterBlocks would have made of
// them, each is verified, and a step that waits for them draws what it would have
// with all of them in place.
func TestArrivals(t *testing.T) {
	arrivals(t, openForArrivals(t))
}

func arrivals(t *testing.T, b mover) {
	t.Helper()
	const blocks = arrivalBlocks
	last, want := arrivalRig(t, b)
	l := b.Layout()
	unit := (l.Layers()*(l.Resolve()[0].BlockBytes()+8*l.Resolve()[0].Heads) + 15) / 16 * 16
	mem, err := memfd.New("test-host", (blocks*unit+4095)/4096*4096)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	host, err := b.RegisterHost(mem.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	m := kernels.HostMove{Memory: host, Layers: l.Layers(), LayerStride: int64(l.Resolve()[0].BlockBytes()), DigestStride: int64(8 * l.Resolve()[0].Heads)}
	for i := range blocks {
		at := int64(i * unit)
		m.Blocks = append(m.Blocks, kernels.HostBlock{Block: int32(i), Rows: at, Digests: at + int64(l.Layers()*l.Resolve()[0].BlockBytes()), Filled: 8, FirstPos: 8 * i})
	}
	out, err := b.GatherBlocks(&m)
	if err == nil {
		err = out.Wait(soon(t))
	}
	if err != nil {
		t.Fatal(err)
	}
	for spoilt := -1; spoilt < blocks; spoilt++ {
		table := make([]int32, 0, blocks+1)
		for i := range m.Blocks {
			m.Blocks[i].Block = int32(10 + 6*(spoilt+1) + i)
			table = append(table, m.Blocks[i].Block)
		}
		table = append(table, 63)
		if spoilt >= 0 {
			mem.Bytes[spoilt*unit+(l.Layers()-1)*l.Resolve()[0].BlockBytes()] ^= 1
		}
		v, err := b.ArriveBlocks(&m)
		if err != nil {
			t.Fatal(err)
		}
		got := last(table, v)
		good, err := v.Good() // the step has proved that all is there
		if err != nil || v.Layers() != l.Layers() || v.Wait(soon(t)) != nil {
			t.Fatalf("after the step: %d layers, %v", v.Layers(), err)
		}
		for i, ok := range good {
			if ok != (i != spoilt) {
				t.Errorf("block %d of which %d is wrong: good %t", i, spoilt, ok)
			}
		}
		if spoilt < 0 && got != want {
			t.Errorf("drew %d behind arrivals, want %d", got, want)
		}
		if spoilt >= 0 {
			mem.Bytes[spoilt*unit+(l.Layers()-1)*l.Resolve()[0].BlockBytes()] ^= 1
		}
	}
	m.Blocks[0].FirstPos = -1
	if _, err := b.ArriveBlocks(&m); err == nil {
		t.Error("blocks arrive at a negative position")
	}
}
