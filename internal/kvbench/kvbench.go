// Package kvbench measures kvconn between two processes: how fast a prompt's
// blocks move from one pool to another, how long a small transfer takes, what
// a new peer costs, and how that compares with limits measured in the same
// run: memcpy, and a bare writev/readv loop over the same scattered memory.
//
// One process is the sender (Serve), as a prefill worker is; the other, where
// the clock is, the receiver (Run), as a decode worker is. They meet on a small
// control connection of their own, where the receiver sends the shape of the pools
// and asks for the sender's CPU time. The pools are memory with kvconn's views; the
// rows are a fixed pattern with the digests that a prefill worker would have stored.
//
// Non-goals: models, engines, the router; see `xpyd bench` for those.
package kvbench

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// Transports are what Config.Transport may be. Who calls Serve and Run hands in all but auto, which is
// shm on one host, else tcp.
var Transports = []string{"tcp", "shm", "auto"}

// Config is what to measure. Start from DefaultConfig.
type Config struct {
	Transport   string `json:"transport"`    // one of Transports
	BlockBytes  int    `json:"block_bytes"`  // one block of one layer
	BlockTokens int    `json:"block_tokens"` // positions in a block
	Layers      int    `json:"layers"`
	KVHeads     int    `json:"kv_heads"`
	Bytes       int    `json:"bytes"`       // of one transfer
	Scatter     string `json:"scatter"`     // order of block ids at both ends: "shuffled" or "contiguous"
	Concurrency int    `json:"concurrency"` // transfers at a time
	Connections int    `json:"connections"` // bulk connections
	Digests     string `json:"digests"`     // checked on arrival: "on", "off", or "both" in turn
	Verify      bool   `json:"verify"`      // compare every byte at the end

	Warmup      int           `json:"warmup"`      // transfers before the clock
	Repetitions int           `json:"repetitions"` // of each kind, at least
	Duration    time.Duration `json:"duration"`    // of all repetitions, at least
	Baselines   bool          `json:"baselines"`   // measure the limits too, in turn

	LatencyBytes int `json:"latency_bytes"` // of one small transfer
	LatencyRuns  int `json:"latency_runs"`  // small transfers, one at a time
	Handshakes   int `json:"handshakes"`    // new peers in a row

	Sweep []int `json:"sweep"` // transfer sizes for the plot
}

// DefaultConfig moves 256 MiB in 16 KiB blocks, the shape of a model of 16
// layers with two KV heads of 128 bf16.
func DefaultConfig() Config {
	return Config{
		Transport: "auto", BlockBytes: 16 << 10, BlockTokens: 16, Layers: 16, KVHeads: 2, Bytes: 256 << 20,
		Scatter: "shuffled", Concurrency: 1, Connections: 1, Digests: "on", Verify: true,
		Warmup: 2, Repetitions: 7, Baselines: true,
		LatencyBytes: 256 << 10, LatencyRuns: 1000, Handshakes: 20,
	}
}

// Bounds of what one process asks another for.
const (
	maxPool    = 64 << 30
	maxRuns    = 1 << 20
	maxConfig  = 64 << 10 // bytes of a request
	maxConns   = 64
	maxTickets = 256
)

