package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/kvbench"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// kv runs `xpyd bench kv` over TCP and over shared memory, its limits, and peers, one after
// the other in rounds. A figure is the median over the rounds; of a peer's settings the best
// one counts.
type kv struct {
	base
	venv        string
	connections int
	copiers     int
	python      string // with the peers; "": none

	values   map[string][]float64 // by step and figure: "nixl tcp/gb_s"
	versions map[string]string    // of the peers
	failed   map[string][]error   // by step
}

func newKV(b base) *kv {
	return &kv{base: b, values: map[string][]float64{}, versions: map[string]string{}, failed: map[string][]error{}}
}

func (b *kv) flags(f *flag.FlagSet) {
	f.StringVar(&b.venv, "venv", "", "Python environment with NIXL and Mooncake, made if missing (in the user's cache)")
	f.IntVar(&b.connections, "connections", 1, "bulk connections of ours, the bare loop and iperf3")
	f.IntVar(&b.copiers, "shm-connections", 2, "bulk connections of ours over shared memory: copying threads")
}

// parts are the steps: see rounds.
func (b *kv) parts() []part {
	nixl := func(name, tls string, env ...string) part {
		args := []string{"nixl", "--ucx-tls", tls}
		if tls != "tcp" {
			args = append(args, "--ucx-errors", "none")
		}
		return b.peer(name, args, env...)
	}
	return []part{
		b.ours(stepTCP, "tcp"),
		nixl(nixlTCP[0], "tcp"),
		nixl(nixlTCP[1], "tcp", "UCX_TCP_PUT_ENABLE=n", "UCX_TCP_TX_SEG_SIZE=64k", "UCX_TCP_RX_SEG_SIZE=256k"),
		b.peer(stepMoon, []string{"mooncake"}),
		{stepIPF, b.iperf},
		b.ours(stepSHM, "shm"),
		nixl(nixlSHM[0], "posix,sysv,self"),
		nixl(nixlSHM[1], "posix,sysv,self", "UCX_POSIX_SEG_SIZE=32k", "UCX_SYSV_SEG_SIZE=32k"),
		nixl(nixlSHM[2], "posix,cma,self"),
		b.peer(nixlSHM[3], []string{"nixl", "--ucx-tls", "posix,sysv,self", "--ucx-errors", "none", "--threads", "1"}), // its default
		b.peer(stepLibc, []string{"memcpy"}),
	}
}

// open installs the peers without their dependencies: gigabytes of torch and CUDA, which
// only GPUs need. The figures of a peer that does not install are left out.
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

// rounds runs every step once a round. A step that failed twice is left out.
func (b *kv) rounds(ctx context.Context, steps []part) error {
	others := busy(ctx, time.Second)
	b.Sayf("others use %.0f %% of the processors at the start", 100*others)
	if others > 0.1 {
		defer log.Printf("others used %.0f %% of the processors, which hurts polling peers more than ours: these figures are not fair", 100*others)
	}
	for round := range b.Rounds {
		for _, s := range steps {
			if len(b.failed[s.name]) > 1 {
				continue
			}
			b.Sayf("round %d of %d: %s", round+1, b.Rounds, s.name)
			err := s.run(ctx)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				b.failed[s.name] = append(b.failed[s.name], err)
				b.Sayf("%s failed: %v", s.name, err)
			}
		}
	}
	all, missing := b.figures()
	if err := b.Add(all...); err != nil || len(missing) == 0 || b.Only != "" {
		return err
	}
	var why []error
	for step, errs := range b.failed {
		why = append(why, fmt.Errorf("%s: %w", step, errs[len(errs)-1]))
	}
	return fmt.Errorf("no figure for %s: %w", strings.Join(missing, ", "), errors.Join(why...))
}

// busy is the share of all processors in use during interval, in which this program idles; 0
// if the system does not say.
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

// processors returns the ticks of all processors so far, and the busy ones of them.
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

