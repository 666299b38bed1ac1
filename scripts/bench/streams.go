package main

import (
	"fmt"
	"log"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/figures"
)

// delayBook counts delays in steps of a tenth of a millisecond up to 2 s.
type delayBook struct {
	mu    sync.Mutex
	steps [20000]int
	n     int
}

func (d *delayBook) add(s float64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.steps[min(max(int(s*1e4), 0), len(d.steps)-1)]++
	d.n++
}

func (d *delayBook) quantile(q float64) float64 {
	want := int(q * float64(d.n))
	for i, n := range d.steps {
		if want -= n; want < 0 {
			return float64(i) / 10
		}
	}
	return float64(len(d.steps)) / 10
}

// mostStreams is how many streams the router has descriptors for: two each.
func mostStreams() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 400
	}
	return (int(min(limit.Cur, 1<<20)) - 400) / 2
}

// manyStreams opens count streams of rate chunks a second, and once all are
// open measures for so long, through xpyd, through the bare loop, and, for the
// delay that this machine and the mocks have of themselves, direct.
func (b *bench) manyStreams(name string, count, rate int) error {
	const long = 15 * time.Second
	chunks := rate * int((opening(count) + long + 2*time.Second).Seconds())
	req := request("/v1/completions", body(prompt(2<<10), true, chunks, fmt.Sprintf("pace-%d", 1000/rate)))
	p, err := b.router()
	if err != nil {
		return err
	}
	before := p.rss()
	log.Printf("%s: %d streams through each of xpyd, the bare loop, and direct; %.0f s each", name, count, (2*opening(count) + long).Seconds())
	ours, peak, err := openStreams(p.addr, count, req, p.rss)
	p.stop()
	if err != nil {
		return fmt.Errorf("xpyd: %w", err)
	}
	if p, err = b.bareLoop(); err != nil {
		return err
	}
	bare, most, err := openStreams(p.addr, count, req, p.rss)
	p.stop()
	if err != nil {
		return fmt.Errorf("bare loop: %w", err)
	}
	direct, _, err := openStreams(b.d, count, req, func() int { return 0 })
	if err != nil {
		return fmt.Errorf("direct: %w", err)
	}
	kb := float64(peak-before) / 1024 / float64(count)
	said := fmt.Sprintf("%d at %d/s: delay p50 %.1f p99 %.1f ms (bare loop p50 %.1f p99 %.1f, direct p50 %.1f p99 %.1f), rss %d -> %d, %.1f KB a stream (bare loop %d KB in all)",
		count, rate, ours.quantile(0.5), ours.quantile(0.99), bare.quantile(0.5), bare.quantile(0.99), direct.quantile(0.5), direct.quantile(0.99), before, peak, kb, most>>10)
	b.book.Logf("streams %s: %s", name, said)
	log.Print(said)
	about := fmt.Sprintf("mock engines, %d open streams, %d tokens/s each", count, rate)
	if name == "slow" {
		if err := b.figure(figures.Figure{Name: "router.stream_kb", Value: kb, Unit: "KB a stream", Peer: "limit", PeerValue: 32, Ratio: kb / 32, Runs: 1, Model: about, Spread: "one run"}); err != nil {
			return err
		}
	}
	return b.figure(figures.Figure{Name: "router.stream_delay_p99_ms." + name, Value: ours.quantile(0.99), Unit: "ms", Peer: "bare two-leg fasthttp loop, same load",
		PeerValue: bare.quantile(0.99), Ratio: ours.quantile(0.99) / max(bare.quantile(0.99), 0.1), Runs: 1, Model: about,
		Spread: fmt.Sprintf("p50 %.1f ms; direct p99 %.1f ms", ours.quantile(0.5), direct.quantile(0.99))})
}

// opening is how long count streams take to open, 500 a second: that is not
// what is measured, and it costs a router more than the streams do.
func opening(count int) time.Duration { return time.Duration(count) * time.Second / 500 }

// openStreams measures from the moment when all are open.
func openStreams(addr string, count int, req []byte, rss func() int) (*delayBook, int, error) {
	d := &delayBook{}
	var open atomic.Bool
	var wg sync.WaitGroup
	errs := make(chan error, count)
	each := func(s float64) {
		if open.Load() {
			d.add(s)
		}
	}
	for i := range count {
		c, err := dial(addr)
		if err != nil {
			return nil, 0, fmt.Errorf("stream %d: %w", i, err)
		}
		wg.Go(func() {
			defer c.conn.Close()
			if err := delays(c, req, each); err != nil {
				errs <- err
			}
		})
		if i%50 == 49 {
			time.Sleep(opening(50))
		}
	}
	open.Store(true)
	peak := 0
	over := make(chan struct{})
	go func() { wg.Wait(); close(over) }()
	for {
		select {
		case <-over:
			if len(errs) > 0 {
				return nil, 0, fmt.Errorf("%d of %d streams failed: %w", len(errs), count, <-errs)
			}
			return d, peak, nil
		case <-time.After(time.Second):
			peak = max(peak, rss())
		}
	}
}
