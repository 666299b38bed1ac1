//go:build cgo && linux

package cuda

// #include "api.h"
import "C"

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/links"
	"github.com/xpyd/xpyd/kvlayout"
)

// Ranks is one model on several devices, by tensor parallelism: each rank has its heads, its
// part of the wide projections and of the vocabulary, and a pool of its KV heads; the sums
// meet in kernels over the devices' own links. It implements kernels.Backend,
// kernels.Holder, kernels.Arriver, kernels.Gated and kernels.Watched. Other processes open the pool of
// each rank (kernels.Divided). Links are rank 0's device's.
//
// Calls are those of a Backend, and as safe.
type Ranks struct {
	ranks  []*Backend
	lead   *Backend // ranks[0]: describes steps, and has their results
	owners []*Backend
	layout kvlayout.Layout
	rows   kvlayout.Rows

	serial    bool         // each rank's step ends before the next one's begins
	launching atomic.Int32 // launches that have not returned
	// driver is held by launches of a step, from the first rank's to the last's, and by calls for
	// which the driver may wait for a device while it lets nobody launch: the device may wait for a
	// rank that is to be launched.
	driver sync.Mutex
	quiet  quiet // of driver
	links  *links.Group
	nccl   bool // the ranks' sums meet through NCCL

	failed atomic.Pointer[error] // the first failure; steps are of no use after it
	hung   chan error            // that failure
	once   sync.Once
	stop   chan struct{} // ends watch
	watch  sync.WaitGroup
}

var (
	_ kernels.Backend = (*Ranks)(nil)
	_ kernels.Holder  = (*Ranks)(nil)
	_ kernels.Gated   = (*Ranks)(nil)
	_ kernels.Watched = (*Ranks)(nil)
)

// Open is New, or NewRanks where opt has several devices.
func Open(a arch.Config, w kernels.Weights, opt Options) (kernels.Backend, error) {
	if len(opt.Devices) < 2 {
		b, err := New(a, w, opt)
		if err != nil {
			return nil, err
		}
		return b, nil
	}
	g, err := NewRanks(a, w, opt)
	if err != nil {
		return nil, err
	}
	return g, nil
}

// NewRanks opens a rank on each of opt.Devices. A device may be there several times, for
// tests: its ranks then share its memory and its multiprocessors. The process must not have
// used CUDA before, or with CUDA_MODULE_LOADING=EAGER in its environment.
func NewRanks(a arch.Config, w kernels.Weights, opt Options) (*Ranks, error) {
	return newRanks(a, opt, func(b *Backend) error { return b.load(w, opt.Loaded) })
}

// NewRandomRanks is NewRanks with random weights, for benchmarks.
func NewRandomRanks(a arch.Config, seed uint64, opt Options) (*Ranks, error) {
	return newRanks(a, opt, func(b *Backend) error { return b.random(seed) })
}

func newRanks(a arch.Config, opt Options, load func(*Backend) error) (*Ranks, error) {
	g := &Ranks{stop: make(chan struct{}), hung: make(chan error, 1)}
	g.quiet.driver, g.links = &g.driver, links.New(ranksNCCL{g, func() links.Library { return nccl{g.lead} }})
	err := g.open(a, opt)
	for _, b := range g.ranks {
		if err == nil {
			err = load(b)
		}
	}
	if err == nil {
		err = g.start(opt)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cuda backend: %w", err), g.Close())
	}
	return g, nil
}

// beside returns how many ranks have the device of each rank.
func beside(devices []int) (n []int) {
	count := map[int]int{}
	for _, d := range devices {
		count[d]++
	}
	for _, d := range devices {
		n = append(n, count[d])
	}
	return n
}

