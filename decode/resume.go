package decode

import (
	"container/list"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/kvconn"
)

// A transfer that broke leaves what has arrived: whole blocks at the front go
// to the prefix cache, where any request finds them, and so does decode when
// it has to compute the rest by itself; the others are shelved, with a note of
// which layers they have (remains). The next attempt at the same prompt takes
// them up and asks its prefill, mostly another one, for the rest only.

// table is where one prompt's rows go.
type table struct {
	blocks []int32
	had    int            // blocks at the front that the prefix cache had
	stored kvconn.UnitSet // of the others, what a broken transfer has brought

	resumed int // blocks of a layer that a broken transfer has brought, of both kinds
}

// remainder is a note of what a broken transfer left: blocks first .. whole-1 in
// the prefix cache, others on the shelf.
type remainder struct {
	first, whole int
	name         kvcache.Hash // of the prompt
	shelf        kvcache.Hash // its own, never used twice
	numerics     string       // of the sender
	index        []int        // of the shelved blocks in the prompt's table
	stored       kvconn.UnitSet
}

// remains is the bounded memory of broken transfers, and of those under way.
type remains struct {
	limit int

	mu     sync.Mutex
	byName map[kvcache.Hash]*list.Element // of *remainder
	order  *list.List                     // oldest first
	under  map[attempt]chan struct{}      // closed at the attempt's end
}

// attempt is what a repeated attempt has in common with the former one.
type attempt struct {
	request string
	index   int
	name    kvcache.Hash
}

func newRemains(limit int) *remains {
	return &remains{limit: limit, byName: map[kvcache.Hash]*list.Element{}, order: list.New(), under: map[attempt]chan struct{}{}}
}

// nameOf names the prompt: rows depend on its tokens, and are shared inside
// its salt only.
func nameOf(c *Claim) (name kvcache.Hash) {
	h := sha256.New()
	h.Write([]byte("xpyd remains"))
	h.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(c.Order.Salt))))
	h.Write([]byte(c.Order.Salt))
	b := make([]byte, 0, 4*len(c.Tokens))
	for _, t := range c.Tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	h.Write(b)
	copy(name[:], h.Sum(nil))
	return name
}

// begin notes an attempt and waits, as long as a fence may take, for a former one at
// the same prompt of the same request, to take up what that one had: a router repeats a request when the former
// attempt is over for it, which may be before it is over here.
func (r *remains) begin(ctx context.Context, c *Claim, name kvcache.Hash, wait time.Duration) (over func(), err error) {
	key := attempt{c.RequestID, c.Order.Index, name}
	mine := make(chan struct{})
	r.mu.Lock()
	former := r.under[key]
	r.under[key] = mine
	r.mu.Unlock()
	over = func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.under[key] == mine {
			delete(r.under, key)
		}
		close(mine)
	}
	if former == nil {
		return over, nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-former:
	case <-timer.C:
	case <-ctx.Done():
		over()
		return nil, context.Cause(ctx)
	}
	return over, nil
}

// put remembers a remainder, in place of an older one of its name, and returns
// the one that it forgets for it, if any.
func (r *remains) put(m *remainder) (gone *remainder) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if old := r.byName[m.name]; old != nil {
		gone = r.order.Remove(old).(*remainder)
	} else if r.order.Len() >= r.limit {
		gone = r.order.Remove(r.order.Front()).(*remainder)
		delete(r.byName, gone.name)
	}
	r.byName[m.name] = r.order.PushBack(m)
	return gone
}

func (r *remains) take(name kvcache.Hash) *remainder {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.byName[name]
	if e == nil {
		return nil
	}
	delete(r.byName, name)
	return r.order.Remove(e).(*remainder)
}

