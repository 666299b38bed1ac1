package kvcache

import (
	"fmt"
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

// States of held blocks. The cache itself gives held and quarantined, the
// others come by SetState.
const (
	StateHeld        = "held"
	StateReceiving   = "receiving"
	StateWaiting     = "waiting"
	StateRunning     = "running"
	StateFinished    = "finished"
	StateQuarantined = "quarantined"
)

// why says what blocks of a state are held for.
func why(state string) string {
	switch state {
	case StateReceiving:
		return "a prefill fills them under a ticket"
	case StateWaiting:
		return "its sequences wait for their turn in the batch"
	case StateRunning:
		return "its sequences run"
	case StateFinished:
		return "the prompt is computed; a receiver or a lease still reads them"
	case StateQuarantined:
		return "a peer that was told to stop may still write to them"
	}
	return "reserved for a request"
}

// SetState names what owner's blocks are for, as the ledger shows it. Nothing
// happens when owner holds nothing.
func (c *Cache) SetState(owner, state string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h := c.owners[owner]; h != nil {
		h.state = state
	}
}

// Holders lists who holds blocks, by owner: one line for held ones, one for
// quarantined ones. Empty means that nothing is held.
func (c *Cache) Holders() []Holder {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []Holder
	for owner, h := range c.owners {
		if len(h.refs) > 0 {
			list = append(list, Holder{owner, sortedKeys(h.refs), h.state, h.since, why(h.state)})
		}
		if len(h.quarantined) > 0 {
			list = append(list, Holder{owner, sortedKeys(h.quarantined), StateQuarantined, h.silent, why(StateQuarantined)})
		}
	}
	slices.SortFunc(list, func(a, b Holder) int {
		if d := strings.Compare(a.Owner, b.Owner); d != 0 {
			return d
		}
		return strings.Compare(a.State, b.State)
	})
	return list
}

func sortedKeys[V any](m map[int32]V) []int32 {
	ids := make([]int32, 0, len(m))
	for id := range m {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// holding returns owner's account, opening it if need be.
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
	h := c.owners[owner]
	if h == nil || h.refs[id] == 0 {
		panic(fmt.Sprintf("kvcache: release of block %d, which %q does not hold", id, owner))
	}
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
