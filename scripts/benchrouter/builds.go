package main

import (
	"fmt"
	"log"

	"github.com/xpyd/xpyd/internal/figures"
)

// builds compares this build of xpyd with an earlier one: processor time a
// request of both, in rounds in which one is measured right after the other,
// and each is first in every second round.
func (b *bench) builds(name string, stream bool) error {
	if b.before == "" {
		log.Print("left out: no -before")
		return nil
	}
	req := request("/v1/completions", body(prompt(2<<10), stream, 16, ""))
	us := map[string][]float64{}
	for i := range b.repeats {
		order := []string{b.before, b.xpyd}
		if i%2 == 1 {
			order[0], order[1] = order[1], order[0]
		}
		for _, binary := range order {
			start := func() (*process, error) { return b.routerOf(binary) }
			v, rate, rss, err := b.cost(target{start: start}, 32, b.n, req)
			if err != nil {
				return fmt.Errorf("%s: %w", binary, err)
			}
			us[binary] = append(us[binary], v)
			which := "now"
			if binary == b.before {
				which = "before"
			}
			log.Printf("%s %d %-6s %7.1f us of processor a request, %6.0f requests/s, %d MiB", name, i, which, v, rate, rss>>20)
			b.book.Logf("%s round %d %s: %.2f us %.0f req/s rss %d, %d requests", name, i, which, v, rate, rss, b.n)
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
