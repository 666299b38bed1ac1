// Package mock is a fake engine for tests and demonstrations. It speaks one dialect as prefill,
// decode or both, checks requests strictly, and answers with a deterministic text and chosen
// latencies and faults. Its checks follow the engines' behaviour, not our router's code. A decode
// mock collects over HTTP from the prefill mock that its request names, so that a wrong address,
// link or prompt shows even between processes.
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
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/scarce"
	"github.com/xpyd/xpyd/internal/zmtp"
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
	Embeds  bool          // only makes embeddings; dialect openai
	TTFT    time.Duration // before the first token, or prefill's answer
	ITL     time.Duration // between tokens
	Tokens  bool          // streams are of tokens; see tokens.go
	Burst   int           // tokens an event, then; 0: one
	Fault   Fault
	Lease   time.Duration // how long prefill keeps prompts that no decode collects; 0: for ever
	KV      KVEvents
	// Register is the ZMQ address, host:port, at which a vllm-p2pnccl mock registers every 3 s; "":
	// nowhere.
	Register string
	Log      *slog.Logger
}

// Alone reports whether engines of a dialect serve whole requests.
func Alone(dialect string) bool { return dialect == "openai" }

// Validate checks the configuration.
func (c *Config) Validate() error {
	switch {
	case !slices.Contains(Dialects, c.Dialect):
		return fmt.Errorf("dialect %q is not one of %s", c.Dialect, strings.Join(Dialects, ", "))
	case !slices.Contains([]string{"prefill", "decode", "both"}, c.Role):
		return fmt.Errorf("role %q is not prefill, decode or both", c.Role)
	case c.Embeds && (!Alone(c.Dialect) || c.Role != legDecode):
		return errors.New("only a decode engine of dialect openai embeds")
	case c.TTFT < 0 || c.ITL < 0 || c.Lease < 0:
		return errors.New("a latency or the lease is negative")
	}
	return nil
}

// Record is a request that an Engine received.
type Record struct {
	Leg    string // prefill, decode or plain
	Path   string
	Header http.Header
	Body   string
	Probe  bool
	Status int  // of the response; 0 before it
	Left   bool // the caller left before the end of the response
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

// maxRecords bounds an Engine's records, of which the oldest go, and its links, of which finished
// ones go.
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

// Close cuts running requests and waits for them.
func (e *Engine) Close() error {
	e.cancel()
	err := e.srv.Close()
	e.wg.Wait()
	e.client.CloseIdleConnections()
	return errors.Join(err, e.blocks.close())
}

// Addr is its address, which is also its bootstrap address.
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

// SetFault changes the fault.
func (e *Engine) SetFault(f Fault) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fault = f
}

// SetLease changes Config.Lease, even for prompts that are already kept.
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

// Held counts the prompts that a prefill mock keeps for decode.
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

// registerEvery is how often vLLM's P2pNccl connector registers.
const registerEvery = 3 * time.Second

// register tells a router's ZMQ listener about the mock until it is closed, like engines with
// the P2pNccl connector.
func (e *Engine) register() {
	kind := "P"
	if e.cfg.Role == legDecode {
		kind = "D"
	}
	ping := kvevents.Ping{Type: kind, HTTP: e.Addr(), ZMQ: e.Addr()}.Append(nil)
	tick := time.NewTicker(registerEvery)
	defer tick.Stop()
	var conn *zmtp.Conn
	defer func() {
		if conn != nil {
			conn.Close()
		}
	}()
	for {
		if conn == nil {
			c, err := zmtp.Dial(e.ctx, e.cfg.Register, zmtp.Config{Type: zmtp.Dealer, Identity: []byte(e.Addr())})
			if err != nil {
				e.cfg.Log.Warn("register", "at", e.cfg.Register, "err", err)
			} else {
				conn = c
			}
		}
		if conn != nil && conn.WriteMessage(ping) != nil {
			conn.Close()
			conn = nil
			continue
		}
		select {
		case <-tick.C:
		case <-e.ctx.Done():
			return
		}
	}
}

// Fault is what goes wrong with requests. A router's probes are exempt unless Probes is set.
type Fault struct {
	Status   int  // answer with it; 0: no
	Hang     bool // never answer
	Refuse   bool // close connections without an answer
	Event    bool // 200, then an error as the first event
	Cut      int  // break the connection after this many chunks; 0: no
	Freeze   int  // send nothing after this many chunks; 0: no
	Fail     int  // end with an error of its own after this many chunks, of a mock with Tokens; 0: no
	Mute     bool // prefill: do the work, and never answer
	NoParams bool // prefill: answer without what decode needs, like an engine without its connector
	NoIDs    bool // return_token_ids goes unheard
	Amiss    bool // a prompt of ids is read with one more in front, by a mock with Tokens
	Probes   bool // also for probes
	// Left is how many requests meet it, of all engines that share it; nil: all.
	Left *atomic.Int32
	Then *Fault // what later ones meet; nil: nothing
}

// ParseFault reads "status=500", "hang", "refuse", "error-event", "cut=3", "freeze=3", "mute",
// "no-params", or "" for none. A ",probes" at the end includes probes.
func ParseFault(s string) (Fault, error) {
	if s == "" {
		return Fault{}, nil
	}
	var f Fault
	flags := map[string]*bool{"hang": &f.Hang, "refuse": &f.Refuse, "error-event": &f.Event, "mute": &f.Mute, "no-params": &f.NoParams, "probes": &f.Probes}
	counts := map[string]*int{"status": &f.Status, "cut": &f.Cut, "freeze": &f.Freeze}
	for part := range strings.SplitSeq(s, ",") {
		name, value, given := strings.Cut(part, "=")
		n, err := strconv.Atoi(value)
		switch flag, count := flags[name], counts[name]; {
		case flag != nil && !given:
			*flag = true
		case count != nil && err == nil && n > 0 && (name != "status" || n >= 300 && n < 600):
			*count = n
		default:
			return Fault{}, fmt.Errorf("fault %q is none of status=CODE, hang, refuse, error-event, cut=CHUNKS, freeze=CHUNKS, mute, no-params, and probes beside one", s)
		}
	}
	return f, nil
}
