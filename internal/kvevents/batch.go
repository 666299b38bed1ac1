package kvevents

import "github.com/tinylib/msgp/msgp"

// Kind says what happened.
type Kind uint8

// Kinds.
const (
	Stored  Kind = iota // blocks can be matched from now on
	Removed             // blocks are gone from a tier
	Cleared             // all blocks are gone
)

// Tier is where a block is.
type Tier uint8

// Tiers, from fast to slow. Storage that engines share is Disk too.
const (
	GPU Tier = iota
	Host
	Disk
	Tiers = 3
)

func (t Tier) String() string { return [...]string{"gpu", "host", "disk"}[t] }

// Batch is one message of a publisher.
type Batch struct {
	Time    float64 // seconds since 1970, by the engine's clock
	Rank    int     // data-parallel rank, 0 when not given
	Events  []Event
	Unknown int // events of unknown kinds
}

// Event is one change. Hashes are the engine's names of blocks: integers, or the last 8 bytes of
// byte strings, as vLLM's integers are.
type Event struct {
	Kind   Kind
	Hashes []uint64
	Tier   Tier
	// Group is the KV group of a model with several kinds of attention. Only those that keep all
	// of a prompt (without Window) name prefixes.
	Group  int
	Window bool

	// For Stored only. The first block extends Parent, each other the one before it.
	Parent    uint64
	HasParent bool
	Tokens    []uint32 // BlockSize for each block; none: blocks of a lower tier that were announced before
	BlockSize int
	LoRA      string   // adapter's name, or its number
	Extra     []uint64 // what else each block depends on, hashed; nil or 0: nothing
}

// Bounds of a batch; those of real engines are far below.
const (
	maxEvents    = 1 << 16
	maxBlockSize = 1 << 16
	maxRank      = 1 << 12
)

// Decode reads a batch of either engine, in any of their shapes, and does not alias b. It skips
// unknown fields and events.
func Decode(b []byte) (*Batch, error) {
	r, out := &reader{b: b}, &Batch{}
	n := r.list()
	if n < 2 {
		r.fail("a batch of %d fields", n)
	}
	out.Time = r.float()
	events := r.list()
	if events > maxEvents {
		r.fail("%d events", events)
	}
	for i := 0; i < events && r.err == nil; i++ {
		if ev, known := r.event(); known {
			out.Events = append(out.Events, ev)
		} else {
			out.Unknown++
		}
	}
	for i := 2; i < n && r.err == nil; i++ {
		if i == 2 && r.isInteger() {
			out.Rank = r.count(maxRank)
		} else {
			r.skip()
		}
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	return out, nil
}

// places is the order of an event's fields, after its type, where the event is a list.
var places = map[string][]string{
	"BlockStored": {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
		"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"},
	"BlockRemoved":     {"block_hashes", "medium", "group_idx"},
	"AllBlocksCleared": {},
}

// event reads one event: a map with its type among the fields, or a list that begins with it.
func (r *reader) event() (ev Event, known bool) {
	d, tag := draft{}, ""
	if msgp.NextType(r.b) == msgp.MapType {
		for n := r.fields(); n > 0 && r.err == nil; n-- {
			if key := r.text(); key == "type" {
				tag = r.text()
			} else {
				d.field(r, key)
			}
		}
	} else if n := r.list(); n > 0 {
		tag = r.text()
		names := places[tag]
		for i := 0; i < n-1 && r.err == nil; i++ {
			switch {
			case i >= len(names):
				r.skip()
			case names[i] == "lora_name" && msgp.NextType(r.b) == msgp.MapType:
				d.metadata(r) // SGLang's, at the place where vLLM has a name
			default:
				d.field(r, names[i])
			}
		}
	}
	if tag == "" {
		r.fail("an event without a type")
	}
	if _, known = places[tag]; !known || r.err != nil {
		return Event{}, false
	}
	return d.event(r, tag), true
}
