// Command benchrouter measures the router beside nginx, a bare two-leg fasthttp
// loop and other P/D routers, all in front of the same mock engines in one run:
// see scripts/bench-router, which installs the peers and calls it.
//
// The proxy under test has processor 0 to itself; the load generator and the
// mock engines share processor 1 with this program.
package main

import (
	"errors"
	"flag"
	"fmt"
	"log"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
)

// options are the command line.
type options struct {
	xpyd       string // the binary under test
	venv       string // where the Python peers are installed; "" leaves them out
	proxy      string // vLLM's example proxy, a Python file; "" leaves it out
	pick       string // the program benchpick; "" leaves its row out
	out        string
	only       string // rows, comma separated; "" for all
	peers      string // comma separated; "" for all
	before     string // an earlier build; "" leaves its rows out
	beforeName string // of the figures of those rows
	resume     bool
	repeats    int
	n          int
}

// row is one part of the report.
type row struct {
	name    string
	run     func() error
	figures []string // that it writes, less the peers' own, without "router."
}

// rows are in the order in which they run.
func (b *bench) rows() []row {
	short := prompt(2 << 10)
	return []row{
		{"nonstream", func() error { return b.cpu("nonstream", short, false) }, []string{"cpu_ratio.nonstream", "cpu_over_bare.nonstream"}},
		{"stream16", func() error { return b.cpu("stream16", short, true) }, []string{"cpu_ratio.stream16", "cpu_over_bare.stream16"}},
		{"added", b.added, []string{"added_ratio.p50", "added_ratio.p99"}},
		{"100k", b.prompt100k, []string{"cpu_ratio.100k"}},
		{"turn40", b.turn40, []string{"cpu_ratio.turn40"}},
		{"slow", func() error { return b.manyStreams("slow", min(10_000, mostStreams()), 4) }, []string{"stream_kb", "stream_delay_p99_ms.slow"}},
		{"fast", func() error { return b.manyStreams("fast", min(2000, mostStreams()), 20) }, []string{"stream_delay_p99_ms.fast"}},
		{"stalled", b.stalled, []string{"stalled_client_kb"}},
		{"builds", func() error { return errors.Join(b.builds("nonstream", false), b.builds("stream16", true)) }, nil},
		{"pick", b.choice, []string{"pick_ratio.4000", "pick_p99_ratio.4000", "index_bytes_per_block"}},
	}
}

// choice runs benchpick, on both processors, a small one in a try.
func (b *bench) choice() error {
	if b.pick == "" {
		log.Print("left out: no -pick")
		return nil
	}
	args := []string{"-c", "0-1", b.pick, "-out", b.out, "-rounds", strconv.Itoa(b.repeats)}
	if b.n < 1000 {
		args = append(args, "-blocks", "200000")
	}
	cmd := exec.Command("taskset", args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	return cmd.Run()
}

func main() {
	log.SetFlags(log.Ltime)
	if len(os.Args) > 1 {
		switch os.Args[1] { // the helpers that this program starts of itself
		case "engine":
			log.Fatal(engine(os.Args[2]))
		case "bare":
			log.Fatal(bare(os.Args[2], os.Args[3], os.Args[4]))
		}
	}
	var o options
	flag.StringVar(&o.xpyd, "xpyd", "bin/xpyd", "the binary to measure")
	flag.StringVar(&o.venv, "venv", "", "virtual environment with vllm-router, smg and sglang-router")
	flag.StringVar(&o.proxy, "vllm-proxy", "", "vLLM's tests/v1/kv_connector/nixl_integration/toy_proxy_server.py")
	flag.StringVar(&o.pick, "pick", "", "the program benchpick, for the row pick")
	flag.StringVar(&o.before, "before", "", "an earlier build of xpyd, for the row builds")
	flag.StringVar(&o.beforeName, "before-name", "router.build_ratio", "what the figures of the row builds are called, less .nonstream and .stream16")
	flag.StringVar(&o.out, "out", "bench", "folder for results/ and raw/")
	flag.StringVar(&o.only, "only", "", "only these rows, comma separated: nonstream, stream16, added, 100k, turn40, slow, fast, stalled, builds, pick")
	flag.BoolVar(&o.resume, "resume", false, "leave out rows that were measured since the router was changed")
	flag.StringVar(&o.peers, "peers", "", "only these, comma separated: nginx, bare, vllm-router, smg, sglang-router, vllm-proxy")
	flag.IntVar(&o.repeats, "repeats", 5, "repeats of each measurement")
	flag.IntVar(&o.n, "n", 6000, "requests of one measurement")
	flag.Parse()
	if err := run(o); err != nil {
		log.Fatal(err)
	}
}

func run(o options) error {
	tmp, err := os.MkdirTemp("", "xpyd-bench-router")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	had := map[string]bool{}
	for _, name := range []string{"router", "pick"} {
		here, err := figures.Here(o.out, name, "router", "internal/openai", "internal/fleet", "internal/clientwatch", "internal/logbuf", "scripts/benchrouter", "scripts/benchpick")
		if err != nil {
			return err
		}
		maps.Copy(had, here)
	}
	book, err := figures.Open(o.out, "router")
	if err != nil {
		return err
	}
	defer book.Close()
	b := &bench{options: o, tmp: tmp, book: book}
	defer b.stopAll()
	if err := b.engines(); err != nil {
		return err
	}
	for _, r := range b.rows() {
		if o.only != "" && !slices.Contains(strings.Split(o.only, ","), r.name) {
			continue
		}
		if o.resume && !slices.ContainsFunc(r.figures, func(name string) bool { return !had["router."+name] }) {
			log.Printf("== %s: there already", r.name)
			continue
		}
		log.Printf("== %s", r.name)
		if err := r.run(); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	return nil
}

// bench is one run: the mock engines and where results go.
type bench struct {
	options
	tmp    string
	book   *figures.Book
	p, d   string // addresses of the mock engines
	procs  []*process
	serial int
}

func (b *bench) stopAll() {
	for _, p := range b.procs {
		p.stop()
	}
}

// file writes a configuration file of a peer.
func (b *bench) file(name, text string) (string, error) {
	path := filepath.Join(b.tmp, name)
	return path, os.WriteFile(path, []byte(text), 0o644)
}

// figure writes one figure and says so.
func (b *bench) figure(f figures.Figure) error {
	if f.Command == "" {
		f.Command = "scripts/bench-router"
	}
	log.Printf("%s = %.4g %s, %s %.4g, ratio %.3f; %s", f.Name, f.Value, f.Unit, f.Peer, f.PeerValue, f.Ratio, f.Spread)
	return b.book.Add(f)
}
