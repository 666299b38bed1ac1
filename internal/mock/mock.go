// Package mock is a fake engine for tests and demonstrations: it speaks one
// dialect as prefill, decode or both, checks strictly what it is sent, and
// answers a deterministic text with latencies and faults of the user's choice.
// Its checks are written from the engines' behaviour, not from our router's
// code. A decode mock collects from the prefill mock that its request names,
// over HTTP, so that a wrong address, link or prompt is noticed also between
// processes.
package mock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/scarce"
)

// Dialects that a mock speaks.
var Dialects = []string{"openai", "vllm-nixl", "vllm-nixl-push", "vllm-mooncake", "vllm-offloading", "vllm-p2pnccl", "storage",
	"sglang", "trtllm", "trtllm-generation-first"}

// Config configures an Engine.
type Config struct {
	Listen  string // host:port; port 0 takes a free one
	Dialect string
	Role    string // prefill, decode or both
	Model   string
	Version string        // of GET /version
	Embeds  bool          // it has embeddings and generates nothing; of dialect openai
	TTFT    time.Duration // before the first token, or prefill's answer
	ITL     time.Duration // between tokens
	Fault   Fault
	// Lease is how long prefill keeps what no decode collects; 0: as long as
	// it runs.
	Lease time.Duration
	KV    KVEvents
	// Register is the ZMQ address, host:port, at which a vllm-p2pnccl mock
	// registers every 3 s; "" for nowhere.
	Register string
	Log      *slog.Logger
}

// Validate refuses what Start cannot work with.
func (c *Config) Validate() error {
	if !slices.Contains(Dialects, c.Dialect) {
		return fmt.Errorf("dialect %q is none of %s", c.Dialect, strings.Join(Dialects, ", "))
	}
	if !slices.Contains([]string{"prefill", "decode", "both"}, c.Role) {
		return fmt.Errorf("role %q is none of prefill, decode, both", c.Role)
	}
	if c.Embeds && (c.Dialect != "openai" || c.Role != legDecode) {
		return errors.New("only a decode engine of dialect openai embeds")
	}
	if c.TTFT < 0 || c.ITL < 0 || c.Lease < 0 {
		return errors.New("a latency or the lease is negative")
	}
	return nil
}

// Record is one generation request that an Engine got.
type Record struct {
	Leg    string // prefill, decode or plain
	Path   string
	Header http.Header
	Body   string
	Probe  bool
	Status int  // of the answer, 0 while there is none
	Left   bool // the caller closed the connection before the answer's end
	Over   bool
}

// Engine is a running mock.
type Engine struct {
	cfg Config
	ln  net.Listener
	srv *http.Server
	id  string // engine id, new with each start

	ctx    context.Context
	cancel context.CancelFunc
	client *http.Client
	wg     sync.WaitGroup

	mu      sync.Mutex
	fault   Fault
	lease   time.Duration
	records []*Record
	links   map[string]*kept

	blocks *blocks // nil when no events are published
}

// maxRecords bounds what an Engine remembers; the oldest go first, and of
// links those that are over.
const maxRecords = 4096

// Start listens and serves until Close.
func Start(cfg Config) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	kv, err := newBlocks(cfg.KV)
	if err != nil {
		return nil, err
	}
	ln, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen: %w", err), kv.close())
	}
	e := &Engine{cfg: cfg, ln: ln, id: rand.Text(), fault: cfg.Fault, lease: cfg.Lease, links: map[string]*kept{},
		client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, blocks: kv}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.srv = &http.Server{Handler: e.mux(), ReadHeaderTimeout: 10 * time.Second}
	if cfg.Register != "" {
		e.wg.Go(e.register)
	}
	e.wg.Go(func() {
		if err := e.srv.Serve(scarce.Listener(ln, cfg.Log, nil)); !errors.Is(err, http.ErrServerClosed) {
			cfg.Log.Error("serve", "err", err)
		}
	})
	return e, nil
}

// Close cuts what runs, and waits.
func (e *Engine) Close() error {
	e.cancel()
	err := e.srv.Close()
	e.wg.Wait()
	e.client.CloseIdleConnections()
	return errors.Join(err, e.blocks.close())
}

// Addr is where it listens; also what a configuration gives as its bootstrap.
func (e *Engine) Addr() string { return e.ln.Addr().String() }

// URL is its address as a URL.
func (e *Engine) URL() string { return "http://" + e.Addr() }

// ID is its engine id.
func (e *Engine) ID() string { return e.id }

// Renew gives it another engine id, as a restart would.
func (e *Engine) Renew() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.id += "'"
}

// SetFault changes what goes wrong from now on.
func (e *Engine) SetFault(f Fault) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fault = f
}

// SetLease changes Config.Lease, also for what prefill keeps already.
func (e *Engine) SetLease(d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lease = d
}

// Records returns copies of the newest requests, without probes.
func (e *Engine) Records() []Record {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []Record
	for _, r := range e.records {
		if !r.Probe {
			out = append(out, *r)
		}
	}
	return out
}

// Held is how many prompts a prefill mock keeps that no decode has collected.
func (e *Engine) Held() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, k := range e.links {
		if k.ready && !k.taken {
			n++
		}
	}
	return n
}
