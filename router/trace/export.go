package trace

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/config"
)

// Config says where spans go, and how many.
type Config struct {
	// Endpoint is the collector's URL, such as http://localhost:4318/v1/traces; "" turns
	// tracing off, and then it costs nothing.
	Endpoint string `key:"endpoint"`
	// Headers are sent with each export, such as an API key.
	Headers map[string]string `key:"headers"`
	// Ratio is the part of the requests to sample, of those without a trace of their own; for
	// the others the client has decided.
	Ratio float64 `key:"ratio"`
	// Service is the service's name in the collector.
	Service string `key:"service"`
	// Queue bounds the spans that wait for export; more are dropped and counted.
	Queue int `key:"queue"`
	// Interval is how long spans wait at most, Timeout how long an export may take.
	Interval time.Duration `key:"interval"`
	Timeout  time.Duration `key:"timeout"`
}

// DefaultConfig is off.
func DefaultConfig() Config {
	return Config{Ratio: 0.1, Service: "xpyd-router", Queue: 8192, Interval: time.Second, Timeout: 5 * time.Second}
}

// Validate returns the first *config.KeyError.
func (c Config) Validate() error {
	if c.Endpoint != "" {
		if u, err := url.Parse(c.Endpoint); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return config.Bad("endpoint", "%q is no http or https URL", c.Endpoint)
		}
	}
	if c.Service == "" {
		return config.Bad("service", "it is empty")
	}
	return cmp.Or(config.Portion("ratio", c.Ratio), config.AtLeast("queue", c.Queue, 1), config.Positive("interval", c.Interval), config.Positive("timeout", c.Timeout))
}

// batch is how many spans go in one export.
const batch = 512

// Exporter sends spans to a collector: New, Start, Close. Add is safe for concurrent use.
type Exporter struct {
	cfg     Config
	version string
	log     *slog.Logger
	client  *http.Client

	exported, dropped atomic.Uint64
	warned            time.Time // run's own

	mu    sync.Mutex
	queue []Span
	full  chan struct{} // a batch is there

	cancel  context.CancelFunc // nil before Start
	running sync.WaitGroup
}

// New prepares an exporter.
func New(cfg Config, version string, log *slog.Logger) *Exporter {
	return &Exporter{cfg: cfg, version: version, log: log, full: make(chan struct{}, 1),
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute, Proxy: http.ProxyFromEnvironment}}}
}

// Add queues all of the spans or none; it never waits.
func (e *Exporter) Add(spans []Span) {
	e.mu.Lock()
	fits := len(e.queue)+len(spans) <= e.cfg.Queue
	if fits {
		e.queue = append(e.queue, spans...)
	}
	enough := len(e.queue) >= batch
	e.mu.Unlock()
	if !fits {
		e.dropped.Add(uint64(len(spans)))
	}
	if enough {
		select {
		case e.full <- struct{}{}:
		default:
		}
	}
}

// Counts are the spans exported and dropped so far.
func (e *Exporter) Counts() (exported, dropped uint64) { return e.exported.Load(), e.dropped.Load() }

// Start begins to export.
func (e *Exporter) Start() {
	ctx, cancel := context.WithCancel(context.Background())
	e.cancel = cancel
	e.running.Go(func() { e.run(ctx) })
}

// Close exports what is left, for at most 2 s, and waits for that.
func (e *Exporter) Close() {
	if e.cancel != nil {
		e.cancel()
		e.running.Wait()
	}
}

// run exports until ctx ends, and then what is left.
func (e *Exporter) run(ctx context.Context) {
	defer e.client.CloseIdleConnections()
	tick := time.NewTicker(e.cfg.Interval)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-tick.C:
		case <-e.full:
		case <-ctx.Done():
		}
		e.flush(ctx)
	}
}

func (e *Exporter) flush(ctx context.Context) {
	last := ctx.Err() != nil
	if last { // one more try, briefly
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), min(e.cfg.Timeout, 2*time.Second))
		defer cancel()
	}
	for {
		e.mu.Lock()
		n := min(len(e.queue), batch)
		spans := slices.Clone(e.queue[:n])
		e.mu.Unlock()
		if n == 0 {
			return
		}
		err := e.export(ctx, encode(e.cfg.Service, e.version, spans), last)
		if err != nil && ctx.Err() != nil && !last {
			return // the next flush is the last
		}
		e.mu.Lock()
		e.queue = append(e.queue[:0], e.queue[n:]...)
		e.mu.Unlock()
		if err == nil {
			e.exported.Add(uint64(n))
			continue
		}
		e.dropped.Add(uint64(n))
		if time.Since(e.warned) > time.Minute {
			e.warned = time.Now()
			e.log.Warn("spans dropped", "endpoint", e.cfg.Endpoint, "spans", n, "err", err)
		}
	}
}

// Tries of one export, and the wait between two if the collector names none. Meanwhile the
// queue may fill.
const (
	tries    = 3
	tryAgain = 500 * time.Millisecond
)

func (e *Exporter) export(ctx context.Context, body []byte, last bool) error {
	for n := 1; ; n++ {
		wait, err := e.post(ctx, body)
		if err == nil || wait == 0 || n == tries || last {
			return err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// post posts one body. On an error it says how long to wait before the next try; 0: do not
// try again.
func (e *Exporter) post(ctx context.Context, body []byte) (wait time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.cfg.Endpoint, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/x-protobuf")
	for k, v := range e.cfg.Headers {
		req.Header.Set(k, v)
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return tryAgain, err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // for the connection's sake
	switch resp.StatusCode {
	case 200, 202, 204:
		return 0, nil
	case 429, 502, 503, 504:
		wait = max(retryAfter(resp.Header.Get("Retry-After"), tryAgain), time.Millisecond)
	}
	return wait, fmt.Errorf("status %d", resp.StatusCode)
}
