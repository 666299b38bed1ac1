// Package cpu runs models on the CPU: Go, with assembly for amd64 (AVX2 and AVX-512), no
// cgo.
//
// Beyond kernels.Backend it promises that logits, KV rows and tokens are bit-identical
// whatever the batch, the chunking, the thread count and the instruction set. Every sum has
// one fixed order, given in kernels/DESIGN.md; portable.go defines it in code, and tests
// hold the assembly to it.
//
// It does no quantised arithmetic (that would be another numerics string) and computes with
// KV rows of f32 only.
package cpu

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"runtime"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// Numerics names the arithmetic: blocks made under different strings are not exchanged. Any
// change of an order in kernels/DESIGN.md changes it.
const Numerics = "cpu-f32-1"

// KVDType is the pool's.
const KVDType = kvlayout.F32

// Options size a Backend.
type Options struct {
	Blocks      int    // KV blocks in the pool
	BlockTokens int    // positions a block: 1..kvlayout.MaxBlockTokens; 0 is 16
	Threads     int    // of all ranks, at least one each; 0 is GOMAXPROCS
	Ranks       int    // tensor-parallel ranks; 0 is 1
	Share       bool   // put the pool where other processes can map it, if the system has such memory
	SIMD        string // "avx512", "avx2", "portable"; "" is the best there is
}

// Backend implements kernels.Backend. One goroutine at a time calls Step; Close
// must not run during a Step.
type Backend struct {
	*pools
	arch arch.Config
	ops  *ops
	team *team
	work func(member int) // b.member, made once

	layers           []layer
	embed            kernels.Tensor // host copy; no Data when the head is tied
	head             matrix
	norm             []float32
	rope, windowRope rotation
	scale            float32 // of attention scores
	pvPasses         []pvPass
	pvRows           int
	tokenMACs        int // multiply-adds of one token without the head

	step stepState
}

