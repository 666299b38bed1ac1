// Command benchloadgen measures `xpyd bench` itself: what a request costs it
// beside net/http's and fasthttp's clients, what rate and how many streams it
// sustains, and whether its figures agree with aiperf's on the same server.
// See scripts/bench-aiperf, which installs aiperf and calls it.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/xpyd/xpyd/internal/figures"
)

// options are the command line.
type options struct {
	xpyd      string // the binary
	aiperf    string // the command; "" leaves that part out
	tokenizer string // a Hugging Face directory for aiperf
	out, only string
	repeats   int
}

func main() {
	log.SetFlags(0)
	if len(os.Args) > 2 && os.Args[1] == "engine" { // this program as the server
		log.Fatal(engine(os.Args[2]))
	}
	var o options
	flag.StringVar(&o.xpyd, "xpyd", "bin/xpyd", "the binary")
	flag.StringVar(&o.aiperf, "aiperf", "", "aiperf's command; none leaves the comparison out")
	flag.StringVar(&o.tokenizer, "tokenizer", "internal/model/stories260k", "Hugging Face directory for aiperf")
	flag.StringVar(&o.out, "out", "bench", "folder for results/ and raw/")
	flag.StringVar(&o.only, "only", "", "one part: cost, rate, streams or aiperf")
	flag.IntVar(&o.repeats, "repeats", 5, "repeats of each measurement")
	flag.Parse()
	// A signal ends what this program started, and so the program.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, o options) error {
	book, err := figures.Open(o.out, "loadgen")
	if err != nil {
		return err
	}
	defer book.Close()
	b := &bench{options: o, book: book, ctx: ctx}
	for _, part := range []struct {
		name string
		run  func() error
	}{{"cost", b.cost}, {"rate", b.rate}, {"streams", b.streams}, {"aiperf", b.compare}} {
		if o.only != "" && o.only != part.name {
			continue
		}
		if err := part.run(); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return nil
}

// bench is one run of this program.
type bench struct {
	options
	book *figures.Book
	ctx  context.Context // ends with a signal
}

func (b *bench) logf(format string, args ...any) {
	b.book.Logf(format, args...)
	log.Printf(format, args...)
}

func (b *bench) add(f figures.Figure) error {
	f.Command = "scripts/bench-aiperf"
	b.logf("%s: %.4g %s, %s %.4g, ratio %.3f (%s)", f.Name, f.Value, f.Unit, f.Peer, f.PeerValue, f.Ratio, f.Spread)
	return b.book.Add(f)
}

// server starts a command that prints its URL in its first line, and returns
// the URL and what stops it.
func (b *bench) server(name string, args ...string) (url string, stop func(), err error) {
	cmd := exec.CommandContext(b.ctx, name, args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", nil, err
	}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	stop = func() {
		_ = cmd.Process.Kill() // it may be gone
		_ = cmd.Wait()         // killed is no success
	}
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	for _, word := range strings.Fields(line) {
		if strings.HasPrefix(word, "http://") {
			go func() { _, _ = io.Copy(io.Discard, lines) }() // ends with the process
			return word, stop, nil
		}
	}
	stop()
	return "", nil, errors.Join(fmt.Errorf("%s said %q", name, line), err)
}
