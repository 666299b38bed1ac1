// Package cpu runs models on the CPU: Go, with assembly for amd64 (AVX2 and
// AVX-512), no cgo.
//
// Its contract beyond kernels.Backend: logits, KV rows and tokens are the same
// bits whatever the batch, the chunking, the thread count and the instruction
// set. Every sum is made in one fixed order, written down in
// kernels/DESIGN.md; portable.go is the executable definition and the
// assembly is tested to equal it.
//
// Non-goals: quantised arithmetic (it would be another numerics string), KV
// types other than f32.
package cpu

import (
	"errors"
	"fmt"
	"math"
	"runtime"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Numerics names the arithmetic: blocks made under different strings are not
// exchanged. Any change of an order in kernels/DESIGN.md changes it.
const Numerics = "cpu-f32-1"

// Options size a Backend.
type Options struct {
	Blocks      int    // KV blocks in the pool
	BlockTokens int    // positions a block: 1..256; 0 is 16
	Threads     int    // 0 is GOMAXPROCS
	Share       bool   // put the pool where other processes can map it, if the system has such memory
	SIMD        string // "avx512", "avx2", "portable"; "" is the best there is
}

// Backend implements kernels.Backend. One goroutine at a time calls Step; Close
// must not run during a Step.
type Backend struct {
	*pool
	arch kernels.Arch
	ops  *ops
	team *team
	work func(member int) // b.member, made once

	layers    []layer
	embed     kernels.Tensor // host copy; no Data when the head is tied
	head      matrix
	norm      []float32
	freq      []float64
	freqScale float64
	scale     float32 // of attention scores
	pvPasses  []pvPass
	pvRows    int
	layerMACs int // multiply-adds of one token without the head

	step stepState
}

type layer struct {
	attnNorm, mlpNorm   []float32
	qkv, o, gated, down matrix
	bias                []float32 // over the rows of qkv
	qNorm, kNorm        []float32
}

// pvPass is one call of the value half of attention: a stretch of head_dim.
type pvPass struct {
	at   int              // first float
	rows [5]func(*pvArgs) // by query rows
}

// New packs the weights and allocates the pool. The caller may release w when
// it returns.
func New(a kernels.Arch, w kernels.Weights, opt Options) (*Backend, error) {
	if opt.BlockTokens == 0 {
		opt.BlockTokens = 16
	}
	if opt.Threads == 0 {
		opt.Threads = runtime.GOMAXPROCS(0)
	}
	if err := checkOptions(opt); err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	if err := checkArch(a, w); err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	o, err := chooseOps(opt.SIMD, simdOps())
	if err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	b := &Backend{arch: a, ops: o, scale: float32(1 / math.Sqrt(float64(a.HeadDim)))}
	if b.freq, b.freqScale, err = a.RopeFrequencies(); err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	b.choosePV()
	b.load(w)
	layout := kvlayout.Plain(a.Layers, a.KVHeads, a.HeadDim, opt.BlockTokens, kvlayout.F32)
	_, size := layerOffsets(layout, opt.Blocks)
	mem, private, err := poolMemory(size, opt.Share)
	if err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	b.pool = newPool(layout, opt.Blocks, mem, private)
	b.team = newTeam(opt.Threads)
	b.work = b.member
	b.step.init(b, opt.Threads)
	return b, nil
}

func checkOptions(opt Options) error {
	if opt.Blocks < 1 || opt.BlockTokens < 1 || opt.BlockTokens > 256 || opt.Threads < 1 || opt.Threads > 1024 {
		return fmt.Errorf("%d blocks of %d tokens, %d threads: want at least 1 block of 1..256 tokens, 1..1024 threads", opt.Blocks, opt.BlockTokens, opt.Threads)
	}
	return nil
}

func chooseOps(name string, have []*ops) (*ops, error) {
	for _, o := range have {
		if name == "" || o.name == name {
			return o, nil
		}
	}
	return nil, fmt.Errorf("simd %q: this machine has %q", name, have[0].name)
}

// maxWidth bounds each dimension so that products stay inside an int.
const maxWidth = 1 << 24

func checkArch(a kernels.Arch, w kernels.Weights) error {
	for _, d := range []int{a.Layers, a.Hidden, a.Intermediate, a.Heads, a.KVHeads, a.HeadDim, a.Vocab, a.MaxPositions} {
		if d < 1 || d > maxWidth {
			return fmt.Errorf("bad architecture %+v", a)
		}
	}
	if a.Heads%a.KVHeads != 0 || a.HeadDim%2 != 0 || a.Layers >= 1<<16 || a.KVHeads >= 1<<15 {
		return fmt.Errorf("bad architecture %+v", a)
	}
	if len(w.Layers) != a.Layers {
		return fmt.Errorf("weights of %d layers, want %d", len(w.Layers), a.Layers)
	}
	q, kv := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	errs := []error{
		check("embed", w.Embed, a.Vocab, a.Hidden),
		check("norm", w.Norm, a.Hidden),
	}
	if !a.TiedHead {
		errs = append(errs, check("head", w.Head, a.Vocab, a.Hidden))
	}
	for i, l := range w.Layers {
		name := func(s string) string { return fmt.Sprintf("layer %d %s", i, s) }
		errs = append(errs,
			check(name("attn norm"), l.AttnNorm, a.Hidden),
			check(name("q"), l.Q, q, a.Hidden),
			check(name("k"), l.K, kv, a.Hidden),
			check(name("v"), l.V, kv, a.Hidden),
			check(name("o"), l.O, a.Hidden, q),
			check(name("mlp norm"), l.MLPNorm, a.Hidden),
			check(name("gate"), l.Gate, a.Intermediate, a.Hidden),
			check(name("up"), l.Up, a.Intermediate, a.Hidden),
			check(name("down"), l.Down, a.Hidden, a.Intermediate))
		if a.QKVBias {
			errs = append(errs, check(name("q bias"), l.QBias, q), check(name("k bias"), l.KBias, kv), check(name("v bias"), l.VBias, kv))
		}
		if a.QKNorm {
			errs = append(errs, check(name("q norm"), l.QNorm, a.HeadDim), check(name("k norm"), l.KNorm, a.HeadDim))
		}
	}
	return errors.Join(errs...)
}

func (b *Backend) load(w kernels.Weights) {
	a := b.arch
	q, kv := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	b.layers = make([]layer, a.Layers)
	for i, lw := range w.Layers {
		l := layer{
			attnNorm: vector(lw.AttnNorm, a.Hidden),
			mlpNorm:  vector(lw.MLPNorm, a.Hidden),
			qkv:      pack(a.Hidden, source{lw.Q, q}, source{lw.K, kv}, source{lw.V, kv}),
			o:        pack(q, source{lw.O, a.Hidden}),
			gated:    packGated(a.Hidden, a.Intermediate, lw.Gate, lw.Up),
			down:     pack(a.Intermediate, source{lw.Down, a.Hidden}),
		}
		if a.QKVBias {
			for _, s := range []source{{lw.QBias, q}, {lw.KBias, kv}, {lw.VBias, kv}} {
				l.bias = append(l.bias, vector(s.t, s.rows)[:s.rows]...)
			}
		}
		if a.QKNorm {
			l.qNorm, l.kNorm = vector(lw.QNorm, a.HeadDim), vector(lw.KNorm, a.HeadDim)
		}
		b.layers[i] = l
	}
	b.norm = vector(w.Norm, a.Hidden)
	if a.TiedHead {
		b.head = pack(a.Hidden, source{w.Embed, a.Vocab})
	} else {
		b.head = pack(a.Hidden, source{w.Head, a.Vocab})
		b.embed = w.Embed
		b.embed.Data = alloc(len(w.Embed.Data))
		copy(b.embed.Data, w.Embed.Data)
	}
	b.layerMACs = a.Layers * a.Hidden * (2*q + 2*kv + 3*a.Intermediate)
}

// choosePV divides head_dim among the value kernels.
func (b *Backend) choosePV() {
	o, dim := b.ops, b.arch.HeadDim
	if dim%8 != 0 || o.lanes == 0 {
		b.pvRows = 1
		b.pvPasses = []pvPass{{rows: [5]func(*pvArgs){1: func(a *pvArgs) { pvPortable(a, dim) }}}}
		p := *o
		p.scores = scoresPortable
		b.ops = &p
		return
	}
	if dim%o.lanes != 0 {
		o = o.narrow
	}
	b.pvRows = o.pvRows
	regs := dim / o.lanes
	passes := (regs + 3) / 4
	for i := range passes {
		lo, hi := i*regs/passes, (i+1)*regs/passes
		p := pvPass{at: lo * o.lanes}
		for r := range p.rows {
			p.rows[r] = o.pv[r][hi-lo]
		}
		b.pvPasses = append(b.pvPasses, p)
	}
}

// Info implements kernels.Backend.
func (b *Backend) Info() kernels.Info {
	return kernels.Info{
		Name:     "cpu",
		Numerics: numerics(),
		SIMD:     b.ops.name,
		Threads:  b.team.size,
		Device:   device(),
	}
}

// Arch implements kernels.Backend.
func (b *Backend) Arch() kernels.Arch { return b.arch }

// Layout implements kernels.Backend.
func (b *Backend) Layout() kvlayout.Layout { return b.layout }

// Blocks implements kernels.Backend.
func (b *Backend) Blocks() int { return b.blocks }

// Close ends the worker goroutines and waits for them. The pool stays readable,
// unless it is shared: then it is unmapped, and must not be touched any more.
// Closing twice is allowed.
func (b *Backend) Close() error {
	b.team.close()
	return b.pool.close()
}
