//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/links"
	"github.com/xpyd/xpyd/kvlayout"
)

// Backend implements kernels.Backend and kernels.Holder. One goroutine at a
// time calls Step, Launch, Draw and Await; Close must not run beside any other call.
type Backend struct {
	lib       *library
	ctx       *C.xk_ctx
	arch      arch.Config
	layout    kvlayout.Layout
	rows      kvlayout.Rows // of every layer
	blocks    int
	opt       Options
	device    string
	pci       string
	mem       Memory
	slow      uint32 // xk_buffers.slow
	moreSpans int    // xk_buffers.more_spans
	choices   string // see Choices

	shard    shard
	bits     uint32 // xk_buffers.bits
	numerics string
	closed   bool
	once     sync.Once

	steps             [2]stepState // in turn
	launched, awaited uint64
	draws             int        // of the last launched step
	held              *stepState // whose draws wait for Draw; nil: none

	exported *exported // one for all ranks
	links    *links.Group
}

// New opens the library and the device, copies the weights there (rounded as opt says) and
// allocates the pool. The caller may release w when it returns.
func New(a arch.Config, w kernels.Weights, opt Options) (*Backend, error) {
	return newBackend(a, opt, func(b *Backend) error { return b.load(w, opt.Loaded) })
}

// NewRandom is New with random weights made on the device, for benchmarks.
func NewRandom(a arch.Config, seed uint64, opt Options) (*Backend, error) {
	return newBackend(a, opt, func(b *Backend) error { return b.random(seed) })
}

func (b *Backend) random(seed uint64) error {
	return b.lib.call("xk_fill_random", func() C.int32_t { return C.api_fill_random(b.lib.api, b.ctx, C.uint64_t(seed)) })
}

// newBackend opens a backend, has load bring its weights, and makes it ready for steps.
func newBackend(a arch.Config, opt Options, load func(*Backend) error) (*Backend, error) {
	if len(opt.Devices) > 1 {
		return nil, errors.New("cuda backend: several devices are for Open")
	}
	b, err := open(a, opt, 0, 1)
	if err != nil {
		return nil, fmt.Errorf("cuda backend: %w", err)
	}
	if err = load(b); err == nil {
		err = b.start()
	}
	if err != nil {
		b.Close()
		return nil, fmt.Errorf("cuda backend: %w", err)
	}
	return b, nil
}

