//go:build linux

package tcp_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvlayout"
)

// benchEnv makes the test binary the sender of the benchmarks.
const benchEnv = "XPYD_KVCONN_BENCH_SENDER"

// The transfer of the benchmarks: 256 MiB in blocks of 16 KiB.
const (
	benchLayers = 16
	benchBlocks = 1024
	blockBytes  = 16 << 10
	bareVectors = 64 // blocks a system call of the bare loop
)

var benchLayout = kvlayout.Plain(benchLayers, 2, 128, 16, "bf16")

// benchRows are its layers, resolved once as a pool does.
var benchRows = benchLayout.Resolve()

// slab is a pool of 256 MiB whose blocks are used in a random order.
type slab struct {
	mem    []byte
	order  []int32
	sums   []uint64 // [layer][index][head]
	verify bool
}

func newSlab(seed uint64) (*slab, error) {
	mem, err := unix.Mmap(-1, 0, benchLayers*benchBlocks*blockBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, err
	}
	unix.Madvise(mem, unix.MADV_HUGEPAGE)
	r := rand.New(rand.NewPCG(seed, 0))
	s := &slab{mem: mem, verify: true}
	for _, b := range r.Perm(benchBlocks) {
		s.order = append(s.order, int32(b))
	}
	for i := 0; i < len(mem); i += 8 {
		binary.LittleEndian.PutUint64(mem[i:], r.Uint64())
	}
	return s, nil
}

// digest makes the digests that a pool has beside its rows.
func (s *slab) digest() {
	s.sums = make([]uint64, benchLayers*benchBlocks*benchRows[0].Heads)
	for l := range benchLayers {
		for i, b := range s.order {
			kernels.DigestRows(&benchRows[l], i*benchLayout.BlockTokens, benchLayout.BlockTokens, s.block(l, b), s.sums[(l*benchBlocks+i)*benchRows[0].Heads:])
		}
	}
}

func (s *slab) block(layer int, b int32) []byte {
	at := (layer*benchBlocks + int(b)) * blockBytes
	return s.mem[at : at+blockBytes : at+blockBytes]
}

func (s *slab) View(layer, index, firstPos, rows int, digests []uint64) ([]byte, bool) {
	copy(digests, s.sums[(layer*benchBlocks+index)*len(digests):])
	return s.block(layer, s.order[index]), rows == benchLayout.BlockTokens
}

func (s *slab) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	run, _ := s.View(layer, index, firstPos, rows, digests)
	copy(dst, run)
	return nil
}

// inbox is a slab that is written.
type inbox struct{ *slab }

func (s inbox) View(layer int, dst int32, row, rows int) ([]byte, bool) {
	return s.block(layer, dst), rows == benchLayout.BlockTokens
}

func (s inbox) Verify(layer int, dst int32, row, rows, firstPos int, digests []uint64) error {
	if !s.verify {
		return nil
	}
	sums := make([]uint64, benchRows[0].Heads)
	kernels.DigestRows(&benchRows[layer], firstPos, rows, s.block(layer, dst), sums)
	if !slices.Equal(sums, digests) {
		return kvconn.ErrDigest
	}
	return nil
}

func (s inbox) Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error {
	copy(s.block(layer, dst), packed)
	return s.Verify(layer, dst, row, rows, firstPos, digests)
}

type pushAll struct{ src *slab }

func (h pushAll) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	if o.Accept(h.src) != nil {
		return
	}
	all := make([]int, len(o.Ticket().Dest))
	for i := range all {
		all[i] = i
	}
	for l := range o.Layout().Layers() {
		o.Push(l, all)
	}
	o.Commit(nil)
	<-o.Done()
}

func benchConfig(conns int) kvconn.Config {
	cfg := kvconn.DefaultConfig()
	cfg.Identity = kvconntest.Config("bench", 1).Identity
	cfg.Identity.Layout = benchLayout
	if conns > 0 {
		cfg.BulkConns = conns
	}
	return cfg
}

// serveBench is the sending process: one listener of the connector, one of the
// bare loop.
func serveBench() error {
	src, err := newSlab(1)
	if err != nil {
		return err
	}
	src.digest()
	tr := tcp.New(nil)
	m, err := kvconn.NewMetrics(nil)
	if err != nil {
		return err
	}
	srv, err := kvconn.NewServer(benchConfig(0), slog.New(slog.NewTextHandler(io.Discard, nil)), m)
	if err != nil {
		return err
	}
	ln, err := tr.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	bare, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr(), bare.Addr())
	var wg sync.WaitGroup
	wg.Go(func() { srv.Serve(context.Background(), ln, pushAll{src}) })
	for {
		c, err := bare.Accept()
		if err != nil {
			return err
		}
		wg.Go(func() { serveBare(c.(*net.TCPConn), src) })
	}
}

