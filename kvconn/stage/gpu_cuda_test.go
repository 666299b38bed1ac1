//go:build cuda && cgo && linux

package stage_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/memfd"
	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/nccl"
	"github.com/xpyd/xpyd/kvconn/pinned"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvlayout"
)

const (
	gpuBlocks = 4096
	gpuLayers = 4
)

var gpuArch = arch.Config{ModelType: "llama", Layers: gpuLayers, Hidden: 1024, Intermediate: 64, Heads: 8, KVHeads: 8, HeadDim: 128, Vocab: 64, MaxPositions: 65536, NormEps: 1e-5, RopeTheta: 10000, TiedHead: true}

var gpuLayout = kvlayout.Plain(gpuLayers, 8, 128, 16, "bf16")

// gpuPool is a pool of one rank or of several.
type gpuPool interface {
	kernels.Backend
	kernels.Linker
	kernels.Verifier
}

// end is one worker's pool as kvconn sees it: a source of block i for index i, and
// a sink.
type end struct {
	gpuPool
	mu    sync.Mutex
	spoil int32  // flipped in layer 0 before it is verified next; 0: none
	again func() // before the second time that block 3 of layer 1 is asked for
	asked int
}

func (e *end) Block(layer, index, _, _ int) (int32, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if layer == 1 && index == 3 {
		if e.asked++; e.asked == 2 && e.again != nil {
			e.again()
		}
	}
	return int32(index), true
}

func (e *end) Load(layer, index, _, rows int, dst []byte, digests []uint64) error {
	e.Gather(layer, int32(index), 0, rows, dst)
	e.Digest(layer, int32(index), digests)
	return nil
}

func (e *end) Store(layer int, dst int32, _, rows, _ int, packed []byte, digests []uint64) error {
	e.Scatter(layer, dst, 0, rows, packed)
	e.SetDigest(layer, dst, rows, digests)
	return nil
}

func (e *end) VerifyPushed(ctx context.Context, layer int, blocks []kvconn.PushedBlock) ([]bool, error) {
	landed := make([]kernels.Landed, len(blocks))
	for i, b := range blocks {
		e.mu.Lock()
		if layer == 0 && b.Block == e.spoil {
			e.flip(0, e.spoil)
			e.spoil = 0
		}
		e.mu.Unlock()
		landed[i] = kernels.Landed{Layer: layer, Block: b.Block, FirstPos: b.FirstPos, Rows: b.Rows}
	}
	return e.Verify(ctx, landed)
}

// result prints a figure as scripts/cuda-test reads it; sorted are its runs.
func result(name, unit string, value float64, sorted []float64, note, peer string, peerValue float64) {
	line, _ := json.Marshal(map[string]any{"name": name, "unit": unit, "value": value, "p1": sorted[0], "p99": sorted[len(sorted)*99/100], "runs": len(sorted),
		"note": note, "peer": peer, "peer_value": peerValue})
	fmt.Fprintf(os.Stdout, "RESULT %s\n", line)
}