// open makes a context with room for the weights: of all of the model, or of one rank's part,
// on opt.Device.
func open(a arch.Config, opt Options, rank, ranks int) (*Backend, error) {
	if err := opt.fill(); err != nil {
		return nil, err
	}
	if err := checkArch(&a, &opt); err != nil {
		return nil, err
	}
	own, err := shardOf(&a, rank, ranks)
	if err != nil {
		return nil, err
	}
	freq, scale, err := a.RopeFrequencies()
	if err != nil {
		return nil, err
	}
	lib, err := openLibrary(opt.Library)
	if err != nil {
		return nil, err
	}
	dev, err := lib.device(opt.Device)
	if err != nil {
		return nil, err
	}
	b := &Backend{lib: lib, arch: a, opt: opt, shard: own, exported: &exported{}, device: C.GoString(&dev.name[0]), pci: C.GoString(&dev.pci[0])}
	b.links = links.New(nccl{b})
	b.layout = opt.layout(&a)
	if _, err = served(b.layout); err != nil {
		return nil, err
	}
	b.layout = own.layout(b.layout)
	b.rows, _ = b.layout.Uniform()
	cfg := C.xk_config{
		device: C.int32_t(opt.Device), layers: C.int32_t(a.Layers), hidden: C.int32_t(a.Hidden),
		intermediate: C.int32_t(own.ff.n), heads: C.int32_t(own.heads.n), kv_heads: C.int32_t(own.kv.n),
		head_dim: C.int32_t(a.HeadDim), vocab: C.int32_t(a.Vocab), max_positions: C.int32_t(a.MaxPositions),
		qkv_bias: flag(a.QKVBias), qk_norm: flag(a.QKNorm), tied_head: flag(a.TiedHead),
		norm_eps: C.float(a.NormEps), block_tokens: C.int32_t(opt.BlockTokens),
		max_rows: C.int32_t(opt.MaxTokens), max_seqs: C.int32_t(opt.MaxSeqs),
		no_graphs: flag(opt.NoGraphs), no_pdl: flag(opt.NoPDL), tune: flag(opt.Tune), batch_invariant: flag(opt.BatchInvariant) + flag(opt.BatchInvariant && opt.anyGEMM), kv_fp8: flag(opt.KVFP8), weights_fp8: flag(opt.WeightsFP8), fp16: flag(opt.FP16),
		part: C.int32_t(opt.part), experts: C.int32_t(a.Experts), experts_per_token: C.int32_t(a.ExpertsPerToken), norm_experts: flag(a.NormExperts),
		rank: C.int32_t(rank), ranks: C.int32_t(ranks), first_kv_head: C.int32_t(own.kv.first), all_kv_heads: C.int32_t(a.KVHeads), first_id: C.int32_t(own.ids.first), ids: C.int32_t(own.ids.n),
	}
	if err := lib.call("xk_open", func() C.int32_t { return C.api_open_ctx(lib.api, &cfg, &b.ctx) }); err != nil {
		return nil, err
	}
	err = lib.call("xk_rope", func() C.int32_t {
		return C.api_rope(lib.api, b.ctx, (*C.double)(unsafe.Pointer(&freq[0])), C.double(scale))
	})
	if err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

func flag(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

// load copies the weights, or this rank's part of them, to the device. The library checks their
// sizes. loaded may be nil; only the first rank tells it.
func (b *Backend) load(w kernels.Weights, loaded func(done, total int64)) error {
	var done, total int64
	for _, t := range w {
		total += int64(len(t.Data))
	}
	put := func(role arch.Role, layer int, t kernels.Tensor) error {
		which := places[role]
		if len(t.Data) == 0 || len(t.Data)%t.DType.Bytes() != 0 {
			return fmt.Errorf("weight %d of layer %d has %d bytes", which, layer, len(t.Data))
		}
		t, n, stride := b.shard.cut(&b.arch, role, t)
		if t.DType == kernels.F8 {
			if len(t.Scale) == 0 {
				return fmt.Errorf("weight %d of layer %d is FP8 without a scale", which, layer)
			}
			return b.lib.call("xk_load8", func() C.int32_t {
				return C.api_load8(b.lib.api, b.ctx, which, C.int32_t(layer), unsafe.Pointer(&t.Data[0]), C.int64_t(n), C.int64_t(stride),
					(*C.float)(unsafe.Pointer(&t.Scale[0])), C.int32_t(len(t.Scale)))
			})
		}
		return b.lib.call("xk_load", func() C.int32_t {
			return C.api_load(b.lib.api, b.ctx, which, C.int32_t(layer), C.int32_t(t.DType),
				unsafe.Pointer(&t.Data[0]), C.int64_t(n), C.int64_t(stride))
		})
	}
	for _, t := range b.arch.Tensors() {
		if err := put(t.Role, t.Expert*b.arch.Layers+t.Layer, w[t.Place]); err != nil {
			return err
		}
		if done += int64(len(w[t.Place].Data)); loaded != nil && b.shard.rank == 0 {
			loaded(done, total)
		}
	}
	return nil
}

// places are the library's names of tensors.
var places = map[arch.Role]C.int32_t{
	arch.Embed: C.XK_EMBED, arch.Norm: C.XK_NORM, arch.Head: C.XK_HEAD, arch.AttnNorm: C.XK_ATTN_NORM, arch.MLPNorm: C.XK_MLP_NORM,
	arch.Q: C.XK_Q, arch.K: C.XK_K, arch.V: C.XK_V, arch.O: C.XK_O, arch.Gate: C.XK_GATE, arch.Up: C.XK_UP, arch.Down: C.XK_DOWN,
	arch.QBias: C.XK_Q_BIAS, arch.KBias: C.XK_K_BIAS, arch.VBias: C.XK_V_BIAS, arch.QNorm: C.XK_Q_NORM, arch.KNorm: C.XK_K_NORM, arch.Router: C.XK_ROUTER,
}

// memory asks the device; free is what no process uses.
func (b *Backend) memory() (m Memory, free int64, err error) {
	var i C.xk_memory_info
	err = b.lib.call("xk_memory", func() C.int32_t { return C.api_memory(b.lib.api, b.ctx, &i) })
	return Memory{Total: int64(i.total), Weights: int64(i.weights), Scratch: int64(i.scratch), Pool: int64(i.pool), Block: int64(i.block),
		Device: b.device, PCI: b.pci}, int64(i.free), err
}

// Memory says where the device's memory went.
func (b *Backend) Memory() Memory { return b.mem }

// SlowProjections names the projections for which BatchInvariant has no fast kernel on this
// device: no algorithm of cuBLASLt keeps a row's bits for them.
func (b *Backend) SlowProjections() (names []string) {
	for i, name := range []string{"qkv", "out", "gate_up", "down", "head"} {
		if b.slow>>i&1 != 0 {
			names = append(names, name)
		}
	}
	return names
}

// start sizes and allocates the pool and runs steps of every kind and size, so that graphs
// exist and code is loaded before the first request. Later steps allocate nothing.
func (b *Backend) start() error {
	m, free, err := b.memory()
	if err != nil {
		return err
	}
	blocks, err := poolBlocks(m, free, b.opt.MemoryPart, b.opt.Blocks)
	if err != nil {
		return err
	}
	if err := b.begin(blocks); err != nil {
		return err
	}
	err = b.warm(func(st *kernels.Step, bucket int) error {
		if err := b.launch(st, bucket); err != nil {
			return err
		}
		if st.Hold {
			b.Draw()
		}
		_, err := b.Await()
		return err
	})
	b.draws = 0 // nothing may refer to these steps' draws
	return err
}

// begin allocates a pool of so many blocks; steps can be launched after it.
func (b *Backend) begin(blocks int) error {
	var buf C.xk_buffers
	b.blocks = blocks
	keep := b.recall()
	err := b.lib.call("xk_start", func() C.int32_t { return C.api_start(b.lib.api, b.ctx, C.int32_t(b.blocks), &buf) })
	keep(err == nil)
	if err != nil {
		return err
	}
	b.bits, b.slow, b.moreSpans = uint32(buf.bits), uint32(buf.slow), int(buf.more_spans)
	b.numerics = b.opt.numerics(b.bits)
	fold := newFolder(b.arch.Vocab)
	for i := range b.steps {
		b.steps[i].init(i, b, &buf, fold)
	}
	b.mem, _, err = b.memory()
	return err
}

// warm has steps of every kind run, one after the other, so that their code is loaded and their
// graphs exist.
func (b *Backend) warm(run func(st *kernels.Step, bucket int) error) error {
	for _, n := range buckets {
		if b.opt.NoGraphs || n > b.opt.MaxSeqs || n > b.opt.MaxTokens {
			break
		}
		for _, hold := range []bool{false, true} {
			if err := run(&kernels.Step{Hold: hold}, n); err != nil {
				return err
			}
		}
	}
	// One prompt of each power of two that fits, drawn and answered in every way. The rows
	// left in the blocks belong to nobody.
	most := min(b.opt.MaxTokens, b.arch.MaxPositions, b.blocks*b.layout.BlockTokens)
	table := make([]int32, (most+b.layout.BlockTokens-1)/b.layout.BlockTokens)
	for i := range table {
		table[i] = int32(i)
	}
	samples := []kernels.Sample{
		{TopP: 1, Repetition: 1, Logprobs: -1},
		{Temperature: 1, TopK: 9, TopP: 0.9, MinP: 0.01, Repetition: 1.1, Prompt: []int32{0}, Logprobs: 1},
	}
	masked := samples[0]
	masked.Mask = make([]uint32, kernels.MaskWords(b.arch.Vocab))
	masked.Mask[0] = 1
	if err := run(&kernels.Step{Seqs: []kernels.Seq{{Tokens: []int32{0}, Blocks: table[:1], Samples: []kernels.Sample{masked}}}}, 0); err != nil {
		return err
	}
	for n := 1; ; n = min(2*n, most) {
		q := kernels.Seq{Tokens: make([]int32, n), Blocks: table, Samples: samples}
		if err := run(&kernels.Step{Seqs: []kernels.Seq{q}}, 0); err != nil {
			return err
		}
		if n == most {
			return nil
		}
	}
}

// Info implements kernels.Backend.
func (b *Backend) Info() kernels.Info {
	return kernels.Info{Name: "cuda", Numerics: b.numerics, Device: b.device, Hidden: true, Verify: true}
}

// PCI is the bus id of the device.
func (b *Backend) PCI() []string { return []string{b.pci} }

// Arch implements kernels.Backend.
func (b *Backend) Arch() arch.Config { return b.arch }

// Layout implements kernels.Backend.
func (b *Backend) Layout() kvlayout.Layout { return b.layout }

// Blocks implements kernels.Backend.
func (b *Backend) Blocks() int { return b.blocks }

// Close frees the device's memory; close peers and links and await pending moves before it.
// Closing twice is allowed. If the end of a link hangs, the memory stays with the process:
// the link may still use it.
func (b *Backend) Close() (err error) {
	b.once.Do(func() {
		b.closed = true
		if n := b.links.Live(); n > 0 {
			err = fmt.Errorf("kernels/cuda: %d links have not ended: the device's memory stays with the process", n)
			return
		}
		C.api_close(b.lib.api, b.ctx)
		if b.shard.rank == 0 && b.exported.flags != nil {
			err = b.exported.flags.Close()
		}
	})
	return err
}

var (
	errClosed   = errors.New("backend is closed")
	errUnderWay = errors.New("too many steps are under way")
)

// LastStepTime returns, in microseconds, the device time of the last awaited step, from its
// first kernel to its last result, and how long the device was idle before it.
func (b *Backend) LastStepTime() (step, idle float64, err error) {
	var s, i C.double
	err = b.lib.call("xk_last_step_us", func() C.int32_t { return C.api_last_step_us(b.lib.api, b.ctx, &s, &i) })
	return float64(s), float64(i), err
}

// Profile begins or ends a CUDA profiler range: ncu and nsys record what lies
// inside with --profile-from-start off, or -c cudaProfilerApi.
func (b *Backend) Profile(on bool) error {
	return b.lib.call("xk_profile", func() C.int32_t { return C.api_profile(b.lib.api, flag(on)) })
}