// leave gives up the blocks of a failed ticket that nobody writes to any more.
func (s *Service) leave(c *Claim, name kvcache.Hash, t *table, stored kvconn.UnitSet, from *kvconn.Session) {
	layers, bt := len(s.layers), s.cache.BlockTokens()
	whole := t.had
	for whole < len(t.blocks) && (whole+1)*bt <= len(c.Tokens) && stored.Block(whole) == layers {
		whole++
	}
	if whole > t.had && from.Exact() { // converted rows stand beside others only in a prompt that was converted as a whole
		chain := c.chain(s.cache)
		whole = max(t.had, s.cache.InsertChain(&chain, c.Tokens[:whole*bt], t.blocks[:whole], 0)/bt)
	} else {
		whole = t.had
	}
	m := &remainder{name: name, first: t.had, whole: whole, numerics: from.Peer().Numerics}
	rand.Read(m.shelf[:]) // never fails (crypto/rand)
	var shelved, rest []int32
	for i := whole; i < len(t.blocks); i++ {
		if stored.Block(i) > 0 {
			m.index = append(m.index, i)
			shelved = append(shelved, t.blocks[i])
		} else {
			rest = append(rest, t.blocks[i])
		}
	}
	if whole+len(shelved) > t.had && s.cfg.MaxRemains > 0 {
		m.stored = stored.Only(func(i int) bool { return i >= whole })
		s.cache.Shelve(m.shelf, shelved, c.Owner)
		shelved = nil
		if gone := s.remains.put(m); gone != nil {
			s.cache.Shelve(gone.shelf, nil, c.Owner)
		}
	}
	s.cache.Release(append(shelved, rest...), c.Owner)
	s.cache.Release(t.blocks[:whole], c.Owner)
}

// assemble returns blocks for the prompt: what the prefix cache has, what a
// broken transfer under the same numerics has left, and fresh ones.
func (s *Service) assemble(ctx context.Context, c *Claim, name kvcache.Hash, numerics string) (*table, error) {
	m := s.remains.take(name)
	var t *table
	if m != nil {
		t = s.resume(c, m, numerics)
	}
	if t == nil {
		blocks, had, err := s.reserve(ctx, c)
		if err != nil {
			return nil, err
		}
		t = &table{blocks: blocks, had: had}
	}
	if m != nil {
		t.resumed = t.stored.Len() + max(0, min(t.had, m.whole)-m.first)*len(s.layers)
	}
	return t, nil
}

// resume is assemble with a remainder; nil when that is of no use: made under
// other numerics, taken back for space, or others wait for the space it needs.
func (s *Service) resume(c *Claim, m *remainder, numerics string) *table {
	left := s.cache.Unshelve(m.shelf, c.Owner)
	if len(left) != len(m.index) || m.numerics != numerics {
		s.cache.Release(left, c.Owner)
		return nil
	}
	chain := c.chain(s.cache)
	n := s.cache.BlocksFor(len(c.Tokens))
	got, hit, err := s.cache.Reserve(&chain, len(c.Tokens)-1, n-len(left), 0, time.Now(), c.Owner)
	if err != nil {
		s.cache.Release(left, c.Owner)
		return nil
	}
	t := &table{had: hit / s.cache.BlockTokens()}
	at := map[int]int32{}
	t.blocks, got = append(t.blocks, got[:t.had]...), got[t.had:]
	for k, i := range m.index {
		if i < t.had { // the prefix cache has it by now: a block like any other
			got = append(got, left[k])
		} else {
			at[i] = left[k]
		}
	}
	for i := t.had; i < n; i++ {
		id, ok := at[i]
		if !ok {
			id, got = got[0], got[1:]
		}
		t.blocks = append(t.blocks, id)
	}
	t.stored = m.stored.Only(func(i int) bool { return i >= t.had })
	return t
}

// Metrics are this package's counters.
type Metrics struct {
	transfers, units, recomputed prometheus.Counter
}

// NewMetrics registers the metrics with reg.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "xpyd_kv_" + name, Help: help})
	}
	m := &Metrics{
		transfers:  counter("resumed_transfers_total", "Transfers that took up what a broken one of the same prompt had left."),
		units:      counter("resumed_units_total", "Blocks of one layer that did not move again because a broken transfer had brought them."),
		recomputed: counter("recomputed_tokens_total", "Prompt tokens that prefill computed, not found in its cache, for transfers that were taken up."),
	}
	for _, c := range []prometheus.Collector{m.transfers, m.units, m.recomputed} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register decode's metrics: %w", err)
		}
	}
	return m, nil
}

func (m *Metrics) takenUp(units, recomputed int) {
	if m != nil {
		m.transfers.Inc()
		m.units.Add(float64(units))
		m.recomputed.Add(float64(recomputed))
	}
}
