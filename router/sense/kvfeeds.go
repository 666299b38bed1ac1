package sense

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/kvevents"
	"github.com/xpyd/xpyd/internal/tokenizer"
	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/zmtp"
	"github.com/xpyd/xpyd/router/index"
	"github.com/xpyd/xpyd/router/pick"
)

// Events configures how the router uses the workers' KV events. It follows them while
// pick.policy uses them.
type Events struct {
	// IndexBytes bounds the memory of the index of their blocks.
	IndexBytes int64 `key:"index_bytes" unit:"bytes"`
	// HostWeight and DiskWeight are what a token in a slower tier is worth, 1 being one in
	// GPU memory.
	HostWeight float64 `key:"host_weight"`
	DiskWeight float64 `key:"disk_weight"`
	// PeerTokens: a worker outside the pair that has so many more tokens of a prompt is
	// named to the pair, which fetches them. 0: never.
	PeerTokens int `key:"peer_tokens"`
	// PeerWeight is what a token that another worker would give is worth, 1 being one at
	// hand in the same tier.
	PeerWeight float64 `key:"peer_weight"`
	// Tokenizers are for prompts that come as text; without their model's they are matched
	// by text.
	Tokenizers []Tokenizer `key:"tokenizers"`
}

// Tokenizer is the files of a model's tokenizer.
type Tokenizer struct {
	Model string `key:"model"` // the name clients use
	Path  string `key:"path"`  // folder with tokenizer.json
}

// DefaultEvents has room for four million blocks.
func DefaultEvents() Events {
	return Events{IndexBytes: 256 << 20, HostWeight: 0.8, DiskWeight: 0.4, PeerTokens: 32, PeerWeight: 0.7}
}

// Validate returns a *config.KeyError.
func (e Events) Validate() error {
	if e.IndexBytes < 1<<20 {
		return config.Bad("index_bytes", "%d is below 1 MiB", e.IndexBytes)
	}
	seen := map[string]bool{}
	for n, t := range e.Tokenizers {
		switch {
		case t.Model == "" || t.Path == "":
			return config.Bad("tokenizers", "entry %d: model and path are required", n+1)
		case seen[t.Model]:
			return config.Bad("tokenizers", "entry %d: model %q is there twice", n+1, t.Model)
		}
		seen[t.Model] = true
	}
	return cmp.Or(config.Portion("host_weight", e.HostWeight), config.Portion("disk_weight", e.DiskWeight), config.Portion("peer_weight", e.PeerWeight), config.AtLeast("peer_tokens", e.PeerTokens, 0))
}

// usesEvents reports whether a policy looks at the index.
func usesEvents(policy string) bool { return policy == pick.KVEvents || policy == pick.PredictedTTFT }

// FeedsDeps is what Feeds is given.
type FeedsDeps struct {
	Events
	Fleet  *fleet.Watcher
	Picker *pick.Picker // its policy says whether events are followed
	Ring   *trust.Ring
	Log    *slog.Logger
	Ctx    context.Context //nolint:containedctx // ends when everything must
}

// Feeds follows the fleet's publishers of KV events and keeps the index.
type Feeds struct {
	FeedsDeps
	index *index.Index
	poke  chan struct{}
	toks  map[string]*tokenizer.Tokenizer // by model

	mu    sync.Mutex
	feeds map[probeKey]*follow // by worker and epoch, without the role
	alien map[string]bool      // models whose workers have another tokenizer
}

// follow is the feeds of one worker, one per data-parallel rank.
type follow struct {
	inst    fleet.Instance
	secrets atomic.Pointer[string] // that it accepts now
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	feeds   []*kvevents.Feed
	sources []*index.Source
}

// NewFeeds loads the tokenizers.
func NewFeeds(d FeedsDeps) (*Feeds, error) {
	e := &Feeds{FeedsDeps: d, index: index.New(d.IndexBytes), poke: make(chan struct{}, 1),
		toks: map[string]*tokenizer.Tokenizer{}, feeds: map[probeKey]*follow{}, alien: map[string]bool{}}
	for _, t := range d.Tokenizers {
		tok, err := tokenizer.Load(t.Path)
		if err != nil {
			return nil, fmt.Errorf("kv_events.tokenizers: %s: %w", t.Model, err)
		}
		e.toks[t.Model] = tok
	}
	return e, nil
}

// Wake has Run look at the policy.
func (e *Feeds) Wake() {
	select {
	case e.poke <- struct{}{}:
	default:
	}
}

// Run follows the fleet until the router ends.
func (e *Feeds) Run() {
	for {
		changed := e.Fleet.Changed()
		e.sync(e.Fleet.Snapshot(), usesEvents(e.Picker.Policy()))
		select {
		case <-changed:
		case <-e.poke:
		case <-e.Ctx.Done():
			e.sync(fleet.NewSnapshot(0, time.Time{}, nil), false)
			return
		}
	}
}

