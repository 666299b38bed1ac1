package kvevents

// Kind says what happened.
type Kind uint8

// Kinds.
const (
	Stored  Kind = iota // blocks can be matched from now on
	Removed             // blocks are gone from a tier
	Cleared             // all are
)

// Tier is where a block is.
type Tier uint8

// Tiers, from fast to slow. Shared storage that no single engine owns is Disk
// too: its engine can load from it.
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
	Rank    int     // data-parallel rank, 0 when not told
	Events  []Event
	Unknown int // events of kinds that are not known
}

// Event is one change. Hashes are the engine's names of blocks: integers as
// they are, of byte strings the last 8 bytes, which is what vLLM's integers
// are too.
type Event struct {
	Kind   Kind
	Hashes []uint64
	Tier   Tier
	// Group is the KV group of a model with several kinds of attention, and
	// Window says that the group forgets: only the others name prefixes.
	Group  int
	Window bool

	// Of Stored. The first block extends Parent, each other the one before.
	Parent    uint64
	HasParent bool
	Tokens    []uint32 // BlockSize of each block; none: blocks of a lower tier that were told of before
	BlockSize int
	LoRA      string   // adapter's name, or its number
	Extra     []uint64 // what else each block depends on, hashed; nil or 0: nothing
}

// Bounds of a batch; engines' own are far below.
const (
	maxEvents    = 1 << 16
	maxBlockSize = 1 << 16
	maxRank      = 1 << 12
)

// Decode reads a batch of either engine, in any of their shapes. Fields and
// events that are not known are skipped. Nothing is returned on error. The
// batch does not alias b.
func Decode(b []byte) (*Batch, error) {
	r := &reader{b}
	n, err := r.list()
	if err != nil {
		return nil, err
	}
	if n < 2 {
		return nil, malformed("a batch of %d fields", n)
	}
	out := &Batch{}
	if out.Time, err = r.float(); err != nil {
		return nil, err
	}
	events, err := r.list()
	if err != nil {
		return nil, err
	}
	if events > maxEvents {
		return nil, malformed("%d events", events)
	}
	for range events {
		ev, known, err := r.event()
		if err != nil {
			return nil, err
		}
		if known {
			out.Events = append(out.Events, ev)
		} else {
			out.Unknown++
		}
	}
	for i := 2; i < n; i++ {
		if i == 2 && r.peek() == kindInt {
			out.Rank, err = r.count(maxRank)
		} else {
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	if len(r.b) > 0 {
		return nil, malformed("%d bytes after the batch", len(r.b))
	}
	return out, nil
}

// places is the order of the fields where an event is a list, after its type.
var places = map[string][]string{
	"BlockStored": {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
		"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"},
	"BlockRemoved":     {"block_hashes", "medium", "group_idx"},
	"AllBlocksCleared": {},
}

// event reads one event: a map with its type among the fields, or a list that
// begins with it.
func (r *reader) event() (ev Event, known bool, err error) {
	if r.peek() == kindMap {
		return r.named()
	}
	n, err := r.list()
	if err != nil {
		return ev, false, err
	}
	if n == 0 {
		return ev, false, malformed("an event without a type")
	}
	tag, err := r.text()
	if err != nil {
		return ev, false, err
	}
	names, known := places[string(tag)]
	d := draft{}
	for i := range n - 1 {
		switch {
		case i >= len(names):
			err = r.skip()
		case names[i] == "lora_name" && r.peek() == kindMap:
			err = d.metadata(r) // SGLang's, at the place where vLLM has a name
		default:
			err = d.field(r, names[i])
		}
		if err != nil {
			return ev, false, err
		}
	}
	if !known {
		return ev, false, nil
	}
	return d.event(string(tag))
}

func (r *reader) named() (ev Event, known bool, err error) {
	n, err := r.fields()
	if err != nil {
		return ev, false, err
	}
	d, tag := draft{}, ""
	for range n {
		key, err := r.text()
		if err != nil {
			return ev, false, err
		}
		if string(key) == "type" {
			var b []byte
			b, err = r.text()
			tag = string(b)
		} else {
			err = d.field(r, string(key))
		}
		if err != nil {
			return ev, false, err
		}
	}
	if _, known = places[tag]; !known {
		if tag == "" {
			err = malformed("an event without a type")
		}
		return ev, false, err
	}
	return d.event(tag)
}
