package kvcache

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// holding is one owner's account.
type holding struct {
	refs        map[int32]int
	quarantined map[int32]bool
	state       string
	since       time.Time
	silent      time.Time // since when some are in quarantine
}

func (h *holding) quarantine(id int32) {
	if len(h.quarantined) == 0 {
		h.quarantined, h.silent = make(map[int32]bool), time.Now()
	}
	h.quarantined[id] = true
}

// Holder is one line of the ledger.
type Holder struct {
	Owner  string    `json:"owner"`
	Blocks []int32   `json:"blocks"` // ascending
	State  string    `json:"state"`
	Since  time.Time `json:"since"` // when the owner began to hold anything, or the first went into quarantine
	Why    string    `json:"why"`
}

// States of held blocks. The cache sets held and quarantined, SetState the others.
const (
	StateHeld        = "held"
	StateReceiving   = "receiving"
	StateWaiting     = "waiting"
	StateRunning     = "running"
	StateFinished    = "finished"
	StateQuarantined = "quarantined"
)

// why says what blocks of each state are held for.
var why = map[string]string{
	StateHeld:        "reserved for a request",
	StateReceiving:   "a prefill fills them under a ticket",
	StateWaiting:     "its sequences wait for their turn in the batch",
	StateRunning:     "its sequences run",
	StateFinished:    "the prompt is computed; a receiver or a lease still reads them",
	StateQuarantined: "a peer that was told to stop may still write to them",
}

// SetState sets what owner's blocks are for, as the ledger shows it, if owner holds any.
func (c *Cache) SetState(owner, state string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h := c.owners[owner]; h != nil {
		h.state = state
	}
}

// Holders lists who holds blocks, by owner: one line for held ones, one for quarantined ones.
func (c *Cache) Holders() []Holder {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []Holder
	for owner, h := range c.owners {
		if len(h.refs) > 0 {
			list = append(list, Holder{owner, slices.Sorted(maps.Keys(h.refs)), h.state, h.since, why[h.state]})
		}
		if len(h.quarantined) > 0 {
			list = append(list, Holder{owner, slices.Sorted(maps.Keys(h.quarantined)), StateQuarantined, h.silent, why[StateQuarantined]})
		}
	}
	slices.SortFunc(list, func(a, b Holder) int {
		return cmp.Or(strings.Compare(a.Owner, b.Owner), strings.Compare(a.State, b.State))
	})
	return list
}

// held is how many references owner has to a block.
func (c *Cache) held(id int32, owner string) int {
	if h := c.owners[owner]; h != nil {
		return h.refs[id]
	}
	return 0
}

// holding returns owner's account, and opens it for n blocks if there is none.
func (c *Cache) holding(owner string, n int) *holding {
	h := c.owners[owner]
	if h == nil {
		h = &holding{refs: make(map[int32]int, n), state: StateHeld, since: time.Now()}
		c.owners[owner] = h
	}
	return h
}

// disown takes one reference off owner's account.
func (c *Cache) disown(id int32, owner string) {
	if c.held(id, owner) == 0 {
		panic(fmt.Sprintf("kvcache: release of block %d, which %q does not hold", id, owner))
	}
	h := c.owners[owner]
	if h.refs[id]--; h.refs[id] == 0 {
		delete(h.refs, id)
		c.forget(owner, h)
	}
}

// forget closes an empty account.
func (c *Cache) forget(owner string, h *holding) {
	if len(h.refs) == 0 && len(h.quarantined) == 0 {
		delete(c.owners, owner)
	}
}
