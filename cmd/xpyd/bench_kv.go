package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/xpyd/xpyd/internal/kvbench"
	"github.com/xpyd/xpyd/kvconn/shm"
	"github.com/xpyd/xpyd/kvconn/tcp"
)

type benchKV struct {
	cfg                              kvbench.Config
	size, block, latencySize, sizes  string
	listen, connect, plot, logLevel  string
	noVerify, noBaselines, once, raw bool
}

func newBenchKV() *cobra.Command {
	b := &benchKV{cfg: kvbench.DefaultConfig()}
	cmd := &cobra.Command{
		Use:   "kv",
		Short: "Move KV blocks between two processes and measure it",
		Long: `Start a second process as the sender, move scattered KV blocks from its pool into this
process's, and report throughput, the latency of small transfers, the cost of a new peer,
and CPU time. The same run measures limits for comparison: memcpy by one thread (of one
piece, and of the same scattered blocks), and a bare writev/readv loop over TCP on the same
memory. The connector carries tickets, digests and checks; the limits carry nothing. GB are
10^9 bytes.

With --listen it is the sender for another host's --connect. It listens on a control port
and a free port of the same address.`,
		Example: `  xpyd bench kv                                    256 MiB in 16 KiB blocks, and the limits
  xpyd bench kv --transport tcp --connections 4 --digests both
  xpyd bench kv --plot kv.svg                      throughput and latency over transfer sizes
  xpyd bench kv --json --repetitions 20 --duration 30s
  xpyd bench kv --listen 10.0.0.1:7700             on one host, and on the other:
  xpyd bench kv --connect 10.0.0.1:7700`,
	}
	f := cmd.Flags()
	f.StringVar(&b.cfg.Transport, "transport", b.cfg.Transport, "tcp, shm, or auto: shm on one host, else tcp")
	f.StringVar(&b.size, "size", "256MiB", "bytes of one transfer, over all layers")
	f.StringVar(&b.block, "block", "16KiB", "bytes of one block of one layer")
	f.IntVar(&b.cfg.BlockTokens, "block-tokens", b.cfg.BlockTokens, "positions in a block")
	f.IntVar(&b.cfg.Layers, "layers", b.cfg.Layers, "layers")
	f.IntVar(&b.cfg.KVHeads, "kv-heads", b.cfg.KVHeads, "KV heads: a digest each")
	f.StringVar(&b.cfg.Scatter, "scatter", b.cfg.Scatter, "order of the block ids at both ends: shuffled or contiguous")
	f.IntVar(&b.cfg.Concurrency, "concurrency", b.cfg.Concurrency, "transfers at a time")
	f.IntVar(&b.cfg.Connections, "connections", b.cfg.Connections, "bulk connections, also of the bare loop")
	f.StringVar(&b.cfg.Digests, "digests", b.cfg.Digests, "check digests on arrival: on, off, or both in turn")
	f.BoolVar(&b.noVerify, "no-verify", false, "do not compare all bytes with the source's pattern at the end")
	f.BoolVar(&b.noBaselines, "no-baselines", false, "leave out memcpy and the bare loop")
	f.IntVar(&b.cfg.Warmup, "warmup", b.cfg.Warmup, "transfers that are not measured")
	f.IntVar(&b.cfg.Repetitions, "repetitions", b.cfg.Repetitions, "at least this many transfers")
	f.DurationVar(&b.cfg.Duration, "duration", 0, "and for at least this long")
	f.StringVar(&b.latencySize, "latency-size", "256KiB", "bytes of one small transfer")
	f.IntVar(&b.cfg.LatencyRuns, "latency-runs", b.cfg.LatencyRuns, "small transfers, one at a time; 0 for none")
	f.IntVar(&b.cfg.Handshakes, "handshakes", b.cfg.Handshakes, "new peers in a row; 0 for none")
	f.StringVar(&b.plot, "plot", "", "also sweep transfer sizes and draw them: FILE.svg or FILE.html")
	f.StringVar(&b.sizes, "sweep", "256KiB,1MiB,4MiB,16MiB,64MiB,256MiB", "the sizes of --plot")
	f.BoolVar(&b.raw, "json", false, "print the report as JSON")
	f.StringVar(&b.listen, "listen", "", "be the sender, at this address, until interrupted")
	f.StringVar(&b.connect, "connect", "", "measure against the sender at this address; default: start one")
	f.StringVar(&b.logLevel, "log-level", "error", "debug, info, warn or error")
	f.BoolVar(&b.once, "once", false, "with --listen: end after the first receiver")
	_ = f.MarkHidden("once")
	cmd.RunE = b.run
	return cmd
}