type layer struct {
	attnNorm, mlpNorm   []float32
	attnPost, mlpPost   []float32 // norms of what is added; nil: there are none
	qkv, o, gated, down matrix
	latent              *latent   // MLA's; qkv and o are its own, too
	experts             *experts  // instead of gated and down
	gelu                bool      // not silu
	window              int       // positions, and rotated as such; 0: all
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
func New(a arch.Config, w kernels.Weights, opt Options) (*Backend, error) {
	opt.BlockTokens, opt.Threads, opt.Ranks = cmp.Or(opt.BlockTokens, 16), cmp.Or(opt.Threads, runtime.GOMAXPROCS(0)), cmp.Or(opt.Ranks, 1)
	if err := checkOptions(opt); err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	if err := checkArch(&a, w); err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	if err := CheckRanks(&a, opt.Ranks); err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	o, err := chooseOps(opt.SIMD, simdOps())
	if err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	b := &Backend{arch: a, ops: o, scale: float32(1 / math.Sqrt(float64(a.HeadDim)))}
	if a.ScoreScale > 0 {
		b.scale = float32(a.ScoreScale)
	}
	if b.rope, err = rotationOf(&a); err == nil && a.Window > 0 {
		windowed := a.Windowed()
		b.windowRope, err = rotationOf(&windowed)
	}
	if err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	b.choosePV()
	if err := b.load(w); err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	if b.pools, err = newPools(kernels.Layout(&a, opt.BlockTokens, KVDType), opt.Blocks, opt.Ranks); err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	mem, private, err := poolMemory(b.size(), opt.Share)
	if err != nil {
		return nil, fmt.Errorf("cpu backend: %w", err)
	}
	b.private = private
	b.fill(mem)
	b.team = newTeam(max(opt.Threads, opt.Ranks), opt.Ranks)
	b.work = b.member
	b.step.init(b)
	return b, nil
}

func checkOptions(opt Options) error {
	if opt.Blocks < 1 || opt.BlockTokens < 1 || opt.BlockTokens > kvlayout.MaxBlockTokens || opt.Threads < 1 || opt.Threads > 1024 {
		return fmt.Errorf("%d blocks of %d tokens, %d threads: want at least 1 block of 1..%d tokens, 1..1024 threads", opt.Blocks, opt.BlockTokens, opt.Threads, kvlayout.MaxBlockTokens)
	}
	return nil
}

// CheckRanks returns why a model cannot be divided among this many ranks.
func CheckRanks(a *arch.Config, ranks int) error {
	if ranks < 1 || ranks > kvlayout.MaxRanks {
		return fmt.Errorf("%d ranks: want 1..%d", ranks, kvlayout.MaxRanks)
	}
	if a.Heads%ranks != 0 {
		return fmt.Errorf("%d ranks do not divide the model's %d query heads", ranks, a.Heads)
	}
	_, err := kernels.Layout(a, 16, KVDType).Ranks(ranks)
	return err
}

func chooseOps(name string, have []*ops) (*ops, error) {
	for _, o := range have {
		if name == "" || o.name == name {
			return o, nil
		}
	}
	return nil, fmt.Errorf("simd %q: this machine has %q", name, have[0].name)
}

func checkArch(a *arch.Config, w kernels.Weights) error {
	if err := a.Validate(); err != nil {
		return fmt.Errorf("bad architecture: %w", err)
	}
	var errs []error
	for _, t := range a.Tensors() {
		errs = append(errs, check(t.Name, w[t.Place], t.Shape...))
	}
	return errors.Join(errs...)
}

// load packs the weights, after checkArch.
func (b *Backend) load(w kernels.Weights) error {
	a := &b.arch
	q, kv := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	b.layers = make([]layer, a.Layers)
	for i := range b.layers {
		get := func(r arch.Role) kernels.Tensor { return w[r.At(i)] }
		l := &b.layers[i]
		norm := func(r arch.Role, n int) []float32 { return normVector(a, get(r), n) }
		l.attnNorm, l.mlpNorm = norm(arch.AttnNorm, a.Hidden), norm(arch.MLPNorm, a.Hidden)
		if a.PostNorms {
			l.attnPost, l.mlpPost = norm(arch.AttnPostNorm, a.Hidden), norm(arch.MLPPostNorm, a.Hidden)
		}
		attention, feed := a.Layer(i)
		switch attention {
		case arch.GQA, arch.WindowGQA:
			if attention == arch.WindowGQA {
				l.window = a.Window
			}
			l.qkv = pack(a.Hidden, source{get(arch.Q), q}, source{get(arch.K), kv}, source{get(arch.V), kv})
			l.o = pack(q, source{get(arch.O), a.Hidden})
			if a.QKVBias {
				for _, s := range []source{{get(arch.QBias), q}, {get(arch.KBias), kv}, {get(arch.VBias), kv}} {
					l.bias = append(l.bias, vector(s.t, s.rows)[:s.rows]...)
				}
			}
			if a.QKNorm {
				l.qNorm, l.kNorm = norm(arch.QNorm, a.HeadDim), norm(arch.KNorm, a.HeadDim)
			}
		case arch.MLA:
			b.loadLatent(l, get)
		default:
			return fmt.Errorf("layer %d: attention %q is not served on the CPU", i, attention)
		}
		switch feed {
		case arch.SwiGLU, arch.GeGLU:
			l.gelu = feed == arch.GeGLU
			l.gated = packGated(a.Hidden, a.Intermediate, get(arch.Gate), get(arch.Up))
			l.down = pack(a.Intermediate, source{get(arch.Down), a.Hidden})
		case arch.Mixture:
			l.experts = loadExperts(a, func(r arch.Role, expert int) kernels.Tensor { return w[r.Of(i, expert)] })
		case arch.SharedMixture:
			l.experts = loadExperts(a, func(r arch.Role, expert int) kernels.Tensor { return w[r.Of(i, expert)] })
			l.experts.loadShared(a, get)
		default:
			return fmt.Errorf("layer %d: feed-forward %q is not served on the CPU", i, feed)
		}
	}
	b.norm = normVector(a, w[arch.Norm.At(0)], a.Hidden)
	embed := w[arch.Embed.At(0)]
	if a.TiedHead {
		b.head = pack(a.Hidden, source{embed, a.Vocab})
	} else {
		b.head = pack(a.Hidden, source{w[arch.Head.At(0)], a.Vocab})
		b.embed = embed
		b.embed.Data = alloc(len(embed.Data))
		copy(b.embed.Data, embed.Data)
	}
	b.tokenMACs = tokenMACs(a)
	return nil
}

// tokenMACs is how many multiply-adds a token takes without scores and the head.
func tokenMACs(a *arch.Config) (macs int) {
	for i := range a.Layers {
		attention, feed := a.Layer(i)
		if attention == arch.MLA {
			macs += latentMACs(a)
		} else {
			macs += 2 * a.Hidden * (a.Heads + a.KVHeads) * a.HeadDim
		}
		if feed == arch.Mixture || feed == arch.SharedMixture {
			macs += a.Hidden * (a.Experts + 3*(a.ExpertsPerToken+a.SharedExperts)*a.ExpertWidth)
		} else {
			macs += 3 * a.Hidden * a.Intermediate
		}
	}
	return macs
}

// normVector is the weights that a norm multiplies by.
func normVector(a *arch.Config, t kernels.Tensor, n int) []float32 {
	v := vector(t, n)
	if a.NormsFromOne {
		for i := range v[:n] {
			v[i]++
		}
	}
	return v
}

// choosePV divides head_dim, or the width of latents, among the value kernels.
func (b *Backend) choosePV() {
	o, dim := b.ops, b.arch.HeadDim
	if b.arch.KVRank > 0 {
		dim = b.arch.KVRank // latents are the values
	}
	if dim%8 != 0 || b.arch.Rotated()%8 != 0 || o.lanes == 0 {
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
		Ranks:    len(b.ranks),
		Device:   device(),
		Hidden:   true,
		Verify:   true,
	}
}

// Arch implements kernels.Backend.
func (b *Backend) Arch() arch.Config { return b.arch }

// Layout implements kernels.Backend.
func (b *Backend) Layout() kvlayout.Layout { return b.layout }

// Blocks implements kernels.Backend.
func (b *Backend) Blocks() int { return b.blocks }

// Close ends the worker goroutines and waits for them. The pool stays readable unless it is
// shared: then it is unmapped and must not be touched again. Closing twice is allowed. If a rank
// hangs, its goroutine and the pool's memory stay until the process ends.
func (b *Backend) Close() error {
	if !b.team.close() {
		return nil
	}
	return b.pools.close()
}

// Hung implements kernels.Watched.
func (b *Backend) Hung() <-chan error {
	if b.team.watch == nil {
		return nil
	}
	return b.team.watch.told
}