func (g *Ranks) open(a arch.Config, opt Options) error {
	n := len(opt.Devices)
	if n < 2 || n > MaxRanks {
		return fmt.Errorf("%d devices: 2 to %d", n, MaxRanks)
	}
	// No launch may have to load its code: the device would have to be idle. Streams of ranks
	// that wait for each other must not share a hardware queue.
	for name, value := range map[string]string{"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"} {
		if os.Getenv(name) == "" {
			if err := os.Setenv(name, value); err != nil {
				return err
			}
		}
	}
	devices := opt.Devices
	opt.Devices = nil
	for rank, device := range devices {
		opt.Device = device
		b, err := open(a, opt, rank, n)
		if err != nil {
			return fmt.Errorf("rank %d on device %d: %w", rank, device, err)
		}
		if rank == 0 {
			g.lead = b
		}
		b.exported = g.lead.exported
		if g.ranks = append(g.ranks, b); rank == 0 || b.shard.kv.first != g.ranks[rank-1].shard.kv.first {
			g.owners = append(g.owners, b)
		}
	}
	g.layout = g.lead.opt.layout(&a)
	g.rows, _ = g.layout.Uniform()
	var exchange C.int32_t
	err := g.lead.lib.call("xk_join", func() C.int32_t { return C.api_join(g.lead.lib.api, &contexts(g.ranks)[0], C.int32_t(n), &exchange) })
	g.nccl = exchange == C.XK_BY_NCCL
	return err
}

// Exchange is how the ranks' sums meet: over peer memory, or through NCCL.
func (g *Ranks) Exchange() string {
	if g.nccl {
		return "NCCL"
	}
	return "peer memory"
}

func contexts(ranks []*Backend) (list []*C.xk_ctx) {
	for _, b := range ranks {
		list = append(list, b.ctx)
	}
	return list
}

// blocks returns how many each rank's pool gets: as many as every device has room for.
func (g *Ranks) blocks(opt *Options) (blocks int, err error) {
	for i, k := range beside(opt.Devices) {
		m, free, err := g.ranks[i].memory()
		if err != nil {
			return 0, err
		}
		m.Weights, m.Scratch, m.Block = m.Weights*int64(k), m.Scratch*int64(k), m.Block*int64(k) // ranks are alike
		n, err := poolBlocks(m, free, g.lead.opt.MemoryPart, opt.Blocks)
		if err != nil {
			return 0, fmt.Errorf("rank %d: %w", i, err)
		}
		if i == 0 || n < blocks {
			blocks = n
		}
	}
	return blocks, nil
}

func (g *Ranks) start(opt Options) error {
	blocks, err := g.blocks(&opt)
	if err != nil {
		return err
	}
	for i, b := range g.ranks {
		if err := b.begin(blocks); err != nil {
			return fmt.Errorf("rank %d: %w", i, err)
		}
	}
	g.watch.Go(g.watching)
	// What a step does first, loading code and making its graph, can need an idle device, on
	// which no rank waits for another. So each rank first runs by itself.
	g.alone(true)
	if err = g.warm(); err != nil || opt.alone {
		return err
	}
	g.alone(false)
	return g.warm()
}

func (g *Ranks) warm() error {
	err := g.lead.warm(func(st *kernels.Step, bucket int) error {
		if err := g.launch(st, bucket); err != nil {
			return err
		}
		if st.Hold {
			g.Draw()
		}
		_, err := g.Await()
		return err
	})
	g.lead.draws = 0 // nothing may refer to these steps' draws
	return err
}

// alone has each rank compute by itself, its waits for others end at once: results are worthless.
func (g *Ranks) alone(on bool) {
	g.serial = on
	if on {
		g.abort(C.XK_SERIAL)
	} else {
		g.abort(C.XK_TOGETHER)
	}
}

// abort has waits of ranks for each other end, or no longer.
func (g *Ranks) abort(how C.int32_t) { C.api_ranks_abort(g.lead.lib.api, g.lead.ctx, how) }

// end ends the exchange through NCCL, and with it kernels that wait for a rank without an end.
func (g *Ranks) end() error {
	list := contexts(g.ranks)
	return g.lead.lib.call("xk_ranks_end", func() C.int32_t { return C.api_ranks_end(g.lead.lib.api, &list[0], C.int32_t(len(list))) })
}

var _ = [1]struct{}{}[inNCCL-C.XK_IN_NCCL] // they are equal

// watching looks for a rank that hangs until Close.
func (g *Ranks) watching() {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	w := newWatcher(len(g.ranks))
	for {
		select {
		case <-g.stop:
			return
		case now := <-tick.C:
			var waits [C.XK_RANKS]C.uint64_t
			C.api_ranks_watch(g.lead.lib.api, g.lead.ctx, &waits[0])
			var seen [MaxRanks]uint64
			for i := range waits {
				seen[i] = uint64(waits[i])
			}
			if rank, waiting, waited, hung := w.look(seen[:], now, g.launching.Load() > 0); hung {
				g.fail(&RankError{Rank: rank, Device: g.ranks[rank].opt.Device, Waiting: waiting, Waited: waited})
			}
		}
	}
}