// bothCopies is the limit of what goes through pinned memory, in GB/s: one GPU gathers
// into it and the other scatters out of it, and neither waits for the other.
func bothCopies(t *testing.T, src, dst *end) float64 {
	geo := stage.NewGeometry(src.Layout(), pinned.DefaultRing())
	slots, rounds := geo.Slots, 32
	mem, err := memfd.New("xpyd-kv-limit", int(geo.Bytes()))
	must(t, err)
	other, err := unix.Mmap(mem.FD, 0, int(mem.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED) // the same memory is not registered twice
	must(t, err)
	bytes := int64(geo.Moves) * int64(src.Layout().Resolve()[0].BlockBytes())
	var sides sync.WaitGroup
	copies := func(e *end, at []byte, move func(*kernels.HostMove) (kernels.Pending, error)) {
		memory, err := e.RegisterHost(at)
		if err != nil {
			t.Error(err)
			return
		}
		var last kernels.Pending
		for n := range slots * rounds {
			m := &kernels.HostMove{Memory: memory, FirstLayer: gpuLayers - 1, Layers: 1, Engine: kernels.Kernel, CTAs: 4}
			for i := range geo.Moves {
				b := kernels.HostBlock{Block: int32((n*geo.Moves + i) * 1283 % (gpuBlocks / 2)), Filled: 16}
				b.Rows = int64(n%slots)*geo.SlotBytes() + int64(i)*int64(e.Layout().Resolve()[0].BlockBytes())
				b.Digests = int64(n%slots)*geo.SlotBytes() + bytes + int64(i)*8*int64(e.Layout().Resolve()[0].Heads)
				m.Blocks = append(m.Blocks, b)
			}
			if last, err = move(m); err != nil {
				t.Error(err)
				return
			}
		}
		if err := errors.Join(stage.Finish(last.Wait), memory.Close()); err != nil {
			t.Error(err)
		}
	}
	began := time.Now()
	sides.Go(func() { copies(src, mem.Bytes, src.GatherBlocks) })
	sides.Go(func() { copies(dst, other, dst.ScatterBlocks) })
	sides.Wait()
	rate := float64(int64(slots*rounds)*bytes) / time.Since(began).Seconds() / 1e9
	must(t, errors.Join(unix.Munmap(other), mem.Close()))
	fmt.Printf("STAGED limit: both copies at once, nobody waiting, %.2f GB/s each\n", rate)
	return rate
}

// flip changes a bit of a block's rows, not its digest.
func (e *end) flip(layer int, block int32) {
	rows := make([]byte, e.Layout().Resolve()[0].BlockBytes())
	e.Gather(layer, block, 0, 16, rows)
	rows[100] ^= 4
	e.Scatter(layer, block, 0, 16, rows)
}

func (e *end) fill() {
	l := e.Layout()
	rows, sums := make([]byte, l.Resolve()[0].BlockBytes()), make([]uint64, l.Resolve()[0].Heads)
	for layer := range gpuLayers {
		for block := range gpuBlocks / 2 {
			for i := 0; i < len(rows); i += 64 {
				rows[i] = byte(i/64 + 31*block + 7*layer)
			}
			kernels.DigestRows(&l.Resolve()[layer], block*16, 16, rows, sums)
			e.Scatter(layer, int32(block), 0, 16, rows)
			e.SetDigest(layer, int32(block), 16, sums)
		}
	}
}

// OnTicket pushes all that is asked for.
func (e *end) OnTicket(_ context.Context, o *kvconn.Outgoing) {
	if o.Accept(e) != nil {
		return
	}
	all := make([]int, len(o.Ticket().Dest))
	for i := range all {
		all[i] = i
	}
	for layer := range gpuLayers {
		o.Push(layer, all)
	}
	o.Commit(nil)
	<-o.Done()
}

type loopback struct{ kvconn.Transport }

func (l loopback) Listen(addr string) (net.Listener, error) {
	return l.Transport.Listen(cmp.Or(addr, "127.0.0.1:0"))
}

// TestStagedOnGPUs moves KV between two GPUs that are not used as peers: what has
// arrived is what was sent, a bit that flips at either end is found and sent again,
// and it prints how fast all that is. Needs two GPUs and XPYD_CUDA_PUSH=1.
func TestStagedOnGPUs(t *testing.T) {
	if os.Getenv("XPYD_CUDA_PUSH") == "" {
		t.Skip("XPYD_CUDA_PUSH is not set")
	}
	ends := [2]*end{}
	for n := range ends {
		b, err := cuda.NewRandom(gpuArch, 1, cuda.Options{Device: n, Blocks: gpuBlocks, MaxTokens: 256, MaxSeqs: 4, NoGraphs: true})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		ends[n] = &end{gpuPool: b}
	}
	src, dst := ends[0], ends[1]
	src.fill()
	l := src.Layout()
	limit := bothCopies(t, src, dst)
	for _, name := range []string{"pinned", "nccl"} {
		tr, err := pinned.New(dst, src, l, pinned.DefaultRing(), "")
		if name == "nccl" {
			tr, err = nccl.New(loopback{tcp.New(nil)}, dst, src, l, nccl.DefaultRing()), nil
		}
		if err != nil {
			t.Fatal(err)
		}
		staged(t, name, tr, src, dst, limit)
	}
}

// TestStagedRanksOnGPUs is that between unequal numbers of ranks, a side's on one GPU or crosswise on
// both: what NCCL links, the sides' first ranks, are on two. Needs two GPUs, XPYD_CUDA_PUSH=1, and
// CUDA_MODULE_LOADING=EAGER from the process's start on.
func TestStagedRanksOnGPUs(t *testing.T) {
	if os.Getenv("XPYD_CUDA_PUSH") == "" {
		t.Skip("XPYD_CUDA_PUSH is not set")
	}
	for _, c := range []struct{ from, to []int }{{[]int{0}, []int{1, 1}}, {[]int{0, 0}, []int{1}}, {[]int{0, 0}, []int{1, 1, 1, 1}}, {[]int{0, 1}, []int{1}}, {[]int{0}, []int{1, 0}}, {[]int{0, 1}, []int{1, 0}}} {
		t.Run(fmt.Sprintf("from %v to %v", c.from, c.to), func(t *testing.T) {
			ends := [2]*end{}
			for n, devices := range [][]int{c.from, c.to} {
				opt := cuda.Options{Device: devices[0], Blocks: gpuBlocks, MaxTokens: 256, MaxSeqs: 4, NoGraphs: true}
				if len(devices) == 1 {
					b, err := cuda.NewRandom(gpuArch, 1, opt)
					must(t, err)
					ends[n] = &end{gpuPool: b}
				} else {
					opt.Devices = devices
					b, err := cuda.NewRandomRanks(gpuArch, 1, opt)
					must(t, err)
					ends[n] = &end{gpuPool: b}
				}
				defer func() { // after links that have not ended it is an error
					if err := ends[n].Close(); err != nil {
						t.Error(err)
					}
				}()
			}
			src, dst := ends[0], ends[1]
			src.fill()
			staged(t, fmt.Sprintf("nccl, ranks on %v to %v", c.from, c.to), nccl.New(loopback{tcp.New(nil)}, dst, src, src.Layout(), nccl.DefaultRing()), src, dst, 0)
		})
	}
}

// sessions are made one after another, each with its first transfer.
const sessions = 7

// staged moves KV by a transport. Without a limit it only checks, and prints how fast it was.
func staged(t *testing.T, name string, tr kvconn.Transport, src, dst *end, limit float64) {
	config := func(id string) kvconn.Config {
		c := kvconn.DefaultConfig()
		c.Identity = kvconn.Identity{PeerID: kvconn.PeerID{ID: id, Epoch: 1}, ModelFingerprint: "m", TokenizerFingerprint: "t", Numerics: "n", Layout: gpuLayout, Build: "test"}
		return c
	}
	rc := config("decode")
	var err error
	rc.Shared, err = kvconn.DeviceRanks(gpuLayout, max(dst.Info().Ranks, 1), gpuBlocks)
	must(t, err)
	sessions, fetches := sessions, 101
	if limit == 0 {
		sessions, fetches = 2, 21
	}
	reg, log := prometheus.NewRegistry(), slog.New(slog.DiscardHandler)
	rm, err := kvconn.NewMetrics(reg)
	must(t, err)
	sm, err := kvconn.NewMetrics(prometheus.NewRegistry())
	must(t, err)
	server, err := kvconn.NewServer(config("prefill"), log, sm)
	must(t, err)
	ln, err := tr.Listen("")
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	serve, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(serve, ln, src) })
	defer wg.Wait()
	defer stop()
	var recv *kvconn.Receiver
	var session *kvconn.Session
	open := func() (ms float64) {
		began := time.Now()
		recv, err = kvconn.NewReceiver(rc, tr, log, rm)
		must(t, err)
		session, err = recv.Open(ctx, ln.Addr().String(), kvconn.PeerID{})
		must(t, err)
		return time.Since(began).Seconds() * 1e3
	}
	defer func() { recv.Close(ctx) }()
	const at = gpuBlocks / 2 // decode's blocks: others than prefill's
	fetch := func(blocks int) time.Duration {
		spec := kvconn.TicketSpec{RequestID: name, Positions: blocks * 16, Sink: dst}
		for i := range blocks {
			spec.Dest = append(spec.Dest, kvconn.Dest{Block: int32(at + (i*1283)%(gpuBlocks/2)), Generation: 1})
		}
		begin := time.Now()
		in, err := session.Request(ctx, spec)
		must(t, err)
		if _, err := in.Wait(ctx); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return time.Since(begin)
	}
	corrupt := func() float64 {
		n, err := testutil.GatherAndCount(reg, "xpyd_kvconn_corrupt_units_total")
		must(t, err)
		families, err := reg.Gather()
		must(t, err)
		for _, f := range families {
			if f.GetName() == "xpyd_kvconn_corrupt_units_total" && n > 0 {
				return f.Metric[0].Counter.GetValue()
			}
		}
		return 0
	}
	mid := func(l []float64) float64 { return l[len(l)/2] }
	times := func(blocks, runs int) (all []float64) {
		for range runs {
			all = append(all, fetch(blocks).Seconds()*1e3)
		}
		return all
	}
	var setups, firsts, steady, ratios []float64
	for n := range sessions {
		if n > 0 {
			must(t, recv.Close(ctx))
		}
		setups = append(setups, open())
		all := times(128, 51) // 2,048 tokens of 4 layers
		firsts, steady = append(firsts, all[0]), append(steady, all[1:]...)
		slices.Sort(all[1:])
		ratios = append(ratios, all[0]/mid(all[1:]))
	}
	for _, l := range [][]float64{setups, firsts, steady, ratios} {
		slices.Sort(l)
	}
	fmt.Printf("STAGED %s: medians of %d sessions: set up in %.1f ms; first 32 MiB %.2f ms of %.2f, steady (of %d) %.2f ms, p10 %.2f, p90 %.2f: ratio %.2f of %.2f\n",
		name, sessions, mid(setups), mid(firsts), firsts, len(steady), mid(steady), steady[len(steady)/10], steady[len(steady)*9/10], mid(ratios), ratios)
	took := times(gpuBlocks/2, fetches)[1:]
	slices.Sort(took)
	bytes := float64(gpuLayers * gpuBlocks / 2 * dst.Layout().Resolve()[0].BlockBytes())
	rates := make([]float64, len(took))
	for i, ms := range took {
		rates[len(took)-1-i] = bytes / ms / 1e6
	}
	fmt.Printf("STAGED %s: 512 MiB in 64 KiB blocks, scattered at decode, median of %d %.2f ms = %.2f GB/s, best %.2f\n", name, len(took), mid(took), mid(rates), rates[len(rates)-1])
	const from = "from the ticket until decode has verified all"
	switch {
	case limit == 0:
	case name == "pinned":
		result("push.staged_gbs", "GB/s", mid(rates), rates, from, "both copies at once, nobody waiting", limit)
	default:
		result("push.nccl_gbs", "GB/s", mid(rates), rates, from, "", 0)
		result("push.nccl_setup_ms", "ms", mid(setups), setups, "a session with its communicator, and the ring moved once", "limit", 1000)
		result("push.nccl_first_ratio", "x", mid(ratios), ratios, fmt.Sprintf("of a session's first 32 MiB to the median of its next 50: %.2f ms and %.2f (p10 %.2f, p90 %.2f)", mid(firsts), mid(steady), steady[len(steady)/10], steady[len(steady)*9/10]), "limit", 1.1)
	}

	want, got := make([]byte, dst.Layout().Resolve()[0].BlockBytes()), make([]byte, dst.Layout().Resolve()[0].BlockBytes())
	same := func(what string) {
		for index := range 128 {
			for layer := range gpuLayers {
				src.Gather(layer, int32(index), 0, 16, want)
				dst.Gather(layer, int32(at+(index*1283)%(gpuBlocks/2)), 0, 16, got)
				if !slices.Equal(want, got) {
					t.Fatalf("%s, %s: layer %d block %d is not what was sent", name, what, layer, index)
				}
			}
		}
	}
	same("at first")
	before := corrupt()
	src.asked, src.again = 0, func() { src.flip(1, 3) } // good again
	src.flip(1, 3)
	fetch(128)
	src.again = nil
	same("flipped at prefill")
	if n := corrupt() - before; n != 1 {
		t.Errorf("%s: a flipped bit at prefill was found %v times", name, n)
	}
	before = corrupt()
	dst.spoil = at
	fetch(128)
	same("flipped at decode")
	if n := corrupt() - before; n != 1 {
		t.Errorf("%s: a flipped bit at decode was found %v times", name, n)
	}
	fmt.Printf("STAGED %s: flipped bits were found and their blocks sent again; ledgers hold %d and %d\n", name, len(recv.Ledger()), len(server.Ledger()))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