// note keeps a round's value of a figure of a step.
func (b *kv) note(step, what string, v float64) {
	key := step + "/" + what
	b.values[key] = append(b.values[key], v)
}

// limit bounds one step on a slow and busy machine.
const limit = 2 * time.Minute

// Steps by their names in the log.
const (
	stepTCP  = "xpyd tcp"
	stepSHM  = "xpyd shm"
	stepIPF  = "iperf3"
	stepLibc = "libc memmove"
	stepMoon = "mooncake tcp"
)

// Each peer's default and its fastest settings; kv_peers.py says what is timed.
var (
	nixlTCP = []string{"nixl tcp", "nixl tcp tuned"}
	nixlSHM = []string{"nixl shm posix", "nixl shm posix 32k", "nixl shm cma", "nixl shm posix, progress threads"}
)

// ours runs `xpyd bench kv`, which alternates with its own limits.
func (b *kv) ours(name, transport string) part {
	return part{name, func(ctx context.Context) error {
		connections := b.connections
		if transport == "shm" {
			connections = b.copiers
		}
		xpyd, err := b.Binary(ctx)
		if err != nil {
			return err
		}
		var r kvbench.Report
		args := []string{xpyd, "bench", "kv", "--json", "--transport", transport, "--digests", "both", "--connections", strconv.Itoa(connections),
			"--repetitions", "5", "--latency-runs", "1000", "--handshakes", "10"}
		if _, err := b.Output(ctx, limit, &r, nil, args...); err != nil {
			return err
		}
		if !r.Verified {
			return errors.New("the bytes were not compared")
		}
		said := ""
		for _, s := range r.Runs {
			b.note(name, s.Name, s.GBs.Median)
			said += fmt.Sprintf("%s %.2f, ", s.Name, s.GBs.Median)
		}
		for what, v := range map[string]float64{"p50_us": r.Latency.P50, "p99_us": r.Latency.P99, "handshake_ms": r.Handshake.FirstByte.Median} {
			b.note(name, what, v)
		}
		b.Sayf("%sGB/s; p50 %.0f p99 %.0f µs; first block of a new peer %.2f ms", said, r.Latency.P50, r.Latency.P99, r.Handshake.FirstByte.Median)
		return nil
	}}
}

// peer runs kv_peers.py.
func (b *kv) peer(name string, args []string, env ...string) part {
	return part{name, func(ctx context.Context) error {
		if b.python == "" {
			return errors.New("the peers are not installed")
		}
		// Figures and settings. exchange_p50_us and exchange_p99_us, of NIXL alone, count from
		// asking for the transfer by a notification.
		var r map[string]any
		if _, err := b.Output(ctx, limit, &r, env, append([]string{b.python, "scripts/kv_peers.py"}, args...)...); err != nil {
			return err
		}
		version, _ := r["version"].(string)
		b.versions[name] = strings.TrimSpace(version + " " + strings.Join(args[1:], " ") + " " + strings.Join(env, " "))
		said := ""
		for _, what := range slices.Sorted(maps.Keys(r)) {
			if v, ok := r[what].(float64); ok && v > 0 {
				b.note(name, what, v)
				said += fmt.Sprintf("%s %.4g, ", what, v)
			}
		}
		b.Sayf("%s", strings.TrimSuffix(said, ", "))
		return nil
	}}
}

// iperf runs iperf3's client and server on loopback.
func (b *kv) iperf(ctx context.Context) error {
	addr, err := harness.FreeAddr()
	if err != nil {
		return err
	}
	_, port, _ := net.SplitHostPort(addr)
	server, _, _, err := b.Saying(ctx, "Server listening", harness.Spec{Name: stepIPF, Argv: []string{"iperf3", "-s", "-1", "-p", port, "-B", "127.0.0.1", "--forceflush"}})
	if err != nil {
		return err
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
		return err
	}
	gbs := r.End.Received.Bits / 8e9
	b.note(stepIPF, "gb_s", gbs)
	b.Sayf("%.2f GB/s", gbs)
	return nil
}