func (b *benchKV) run(cmd *cobra.Command, _ []string) error {
	if b.listen != "" && b.connect != "" {
		return usageError{errors.New("--listen and --connect exclude each other")}
	}
	if err := b.parse(); err != nil {
		return usageError{err}
	}
	transports, err := benchTransports()
	if err != nil {
		return err
	}
	log, flush := newLogger(cmd.ErrOrStderr(), b.logLevel, "text")
	defer flush()
	if b.listen != "" {
		ln, err := net.Listen("tcp", b.listen)
		if err != nil {
			return fmt.Errorf("bench kv: %w", err)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "listening %s\n", ln.Addr())
		return kvbench.Serve(cmd.Context(), ln, transports, log, b.once)
	}
	peer := kvbench.Peer{Addr: b.connect, Transports: transports, Log: log, Progress: cmd.ErrOrStderr()}
	if b.connect == "" {
		stop, err := startBenchSender(cmd.Context(), cmd.ErrOrStderr(), b.logLevel, &peer.Addr)
		if err != nil {
			return fmt.Errorf("bench kv: sender: %w", err)
		}
		defer stop()
	}
	report, err := kvbench.Run(cmd.Context(), b.cfg, peer)
	if err != nil {
		return err
	}
	if err := showMeasured(cmd.OutOrStdout(), report, b.plot, b.raw); err != nil {
		return fmt.Errorf("bench kv: %w", err)
	}
	return nil
}

// parse turns the flags' texts into the configuration.
func (b *benchKV) parse() error {
	b.cfg.Verify, b.cfg.Baselines = !b.noVerify, !b.noBaselines
	for _, s := range []struct {
		flag, text string
		to         *int
	}{{"size", b.size, &b.cfg.Bytes}, {"block", b.block, &b.cfg.BlockBytes}, {"latency-size", b.latencySize, &b.cfg.LatencyBytes}} {
		var err error
		if *s.to, err = kvbench.ParseSize(s.text); err != nil {
			return fmt.Errorf("--%s: %w", s.flag, err)
		}
	}
	if b.plot != "" {
		var err error
		if b.cfg.Sweep, err = listOf("sweep", b.sizes, kvbench.ParseSize); err != nil {
			return err
		}
	}
	return cmp.Or(plottable(b.plot), b.cfg.Validate())
}

// plottable refuses a file whose name does not tell the format to draw.
func plottable(path string) error {
	if path != "" && !strings.HasSuffix(path, ".svg") && !strings.HasSuffix(path, ".html") {
		return fmt.Errorf("--plot: %q ends neither in .svg nor in .html", path)
	}
	return nil
}

// measured is the result of a benchmark of KV.
type measured interface {
	Table(io.Writer) error
	Plot(io.Writer) error
	PlotHTML(io.Writer) error
}

// showMeasured draws a result to a file, if one is named, and prints it.
func showMeasured(w io.Writer, r measured, plot string, asJSON bool) error {
	if plot != "" {
		f, err := os.Create(plot)
		if err != nil {
			return fmt.Errorf("plot: %w", err)
		}
		draw := r.Plot
		if strings.HasSuffix(plot, ".html") {
			draw = r.PlotHTML
		}
		if err := errors.Join(draw(f), f.Close()); err != nil {
			return fmt.Errorf("plot: %w", err)
		}
	}
	if asJSON {
		return json.NewEncoder(w).Encode(r)
	}
	return r.Table(w)
}

// benchTransports are those that `bench kv` can measure.
func benchTransports() (map[string]kvbench.Transport, error) {
	all := map[string]kvbench.Transport{"tcp": {Transport: tcp.New(nil)}}
	overMemory, err := shm.New("")
	if err == nil {
		all[shm.Name] = kvbench.Transport{Transport: overMemory, Local: true}
	} else if !errors.Is(err, shm.ErrUnsupported) {
		return nil, err
	}
	return all, nil
}

// startBenchSender starts this program as the sender and sets addr to where it listens. The sender
// ends with our control connection, or when stop kills it.
func startBenchSender(ctx context.Context, stderr io.Writer, logLevel string, addr *string) (stop func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, self, "bench", "kv", "--listen", "127.0.0.1:0", "--once", "--log-level", logLevel)
	cmd.Stderr, cmd.WaitDelay = stderr, time.Second
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	stop = func() {
		cancel()
		_ = cmd.Wait() // killed, or ended with the connection
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	listening, ok := strings.CutPrefix(strings.TrimSpace(line), "listening ")
	if err != nil || !ok {
		stop()
		return nil, fmt.Errorf("it did not say where it listens: %q %w", line, err)
	}
	*addr = listening
	return stop, nil
}
