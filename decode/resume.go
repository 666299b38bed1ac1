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

// What a broken transfer has brought is kept. Leading whole blocks go to the prefix cache, for any
// request. The others are shelved, and their layers recorded (remains). The next attempt at the
// same prompt takes them and asks its prefill worker, usually another one, only for the rest.

// table is the blocks of a prompt.
type table struct {
	blocks  []int32
	had     int            // leading blocks from the prefix cache
	stored  kvconn.UnitSet // of the others, what a broken transfer brought
	resumed int            // blocks of one layer that a broken transfer brought, of all blocks
}

// remainder is what a broken transfer left: blocks first to whole-1 in the prefix cache, others on
// the shelf.
type remainder struct {
	first, whole int
	name         kvcache.Hash // of the prompt
	shelf        kvcache.Hash // unique
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

// attempt identifies attempts at the same work.
type attempt struct {
	request string
	index   int
	name    kvcache.Hash
}

func newRemains(limit int) *remains {
	return &remains{limit: limit, byName: map[kvcache.Hash]*list.Element{}, order: list.New(), under: map[attempt]chan struct{}{}}
}

// nameOf names a prompt by its tokens and its salt, which bounds sharing.
func nameOf(c *Claim) (name kvcache.Hash) {
	h := sha256.New()
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

// begin starts an attempt. It first waits for a former one at the same prompt of the same request,
// to reuse what that brought: a router may repeat a request before the former attempt is over here.
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

// put stores a remainder, and returns the one that it replaces: that of the same name, or the
// oldest.
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

func (r *remains) remove(name kvcache.Hash) *remainder {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.byName[name]
	if e == nil {
		return nil
	}
	delete(r.byName, name)
	return r.order.Remove(e).(*remainder)
}

// salvage keeps what a failed ticket brought, for another attempt, and releases its other blocks.
// Nobody writes to them any more.
func (s *Service) salvage(c *Claim, name kvcache.Hash, t *table, stored kvconn.UnitSet, from *kvconn.Session) {
	bt := s.cache.BlockTokens()
	whole := s.whole(stored, t.had, len(c.Tokens)/bt)
	if whole > t.had && from.Exact() { // a prompt must not mix converted rows with others
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

// assemble returns blocks for the prompt: from the prefix cache, from a broken transfer with the
// same numerics, and fresh ones.
func (s *Service) assemble(ctx context.Context, c *Claim, name kvcache.Hash, numerics string) (*table, error) {
	m := s.remains.remove(name)
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

// resume is assemble with a remainder. It returns nil if the remainder is of no use: other
// numerics, blocks taken by others, or no space for the rest.
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
		if i < t.had { // the prefix cache has it by now: use it as a fresh block
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
