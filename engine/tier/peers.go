package tier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
)

// Peer is another worker that is said to have the beginning of a prompt.
type Peer struct {
	ID     string
	Epoch  uint64
	URL    string // where to ask how far it reaches; "": it holds Tokens for us
	KV     string // where to collect from
	Tokens int
}

// Fetch is a prefix to collect from one peer.
type Fetch struct {
	Peer      Peer
	RequestID string
	Owner     string // label of its blocks
	Tokens    []int32
	Salt      string
	Chain     *kvcache.Chain // of at least the first Upto of Tokens
	Upto      int            // tokens, at most
	Least     int            // tokens beyond those that are here
	Blocks    int            // that it may take
	Deadline  time.Time
}

// Errors of a Collector that, like ErrAbsent, are not just the peer's failure.
var (
	ErrCorrupt = errors.New("rows do not agree with their digests")
	ErrBusy    = errors.New("no room, here or there, just now")
)

// Collector brings a prefix from a peer into the pool and the prefix index, verifies every
// row, and returns how many tokens came. It ends with ctx.
type Collector interface {
	Collect(ctx context.Context, f *Fetch) (tokens int, err error)
}

// PeersConfig bounds what is fetched from peers and given to them.
type PeersConfig struct {
	LoadTimeout   time.Duration // of a fetch, and of a load from the tiers for another worker
	MinLoadTokens int           // fewer are computed
	FetchBlocks   int           // of all fetches under way; with Tiers, their LoadBlocks count
	FetchQuota    int64         // bytes a second, 0: any; with Tiers, their LoadQuota counts
	GiveBlocks    int           // held for all peers together
	GiveQuota     int64         // bytes a second that are given; 0: any
	BlockBytes    int64         // of a block, all layers
}

// Peers is the tier of other workers: it fetches what they have and gives what this worker
// has. It needs no other tier. It runs on its callers' goroutines, so nothing is to close.
type Peers struct {
	cfg      PeersConfig
	cache    *kvcache.Cache
	tiers    *Tiers // may be nil
	from     Collector
	log      *slog.Logger
	metrics  *peerMetrics
	guards   guards
	loading  claims // of fetches before a request is queued
	bringing claims // of fetches into a request's blocks

	mu       sync.Mutex
	fetches  int // begun, ever; for their owners' names
	taken    int // blocks of fetches under way
	quota    bucket
	gives    int // begun, ever; the same
	held     int // blocks held for peers
	giveaway bucket
}

// NewPeers makes the tier over a pool's cache and the tiers below it, which may be nil.
func NewPeers(cfg PeersConfig, cache *kvcache.Cache, tiers *Tiers, from Collector, log *slog.Logger, reg prometheus.Registerer) (*Peers, error) {
	if cfg.LoadTimeout <= 0 || cfg.MinLoadTokens < 0 || cfg.FetchBlocks < 1 || cfg.GiveBlocks < 1 || cfg.FetchQuota < 0 || cfg.GiveQuota < 0 || cfg.BlockBytes < 1 {
		return nil, fmt.Errorf("tier: bounds of peers: %+v", cfg)
	}
	p := &Peers{cfg: cfg, cache: cache, tiers: tiers, from: from, log: log, quota: bucket{rate: cfg.FetchQuota}, giveaway: bucket{rate: cfg.GiveQuota}}
	var err error
	p.metrics, err = newPeerMetrics(p, reg)
	return p, err
}

// Load fetches what the index lacks of a prompt's first upto tokens from the peer that reaches
// furthest, then from the next, and returns how many tokens came. LoadTimeout bounds it.
func (p *Peers) Load(ctx context.Context, requestID string, tokens []int32, salt string, upto int, peers []Peer) int {
	reach := 0
	for i := range peers {
		reach = max(reach, peers[i].Tokens)
	}
	if upto = min(upto, reach, len(tokens)); upto < p.least() {
		return 0
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.LoadTimeout)
	defer cancel()
	chain := p.cache.NewChain(salt)
	chain.Extend(tokens[:upto])
	return p.load(ctx, requestID, tokens, salt, &chain, upto, p.least(), peers)
}

// pieceBytes is how much Follow fetches at once: what has come stays, whatever becomes of the rest.
const pieceBytes = 64 << 20

// Follow is Load of all whole units of a stream that runs at the peers, piece by piece, however few.
// ctx alone bounds it: no client waits.
func (p *Peers) Follow(ctx context.Context, requestID string, tokens []int32, salt string, peers []Peer) (total int) {
	unit := p.cache.UnitTokens()
	chain := p.cache.NewChain(salt)
	chain.Extend(tokens)
	whole := len(tokens) / unit * unit
	piece := max(pieceBytes/(int64(unit/p.cache.BlockTokens())*p.cfg.BlockBytes), 1) * int64(unit)
	for ctx.Err() == nil {
		from := p.cache.Reach(&chain, whole)
		upto := min(from+int(piece), whole)
		n := 0
		if upto > from {
			n = p.load(ctx, requestID, tokens, salt, &chain, upto, unit, peers)
		}
		if n == 0 {
			break
		}
		total += n
	}
	return total
}

