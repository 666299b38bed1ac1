// Command kvsoak keeps many transfers of many peers in flight between two processes and checks
// that memory, goroutines and latency stay flat.
//
//	go run ./scripts/kvsoak -peers 200 -transfers 10000 -time 10m
//
// This process has the receivers, each with a session to the sender, a second process. A transfer
// waits at the sender for -compute, as for a prompt, and then moves 2 small blocks of 2 layers.
// Every byte is compared. Latency excludes the wait.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/tcp"
	"github.com/xpyd/xpyd/kvlayout"
)

const tokens, blocks = 8, 2 // of one transfer; 2 layers

func config(id string, compute time.Duration, transfers int) kvconn.Config {
	c := kvconn.DefaultConfig()
	c.PeerSilence = 10 * time.Second // for a shared machine; silence is not under test
	c.AcceptTimeout, c.RevokeTimeout, c.RepairTimeout = 30*time.Second, 10*time.Second, 30*time.Second
	c.TicketTimeout = compute + time.Minute
	c.MaxTickets = max(c.MaxTickets, transfers)
	c.MaxSessions = 1024
	c.Identity = kvconn.Identity{PeerID: kvconn.PeerID{ID: id, Epoch: 1}, ModelFingerprint: "soak", TokenizerFingerprint: "soak", Numerics: "soak", Build: "soak",
		Layout: kvlayout.Plain(2, 2, 4, 4, "f32")}
	return c
}

func main() {
	peers := flag.Int("peers", 200, "receivers, one session each")
	transfers := flag.Int("transfers", 10_000, "in flight at a time, over all receivers")
	length := flag.Duration("time", 10*time.Minute, "duration")
	every := flag.Duration("every", 15*time.Second, "between lines of output")
	profiles := flag.String("profiles", "", "folder for the receivers' heap profiles, after a third of the time and at the end")
	compute := flag.Duration("compute", 20*time.Second, "wait at the sender")
	sender := flag.Bool("sender", false, "be the second process")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	work := func() error { return soak(ctx, *peers, *transfers, *length, *every, *compute, *profiles) }
	if *sender {
		work = func() error { return serveSender(ctx, config("sender", *compute, *transfers), *compute) }
	}
	if err := work(); err != nil {
		fmt.Fprintln(os.Stderr, "kvsoak:", err)
		os.Exit(1)
	}
}

// sample is what a process holds.
type sample struct {
	RSS, Heap  uint64 // MiB
	Goroutines int
	Tickets    int
}

func measure(tickets int) sample {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	s := sample{Heap: m.HeapAlloc >> 20, Goroutines: runtime.NumGoroutine(), Tickets: tickets}
	var size, pages uint64
	statm, _ := os.ReadFile("/proc/self/statm") // 0 where there is none
	_, _ = fmt.Sscan(string(statm), &size, &pages)
	s.RSS = pages * uint64(os.Getpagesize()) >> 20
	return s
}

// handler waits for a while, then pushes.
type handler struct{ compute time.Duration }

func (h handler) OnTicket(ctx context.Context, o *kvconn.Outgoing) {
	src := &kvconntest.Source{Layout: o.Peer().Layout, Seed: kvconntest.Seed(o.Ticket().Tokens)}
	if o.Accept(src) != nil {
		return
	}
	select {
	case <-time.After(h.compute):
	case <-ctx.Done():
		return
	}
	for l := range src.Layout.Layers() {
		o.Push(l, []int{0, 1})
	}
	o.Commit(nil)
}

// serveSender is the second process. It prints its address, then a sample for each line it reads.
func serveSender(ctx context.Context, cfg kvconn.Config, compute time.Duration) error {
	srv, err := kvconn.NewServer(cfg, slog.New(slog.DiscardHandler), metrics())
	if err != nil {
		return err
	}
	ln, err := transport().Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	fmt.Fprintln(os.Stdout, ln.Addr())
	go func() {
		defer cancel()
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			if json.NewEncoder(os.Stdout).Encode(measure(len(srv.Ledger()))) != nil {
				return
			}
		}
	}()
	return srv.Serve(ctx, ln, handler{compute})
}

func metrics() *kvconn.Metrics { return must(kvconn.NewMetrics(nil)) }

func transport() kvconn.Transport { return tcp.New(nil) }

func must[T any](v T, err error) T {
	if err != nil {
		panic(err) // the defaults are valid
	}
	return v
}

// checker compares what arrives with the prompt's rows.
type checker struct {
	src   *kvconntest.Source
	wrong *atomic.Int64
}

