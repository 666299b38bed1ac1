package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
	"github.com/xpyd/xpyd/scripts/bench/harness"
)

// upgrade counts the requests that fail while `xpyd up` is upgraded under load, beside how many do when
// it is stopped and started again instead. Clients keep their connections and repeat nothing.
type upgrade struct {
	base
	requests, times, clients int
}

func (b *upgrade) flags(f *flag.FlagSet) {
	f.IntVar(&b.requests, "requests", 20_000, "in a round")
	f.IntVar(&b.times, "times", 4, "upgrades in a round, or restarts")
	f.IntVar(&b.clients, "clients", 16, "at once")
}

func (b *upgrade) parts() []part { return []part{{"failed", b.failed}} }

const (
	upgraded  = "upgraded"
	restarted = "stopped and started"
)

// refusedPause is how long a client waits behind a request that failed.
const refusedPause = 100 * time.Millisecond

func (b *upgrade) failed(ctx context.Context) error {
	runs, err := figures.Compare(b.Sayf, b.Rounds, [2]string{upgraded, restarted}, func(_ int, way string) (*changes, error) {
		c, err := b.change(ctx, way)
		if err != nil {
			err = fmt.Errorf("%s: %w", way, err)
		}
		return c, err
	})
	if err != nil {
		return err
	}
	return b.Add(figures.RatiosOf(figures.Figure{Name: "stream.upgrade_failed", Unit: "requests", Peer: "stopped and started instead; limit 0",
		Model: fmt.Sprintf("stories260k, 2P2D, %d clients on kept connections, %d requests of 8 to 400 tokens, streams and whole answers, in a round with %d upgrades to the same build",
			b.clients, b.requests, b.times)}, runs, func(c *changes) float64 { return float64(c.failed.Load()) }))
}

// changes is a round.
type changes struct {
	asked, failed atomic.Int64
	took          time.Duration // all of it
	each          []time.Duration

	mu    sync.Mutex
	times []float64 // ms, of requests that did not fail
	why   error     // the first failure
}

func (c *changes) String() string {
	return fmt.Sprintf("%d of %d requests failed (the first: %v); p50 %.0f p99 %.0f longest %.0f ms; %d changes took %v; all over after %.0f s",
		c.failed.Load(), c.asked.Load(), c.why, figures.Median(c.times), figures.Quantile(c.times, 0.99), figures.Quantile(c.times, 1), len(c.each), c.each, c.took.Seconds())
}

// upgradeRequests are asked in turn.
func upgradeRequests() (out [][]byte) {
	for i, tokens := range []int{8, 32, 400, 16, 64, 8, 120, 24} {
		out = append(out, post("/v1/completions", fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":%d,"seed":%d,"ignore_eos":true,"stream":%t}`,
			words(100), tokens, i, i%4 != 3)))
	}
	return out
}

// change runs one round.
func (b *upgrade) change(ctx context.Context, way string) (*changes, error) {
	binary, err := b.Binary(ctx)
	if err != nil {
		return nil, err
	}
	addr, err := harness.FreeAddr()
	if err != nil {
		return nil, err
	}
	data := filepath.Join(b.Dir, fmt.Sprint("upgrade-", time.Now().UnixNano()))
	config := filepath.Join(b.Dir, "upgrade.yaml")
	if err := os.WriteFile(config, []byte("idle_timeout: 5s\n"), 0o600); err != nil {
		return nil, err
	}
	start := func() (*harness.Process, error) {
		p, _, _, err := b.Saying(ctx, "ready ", harness.Spec{Name: "up", Argv: []string{binary, "up", "--prefill", "2", "--decode", "2",
			"--listen", addr, "--admin", "127.0.0.1:0", "--data", data, "--config", config}})
		return p, err
	}
	p, err := start()
	if err != nil {
		return nil, err
	}
	defer func() { p.Kill() }()
	c := &changes{}
	began := time.Now()
	reqs := upgradeRequests()
	var clients sync.WaitGroup
	quit, end := context.WithCancel(ctx)
	defer clients.Wait()
	defer end()
	for range b.clients {
		clients.Go(func() { c.ask(quit, addr, reqs, int64(b.requests)) })
	}
	for i := range b.times {
		if err := harness.Until(ctx, time.Hour, func() error {
			if c.asked.Load() < int64(b.requests*(i+1)/(b.times+1)) {
				return errors.New("too few requests so far")
			}
			return nil
		}, p); err != nil {
			return nil, err
		}
		at := time.Now()
		if way == upgraded {
			_, err = b.Output(ctx, 5*time.Minute, io.Discard, nil, binary, "up", "--upgrade", binary, "--data", data)
		} else if err = p.Stop(); err == nil {
			var next *harness.Process
			if next, err = start(); err == nil {
				p = next
			}
		}
		if err != nil {
			return nil, err
		}
		c.each = append(c.each, time.Since(at).Round(100*time.Millisecond))
	}
	clients.Wait()
	c.took = time.Since(began)
	return c, p.Stop()
}

// ask is one client, on one connection as long as that lasts.
func (c *changes) ask(ctx context.Context, addr string, reqs [][]byte, most int64) {
	var conn *rawClient
	for ctx.Err() == nil {
		n := c.asked.Add(1)
		if n > most {
			c.asked.Add(-1)
			break
		}
		at, err := time.Now(), error(nil)
		if conn == nil {
			conn, err = dial(addr)
		}
		if err == nil {
			err = conn.do(reqs[int(n)%len(reqs)])
		}
		c.mu.Lock()
		if err == nil {
			c.times = append(c.times, ms(time.Since(at)))
		} else if c.why == nil {
			c.why = err
		}
		c.mu.Unlock()
		if err == nil {
			continue
		}
		c.failed.Add(1)
		if conn != nil {
			conn.conn.Close()
			conn = nil
		}
		select {
		case <-time.After(refusedPause):
		case <-ctx.Done():
		}
	}
	if conn != nil {
		conn.conn.Close()
	}
}
