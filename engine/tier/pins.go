package tier

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
)

// Errors of Pin.
var (
	ErrPinned  = errors.New("too much is pinned")
	ErrNoTiers = errors.New("there is no KV tier in host memory")
	ErrShort   = errors.New("the prompt is shorter than one unit")
)

// pins are prefixes that are kept for a time. A unit is pinned by name and counts against
// the share whether or not a tier has it yet. The lock is the innermost: levels call has
// under their own.
type pins struct {
	most int // names that may be pinned

	mu    sync.Mutex
	names map[kvcache.Hash]int // pins that each name is part of
	list  map[kvcache.Hash]*pin
}

type pin struct {
	keys   []kvcache.Hash // of its units; the last one is its id
	tokens int
	until  time.Time
}

// Pinned is one pin.
type Pinned struct {
	ID     string    `json:"id"`
	Tokens int       `json:"tokens"` // whole units of the prompt
	Units  int       `json:"units"`
	Until  time.Time `json:"until"`
	// Where its units are. The others are kept once they are computed.
	Host int `json:"host_units"`
	SSD  int `json:"ssd_units"` // below, of those not in host memory
}

func newPins() *pins {
	return &pins{names: make(map[kvcache.Hash]int), list: make(map[kvcache.Hash]*pin)}
}

func (p *pins) has(key kvcache.Hash) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.names[key] > 0
}

func (p *pins) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.names)
}

// add adds a pin or renews it.
func (p *pins) add(one *pin) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := one.keys[len(one.keys)-1]
	if old := p.list[id]; old != nil {
		old.until = one.until
		return nil
	}
	n := len(p.names)
	for _, key := range one.keys {
		if p.names[key] == 0 {
			n++
		}
	}
	if n > p.most {
		return fmt.Errorf("%w: %d units with this prompt's, %d may be", ErrPinned, n, p.most)
	}
	for _, key := range one.keys {
		p.names[key]++
	}
	p.list[id] = one
	return nil
}

// remove ends a pin; nil: there is none.
func (p *pins) remove(id kvcache.Hash) *pin {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.end(id)
}

// end is remove under the lock.
func (p *pins) end(id kvcache.Hash) *pin {
	one := p.list[id]
	if one == nil {
		return nil
	}
	delete(p.list, id)
	for _, key := range one.keys {
		if p.names[key]--; p.names[key] == 0 {
			delete(p.names, key)
		}
	}
	return one
}

// expired ends the pins whose time is over, and returns when the next one's will be.
func (p *pins) expired(now time.Time) (over []*pin, next time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, one := range p.list {
		switch {
		case !one.until.After(now):
			over = append(over, p.end(id))
		case next.IsZero() || one.until.Before(next):
			next = one.until
		}
	}
	return over, next
}

// all lists the pins in the order in which they end.
func (p *pins) all() []*pin {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []*pin
	for _, one := range p.list {
		c := *one // until changes
		list = append(list, &c)
	}
	slices.SortFunc(list, func(a, b *pin) int { return a.until.Compare(b.until) })
	return list
}

// Pin keeps the prompt's whole units in this worker's own levels for ttl from now: those
// that are there, and the others once they are computed. Pinning again renews the pin.
// Errors: ErrPinned, ErrNoTiers, ErrShort.
func (t *Tiers) Pin(tokens []int32, salt string, ttl time.Duration) (Pinned, error) {
	if t == nil {
		return Pinned{}, ErrNoTiers
	}
	one, chain := t.pinOf(tokens, salt)
	if one == nil {
		return Pinned{}, ErrShort
	}
	one.until = time.Now().Add(ttl)
	if err := t.pins.add(one); err != nil {
		return Pinned{}, err
	}
	t.pinsChanged()
	t.host.Repin(one.keys)
	for i, key := range one.keys { // what only the pool has is copied now
		if !t.host.Has(key) {
			t.enqueue(save{Unit: level.Unit{Key: key, Parent: chain.Name(i * t.shape.Tokens()), Root: chain.Name(0), Pos: i * t.shape.Tokens()}})
		}
	}
	poke(t.repin)
	return t.pinned(one), nil
}

// poke wakes whoever waits for c, now or next.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// pinOf makes the pin of a prompt; nil if the prompt is shorter than a unit.
func (t *Tiers) pinOf(tokens []int32, salt string) (one *pin, chain kvcache.Chain) {
	chain = t.cache.NewChain(salt)
	chain.Extend(tokens)
	unit := t.shape.Tokens()
	if len(tokens) < unit {
		return nil, chain
	}
	one = &pin{tokens: len(tokens) / unit * unit}
	for end := unit; end <= one.tokens; end += unit {
		one.keys = append(one.keys, chain.Name(end))
	}
	return one, chain
}

// PinID returns the id that Pin gives to the same prompt; "" if it is too short.
func (t *Tiers) PinID(tokens []int32, salt string) string {
	if t != nil {
		if one, _ := t.pinOf(tokens, salt); one != nil {
			return one.id()
		}
	}
	return ""
}

func (p *pin) id() string { return fmt.Sprintf("%x", p.keys[len(p.keys)-1]) }

// Unpin ends a pin. It returns false if there is none with that id.
func (t *Tiers) Unpin(id string) bool {
	var key kvcache.Hash
	if t == nil || key.UnmarshalText([]byte(id)) != nil {
		return false
	}
	one := t.pins.remove(key)
	if one == nil {
		return false
	}
	t.pinsChanged()
	t.host.Repin(one.keys)
	return true
}

// Pins lists the pins in the order in which they end.
func (t *Tiers) Pins() []Pinned {
	if t == nil {
		return nil
	}
	var list []Pinned
	for _, one := range t.pins.all() {
		list = append(list, t.pinned(one))
	}
	return list
}

// PinnedUnits returns how many units are pinned, and how many may be.
func (t *Tiers) PinnedUnits() (n, most int) {
	if t == nil {
		return 0, 0
	}
	return t.pins.count(), t.pins.most
}

func (t *Tiers) pinned(one *pin) Pinned {
	p := Pinned{ID: one.id(), Tokens: one.tokens, Units: len(one.keys), Until: one.until}
	for _, key := range one.keys {
		if t.host.Has(key) {
			p.Host++
		} else if t.has(key) {
			p.SSD++
		}
	}
	return p
}

// expirer ends pins when their time is over, until the tiers close.
func (t *Tiers) expirer() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		over, next := t.pins.expired(time.Now())
		for _, one := range over {
			t.pinsChanged()
			t.host.Repin(one.keys)
		}
		if next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(next))
		}
		select {
		case <-timer.C:
		case <-t.repin:
		case <-t.awake.Done():
			return
		}
	}
}
