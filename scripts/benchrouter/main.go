// Command benchrouter measures the router beside nginx, a bare two-leg fasthttp
// loop and other P/D routers, all in front of the same mock engines in one run:
// see scripts/bench-router, which installs the peers and calls it.
//
// The proxy under test has processor 0 to itself; the load generator and the
// mock engines share processor 1 with this program.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
)

// options are the command line.
type options struct {
	xpyd    string // the binary under test
	venv    string // where the Python peers are installed; "" leaves them out
	proxy   string // vLLM's example proxy, a Python file; "" leaves it out
	out     string
	only    string
	repeats int
	n       int
}

func main() {
	log.SetFlags(0)
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
	flag.StringVar(&o.out, "out", "bench", "folder for results/ and raw/")
	flag.StringVar(&o.only, "only", "", "only the parts whose name contains this: whole, stream16, added, long, streams")
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
	for _, part := range []struct {
		name string
		run  func() error
	}{
		{"whole", func() error { return b.cpu("nonstream", prompt(2<<10), false) }},
		{"stream16", func() error { return b.cpu("stream16", prompt(2<<10), true) }},
		{"added", b.added},
		{"long", b.long},
		{"streams", b.streams},
	} {
		if !strings.Contains(part.name, o.only) {
			continue
		}
		log.Printf("== %s", part.name)
		if err := part.run(); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
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
	f.Command = "scripts/bench-router"
	log.Printf("%s = %.4g %s, %s %.4g, ratio %.3f; %s", f.Name, f.Value, f.Unit, f.Peer, f.PeerValue, f.Ratio, f.Spread)
	return b.book.Add(f)
}