// blocking returns a descriptor for plain system calls.
func blocking(c *net.TCPConn) (*os.File, error) {
	f, err := c.File()
	if err == nil {
		err = syscall.SetNonblock(int(f.Fd()), false)
	}
	return f, err
}

// serveBare writes the part of all blocks that four bytes ask for, part and
// parts, again and again.
func serveBare(c *net.TCPConn, src *slab) {
	f, err := blocking(c)
	if err != nil {
		return
	}
	defer f.Close()
	var ask [4]byte
	for {
		if _, err := io.ReadFull(f, ask[:]); err != nil {
			return
		}
		if src.bare(int(f.Fd()), unix.Writev, int(binary.LittleEndian.Uint16(ask[:])), int(binary.LittleEndian.Uint16(ask[2:]))) != nil {
			return
		}
	}
}

// bare moves part of all blocks through fd with one system call for many.
func (s *slab) bare(fd int, call func(int, [][]byte) (int, error), part, parts int) error {
	n := benchLayers * benchBlocks
	var vecs [][]byte
	for u, hi := n*part/parts, n*(part+1)/parts; u < hi || len(vecs) > 0; {
		for ; u < hi && len(vecs) < bareVectors; u++ {
			vecs = append(vecs, s.block(u/benchBlocks, s.order[u%benchBlocks]))
		}
		m, err := call(fd, vecs)
		if err != nil || m == 0 {
			return fmt.Errorf("bare: %d bytes: %w", m, err)
		}
		for m > 0 {
			k := min(m, len(vecs[0]))
			vecs[0], m = vecs[0][k:], m-k
			if len(vecs[0]) == 0 {
				vecs = vecs[1:]
			}
		}
	}
	return nil
}

// benchPair is the receiving process with its helper.
type benchPair struct {
	dst  *slab
	s    *kvconn.Session
	addr string
	bare []*os.File
	r    *kvconn.Receiver
	pid  int // of the sender
}

// cpu is the time that both processes have computed so far.
func (p *benchPair) cpu() (d time.Duration) {
	for _, pid := range []int{os.Getpid(), p.pid} {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		for _, path := range tasks {
			var ns int64
			text, _ := os.ReadFile(path)
			fmt.Sscan(string(text), &ns)
			d += time.Duration(ns)
		}
	}
	return d
}

func newBenchPair(b *testing.B, conns int) *benchPair {
	fatal := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), benchEnv+"=1")
	out, err := cmd.StdoutPipe()
	fatal(err)
	fatal(cmd.Start())
	b.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	fatal(err)
	addrs := strings.Fields(line)
	p := &benchPair{addr: addrs[0], pid: cmd.Process.Pid}
	p.dst, err = newSlab(2)
	fatal(err)
	b.Cleanup(func() { unix.Munmap(p.dst.mem) })
	for range conns {
		c, err := net.Dial("tcp", addrs[1])
		fatal(err)
		f, err := blocking(c.(*net.TCPConn))
		fatal(err)
		b.Cleanup(func() { f.Close(); c.Close() })
		p.bare = append(p.bare, f)
	}
	tr := tcp.New(nil)
	m, err := kvconn.NewMetrics(nil)
	fatal(err)
	p.r, err = kvconn.NewReceiver(benchConfig(conns), tr, slog.New(slog.NewTextHandler(io.Discard, nil)), m)
	fatal(err)
	b.Cleanup(func() { p.r.Close(context.Background()) })
	p.s, err = p.r.Open(b.Context(), p.addr, kvconn.PeerID{})
	fatal(err)
	return p
}

