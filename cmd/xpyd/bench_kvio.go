package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/engine/tier/host"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/ssd"
	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/kvbench"
	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/internal/model"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kvlayout"
)

type benchKVIO struct {
	device, blockTokens, hostTotal string
	layers, heads, headDim         int
	gpu, rounds                    int

	dir, units, total, io string
	depth                 int

	plot string
	json bool
	say  io.Writer
}

func newBenchKVIO() *cobra.Command {
	b := &benchKVIO{}
	cmd := &cobra.Command{
		Use:   "kvio",
		Short: "Measure the links between KV tiers: pool, host memory, SSD",
		Long: `Move KV units of a model's shape from a pool to host memory and back, as a worker's
tiers do (--kv-host-memory): with the GPU's copy engines or multiprocessors, whichever
is faster there, and verified on arrival; each way alone, then both at once. A unit is
16 tokens, or a block if that has more.

With --ssd-dir, also write units through an SSD tier, then read them in random order,
with headers checked, past the page cache if the file system allows it. The folder must
be empty or new; it is deleted at the end. scripts/bench kvio runs that beside fio.
--device none leaves the pool out. GB are 10^9 bytes.`,
		Example: `  xpyd bench kvio                                       this machine's GPU, or CPU; Llama-3-8B's shape
  xpyd bench kvio --block-tokens 16 --layers 28 --kv-heads 4 --plot kvio.html
  xpyd bench kvio --ssd-dir /var/cache/xpyd-bench
  xpyd bench kvio --device none --ssd-dir /mnt/nvme/x --unit 256KiB,2MiB --total 16GiB --depth 32 --json`,
	}
	f := cmd.Flags()
	f.StringVar(&b.device, "device", "auto", "of the pool: cuda, cpu, auto (a GPU if there is one) or none")
	f.IntVar(&b.gpu, "gpu", 0, "which GPU")
	f.StringVar(&b.blockTokens, "block-tokens", "1,16,64,256", "tokens of a block; a list is measured one by one")
	f.IntVar(&b.layers, "layers", 32, "layers")
	f.IntVar(&b.heads, "kv-heads", 8, "KV heads")
	f.IntVar(&b.headDim, "head-dim", 128, "width of a head")
	f.StringVar(&b.hostTotal, "host-total", "256MiB", "bytes each way; the pool and host memory each take twice as many")
	f.IntVar(&b.rounds, "rounds", 20, "how often everything is moved")
	f.StringVar(&b.dir, "ssd-dir", "", "an unused folder; without it no SSD is measured")
	f.StringVar(&b.units, "unit", "2MiB", "bytes of a unit on the SSD, multiples of 4 KiB; a list is measured one by one")
	f.StringVar(&b.total, "total", "4GiB", "bytes to write to the SSD, and to read")
	f.IntVar(&b.depth, "depth", 16, "writes, or reads, at a time")
	f.StringVar(&b.io, "io", string(ssd.IOAuto), "auto, io_uring or pread, like kv.ssd_io")
	f.StringVar(&b.plot, "plot", "", "draw the results: FILE.svg or FILE.html")
	f.BoolVar(&b.json, "json", false, "print JSON")
	cmd.RunE = b.run
	return cmd
}

