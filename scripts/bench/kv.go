package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/kvbench"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// kv runs `xpyd bench kv` over TCP and over shared memory, its limits, and peers, one after
// the other in rounds. A figure is the median over the rounds; a peer that has several
// settings counts with its best.
type kv struct {
	*harness.Bench
	venv        string
	connections int
	copiers     int
	python      string // that has the peers; "": none

	values   map[string][]float64 // by step and figure: "nixl tcp/gb_s"
	versions map[string]string    // of the peers
	failed   map[string]error     // steps that failed, and why the last time
	failures map[string]int       // how often
}

func newKV(b *harness.Bench) benchmark {
	return &kv{Bench: b, values: map[string][]float64{}, versions: map[string]string{}, failed: map[string]error{}, failures: map[string]int{}}
}

func (b *kv) flags(f *flag.FlagSet) {
	f.StringVar(&b.venv, "venv", "", "Python environment with NIXL and Mooncake, made if they are not there (the user's cache)")
	f.IntVar(&b.connections, "connections", 1, "bulk connections of ours, of the bare loop and of iperf3")
	f.IntVar(&b.copiers, "shm-connections", 2, "bulk connections of ours over shared memory: threads that copy")
}

// parts are the steps, which take turns: see rounds.
func (b *kv) parts() (all []part) {
	for _, s := range b.steps() {
		all = append(all, part{name: s.name})
	}
	return all
}

// open installs the peers, without their dependencies: torch and CUDA, gigabytes, are for
// GPUs. What cannot be installed takes its figures with it.
func (b *kv) open(ctx context.Context) error {
	if err := errors.Join(harness.Install(ctx, "iperf3", "iperf3"), harness.Install(ctx, "ibv_devinfo", "ibverbs-utils")); err != nil {
		log.Print(err)
	}
	packages := [][]string{{"--no-deps", "numpy", "nixl-cu12==1.5.1", "mooncake-transfer-engine-non-cuda==0.3.13.post1"}}
	venv, err := harness.Python{Venv: b.venv, Name: "kv-peers", Imports: "numpy, nixl_cu12._bindings, mooncake.engine", Pip: packages}.Open(ctx)
	if err != nil {
		log.Print(err)
		return nil
	}
	b.python = filepath.Join(venv, "bin", "python")
	return nil
}

// rounds runs all steps, so many times.
func (b *kv) rounds(ctx context.Context) error {
	others := busy(ctx, time.Second)
	b.Sayf("others use %.0f %% of the processors at the start", 100*others)
	if others > 0.1 {
		defer log.Printf("others used %.0f %% of the processors: peers that poll suffer from that more than ours, so these figures are not fair", 100*others)
	}
	for round := range b.Rounds {
		for _, s := range b.steps() {
			if !b.Wants(s.name) || b.failures[s.name] > 1 {
				continue
			}
			said, err := s.run(ctx, s.name)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				b.failed[s.name] = err
				b.failures[s.name]++
				b.Sayf("round %d of %d: %s failed, and is left out the second time: %v", round+1, b.Rounds, s.name, err)
				continue
			}
			b.Sayf("round %d of %d: %s: %s", round+1, b.Rounds, s.name, said)
		}
	}
	all, missing := b.figures()
	for _, f := range all {
		if err := b.Add(f); err != nil {
			return err
		}
	}
	if len(missing) == 0 || b.Only != "" {
		return nil
	}
	var why []error
	for step, err := range b.failed {
		why = append(why, fmt.Errorf("%s: %w", step, err))
	}
	return fmt.Errorf("no figure for %s: %w", strings.Join(missing, ", "), errors.Join(why...))
}

// busy is the share of all processors that is in use for a while in which this
// program does nothing; 0 where the system does not say.
func busy(ctx context.Context, interval time.Duration) float64 {
	used0, all0 := processors()
	select {
	case <-ctx.Done():
	case <-time.After(interval):
	}
	used, all := processors()
	if all <= all0 {
		return 0
	}
	return float64(used-used0) / float64(all-all0)
}

// processors returns the ticks of all processors so far, and those not idle.
func processors() (used, all int64) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0
	}
	line, _, _ := strings.Cut(string(stat), "\n")
	for i, field := range strings.Fields(line) {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			continue // "cpu"
		}
		all += n
		if i != 4 && i != 5 { // idle, iowait
			used += n
		}
	}
	return used, all
}

// note keeps one round's value.
func (b *kv) note(step, what string, v float64) {
	key := step + "/" + what
	b.values[key] = append(b.values[key], v)
}

// step is one program run of a round. It returns a line for people.
type step struct {
	name string
	run  func(ctx context.Context, name string) (string, error)
}

// limit is how long one step may take on a slow and busy machine.
const limit = 2 * time.Minute

// Steps, by the names in the log.
const (
	stepTCP  = "xpyd tcp"
	stepSHM  = "xpyd shm"
	stepIPF  = "iperf3"
	stepLibc = "libc memmove"
	stepMoon = "mooncake tcp"
)

// The settings in which each peer was found fastest, besides its default: see
// kv_peers.py for what is timed.
var (
	nixlTCP = []string{"nixl tcp", "nixl tcp tuned"}
	nixlSHM = []string{"nixl shm posix", "nixl shm posix 32k", "nixl shm cma", "nixl shm posix, progress threads"}
)

