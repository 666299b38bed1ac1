package mock

import (
	"cmp"
	"encoding/json"
	"errors"
	"hash/fnv"
	"slices"
	"sync"
	"time"

	"github.com/xpyd/xpyd/internal/kvevents"
)

// KVEvents makes a mock publish the blocks that it would cache of its prompts; the least recently
// used is evicted first.
type KVEvents struct {
	Listen string // host:port; "" publishes nothing
	Replay string // host:port of the replay socket
	Topic  string
	Arrays bool // events in the older form, like SGLang
	Block  int  // tokens per block; 0 means 16
	Blocks int  // size of the cache; 0 means 1,024
}

// blocks is the cache that a mock pretends to have.
type blocks struct {
	cfg KVEvents
	pub *kvevents.Publisher

	mu     sync.Mutex
	hashes []uint64 // least recently used first
}

// newBlocks returns nil if there is nothing to publish.
func newBlocks(cfg KVEvents) (*blocks, error) {
	if cfg.Listen == "" {
		return nil, nil
	}
	if cfg.Block < 0 || cfg.Blocks < 0 {
		return nil, errors.New("kv events: a size is negative")
	}
	cfg.Block, cfg.Blocks = cmp.Or(cfg.Block, 16), cmp.Or(cfg.Blocks, 1024)
	pub, err := kvevents.Publish(kvevents.PublisherConfig{Listen: cfg.Listen, Replay: cfg.Replay, Topic: cfg.Topic, Arrays: cfg.Arrays})
	if err != nil {
		return nil, err
	}
	return &blocks{cfg: cfg, pub: pub}, nil
}

func (b *blocks) close() error {
	if b == nil {
		return nil
	}
	return b.pub.Close()
}

// tokensOf tokenises for the cache: ids as they are, text as one token per byte.
func tokensOf(prompt string) []uint32 {
	var ids []uint32
	if json.Unmarshal([]byte(prompt), &ids) == nil {
		return ids
	}
	ids = make([]uint32, len(prompt))
	for i := range ids {
		ids[i] = uint32(prompt[i])
	}
	return ids
}

// store caches a prompt's whole blocks and publishes the changes.
func (b *blocks) store(prompt string) {
	if b == nil {
		return
	}
	tokens, size := tokensOf(prompt), b.cfg.Block
	b.mu.Lock()
	defer b.mu.Unlock()
	stored := kvevents.Event{BlockSize: size}
	removed := kvevents.Event{Kind: kvevents.Removed}
	h := fnv.New64a() // its sum names the prefix
	var parent uint64
	for n := range min(len(tokens)/size, b.cfg.Blocks) {
		block := tokens[n*size : (n+1)*size]
		for _, t := range block {
			h.Write([]byte{byte(t), byte(t >> 8), byte(t >> 16), byte(t >> 24)})
		}
		hash := h.Sum64()
		i := slices.Index(b.hashes, hash)
		if i < 0 {
			if len(stored.Hashes) == 0 {
				stored.Parent, stored.HasParent = parent, n > 0
			}
			stored.Hashes = append(stored.Hashes, hash)
			stored.Tokens = append(stored.Tokens, block...)
			if i = len(b.hashes); i >= b.cfg.Blocks {
				i = 0 // evict the oldest
				removed.Hashes = append(removed.Hashes, b.hashes[0])
			}
		}
		if i < len(b.hashes) {
			b.hashes = slices.Delete(b.hashes, i, i+1)
		}
		b.hashes = append(b.hashes, hash)
		parent = hash
	}
	batch := &kvevents.Batch{Time: float64(time.Now().UnixMicro()) / 1e6}
	for _, ev := range []kvevents.Event{removed, stored} {
		if len(ev.Hashes) > 0 {
			batch.Events = append(batch.Events, ev)
		}
	}
	if len(batch.Events) > 0 {
		b.pub.Send(batch)
	}
}

// ClearKV empties the cache, as an engine's reset does.
func (e *Engine) ClearKV() {
	b := e.blocks
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hashes = nil
	b.pub.Send(&kvevents.Batch{Events: []kvevents.Event{{Kind: kvevents.Cleared}}})
}

// LoseKV loses a batch of events.
func (e *Engine) LoseKV() {
	if e.blocks != nil {
		e.blocks.pub.Lose()
	}
}

// KVAddrs are the addresses of events and replays, "" for none.
func (e *Engine) KVAddrs() (events, replay string) {
	if e.blocks == nil {
		return "", ""
	}
	if a := e.blocks.pub.ReplayAddr(); a != nil {
		replay = a.String()
	}
	return e.blocks.pub.Addr().String(), replay
}