// Validate reports everything that is wrong.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	in := func(name string, v, low, high int) {
		if v < low || v > high {
			bad("%s: %d is not in %d..%d", name, v, low, high)
		}
	}
	oneOf := func(name, v string, want ...string) {
		if !slices.Contains(want, v) {
			bad("%s: %q is not one of %s", name, v, strings.Join(want, ", "))
		}
	}
	oneOf("transport", c.Transport, Transports...)
	oneOf("scatter", c.Scatter, "shuffled", "contiguous")
	oneOf("digests", c.Digests, "on", "off", "both")
	in("layers", c.Layers, 1, 1024)
	in("kv-heads", c.KVHeads, 1, 1024)
	in("block-tokens", c.BlockTokens, 1, 256)
	in("block", c.BlockBytes, 1, 64<<20)
	in("concurrency", c.Concurrency, 1, maxTickets)
	in("connections", c.Connections, 1, maxConns)
	in("repetitions", c.Repetitions, 1, maxRuns)
	in("warmup", c.Warmup, 0, maxRuns)
	in("latency-runs", c.LatencyRuns, 0, maxRuns)
	in("handshakes", c.Handshakes, 0, maxRuns)
	if c.Duration < 0 || c.Duration > 24*time.Hour {
		bad("duration: %v is not in 0..24h", c.Duration)
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	if c.BlockBytes%c.rows() != 0 {
		bad("block: %s is not a whole number of bytes for each of 2 (K,V) x %d heads x %d tokens", Size(c.BlockBytes), c.KVHeads, c.BlockTokens)
	}
	step := c.Layers * c.BlockBytes
	sizes := append([]int{c.Bytes}, c.Sweep...)
	if c.LatencyRuns > 0 || c.Handshakes > 0 {
		sizes = append(sizes, c.LatencyBytes)
	}
	for _, n := range sizes {
		if n < step || n%step != 0 || n > maxPool/c.Concurrency {
			bad("size: %s is not a multiple of %s (%d layers x %s), or over %s in all", Size(n), Size(step), c.Layers, Size(c.BlockBytes), Size(maxPool))
		}
	}
	return errors.Join(errs...)
}

// rows is how many rows a block of a layer has.
func (c Config) rows() int {
	return kvlayout.Plain(1, c.KVHeads, 1, c.BlockTokens, kvlayout.U8).BlockBytes()
}

// blocks is how many blocks a transfer of n bytes has in each layer.
func (c Config) blocks(n int) int { return n / (c.Layers * c.BlockBytes) }

// most is the largest transfer.
func (c Config) most() int {
	return max(c.Bytes, c.LatencyBytes, slices.Max(append([]int{0}, c.Sweep...)))
}

// layout is the pools'. The type of the elements does not matter here.
func (c Config) layout() kvlayout.Layout {
	return kvlayout.Plain(c.Layers, c.KVHeads, c.BlockBytes/c.rows(), c.BlockTokens, kvlayout.U8)
}

// connector is kvconn's configuration of one end. Both ends prove to each other, as
// workers do, that they hold a secret, to measure what that costs; it is a public one.
func (c Config) connector(id string) kvconn.Config {
	ring, err := trust.NewRing(trust.Secret{})
	if err != nil { // one secret makes a ring
		panic(err)
	}
	k := kvconn.DefaultConfig()
	k.BulkConns, k.Ring = c.Connections, ring
	k.Identity = kvconn.Identity{PeerID: kvconn.PeerID{ID: id, Epoch: 1}, ModelFingerprint: "bench kv", TokenizerFingerprint: "none", Numerics: "none",
		Layout: c.layout()}
	return k
}

// Size formats a number of bytes: "256 MiB".
func Size(n int) string {
	for _, u := range units {
		if n >= u.bytes && n%u.bytes == 0 {
			return strconv.Itoa(n/u.bytes) + " " + u.name
		}
	}
	return strconv.Itoa(n) + " B"
}

var units = []struct {
	name  string
	bytes int
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

// ParseSize reads "256MiB", "16 KiB", "64k" or a plain number of bytes; k, m
// and g are powers of 1024.
func ParseSize(s string) (int, error) {
	t, scale := strings.ToLower(strings.ReplaceAll(s, " ", "")), 1
	for _, u := range units {
		for _, suffix := range []string{u.name, u.name[:1]} {
			if v, ok := strings.CutSuffix(t, strings.ToLower(suffix)); ok && scale == 1 {
				t, scale = v, u.bytes
			}
		}
	}
	t = strings.TrimSuffix(t, "b")
	n, err := strconv.Atoi(t)
	if err != nil || n < 1 || n > maxPool/scale {
		return 0, fmt.Errorf("size %q: want bytes, or a number with KiB, MiB or GiB", s)
	}
	return n * scale, nil
}