// Hung implements kernels.Watched. Any failure of a rank counts: no step can follow it.
func (g *Ranks) Hung() <-chan error { return g.hung }

// fail records the first failure and has all ranks' kernels end.
func (g *Ranks) fail(err error) {
	err = asHung(err)
	if g.failed.CompareAndSwap(nil, &err) {
		g.hung <- err // has room for one
	}
	g.abort(C.XK_ABORT)
}

// failure is the first failure, or nil.
func (g *Ranks) failure() error {
	if err := g.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Info implements kernels.Backend.
func (g *Ranks) Info() kernels.Info {
	bits, names := uint32(0), []string{}
	for _, b := range g.ranks {
		bits = bits*0x01000193 ^ b.bits
		names = append(names, b.device)
	}
	return kernels.Info{Name: "cuda", Numerics: g.lead.opt.rankNumerics(bits, len(g.ranks)), Ranks: len(g.ranks), Hidden: true, Verify: true, Device: strings.Join(names, ", ")}
}

// PCI is the bus id of each rank's device.
func (g *Ranks) PCI() (list []string) {
	for _, b := range g.ranks {
		list = append(list, b.pci)
	}
	return list
}

// Arch implements kernels.Backend.
func (g *Ranks) Arch() arch.Config { return g.lead.arch }

// Layout implements kernels.Backend: all of the model's heads.
func (g *Ranks) Layout() kvlayout.Layout { return g.layout }

// Blocks implements kernels.Backend.
func (g *Ranks) Blocks() int { return g.lead.blocks }

// Memory says where the memory of rank 0's device went, and how much of it is rank 0's.
func (g *Ranks) Memory() Memory { return g.lead.mem }

// Choices says where rank 0's choice of kernels for the projections comes from.
func (g *Ranks) Choices() string { return g.lead.choices }

// SlowProjections are rank 0's.
func (g *Ranks) SlowProjections() []string { return g.lead.SlowProjections() }

// LastStepTime is rank 0's.
func (g *Ranks) LastStepTime() (step, idle float64, err error) { return g.lead.LastStepTime() }

// Close frees the devices' memory. Closing twice is allowed. Of a device that does not become
// idle it does not wait for long: the error names it, and all ranks' memory stays with the
// process, as they read each other's.
func (g *Ranks) Close() (err error) {
	g.once.Do(func() { err = g.close() })
	return err
}

func (g *Ranks) close() (err error) {
	var devices []int
	for _, b := range g.ranks {
		devices = append(devices, b.opt.Device)
	}
	late, err := g.idle() // none goes while another computes
	close(g.stop)
	g.watch.Wait()
	n := g.links.Live()
	if n > 0 {
		err = errors.Join(err, fmt.Errorf("kernels/cuda: %d links have not ended: the devices' memory stays with the process", n))
	}
	if len(late) > 0 {
		err = errors.Join(err, busy(late, devices))
	}
	if n > 0 || len(late) > 0 {
		return err
	}
	for i := len(g.ranks) - 1; i >= 0; i-- { // rank 0's memory is all ranks' to tell what they wait for
		late, err1 := within(closes, 1, func(int) error { return g.ranks[i].Close() })
		if err = errors.Join(err, err1); len(late) > 0 {
			return errors.Join(err, busy([]int{i}, devices))
		}
	}
	return err
}

// idle waits until no rank computes, and ends an exchange through NCCL. It returns the ranks that go
// on. Kernels that wait for a rank that does not come end by what watch finds, and NCCL's when their
// exchange does.
func (g *Ranks) idle() (late []int, err error) {
	drained := func() ([]int, error) {
		return within(closes, len(g.ranks), func(i int) error { return drain(g.ranks[i : i+1]) })
	}
	if !g.nccl {
		return drained()
	}
	if g.failure() == nil {
		if late, err = drained(); err != nil {
			return late, err
		}
	}
	held, err := within(closes, 1, func(int) error { return g.end() })
	late, err1 := drained()
	if len(held) > 0 && len(late) == 0 { // NCCL has not let go of them
		for i := range g.ranks {
			late = append(late, i)
		}
	}
	return late, errors.Join(err, err1)
}