func (c *checker) Store(layer int, dst int32, row, rows, firstPos int, packed []byte, digests []uint64) error {
	want, sums := make([]byte, len(packed)), make([]uint64, len(digests))
	if err := c.src.Load(layer, 0, firstPos, rows, want, sums); err != nil {
		return err
	}
	if !bytes.Equal(want, packed) || !slices.Equal(sums, digests) {
		c.wrong.Add(1)
		return kvconn.ErrDigest
	}
	return nil
}

// soaking is the state that all transfers share.
type soaking struct {
	compute             time.Duration
	flying, done, wrong atomic.Int64
	mu                  sync.Mutex
	took                []float64 // ms, since the last line
	failures            map[string]int
}

// transfer makes one transfer after the other.
func (r *soaking) transfer(ctx context.Context, s *kvconn.Session, seed int32) {
	dest := []kvconn.Dest{{Block: 0, Generation: 1}, {Block: 1, Generation: 1}}
	for n := int32(0); ctx.Err() == nil; n++ {
		prompt := kvconntest.Prompt(seed+n*tokens, tokens)
		src := &kvconntest.Source{Layout: s.Peer().Layout, Seed: kvconntest.Seed(prompt)}
		start := time.Now()
		r.flying.Add(1)
		in, err := s.Request(ctx, kvconn.TicketSpec{Tokens: prompt, Dest: dest, Sink: &checker{src, &r.wrong}})
		if err == nil {
			if _, err = in.Wait(ctx); err != nil {
				err = errors.Join(err, in.Revoke(context.Background()))
			}
		}
		r.flying.Add(-1)
		if ctx.Err() != nil {
			return
		}
		r.mu.Lock()
		if err == nil {
			r.done.Add(1)
			r.took = append(r.took, (time.Since(start)-r.compute).Seconds()*1e3)
		} else {
			if len(r.failures) < 20 {
				fmt.Fprintf(os.Stdout, "failure %v after %v: %v\n", r.failures, time.Since(start).Round(time.Millisecond), err)
			}
			r.failures[string(kvconn.OutcomeOf(err, "untyped"))]++
		}
		r.mu.Unlock()
		if err != nil { // a broken session fails at once
			return
		}
	}
}

func soak(ctx context.Context, peers, transfers int, length, every, compute time.Duration, profiles string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, self, "-sender", "-compute", compute.String(), "-transfers", fmt.Sprint(transfers))
	cmd.Stderr = os.Stderr
	ask, inErr := cmd.StdinPipe()
	out, outErr := cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	defer func() { _ = cmd.Wait() }() // it ends with its standard input
	defer ask.Close()
	samples := bufio.NewReader(out)
	addr, err := samples.ReadString('\n')
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "# %d peers, %d transfers in flight of %d blocks x 2 layers of 256 bytes, %v at the sender, %d CPUs, %s\n",
		peers, transfers, blocks, compute, runtime.NumCPU(), runtime.Version())

	r := &soaking{compute: compute, failures: map[string]int{}}
	loops, end := context.WithTimeout(ctx, length)
	defer end()
	var wg sync.WaitGroup
	var pools []*kvconn.Receiver
	for p := range peers {
		pool, err := kvconn.NewReceiver(config(fmt.Sprint("receiver-", p), compute, transfers), transport(), slog.New(slog.DiscardHandler), metrics())
		if err != nil {
			return err
		}
		s, err := pool.Open(ctx, strings.TrimSpace(addr), kvconn.PeerID{})
		if err != nil {
			return err
		}
		pools = append(pools, pool)
		for t := range transfers / peers {
			at := time.Duration(p*(transfers/peers)+t) * compute / time.Duration(transfers)
			wg.Go(func() {
				select {
				case <-time.After(at): // spread, so that not all end at once
					r.transfer(loops, s, int32(1_000_000*p+10_000*t))
				case <-loops.Done():
				}
			})
		}
	}
	wg.Go(func() {
		for n, at := range []time.Duration{length / 3, length - every} {
			select {
			case <-time.After(at - time.Duration(n)*length/3):
				if err := printHeap(profiles, fmt.Sprintf("heap-%d", n+1), at); err != nil {
					fmt.Fprintln(os.Stderr, "kvsoak:", err)
				}
			case <-loops.Done():
				return
			}
		}
	})
	series, err := r.sample(loops, every, ask, samples, pools)
	wg.Wait()
	if err != nil {
		return err
	}
	return r.verdict(ctx, series, transfers, pools)
}

