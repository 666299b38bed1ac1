// Command benchkv makes the figures of bench/results/kv.jsonl: `xpyd bench kv`
// over TCP and over shared memory, its limits, and peers, one after the other
// in rounds, so that what disturbs the machine disturbs all of them. A figure
// is the median over the rounds; a peer that has several settings counts with
// its best. scripts/bench-kv builds and installs what this needs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
)

func main() {
	log.SetFlags(log.Ltime)
	b := &bench{}
	var out, only string
	flag.StringVar(&b.xpyd, "xpyd", "", "the xpyd binary")
	flag.StringVar(&b.python, "python", "", "a Python that has the peers; without it they are left out")
	flag.StringVar(&b.peers, "peers", "scripts/kv_peers.py", "the peers' program")
	flag.IntVar(&b.connections, "connections", 1, "bulk connections of ours, of the bare loop and of iperf3")
	flag.IntVar(&b.copiers, "shm-connections", 2, "bulk connections of ours over shared memory: threads that copy")
	flag.IntVar(&b.rounds, "n", 7, "rounds")
	flag.StringVar(&out, "out", "bench", "folder for results/ and raw/; empty: print the figures only")
	flag.StringVar(&only, "only", "", "only steps whose name contains this")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := b.run(ctx, out, only)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// bench holds the settings and what each step has measured, round by round.
type bench struct {
	xpyd, python, peers string
	connections, rounds int
	copiers             int
	logf                func(format string, args ...any)

	values   map[string][]float64 // by step and figure: "nixl tcp/gb_s"
	versions map[string]string    // of the peers
	failed   map[string]error     // steps that failed, and why the last time
	failures map[string]int       // how often
}

func (b *bench) run(ctx context.Context, out, only string) error {
	b.values, b.versions, b.failed, b.failures = map[string][]float64{}, map[string]string{}, map[string]error{}, map[string]int{}
	b.logf = func(string, ...any) {}
	var book *figures.Book
	if out != "" {
		var err error
		if book, err = figures.Open(out, "kv"); err != nil {
			return err
		}
		defer book.Close()
		b.logf = book.Logf
	}
	others := busy(ctx, time.Second)
	b.logf("others use %.0f %% of the processors at the start", 100*others)
	if others > 0.1 {
		warning := fmt.Sprintf("others use %.0f %% of the processors: peers that poll suffer from that more than ours, so these figures are not fair", 100*others)
		log.Print(warning)
		defer log.Print(warning)
	}
	steps := b.steps()
	for round := range b.rounds {
		for _, s := range steps {
			if !strings.Contains(s.name, only) || b.failures[s.name] > 1 {
				continue
			}
			said, err := s.run(ctx, s.name)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				b.failed[s.name] = err
				b.failures[s.name]++
				log.Printf("round %d of %d: %s failed, and is left out the second time: %v", round+1, b.rounds, s.name, err)
				b.logf("round %d: %s FAILED: %v", round+1, s.name, err)
				continue
			}
			log.Printf("round %d of %d: %s: %s", round+1, b.rounds, s.name, said)
		}
	}
	all, missing := b.figures()
	for _, f := range all {
		log.Printf("%s = %.4g %s, peer %.4g (%s), ratio %.3f; %s", f.Name, f.Value, f.Unit, f.PeerValue, f.Peer, f.Ratio, f.Spread)
		if book != nil {
			if err := book.Add(f); err != nil {
				return err
			}
		}
	}
	if len(missing) > 0 && only == "" {
		var why []error
		for step, err := range b.failed {
			why = append(why, fmt.Errorf("%s: %w", step, err))
		}
		return fmt.Errorf("no figure for %s: %w", strings.Join(missing, ", "), errors.Join(why...))
	}
	return nil
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
func (b *bench) note(step, what string, v float64) {
	key := step + "/" + what
	b.values[key] = append(b.values[key], v)
}
