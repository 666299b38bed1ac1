package main

import (
	"bufio"
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
)

// cluster is a running `xpyd up`.
type cluster struct {
	cmd   *exec.Cmd
	url   string
	ready time.Duration // from exec to the ready line
}

func (b *bench) binary() (string, error) {
	path := filepath.Join(b.tmp, "xpyd")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	cmd := exec.Command("go", "build", "-trimpath", "-o", path, "./cmd/xpyd")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
}

func (b *bench) up(args ...string) (*cluster, error) {
	bin, err := b.binary()
	if err != nil {
		return nil, err
	}
	c := &cluster{cmd: exec.Command(bin, append([]string{"up", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
		"--data", filepath.Join(b.tmp, "data")}, args...)...)}
	c.cmd.Stderr = os.Stderr
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	start := time.Now()
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if url, ok := strings.CutPrefix(lines.Text(), "ready "); ok {
			c.url, c.ready = url, time.Since(start)
			return c, nil
		}
	}
	return nil, fmt.Errorf("xpyd up ended without a ready line: %w", c.cmd.Wait())
}

func (c *cluster) stop() error {
	if err := c.cmd.Process.Signal(syscall.SIGINT); err != nil {
		return err
	}
	return c.cmd.Wait()
}

// ready times `xpyd up` from exec to its ready line; the limit is 2 s.
func (b *bench) ready() error {
	return b.pairs(figures.Figure{Name: "e2e.ready_s", Unit: "s", Peer: "limit: ready within 2 s", Model: "stories260k",
		Command: "go run ./scripts/bench -only e2e.ready_s"},
		func() (float64, error) {
			c, err := b.up()
			if err != nil {
				return 0, err
			}
			return c.ready.Seconds(), c.stop()
		}, func() (float64, error) { return 2, nil })
}

// ttft compares the first token of a stream through router, prefill, push and
// decode with a single worker's that does both phases, p50 of 100 requests one
// after the other. The figure's value is the difference.
func (b *bench) ttft() error {
	c, err := b.up()
	if err != nil {
		return err
	}
	defer func() { _ = c.stop() }()
	bin, err := b.binary()
	if err != nil {
		return err
	}
	const single = "127.0.0.1:18099"
	w := exec.Command(bin, "decode", "--trust-everyone", "--listen", single, "--log-level", "warn")
	w.Stderr = os.Stderr
	if err := w.Start(); err != nil {
		return err
	}
	defer func() {
		_ = w.Process.Signal(syscall.SIGTERM)
		_ = w.Wait()
	}()
	if err := waitHealthy("http://" + single); err != nil {
		return err
	}
	var pair, alone []float64
	n := 0
	one := func(url string) (float64, error) {
		n++ // unlike the last: no prefix hit on either side
		return firstToken(url, fmt.Sprintf("%d: Once upon a time, there was a little girl named Lily. She loved to play outside in the park.", n))
	}
	for i := range 120 {
		p, err := one(c.url)
		if err != nil {
			return err
		}
		a, err := one("http://" + single)
		if err != nil {
			return err
		}
		b.book.Logf("e2e.ttft_overhead_ms request %d: pair %.3f ms, single %.3f ms", i, p, a)
		if i >= 20 {
			pair, alone = append(pair, p), append(alone, a)
		}
	}
	f := figures.Figure{Name: "e2e.ttft_overhead_ms", Unit: "ms", Peer: "single worker, p50 ms; limit 3 ms over it", Model: "stories260k",
		Value: figures.Median(pair) - figures.Median(alone), PeerValue: figures.Median(alone), Ratio: figures.Median(pair) / figures.Median(alone), Runs: len(pair),
		Spread:  fmt.Sprintf("pair p50 %.3f p90 %.3f, single p50 %.3f p90 %.3f ms", figures.Median(pair), figures.Quantile(pair, 0.9), figures.Median(alone), figures.Quantile(alone, 0.9)),
		Command: "go run ./scripts/bench -only e2e.ttft_overhead_ms"}
	return b.write(f)
}

func waitHealthy(url string) error {
	for range 200 {
		if resp, err := http.Get(url + "/health"); err == nil {
			resp.Body.Close()
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("%s is not healthy after 2 s", url)
}

// firstToken is the time to the first data line of a stream, in ms.
func firstToken(url, prompt string) (float64, error) {
	body := fmt.Sprintf(`{"model":"stories260k","prompt":%q,"max_tokens":4,"temperature":0,"stream":true}`, prompt)
	start := time.Now()
	resp, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	r := bufio.NewReader(resp.Body)
	first := 0.0
	for {
		line, err := r.ReadBytes('\n')
		if first == 0 && bytes.HasPrefix(line, []byte("data: {")) {
			first = float64(time.Since(start).Microseconds()) / 1000
		}
		if err != nil {
			break
		}
	}
	if first == 0 {
		return 0, fmt.Errorf("%s: no token, status %d", url, resp.StatusCode)
	}
	return first, nil
}
