//go:build cuda && cgo && linux

package cuda_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/convert"
	"github.com/xpyd/xpyd/kvlayout"
)

// openRows opens a pool of rows of a dtype.
func openRows(t testing.TB, dtype kvlayout.DType, dim, kvHeads, bt, blocks, device int) *cuda.Backend {
	t.Helper()
	a := shape(1, 128, 64, 2*kvHeads, kvHeads, dim, 64)
	opt := cuda.Options{MaxTokens: 256, MaxSeqs: 4, NoGraphs: true, KVFP8: dtype == kvlayout.F8E4M3, FP16: dtype == kvlayout.F16, BlockTokens: bt, Blocks: blocks, Device: device}
	b, err := cuda.New(a, randomWeights(a, 1), opt)
	if err != nil && device > 0 { // one GPU
		opt.Device = 0
		b, err = cuda.New(a, randomWeights(a, 1), opt)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// hard fills a row, and its scale, with what conversions can get wrong.
func hard(r *rand.Rand, dtype kvlayout.DType, row, scale []byte) {
	for i := range row {
		row[i] = byte(r.Uint32())
	}
	kind := r.IntN(12)
	if dtype == kvlayout.F8E4M3 {
		bits := r.Uint32N(0x7f800000) // any that is finite
		switch kind {
		case 0:
			bits = 0x7f7fffff // the greatest: products are infinite
		case 1:
			bits = 1 // denormal: products are
		case 2:
			bits = math.Float32bits(0x1p-126)
		case 3, 4, 5, 6, 7: // into the range of fp16 and its end
			bits = math.Float32bits(float32(math.Ldexp(1+r.Float64(), r.IntN(40)-32)))
		case 8: // no NaN
			for i := range row {
				row[i] &= 0xbf
			}
		}
		binary.LittleEndian.PutUint32(scale, bits)
		return
	}
	man := map[string]int{"bf16": 7, "f16": 10}[string(dtype)]
	least, most := 1-(1<<(14-man)-1), 1<<(14-man)-1 // exponents
	set := func(exp, frac int, negative bool) (h uint16) {
		h = uint16((exp-least+1)<<man | frac&(1<<man-1))
		if negative {
			h |= 0x8000
		}
		return h
	}
	for i := 0; i < len(row); i += 2 {
		random := binary.LittleEndian.Uint16(row[i:])
		h := random
		switch kind {
		case 0:
			h = 0
		case 1:
			h = random & 0x8000 // zeros of both signs
		case 2:
			h = random & (0x8000 | 1<<man - 1) // denormals
		case 3:
			h = random&0x8000 | uint16(set(most, 1<<man-1, false)) // the greatest
		case 4:
			h = random&0x8000 | uint16(most-least+2)<<man | random&uint16(random%2) // infinities and a NaN's least bit
		case 5, 6: // ties of E4M3: 1/16 steps under a row's 448
			h = set(r.IntN(14)-6, r.IntN(16)<<(man-4), random&1 > 0)
			if i == 0 {
				h = set(8, 6<<(man-3), true) // 448: the scale is 1
			}
		case 7: // around fp16's end and its least
			h = set(min(max([]int{15, 16, -14, -15, -24, -25}[r.IntN(6)], least), most), int(random), random&1 > 0)
		case 8: // one value among zeros
			if h = 0; i == len(row)-2 {
				h = random
			}
		case 9, 10: // as activations are
			h = set(r.IntN(9)-6, int(random), random&0x400 > 0)
		}
		binary.LittleEndian.PutUint16(row[i:], h)
	}
}

// hardRows are n positions from first on of one layer in a pool: packed, and where they lie.
type hardRows struct {
	l        kvlayout.Layout
	first, n int
	packed   []byte
	held     []kvlayout.Held
}

func hardSequence(r *rand.Rand, b *cuda.Backend, first, n int) *hardRows {
	l := b.Layout()
	p := &hardRows{l: l, first: first, n: n, packed: make([]byte, l.Resolve()[0].PackedBytes(n))}
	for i := range 2 * l.Resolve()[0].Heads * n {
		row, scale := rowOf(l, p.packed, n, i/n/l.Resolve()[0].Heads, i/n%l.Resolve()[0].Heads, i%n)
		hard(r, l.Groups[0].DType, row, scale)
	}
	for i, block := range table(r, b, (n+l.BlockTokens-1)/l.BlockTokens) {
		h := kvlayout.Held{Block: block, FirstPos: first + i*l.BlockTokens, Rows: min(l.BlockTokens, n-i*l.BlockTokens)}
		rows, sums := make([]byte, l.Resolve()[0].PackedBytes(h.Rows)), make([]uint64, l.Resolve()[0].Heads)
		p.cut(h.FirstPos, h.Rows, rows)
		kernels.DigestRows(&l.Resolve()[0], h.FirstPos, h.Rows, rows, sums)
		b.Scatter(0, block, 0, h.Rows, rows)
		b.SetDigest(0, block, h.Rows, sums)
		p.held = append(p.held, h)
	}
	return p
}

func (p *hardRows) cut(firstPos, rows int, dst []byte) {
	p.l.Resolve()[0].Copy(dst, rows, 0, p.packed, p.n, firstPos-p.first, rows)
}

// Load implements kvconn.Source.
func (p *hardRows) Load(_, _, firstPos, rows int, dst []byte, digests []uint64) error {
	p.cut(firstPos, rows, dst)
	kernels.DigestRows(&p.l.Resolve()[0], firstPos, rows, dst, digests)
	return nil
}

// converted is dst with what the list brings of a prompt, as a host converts it.
func (m image) converted(t *testing.T, from *hardRows, to *cuda.Backend, a *kernels.Push) image {
	t.Helper()
	m.rows, m.digests = slices.Clone(m.rows), slices.Clone(m.digests)
	rowsTo := to.Layout().Resolve()[0]
	src, err := convert.New(from, from.l, to.Layout(), kernels.DigestPart)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range a.Refills {
		rows, sums := make([]byte, rowsTo.PackedBytes(f.Rows)), make([]uint64, rowsTo.Heads)
		if err := src.Load(0, 0, f.FirstPos, f.Rows, rows, sums); err != nil {
			t.Fatal(err)
		}
		block := slices.Clone(m.rows[f.Block])
		rowsTo.Copy(block, rowsTo.BlockTokens, 0, rows, f.Rows, 0, f.Rows)
		m.rows[f.Block], m.digests[f.Block] = block, sums
	}
	return m
}

var rowTypes = []kvlayout.DType{kvlayout.BF16, kvlayout.F16, kvlayout.F8E4M3}

// Rows of each dtype become rows of each other exactly as kvconn/convert makes them,
// with new digests, whatever the shapes; nothing else is written; and a row that is
// wrong at its source gets no good digest.
func TestRefillConverts(t *testing.T) {
	const n, heads = 256 + 77, 3
	seq := uint64(0) // of all pushes: a pool's flags only rise
	for round, dim := range []int{64, 80, 96, 128, 256} {
		// Blocks at either end. Those of FP8 are multiples of 16; of 128, all are alike.
		sizes := [2]map[kvlayout.DType]int{
			{"bf16": []int{5, 256, 16, 16, 64}[round], "f16": []int{1, 16, 24, 16, 7}[round], kvlayout.F8E4M3: []int{48, 16, 256, 16, 64}[round]},
			{"bf16": []int{16, 1, 3, 16, 256}[round], "f16": []int{64, 5, 1, 16, 16}[round], kvlayout.F8E4M3: []int{16, 256, 32, 16, 48}[round]}}
		var ends [2]map[kvlayout.DType]*cuda.Backend
		for i := range ends {
			ends[i] = map[kvlayout.DType]*cuda.Backend{}
			for _, dtype := range rowTypes {
				bt := sizes[i][dtype]
				ends[i][dtype] = openRows(t, dtype, dim, heads, bt, n/bt+5, i)
			}
		}
		for _, from := range rowTypes {
			src := ends[0][from]
			r := rand.New(rand.NewPCG(uint64(dim), uint64(len(from))))
			held := hardSequence(r, src, 48, n)
			source := imageOf(src)
			for _, to := range rowTypes {
				if from == to {
					continue
				}
				dst, name := ends[1][to], fmt.Sprintf("head_dim %d, %s blocks of %d to %s blocks of %d", dim, from, sizes[0][from], to, sizes[1][to])
				converts(t, name, r, src, dst, held, &seq)
			}
			source.same(t, fmt.Sprintf("head_dim %d, %s: source", dim, from), src)
		}
		for i := range ends {
			for _, b := range ends[i] {
				b.Close()
			}
		}
	}
}

// converts pushes a prompt from src to dst several times.
func converts(t *testing.T, name string, r *rand.Rand, src, dst *cuda.Backend, from *hardRows, seq *uint64) {
	t.Helper()
	p, err := src.OpenLocal(dst)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	defer func() {
		if err := p.Close(soon(t)); err != nil {
			t.Error(err)
		}
	}()
	bt, heads := dst.Layout().BlockTokens, from.l.Resolve()[0].Heads
	noise(dst, 2)
	want := imageOf(dst)
	push := func(a *kernels.Push) {
		t.Helper()
		*seq++
		a.Layers, a.Line, a.Value = 1, 5, *seq
		if err := checkRefills(a, src, dst); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := p.Push(a); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := dst.AwaitFlag(soon(t), 5, *seq); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	verify := func(a *kernels.Push) []bool {
		t.Helper()
		var landed []kernels.Landed
		for _, f := range a.Refills {
			landed = append(landed, kernels.Landed{Block: f.Block, FirstPos: f.FirstPos, Rows: f.Rows})
		}
		good, err := dst.Verify(soon(t), landed)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return good
	}
	var last kernels.Push
	for round, ctas := range []int{0, 1, 16} {
		blocks := table(r, dst, (from.n+bt-1)/bt)
		a := kernels.Push{CTAs: ctas}
		a.Sources, a.Refills = refills(from.held, blocks, bt, func(i int) bool { return round == 1 && i%3 == 0 && len(blocks) > 2 })
		push(&a)
		want = want.converted(t, from, dst, &a)
		if good := verify(&a); slices.Contains(good, false) {
			t.Fatalf("%s, round %d: %v", name, round, good)
		}
		last = a
		now := imageOf(dst)
		for i := range want.rows {
			if !bytes.Equal(now.rows[i], want.rows[i]) || !slices.Equal(now.digests[i], want.digests[i]) {
				at := 0
				for at < len(now.rows[i])-1 && now.rows[i][at] == want.rows[i][at] {
					at++
				}
				t.Fatalf("%s, round %d: block %d of %d tokens differs, rows from byte %d of %d on: %x, want %x; digests %x, want %x", name, round, i, bt, at, len(want.rows[i]),
					now.rows[i][at:min(at+16, len(now.rows[i]))], want.rows[i][at:min(at+16, len(want.rows[i]))], now.digests[i], want.digests[i])
			}
		}
	}
	// One bit of the last head's V, in the middle of a source.
	h := from.held[len(from.held)/2]
	row := make([]byte, src.Layout().Resolve()[0].PackedBytes(1))
	flip := func() {
		src.Gather(0, h.Block, h.Rows/2, 1, row)
		row[2*heads*from.l.Resolve()[0].RowBytes(0)-1] ^= 0x10
		src.Scatter(0, h.Block, h.Rows/2, 1, row)
	}
	flip()
	push(&last)
	flip()
	for i, good := range verify(&last) {
		f := last.Refills[i]
		if touched := f.FirstPos < h.FirstPos+h.Rows && h.FirstPos < f.FirstPos+f.Rows; good == touched {
			t.Errorf("%s: positions %d+%d of a source that is wrong: good is %t", name, f.FirstPos, f.Rows, good)
		}
	}
	if err := p.Push(&kernels.Push{Layers: 1, Blocks: []kernels.BlockPair{{}}}); err == nil {
		t.Errorf("%s: whole blocks were pushed", name)
	}
}

// BenchmarkRefillConverts times conversions from one GPU to another from the call until
// D's host has seen the flag, in bytes of rows of 16 bits.
func BenchmarkRefillConverts(b *testing.B) {
	const positions = 16384 // 64 MiB a layer: 8 heads of 128
	for _, dtypes := range [][2]kvlayout.DType{{"bf16", kvlayout.F8E4M3}, {kvlayout.F8E4M3, "bf16"}, {"f16", "bf16"}} {
		src, dst := openRows(b, dtypes[0], 128, 8, 16, positions/16+1, 0), openRows(b, dtypes[1], 128, 8, 16, positions/16+1, 1)
		p, err := src.OpenLocal(dst)
		if err != nil {
			b.Fatal(err)
		}
		r := rand.New(rand.NewPCG(1, 2))
		a, seq := kernels.Push{Layers: 1, Line: 1}, uint64(0)
		a.Sources, a.Refills = refills(sequence(r, src, 0, positions), table(r, dst, positions/16), 16, nil)
		for _, a.CTAs = range []int{16, 0} {
			b.Run(fmt.Sprintf("%s/%s/ctas%d", dtypes[0], dtypes[1], a.CTAs), func(b *testing.B) {
				timePushes(b, p, dst, &a, &seq, positions*4096)
			})
		}
		if err := p.Close(soon(b)); err != nil {
			b.Fatal(err)
		}
		src.Close()
		dst.Close()
	}
}

var _ kvconn.Source = (*hardRows)(nil)