// printHeap prints this process's live memory after a collection; RSS also counts what the
// collector has not returned yet. With a folder it leaves a heap profile there.
func printHeap(dir, name string, at time.Duration) error {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	fmt.Fprintf(os.Stdout, "receivers after %v: %.1f MiB of heap alive in %d objects, %.1f MiB of stacks, %.1f MiB of spans idle, %.1f MiB from the system\n",
		at.Round(time.Second), float64(m.HeapAlloc)/(1<<20), m.HeapObjects, float64(m.StackInuse)/(1<<20), float64(m.HeapIdle-m.HeapReleased)/(1<<20), float64(m.Sys-m.HeapReleased)/(1<<20))
	if dir == "" {
		return nil
	}
	f, err := os.Create(filepath.Join(dir, name+".pb.gz"))
	if err != nil {
		return err
	}
	return errors.Join(pprof.WriteHeapProfile(f), f.Close())
}

// line is a line of the time series.
type line struct {
	at             time.Duration
	here, there    sample
	flying         int64
	rate, p50, p99 float64
}

// sample prints a line of the time series at each tick.
func (r *soaking) sample(ctx context.Context, every time.Duration, ask io.Writer, samples *bufio.Reader, pools []*kvconn.Receiver) (series []line, err error) {
	start, last := time.Now(), int64(0)
	fmt.Fprintln(os.Stdout, "   time  in flight  done/s   p50 ms   p99 ms | receivers: RSS MiB  heap  goroutines | sender: RSS MiB  heap  goroutines  tickets")
	for tick := time.NewTicker(every); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return series, nil
		case <-tick.C:
		}
		held := 0
		for _, p := range pools {
			held += len(p.Ledger())
		}
		l := line{at: time.Since(start), here: measure(held), flying: r.flying.Load()}
		fmt.Fprintln(ask)
		if err := json.NewDecoder(samples).Decode(&l.there); err != nil {
			return series, err
		}
		r.mu.Lock()
		took := r.took
		r.took = nil
		r.mu.Unlock()
		done := r.done.Load()
		l.rate, last = float64(done-last)/every.Seconds(), done
		if len(took) > 0 {
			l.p50, l.p99 = figures.Quantile(took, 0.5), figures.Quantile(took, 0.99)
		}
		fmt.Fprintf(os.Stdout, "%7s %10d %7.0f %8.1f %8.1f | %18d %5d %11d | %15d %5d %11d %8d\n", l.at.Round(time.Second), l.flying, l.rate, l.p50, l.p99,
			l.here.RSS, l.here.Heap, l.here.Goroutines, l.there.RSS, l.there.Heap, l.there.Goroutines, l.there.Tickets)
		series = append(series, l)
	}
}

// verdict compares the last third of the series with the second.
func (r *soaking) verdict(ctx context.Context, series []line, transfers int, pools []*kvconn.Receiver) error {
	if len(series) < 6 {
		return fmt.Errorf("%d lines are too few for a verdict", len(series))
	}
	third := len(series) / 3
	bad := 0
	judge := func(name string, grown float64, f func(l line) float64) {
		var most [3]float64
		for i, l := range series {
			at := min(i/third, 2)
			most[at] = max(most[at], f(l))
		}
		word := "flat"
		if most[2] > most[1]*grown+1 {
			word = "GROWS"
			bad++
		}
		fmt.Fprintf(os.Stdout, "%-28s most in the second third %.0f, in the last %.0f: %s\n", name, most[1], most[2], word)
	}
	judge("receivers' RSS, MiB", 1.2, func(l line) float64 { return float64(l.here.RSS) })
	judge("receivers' goroutines", 1.05, func(l line) float64 { return float64(l.here.Goroutines) })
	judge("sender's RSS, MiB", 1.2, func(l line) float64 { return float64(l.there.RSS) })
	judge("sender's goroutines", 1.05, func(l line) float64 { return float64(l.there.Goroutines) })
	judge("p99, ms", 2, func(l line) float64 { return l.p99 })
	fmt.Fprintf(os.Stdout, "%d transfers done, %d wrong blocks, failures %v\n", r.done.Load(), r.wrong.Load(), r.failures)
	for _, p := range pools {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		if err := p.Close(ctx); err != nil || len(p.Ledger()) > 0 {
			fmt.Fprintf(os.Stdout, "ledger: %v, %d tickets\n", err, len(p.Ledger()))
			bad++
		}
		cancel()
	}
	if bad > 0 || r.wrong.Load() > 0 || len(r.failures) > 0 {
		return fmt.Errorf("not flat, or not right")
	}
	fmt.Fprintln(os.Stdout, "verdict: bounded, flat, and right")
	return nil
}