func (b *benchKVIO) run(cmd *cobra.Command, _ []string) error {
	switch {
	case !slices.Contains([]ssd.IO{ssd.IOAuto, ssd.IOUring, ssd.IOPread}, ssd.IO(b.io)):
		return usageError{fmt.Errorf("--io %q: want auto, io_uring or pread", b.io)}
	case !slices.Contains([]string{"auto", "cpu", "cuda", "none"}, b.device):
		return usageError{fmt.Errorf("--device %q: want auto, cuda, cpu or none", b.device)}
	case b.device == "none" && b.dir == "":
		return usageError{errors.New("--device none leaves nothing to measure without --ssd-dir")}
	}
	blocks, err := listOf("block-tokens", b.blockTokens, func(s string) (int, error) {
		n, err := strconv.Atoi(s)
		if err == nil && (n < 1 || n > kvlayout.MaxBlockTokens || n&(n-1) != 0) {
			err = fmt.Errorf("want powers of two up to %d", kvlayout.MaxBlockTokens)
		}
		return n, err
	})
	if err != nil {
		return err
	}
	units, err := listOf("unit", b.units, config.ParseSize)
	if err != nil {
		return err
	}
	total, err := config.ParseSize(b.total)
	if err != nil {
		return usageError{fmt.Errorf("--total: %w", err)}
	}
	if b.dir != "" {
		err = b.checkSSD(units, total, memfd.Available())
	}
	if err = cmp.Or(err, plottable(b.plot)); err != nil {
		return usageError{err}
	}
	b.say = cmd.ErrOrStderr()
	r := &kvbench.Links{}
	if b.device != "none" {
		if err := b.host(cmd.Context(), r, blocks); err != nil {
			return fmt.Errorf("bench kvio: %w", err)
		}
	}
	if b.dir != "" {
		for _, unit := range units {
			fmt.Fprintf(b.say, "SSD, units of %v: %v written and read\n", unit, total)
			s, err := ssd.Measure(cmd.Context(), b.dir, int(unit), int64(total), b.depth, ssd.IO(b.io), b.progress(fmt.Sprintf("SSD, units of %v", unit)))
			if err != nil {
				return fmt.Errorf("bench kvio: %w", err)
			}
			r.SSD = append(r.SSD, kvbench.SSD{UnitBytes: s.UnitBytes, Units: s.Units, Depth: s.Depth, IO: string(s.IO),
				Write: s.Write / 1e9, Read: s.Read / 1e9, WriteCPU: s.WriteCPU, ReadCPU: s.ReadCPU})
		}
	}
	if err := showMeasured(cmd.OutOrStdout(), r, b.plot, b.json); err != nil {
		return fmt.Errorf("bench kvio: %w", err)
	}
	return nil
}

// host measures a pool and host memory, for each block size.
func (b *benchKVIO) host(ctx context.Context, r *kvbench.Links, blocks []int) error {
	total, err := config.ParseSize(b.hostTotal)
	if err != nil {
		return usageError{fmt.Errorf("--host-total: %w", err)}
	}
	if b.layers < 1 || b.layers > kvlayout.MaxLayers || b.heads < 1 || b.heads > 256 || b.headDim < 8 || b.headDim > 512 || total < 1<<10 || total > 1<<36 || b.rounds < 1 {
		return usageError{fmt.Errorf("--layers 1 to %d, --kv-heads 1 to 256, --head-dim 8 to 512, --host-total 1KiB to 64GiB, --rounds at least 1", kvlayout.MaxLayers)}
	}
	for _, tokens := range blocks {
		pool, l, name, end, err := b.pool(tokens, int64(total))
		if err != nil {
			return err
		}
		r.Pool, r.Layout = name, fmt.Sprintf("%d layers, %d KV heads of %d %s", b.layers, b.heads, b.headDim, l.Groups[0].DType)
		fmt.Fprintf(b.say, "%s, blocks of %d tokens: %v each way, %d times\n", name, tokens, total, b.rounds)
		m, err := host.Measure(ctx, l, pool, int64(total), b.rounds, b.progress(fmt.Sprintf("%s, blocks of %d tokens", name, tokens)))
		if err := errors.Join(err, end()); err != nil {
			return err
		}
		r.Host = append(r.Host, kvbench.Host{BlockTokens: m.BlockTokens, UnitBytes: m.UnitBytes, Units: m.Units,
			Out: kvbench.GBs(m.Out), In: kvbench.GBs(m.In), Both: kvbench.GBs(m.Both)})
	}
	return nil
}

