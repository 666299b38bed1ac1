package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/kvbench"
)

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

func (b *bench) steps() []step {
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
func (b *bench) ours(transport string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, name string) (string, error) {
		var r kvbench.Report
		connections := b.connections
		if transport == "shm" {
			connections = b.copiers
		}
		args := []string{"bench", "kv", "--json", "--transport", transport, "--digests", "both", "--connections", strconv.Itoa(connections),
			"--repetitions", "5", "--latency-runs", "1000", "--handshakes", "10"}
		if err := b.output(ctx, &r, nil, b.xpyd, args...); err != nil {
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
func (b *bench) peer(args []string, env ...string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, name string) (string, error) {
		if b.python == "" {
			return "", errors.New("no Python with the peers was given")
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
		if err := b.output(ctx, &r, env, b.python, append([]string{b.peers}, args...)...); err != nil {
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
func (b *bench) iperf(ctx context.Context, name string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	port, err := freePort()
	if err != nil {
		return "", err
	}
	server := exec.CommandContext(ctx, "iperf3", "-s", "-1", "-p", port, "-B", "127.0.0.1", "--forceflush")
	out, err := server.StdoutPipe()
	if err == nil {
		err = server.Start()
	}
	if err != nil {
		return "", err
	}
	defer func() {
		cancel()
		_ = server.Wait() // it ends after one client, or is killed
	}()
	for lines := bufio.NewScanner(out); lines.Scan() && !strings.Contains(lines.Text(), "listening"); {
	}
	var r struct {
		End struct {
			Received struct {
				Bits float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := b.output(ctx, &r, nil, "iperf3", "-c", "127.0.0.1", "-p", port, "-t", "1", "-P", strconv.Itoa(b.connections), "-J"); err != nil {
		return "", err
	}
	gbs := r.End.Received.Bits / 8e9
	b.note(name, "gb_s", gbs)
	return fmt.Sprintf("%.2f GB/s", gbs), nil
}

func freePort() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	_, port, err := net.SplitHostPort(ln.Addr().String())
	return port, err
}

// output runs a program and reads the JSON that it prints; what it printed
// goes to the log.
func (b *bench) output(ctx context.Context, to any, env []string, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env, cmd.WaitDelay = append(os.Environ(), env...), time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	b.logf("$ %s %s %s\n%s", strings.Join(env, " "), name, strings.Join(args, " "), compact(stdout.Bytes()))
	if err == nil {
		err = json.Unmarshal(stdout.Bytes(), to)
	}
	if err != nil {
		b.logf("%s", stderr.Bytes())
		return fmt.Errorf("%w: %s", err, lastLine(stderr.String()))
	}
	return nil
}

// compact puts JSON on one line; iperf3's, which is long, is cut.
func compact(b []byte) string {
	var c bytes.Buffer
	if json.Compact(&c, b) != nil {
		return string(b)
	}
	if s := c.String(); len(s) <= 4096 {
		return s
	}
	return c.String()[:4096] + " …"
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}
