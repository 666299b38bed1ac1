package main

import (
	"fmt"
	"log"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
)

// turns is how often the two builds take turns in a round. A machine that others use
// too is slower for some seconds at times; that meets both then.
const turns = 10

// builds compares this build of xpyd with an earlier one: processor time a request of
// both. Each round starts both anew, and drives them in turns.
func (b *bench) builds(name string, stream bool) error {
	if b.before == "" {
		log.Print("left out: no -before")
		return nil
	}
	req := request("/v1/completions", body(prompt(2<<10), stream, 16, ""))
	us := map[string][]float64{}
	for i := range b.repeats {
		used, err := b.inTurns([]string{b.before, b.xpyd}, i, max(b.n/turns, 1), req)
		if err != nil {
			return err
		}
		for _, binary := range []string{b.before, b.xpyd} {
			v := float64(used[binary].Nanoseconds()) / 1e3 / float64(turns*max(b.n/turns, 1))
			us[binary] = append(us[binary], v)
			which := "now"
			if binary == b.before {
				which = "before"
			}
			log.Printf("%s %d %-6s %7.1f us of processor a request", name, i, which, v)
			b.book.Logf("%s round %d %s: %.2f us, %d requests in %d turns", name, i, which, v, b.n, turns)
		}
	}
	ratios := make([]float64, b.repeats)
	for i := range ratios {
		ratios[i] = us[b.xpyd][i] / us[b.before][i]
	}
	low, high := figures.MedianWithin(ratios)
	return b.figure(figures.Figure{Name: b.beforeName + "." + name, Value: high, PeerValue: 1, Ratio: high, Unit: "x", Peer: "the build before",
		Command: "scripts/bench-router -only builds -before BINARY -before-name " + b.beforeName, Runs: b.repeats,
		Model: "mock engines, 2 KB prompt, c=32; upper end of the median's 95 % interval",
		Spread: fmt.Sprintf("median %.4f, 95 %% interval %.4f..%.4f; now %.4g us, before %.4g us", figures.Median(ratios), low, high,
			figures.Median(us[b.xpyd]), figures.Median(us[b.before]))})
}

// inTurns starts the builds and drives one after the other, n requests in each
// turn; another is first each time. It returns the processor time of each.
func (b *bench) inTurns(binaries []string, round, n int, req []byte) (map[string]time.Duration, error) {
	var started []*process
	used := map[string]time.Duration{}
	for _, binary := range binaries {
		p, err := b.routerOf(binary)
		if err == nil {
			defer p.stop()
			_, err = drive(p.addr, 32, max(b.n/5, 1), req)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", binary, err)
		}
		started = append(started, p)
	}
	for turn := range turns * len(started) {
		at := (turn + turn/len(started) + round) % len(started)
		p := started[at]
		before := p.cpu()
		if _, err := drive(p.addr, 32, n, req); err != nil {
			return nil, fmt.Errorf("%s: %w", binaries[at], err)
		}
		used[binaries[at]] += p.cpu() - before
	}
	return used, nil
}