func (b *benchKVIO) progress(of string) level.Progress {
	say := progress(b.say)
	return func(what string, done, total int64) {
		say(model.Progress{Phase: what, What: of, Done: done, Total: total})
	}
}

// checkSSD refuses what ssd.Measure would, and buffers that need more than the available bytes (0:
// unknown).
func (b *benchKVIO) checkSSD(units []config.Size, total config.Size, available int64) error {
	if b.depth < 1 || b.depth > ssd.MostDepth {
		return fmt.Errorf("--depth %d: want 1 to %d", b.depth, ssd.MostDepth)
	}
	for _, unit := range units {
		if unit < ssd.UnitPage || unit%ssd.UnitPage != 0 {
			return fmt.Errorf("--unit %v: want a multiple of %v", unit, config.Size(ssd.UnitPage))
		}
		if total/unit < ssd.LeastUnits {
			return fmt.Errorf("--total %v: want %v at least, %d units of %v", total, ssd.LeastUnits*unit, ssd.LeastUnits, unit)
		}
		if most := config.Size(available); most > 0 && unit > most/config.Size(b.depth) {
			return fmt.Errorf("--depth %d: so many units of %v take more memory than the %v that this machine has to give: take fewer, or smaller ones", b.depth, unit, most>>20<<20)
		}
	}
	if err := ssd.FreshDir(b.dir); err != nil {
		return fmt.Errorf("--ssd-dir: %w", err)
	}
	return nil
}

// room refuses a --host-total that needs more than the available bytes (0: unknown): twice as much
// host memory, and the pool.
func (b *benchKVIO) room(l kvlayout.Layout, total int64, pool bool, available int64) error {
	takes, what := int64(host.MeasureBlocks(l, total))*int64(l.BlockBytes()), "host memory"
	if pool {
		takes, what = 2*takes, "a pool and host memory"
	}
	if available == 0 || takes+memfd.Spare <= available {
		return nil
	}
	gib := func(n int64) float64 { return float64(n) / (1 << 30) }
	return fmt.Errorf("--host-total %s takes %.1f GiB for %s, and %.1f to spare, and this machine has %.1f to give: take less, or a smaller shape",
		b.hostTotal, gib(takes), what, gib(memfd.Spare), gib(available))
}

// pool makes a pool of that shape, with blocks of so many tokens, for host.Measure.
func (b *benchKVIO) pool(tokens int, total int64) (kernels.Pool, kvlayout.Layout, string, func() error, error) {
	layout := func(d kvlayout.DType) kvlayout.Layout {
		return kvlayout.Plain(b.layers, b.heads, b.headDim, tokens, d)
	}
	if b.device != "cpu" {
		l := layout(kvlayout.BF16)
		if err := b.room(l, total, false, memfd.Available()); err != nil {
			return nil, l, "", nil, usageError{err}
		}
		a := arch.Config{ModelType: "llama", Layers: b.layers, Hidden: 256, Intermediate: 64, Heads: b.heads, KVHeads: b.heads, HeadDim: b.headDim,
			Vocab: 64, MaxPositions: 1024, NormEps: 1e-5, RopeTheta: 1e4, TiedHead: true}
		g, err := cuda.NewRandom(a, 1, cuda.Options{Device: b.gpu, BlockTokens: tokens, Blocks: host.MeasureBlocks(l, total), MaxTokens: 256, MaxSeqs: 4, NoGraphs: true})
		if err == nil {
			return g, g.Layout(), g.Info().Device, g.Close, nil
		}
		if b.device == "cuda" || !errors.Is(err, cuda.ErrUnavailable) {
			return nil, l, "", nil, err
		}
	}
	l := layout(kvlayout.F32)
	if err := b.room(l, total, true, memfd.Available()); err != nil {
		return nil, l, "", nil, usageError{err}
	}
	p, err := cpu.NewPool(l, host.MeasureBlocks(l, total))
	return p, l, "CPU", func() error { return nil }, err
}