// sync starts and ends feeds so that they fit the members.
func (e *Feeds) sync(s *fleet.Snapshot, on bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	keep := map[probeKey]bool{}
	clear(e.alien)
	for i := range s.Members {
		m := &s.Members[i]
		if t := e.toks[m.Model]; t != nil && m.TokenizerFingerprint != "" && m.TokenizerFingerprint != t.Fingerprint() {
			e.alien[m.Model] = true
		}
		if !on || m.KVEvents == "" || m.State == fleet.Dead || m.State == fleet.Gone {
			continue
		}
		key := probeKey{id: m.ID, epoch: m.Epoch}
		f := e.feeds[key]
		if f != nil && (asks(&f.inst) != asks(&m.Instance) || f.inst.KVEvents != m.KVEvents || f.inst.KVReplay != m.KVReplay || f.inst.KVTopic != m.KVTopic ||
			f.inst.DPRanks != m.DPRanks || f.inst.Model != m.Model) {
			f.end()
			f = nil
		}
		if f == nil {
			f = e.start(m)
			e.feeds[key] = f
		}
		f.secrets.Store(&m.Secrets)
		for _, src := range f.sources {
			src.SetRole(legOf(m))
		}
		keep[key] = true
	}
	for key, f := range e.feeds {
		if !keep[key] {
			f.end()
			delete(e.feeds, key)
		}
	}
}

func legOf(m *fleet.Member) index.Role {
	switch {
	case m.Alone():
		return index.Prefill | index.Decode
	case m.Role == fleet.Prefill:
		return index.Prefill
	}
	return index.Decode
}

// asks reports whether a publisher wants the fleet's secret. A native worker with secrets
// does unless it says otherwise, and is not followed without them.
func asks(i *fleet.Instance) bool {
	return i.Dialect == fleet.Native && i.Secrets != "" && !i.KVEventsOpen
}

// maxRanks bounds the feeds of one worker.
const maxRanks = 64

// start follows a member; it stops at an address that makes no sense.
func (e *Feeds) start(m *fleet.Member) *follow {
	ctx, cancel := context.WithCancel(e.Ctx)
	f := &follow{inst: m.Instance, cancel: cancel}
	f.secrets.Store(&m.Secrets)
	keys := func() (*zmtp.Keys, error) { return kvevents.SubscriberKeys(e.Ring, *f.secrets.Load()) }
	if !asks(&m.Instance) {
		keys = nil
	}
	for rank := range min(max(m.DPRanks, 1), maxRanks) {
		endpoint, ok := portAfter(m.KVEvents, rank)
		replay, ok2 := portAfter(m.KVReplay, rank)
		if !ok || !ok2 {
			e.Log.Warn("kv events: no such port", "id", m.ID, "kv_events", m.KVEvents, "kv_replay", m.KVReplay, "rank", rank)
			break
		}
		src := e.index.Add(index.Key{ID: m.ID, Epoch: m.Epoch, Rank: rank}, m.Model, legOf(m))
		feed := kvevents.NewFeed(kvevents.FeedConfig{Endpoint: endpoint, Replay: replay, Topic: m.KVTopic, Keys: keys, Handler: src,
			Log: e.Log.With("id", m.ID, "rank", rank)})
		f.sources, f.feeds = append(f.sources, src), append(f.feeds, feed)
		f.wg.Go(func() { feed.Run(ctx) })
	}
	return f
}

// end stops the feeds, waits for them, and forgets their blocks.
func (f *follow) end() {
	f.cancel()
	f.wg.Wait()
	for _, src := range f.sources {
		src.Remove()
	}
}

// portAfter is addr with a port higher by n; "" stays as it is.
func portAfter(addr string, n int) (string, bool) {
	if addr == "" {
		return "", true
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", false
	}
	p, err := strconv.Atoi(port)
	if err != nil || p+n > 65535 {
		return "", false
	}
	return net.JoinHostPort(host, strconv.Itoa(p+n)), true
}

// Reach is how many tokens of a prompt a worker has, in any tier, by its own events.
type Reach struct {
	ID     string
	Epoch  uint64
	Tokens int
	Worth  float64 // as Tokens, but those in slow tiers count in part
}