// load is Load of at least so many tokens; chain covers upto.
func (p *Peers) load(ctx context.Context, requestID string, tokens []int32, salt string, chain *kvcache.Chain, upto, least int, peers []Peer) int {
	if upto-p.tiers.local(chain, p.cache.Reach(chain, upto), upto, p.cache.UnitTokens()) < least {
		return 0 // as much is here, for Load or Stage
	}
	p.tiers.LoadLocal(ctx, tokens, salt, upto) // what lies before it
	untried := slices.Clone(peers)
	slices.SortStableFunc(untried, func(a, b Peer) int { return b.Tokens - a.Tokens })
	total := 0
	for ctx.Err() == nil {
		from := p.cache.Reach(chain, upto)
		i := slices.IndexFunc(untried, func(peer Peer) bool { return min(peer.Tokens, upto)-from >= least })
		if i < 0 {
			break
		}
		first := chain.Name(from + p.cache.UnitTokens())
		wait, mine := p.loading.begin(first)
		if mine == nil { // another request fetches the same: look again after it
			select {
			case <-wait:
			case <-ctx.Done():
			}
			continue
		}
		if p.cache.Knows(first) { // since we looked
			mine()
			continue
		}
		peer := untried[i]
		untried = slices.Delete(untried, i, i+1)
		total += p.fetch(ctx, &Fetch{Peer: peer, RequestID: requestID, Tokens: tokens, Salt: salt, Chain: chain, Upto: min(peer.Tokens, upto), Least: least}, from)
		mine()
	}
	return total
}

// least is how many tokens are worth a fetch.
func (p *Peers) least() int { return max(p.cfg.MinLoadTokens, p.cache.UnitTokens()) }

// fetch asks one peer, unless it is left alone.
func (p *Peers) fetch(ctx context.Context, f *Fetch, from int) int {
	over, ok := p.enter(f, from)
	if !ok {
		return 0
	}
	f.Deadline, _ = ctx.Deadline()
	n, err := p.from.Collect(ctx, f)
	over(n, err)
	return n
}

// enter reports whether a fetch may be made now; over must then be called with its outcome.
func (p *Peers) enter(f *Fetch, from int) (over func(tokens int, err error), ok bool) {
	refuse := func(blocks int, result string) (func(int, error), bool) {
		p.unbook(blocks, blocks)
		p.metrics.fetches.WithLabelValues(result).Inc()
		return nil, false
	}
	blocks, ok := p.book((f.Upto-from)/p.cache.BlockTokens(), f)
	if !ok { // before the peer's guard: it says nothing about the peer
		return refuse(blocks, "no_room")
	}
	done, ok := p.guards.enter(guardKey{f.Peer.ID, f.Peer.Epoch}, time.Now())
	if !ok {
		return refuse(blocks, "shut")
	}
	began := time.Now()
	return func(n int, err error) {
		nothing := errors.Is(err, ErrBusy) || errors.Is(err, ErrAbsent)
		unused := 0
		if err == nil || nothing {
			unused = blocks - n/p.cache.BlockTokens()
		}
		p.unbook(blocks, unused)
		p.count(f, began, n, err)
		if nothing || errors.Is(err, context.Canceled) { // the request left
			err = nil
		}
		done(n > 0, err, time.Now())
	}, true
}

// count notes how a fetch ended.
func (p *Peers) count(f *Fetch, began time.Time, n int, err error) {
	p.metrics.seconds.Observe(time.Since(began).Seconds())
	p.metrics.hits.Add(float64(n / p.cache.UnitTokens()))
	p.metrics.loaded.Add(float64(n))
	result := "done"
	switch {
	case err == nil && n == 0, errors.Is(err, ErrAbsent):
		result = "nothing"
	case err == nil:
	case errors.Is(err, context.Canceled):
		result = "cancelled"
	case errors.Is(err, ErrBusy):
		result = "no_room"
	case errors.Is(err, ErrCorrupt):
		result = "corrupt"
		p.metrics.corrupt.Inc()
		p.log.Error("KV of a peer does not agree with its digests; it is computed instead", "peer", f.Peer.ID, "error", err)
	default:
		result = "failed"
		p.log.Warn("KV not fetched from a peer; it is computed instead", "peer", f.Peer.ID, "request_id", f.RequestID, "error", err)
	}
	p.metrics.fetches.WithLabelValues(result).Inc()
}

// book takes a share of the blocks and bytes that fetches may have.
func (p *Peers) book(want int, f *Fetch) (blocks int, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fetches++
	f.Owner = fmt.Sprintf("peer/fetch-%d", p.fetches)
	if p.tiers != nil {
		blocks = p.tiers.lend(want, int(p.cfg.BlockBytes))
	} else {
		blocks = p.quota.take(min(want, p.cfg.FetchBlocks-p.taken), int(p.cfg.BlockBytes), time.Now())
	}
	p.taken += blocks
	f.Blocks = blocks
	return blocks, blocks*p.cache.BlockTokens() >= f.Least
}

// unbook gives back a fetch's blocks, and the bytes of those that did not move.
func (p *Peers) unbook(blocks, unused int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.taken -= blocks
	if p.tiers != nil {
		p.tiers.settle(-blocks)
		p.tiers.credit(unused, int(p.cfg.BlockBytes))
		return
	}
	p.quota.credit(unused, int(p.cfg.BlockBytes))
}