// readBare reads everything with the bare loop.
func (p *benchPair) readBare() error {
	var wg sync.WaitGroup
	errs := make([]error, len(p.bare))
	for n := range p.bare {
		wg.Go(func() { errs[n] = p.askBare(n, n, len(p.bare)) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// askBare reads one part with one connection.
func (p *benchPair) askBare(conn, part, parts int) error {
	f := p.bare[conn]
	ask := binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(nil, uint16(part)), uint16(parts))
	if _, err := f.Write(ask); err != nil {
		return err
	}
	return p.dst.bare(int(f.Fd()), unix.Readv, part, parts)
}

// fetch reads n blocks of every layer with a ticket.
func (p *benchPair) fetch(ctx context.Context, n int) error {
	dest := make([]kvconn.Dest, n)
	for i := range dest {
		dest[i].Block = p.dst.order[i]
	}
	in, err := p.s.Request(ctx, kvconn.TicketSpec{Positions: n * benchLayout.BlockTokens, Dest: dest, Sink: inbox{p.dst}})
	if err == nil {
		_, err = in.Wait(ctx)
	}
	return err
}

// BenchmarkTransfer moves 256 MiB in scattered blocks of 16 KiB between two
// processes: by ticket, with and without checking digests, and with a bare
// loop of writev and readv over the same memory and as many connections. The
// three take turns; the figures are medians. The CPU time of both processes
// says the same where other work disturbs the clock.
func BenchmarkTransfer(b *testing.B) {
	for _, conns := range []int{1, 2, 4} {
		b.Run(fmt.Sprintf("conns=%d", conns), func(b *testing.B) {
			p := newBenchPair(b, conns)
			var bare, checked, unchecked []float64
			var bareCPU, checkedCPU, uncheckedCPU time.Duration
			measure := func(into *[]float64, cpu *time.Duration, f func() error) {
				start, used := time.Now(), p.cpu()
				if err := f(); err != nil {
					b.Fatal(err)
				}
				*into = append(*into, float64(len(p.dst.mem))/time.Since(start).Seconds()/1e9)
				*cpu += p.cpu() - used
			}
			for b.Loop() {
				measure(&bare, &bareCPU, p.readBare)
				p.dst.verify = true
				measure(&checked, &checkedCPU, func() error { return p.fetch(b.Context(), benchBlocks) })
				p.dst.verify = false
				measure(&unchecked, &uncheckedCPU, func() error { return p.fetch(b.Context(), benchBlocks) })
			}
			b.ReportMetric(bareCPU.Seconds()/checkedCPU.Seconds(), "of-bare-cpu")
			b.ReportMetric(100*(checkedCPU.Seconds()/uncheckedCPU.Seconds()-1), "digest-cpu-%")
			b.ReportMetric(float64(checkedCPU.Milliseconds())/float64(len(checked)), "cpu-ms")
			b.ReportMetric(quantile(bare, 0.5), "bare-GB/s")
			b.ReportMetric(quantile(checked, 0.5), "GB/s")
			b.ReportMetric(quantile(checked, 0.5)/quantile(bare, 0.5), "of-bare")
			b.ReportMetric(100*(1-quantile(checked, 0.5)/quantile(unchecked, 0.5)), "digest-%")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkLatency moves one block of 16 layers, 256 KiB: from the request to
// the end of the wait. The bare loop's part is a question of four bytes and the
// same bytes back.
func BenchmarkLatency(b *testing.B) {
	for _, conns := range []int{1, 2} {
		b.Run(fmt.Sprintf("conns=%d", conns), func(b *testing.B) {
			p := newBenchPair(b, conns)
			p.dst.verify = true
			var took, bare []float64
			for b.Loop() {
				start := time.Now()
				if err := p.fetch(b.Context(), 1); err != nil {
					b.Fatal(err)
				}
				between := time.Now()
				took = append(took, float64(between.Sub(start).Microseconds()))
				if err := p.askBare(0, 0, benchBlocks); err != nil {
					b.Fatal(err)
				}
				bare = append(bare, float64(time.Since(between).Microseconds()))
			}
			b.ReportMetric(quantile(bare, 0.5), "bare-p50-µs")
			b.ReportMetric(quantile(bare, 0.99), "bare-p99-µs")
			b.ReportMetric(quantile(took, 0.5), "p50-µs")
			b.ReportMetric(quantile(took, 0.99), "p99-µs")
		})
	}
}

// BenchmarkOpen makes a session: dial and handshake of all its connections.
func BenchmarkOpen(b *testing.B) {
	p := newBenchPair(b, 1)
	var took []float64
	for b.Loop() {
		if err := p.r.Close(b.Context()); err != nil {
			b.Fatal(err)
		}
		tr := tcp.New(nil)
		m, err := kvconn.NewMetrics(nil)
		if err != nil {
			b.Fatal(err)
		}
		if p.r, err = kvconn.NewReceiver(benchConfig(0), tr, slog.New(slog.NewTextHandler(io.Discard, nil)), m); err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		if p.s, err = p.r.Open(b.Context(), p.addr, kvconn.PeerID{}); err != nil {
			b.Fatal(err)
		}
		if err := p.fetch(b.Context(), 1); err != nil {
			b.Fatal(err)
		}
		took = append(took, float64(time.Since(start).Microseconds()))
	}
	b.ReportMetric(quantile(took, 0.5), "p50-µs")
	b.ReportMetric(quantile(took, 0.99), "p99-µs")
}

func quantile(v []float64, q float64) float64 {
	v = slices.Clone(v)
	slices.Sort(v)
	return v[int(q*float64(len(v)-1))]
}