// Warm adds to a pick request which workers have how much of its prompt, if the policy
// wants to know and the prompt's tokens can be known. If peers are of interest it appends
// them to reaches.
func (e *Feeds) Warm(ctx context.Context, p *Prompt, req *pick.Request, reaches []Reach) []Reach {
	if !usesEvents(e.Picker.Policy()) {
		return reaches
	}
	tokens := e.tokens(ctx, p)
	if len(tokens) == 0 {
		return reaches
	}
	req.Tokens, req.Tokenized = len(tokens), true
	if n := e.PeerTokens; n > 0 {
		req.Fetch = pick.Fetch{Dialect: fleet.Native, Weight: e.PeerWeight, Least: n}
	}
	var salt string
	if len(p.Top.Salt) > 0 {
		_ = json.Unmarshal(p.Top.Salt, &salt) // anything but a string is none
	}
	weight := [kvevents.Tiers]float64{1, e.HostWeight, e.DiskWeight}
	for _, h := range e.index.Match(&index.Query{Model: p.Top.Model, Salt: salt, Tokens: tokens}) {
		if p.Cache != "" && e.native(h.Key) { // its events are of KV in no key's cache
			continue
		}
		worth := 0.0
		for tier, n := range h.Tokens {
			worth += weight[tier] * float64(n)
		}
		if e.PeerTokens > 0 {
			reaches = append(reaches, Reach{h.Key.ID, h.Key.Epoch, h.Total(), worth})
		}
		i := slices.IndexFunc(req.Warm, func(w pick.Warm) bool { return w.ID == h.Key.ID && w.Epoch == h.Key.Epoch })
		if i < 0 {
			req.Warm = append(req.Warm, pick.Warm{ID: h.Key.ID, Epoch: h.Key.Epoch, Tokens: worth, Rank: h.Key.Rank})
		} else if w := &req.Warm[i]; worth > w.Tokens { // another rank of the same worker
			w.Tokens, w.Rank = worth, h.Key.Rank
		}
	}
	return reaches
}

func (e *Feeds) native(k index.Key) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	f := e.feeds[probeKey{id: k.ID, epoch: k.Epoch}]
	return f != nil && f.inst.Dialect == fleet.Native
}

// FeedInfo is what the admin API shows of a worker's events.
type FeedInfo struct {
	Connected bool   `json:"connected"` // all ranks
	Blocks    int64  `json:"blocks"`
	Batches   uint64 `json:"batches"`
	Gaps      uint64 `json:"gaps"`
	Resets    uint64 `json:"resets"`
	Refused   bool   `json:"refused,omitempty"` // one of them, for want of a secret that both have
	Error     string `json:"error,omitempty"`   // why one of them is not connected
}

// Info is a worker's feed; nil if it is not followed.
func (e *Feeds) Info(m *fleet.Member) *FeedInfo {
	e.mu.Lock()
	defer e.mu.Unlock()
	f := e.feeds[probeKey{id: m.ID, epoch: m.Epoch}]
	if f == nil {
		return nil
	}
	out := &FeedInfo{Connected: true}
	for i, feed := range f.feeds {
		s := feed.Stats()
		out.Connected = out.Connected && s.Connected.Load()
		out.Blocks += f.sources[i].Blocks()
		out.Batches += s.Batches.Load()
		out.Gaps += s.Gaps.Load()
		out.Resets += s.Resets.Load()
		if err := s.Failure(); err != nil && !out.Refused {
			out.Refused, out.Error = kvevents.Refused(err), err.Error()
		}
	}
	return out
}

// totals counts the feeds, for metrics.
func (e *Feeds) totals() (feeds, connected int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, f := range e.feeds {
		for _, feed := range f.feeds {
			feeds++
			if feed.Stats().Connected.Load() {
				connected++
			}
		}
	}
	return feeds, connected
}

// Collectors returns the metrics of KV events.
func (e *Feeds) Collectors() []prometheus.Collector {
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f)
	}
	count := func(name, help string, f func() uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(f()) })
	}
	return []prometheus.Collector{
		gauge("xpyd_router_kv_index_blocks", "Blocks of all workers in the index of KV events.", func() float64 { return float64(e.index.Stats().Blocks) }),
		gauge("xpyd_router_kv_index_bytes", "Memory of the index of KV events. At kv_events.index_bytes it forgets what no prompt asks for.", func() float64 { return float64(e.index.Stats().Bytes) }),
		count("xpyd_router_kv_index_evicted_total", "Blocks forgotten to stay within kv_events.index_bytes. If it rises fast, raise that.", func() uint64 { return e.index.Stats().Evicted }),
		count("xpyd_router_kv_index_foreign_total", "Blocks left out of the index: of KV groups that do not name prefixes (normal for hybrid models), of another block size than their engine's first, or too many in one event for kv_events.index_bytes.", func() uint64 { return e.index.Stats().Foreign }),
		count("xpyd_router_kv_index_orphans_total", "Blocks whose parent was unknown when they came. Some are normal after a router's start if engines cannot replay everything.", func() uint64 { return e.index.Stats().Orphans }),
		gauge("xpyd_router_kv_feeds", "Publishers of KV events that are followed.", func() float64 { n, _ := e.totals(); return float64(n) }),
		gauge("xpyd_router_kv_feeds_connected", "Publishers of KV events that are connected. While one is not, its worker counts as warm as it last was.", func() float64 { _, n := e.totals(); return float64(n) }),
	}
}
