package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// mostStreams is how many streams the router has descriptors for, at two each.
func mostStreams() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 400
	}
	return (int(min(limit.Cur, 1<<20)) - 400) / 2
}

// manyStreams opens count streams of rate chunks/s and measures once all are open: through
// xpyd, through the bare loop, and direct, for the delay of this machine and the mocks.
func (b *router) manyStreams(ctx context.Context, name string, count, rate int) error {
	const long = 15 * time.Second
	chunks := rate * int((opening(count) + long + 2*time.Second).Seconds())
	req := post("/v1/completions", completion(words(2<<10), true, chunks, fmt.Sprintf("%s%d", pacePrefix, 1000/rate)))
	through := func(start func(context.Context) (*harness.Process, error)) (ages []float64, before, peak int, err error) {
		p, err := start(ctx)
		if err != nil {
			return nil, 0, 0, err
		}
		defer p.Kill()
		before = p.RSS()
		if ages, peak, err = openStreams(p.Addr, count, req, p.RSS); err != nil {
			err = fmt.Errorf("%s: %w", p.Name, err)
		}
		return ages, before, peak, err
	}
	b.Sayf("%s: %d streams through each of xpyd, the bare loop, and direct; %.0f s each", name, count, (2*opening(count) + long).Seconds())
	ours, before, peak, err := through(b.ours)
	if err != nil {
		return err
	}
	bare, _, most, err := through(b.bareLoop)
	if err != nil {
		return err
	}
	direct, _, err := openStreams(b.d, count, req, func() int { return 0 })
	if err != nil {
		return fmt.Errorf("direct: %w", err)
	}
	ms := func(ages []float64, q float64) float64 { return 1000 * figures.Quantile(ages, q) }
	kb := float64(peak-before) / 1024 / float64(count)
	b.Sayf("%s: %d at %d/s: delay p50 %.1f p99 %.1f ms (bare loop p50 %.1f p99 %.1f, direct p50 %.1f p99 %.1f), rss %d -> %d, %.1f KB a stream (bare loop %d KB in all)", name,
		count, rate, ms(ours, 0.5), ms(ours, 0.99), ms(bare, 0.5), ms(bare, 0.99), ms(direct, 0.5), ms(direct, 0.99), before, peak, kb, most>>10)
	about := fmt.Sprintf("mock engines, %d open streams, %d tokens/s each", count, rate)
	if name == "slow" {
		if err := b.Add(figures.Figure{Name: "router.stream_kb", Value: kb, Unit: "KB a stream", Peer: "limit", PeerValue: 32, Ratio: kb / 32, Runs: 1, Model: about, Spread: "one run"}); err != nil {
			return err
		}
	}
	return b.Add(figures.Figure{Name: "router.stream_delay_p99_ms." + name, Value: ms(ours, 0.99), Unit: "ms", Peer: "bare two-leg fasthttp loop, same load",
		PeerValue: ms(bare, 0.99), Ratio: ms(ours, 0.99) / max(ms(bare, 0.99), 0.1), Runs: 1, Model: about,
		Spread: fmt.Sprintf("p50 %.1f ms; direct p99 %.1f ms", ms(ours, 0.5), ms(direct, 0.99))})
}

// opening is how long count streams take to open, at 500/s. Opening costs a router more than
// the streams do, and is not measured.
func opening(count int) time.Duration { return time.Duration(count) * time.Second / 500 }

// openStreams opens count streams and returns the chunks' ages in seconds and the peak of rss,
// both from the moment when all are open.
func openStreams(addr string, count int, req []byte, rss func() int) ([]float64, int, error) {
	var ages []float64
	var mu sync.Mutex
	var open atomic.Bool
	var wg sync.WaitGroup
	errs := make(chan error, count)
	each := func(s float64) {
		if open.Load() {
			mu.Lock()
			ages = append(ages, s)
			mu.Unlock()
		}
	}
	var conns []net.Conn
	for i := range count {
		c, err := dial(addr)
		if err != nil {
			for _, c := range conns {
				c.Close()
			}
			wg.Wait()
			return nil, 0, fmt.Errorf("stream %d: %w", i, err)
		}
		conns = append(conns, c.conn)
		wg.Go(func() {
			defer c.conn.Close()
			if err := chunkAges(c, req, each); err != nil {
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
			if len(ages) == 0 {
				return nil, 0, fmt.Errorf("no chunk came once all of %d streams were open", count)
			}
			return ages, peak, nil
		case <-time.After(time.Second):
			peak = max(peak, rss())
		}
	}
}

// stalled measures the cost of a client that asks for an endless stream and does not read it:
// the router's memory, and what the kernel queues for both of its connections.
func (b *router) stalled(ctx context.Context) error {
	const clients, limit = 200, 256.0
	p, err := b.ours(ctx)
	if err != nil {
		return err
	}
	defer p.Kill()
	if _, err := drive(p.Addr, clients, 20*clients, post("/v1/completions", completion(words(2<<10), true, 16, ""))); err != nil { // memory that stays
		return err
	}
	req := post("/v1/completions", completion(words(2<<10), true, 1<<30, ""))
	before := p.RSS()
	for range clients {
		c, err := net.Dial("tcp", p.Addr)
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.Write(req); err != nil {
			return err
		}
	}
	last, held, since := -1, 0, time.Now()
	for { // until nothing grows
		time.Sleep(time.Second)
		if held, err = queued(p.Addr, b.d); err != nil {
			return err
		}
		if held == last || time.Since(since) > 30*time.Second {
			break
		}
		last = held
	}
	own := float64(p.RSS()-before) / 1024 / clients
	kb := own + float64(held)/1024/clients
	b.Sayf("stalled: %d clients that do not read: %.1f KB each, %.1f of it the router's", clients, kb, own)
	return b.Add(figures.Figure{Name: "router.stalled_client_kb", Value: kb, Unit: "KB a client", Peer: "limit", PeerValue: limit, Ratio: kb / limit, Runs: 1,
		Model:  fmt.Sprintf("mock engines, %d streams without end that are not read; resident memory and the kernel's queues of both connections", clients),
		Spread: fmt.Sprintf("one run; %.1f KB the router's", own)})
}

// queued is what the kernel holds for the router: bytes not yet sent to its clients, and bytes
// from the engine that it has not read.
func queued(router, engine string) (int, error) {
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return 0, err
	}
	port := func(addr string) string {
		_, p, _ := net.SplitHostPort(addr)
		n, _ := strconv.Atoi(p)
		return fmt.Sprintf(":%04X", n)
	}
	sum := 0
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line) // number, local, remote, state, out:in
		var out, in int
		if n, _ := fmt.Sscanf(strings.Join(f[min(len(f), 4):], " "), "%x:%x", &out, &in); n < 2 {
			continue // the head
		}
		if strings.HasSuffix(f[1], port(router)) {
			sum += out
		}
		if strings.HasSuffix(f[2], port(engine)) {
			sum += in
		}
	}
	return sum, nil
}