func (b *kv) steps() []step {
	nixl := func(tls string, env ...string) func(context.Context, string) (string, error) {
		args := []string{"nixl", "--ucx-tls", tls}
		if tls != "tcp" {
			args = append(args, "--ucx-errors", "none")
		}
		return b.peer(args, env...)
	}
	return []step{
		{stepTCP, b.ours("tcp")},
		{nixlTCP[0], nixl("tcp")},
		{nixlTCP[1], nixl("tcp", "UCX_TCP_PUT_ENABLE=n", "UCX_TCP_TX_SEG_SIZE=64k", "UCX_TCP_RX_SEG_SIZE=256k")},
		{stepMoon, b.peer([]string{"mooncake"})},
		{stepIPF, b.iperf},
		{stepSHM, b.ours("shm")},
		{nixlSHM[0], nixl("posix,sysv,self")},
		{nixlSHM[1], nixl("posix,sysv,self", "UCX_POSIX_SEG_SIZE=32k", "UCX_SYSV_SEG_SIZE=32k")},
		{nixlSHM[2], nixl("posix,cma,self")},
		{nixlSHM[3], b.peer([]string{"nixl", "--ucx-tls", "posix,sysv,self", "--ucx-errors", "none", "--threads", "1"})}, // its default
		{stepLibc, b.peer([]string{"memcpy"})},
	}
}

// ours runs `xpyd bench kv`, which takes turns with its own limits.
func (b *kv) ours(transport string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, name string) (string, error) {
		var r kvbench.Report
		connections := b.connections
		if transport == "shm" {
			connections = b.copiers
		}
		xpyd, err := b.Binary(ctx)
		if err != nil {
			return "", err
		}
		args := []string{xpyd, "bench", "kv", "--json", "--transport", transport, "--digests", "both", "--connections", strconv.Itoa(connections),
			"--repetitions", "5", "--latency-runs", "1000", "--handshakes", "10"}
		if _, err := b.Output(ctx, limit, &r, nil, args...); err != nil {
			return "", err
		}
		if !r.Verified {
			return "", errors.New("the bytes were not compared")
		}
		for _, s := range r.Runs {
			b.note(name, s.Name, s.GBs.Median)
		}
		for what, v := range map[string]float64{"p50_us": r.Latency.P50, "p99_us": r.Latency.P99, "handshake_ms": r.Handshake.FirstByte.Median} {
			b.note(name, what, v)
		}
		said := []string{}
		for _, s := range r.Runs {
			said = append(said, fmt.Sprintf("%s %.2f", s.Name, s.GBs.Median))
		}
		return fmt.Sprintf("%s GB/s; p50 %.0f p99 %.0f µs; first block of a new peer %.2f ms", strings.Join(said, ", "), r.Latency.P50, r.Latency.P99,
			r.Handshake.FirstByte.Median), nil
	}
}

// peer runs kv_peers.py.
func (b *kv) peer(args []string, env ...string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, name string) (string, error) {
		if b.python == "" {
			return "", errors.New("the peers are not installed")
		}
		var r struct {
			Version string  `json:"version"`
			GBs     float64 `json:"gb_s"`
			P50     float64 `json:"p50_us"`
			P99     float64 `json:"p99_us"`
			Connect float64 `json:"connect_ms"`
			// NIXL: from asking for the transfer by a notification.
			Exchange50 float64 `json:"exchange_p50_us"`
			Exchange99 float64 `json:"exchange_p99_us"`
		}
		if _, err := b.Output(ctx, limit, &r, env, append([]string{b.python, "scripts/kv_peers.py"}, args...)...); err != nil {
			return "", err
		}
		b.versions[name] = strings.TrimSpace(r.Version + " " + strings.Join(args[1:], " ") + " " + strings.Join(env, " "))
		b.note(name, "gb_s", r.GBs)
		if r.P50 == 0 {
			return fmt.Sprintf("%.2f GB/s", r.GBs), nil
		}
		b.note(name, "p50_us", r.P50)
		b.note(name, "p99_us", r.P99)
		b.note(name, "connect_ms", r.Connect)
		if r.Exchange50 > 0 {
			b.note(name, "exchange_p50_us", r.Exchange50)
			b.note(name, "exchange_p99_us", r.Exchange99)
		}
		return fmt.Sprintf("%.2f GB/s; p50 %.0f p99 %.0f µs; first transfer of a new peer %.1f ms", r.GBs, r.P50, r.P99, r.Connect), nil
	}
}

// iperf is iperf3's own client and server on loopback.
func (b *kv) iperf(ctx context.Context, name string) (string, error) {
	addr, err := harness.FreeAddr()
	if err != nil {
		return "", err
	}
	_, port, _ := net.SplitHostPort(addr)
	server, _, _, err := b.Saying(ctx, "Server listening", harness.Spec{Name: name, Argv: []string{"iperf3", "-s", "-1", "-p", port, "-B", "127.0.0.1", "--forceflush"}})
	if err != nil {
		return "", err
	}
	defer server.Kill() // it ends after one client
	var r struct {
		End struct {
			Received struct {
				Bits float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if _, err := b.Output(ctx, 20*time.Second, &r, nil, "iperf3", "-c", "127.0.0.1", "-p", port, "-t", "1", "-P", strconv.Itoa(b.connections), "-J"); err != nil {
		return "", err
	}
	gbs := r.End.Received.Bits / 8e9
	b.note(name, "gb_s", gbs)
	return fmt.Sprintf("%.2f GB/s", gbs), nil
}
