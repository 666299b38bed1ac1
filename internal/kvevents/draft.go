package kvevents

import (
	"hash/fnv"
	"strconv"
	"strings"

	"github.com/tinylib/msgp/msgp"
)

// draft is an event while its fields are read, in any order.
type draft struct {
	ev     Event
	hashes bool // block_hashes was there
	loraID string
	common uint64 // what all blocks depend on
}

// field reads one field and skips unknown ones.
func (d *draft) field(r *reader, name string) {
	if r.null() {
		return
	}
	ev := &d.ev
	switch {
	case name == "block_hashes":
		d.hashes = true
		ev.Hashes = make([]uint64, r.list())
		for i := 0; i < len(ev.Hashes) && r.err == nil; i++ {
			ev.Hashes[i] = r.hash()
		}
	case name == "parent_block_hash":
		ev.HasParent = true
		ev.Parent = r.hash()
	case name == "token_ids":
		ev.Tokens = make([]uint32, r.list())
		for i := 0; i < len(ev.Tokens) && r.err == nil; i++ {
			ev.Tokens[i] = uint32(r.count(1<<32 - 1))
		}
	case name == "block_size":
		ev.BlockSize = r.count(maxBlockSize)
	case name == "lora_id" && r.isInteger():
		d.loraID = strconv.FormatUint(r.integer(), 10)
	case name == "lora_name" && r.isText():
		ev.LoRA = r.text()
	case name == "medium" && r.isText():
		ev.Tier = tierOf(r.text())
	case name == "extra_keys":
		d.readExtra(r)
	case name == "group_idx" && r.isInteger():
		ev.Group = r.count(1 << 16)
	case name == "kv_cache_spec_kind" && r.isText():
		ev.Window = forgets(r.text())
	case name == "metadata":
		d.metadata(r)
	default:
		r.skip()
	}
}

// tierOf reads vLLM's GPU, CPU, STORAGE and SGLang's GPU, CPU_PINNED, DISK, EXTERNAL.
func tierOf(medium string) Tier {
	switch m := strings.ToUpper(medium); {
	case strings.HasPrefix(m, "GPU"), m == "":
		return GPU
	case strings.HasPrefix(m, "CPU"):
		return Host
	}
	return Disk
}

// forgets reports whether a group of that kind keeps less than the whole prefix.
func forgets(spec string) bool {
	s := strings.ToLower(spec)
	return strings.Contains(s, "window") || strings.Contains(s, "mamba") || strings.Contains(s, "chunked")
}

// hash reads a block's name.
func (r *reader) hash() (v uint64) {
	if r.isInteger() {
		return r.integer()
	}
	b := r.bytes()
	if len(b) == 0 || len(b) > 64 {
		r.fail("a block hash of %d bytes", len(b))
	}
	for _, c := range b[max(0, len(b)-8):] {
		v = v<<8 | uint64(c)
	}
	return v
}

// readExtra reads what each block depends on besides its tokens: nil or a list for each.
// Only equality matters, so anything but nil is hashed as it came.
func (d *draft) readExtra(r *reader) {
	if msgp.NextType(r.b) != msgp.ArrayType {
		r.skip()
		return
	}
	extra := make([]uint64, r.list())
	for i := 0; i < len(extra) && r.err == nil; i++ {
		if !r.null() {
			extra[i] = ExtraOf(r.skip())
			d.ev.Extra = extra
		}
	}
}

// metadata reads SGLang's map of what a block depends on.
func (d *draft) metadata(r *reader) {
	if raw := r.skip(); len(raw) > 1 { // not the empty map
		d.common = ExtraOf(raw)
	}
}

// ExtraOf hashes the msgpack of extra keys; never 0.
func ExtraOf(raw []byte) uint64 {
	h := fnv.New64a()
	h.Write(raw)
	return max(h.Sum64(), 1)
}

// SaltExtra is the Extra of a prompt's first block with that cache salt and no other extra keys,
// as in vLLM.
func SaltExtra(salt string) uint64 {
	return ExtraOf(msgp.AppendString(msgp.AppendArrayHeader(nil, 1), salt))
}

// event checks the fields that were read.
func (d *draft) event(r *reader, tag string) Event {
	ev := &d.ev
	if !d.hashes && tag != "AllBlocksCleared" {
		r.fail("%s without block_hashes", tag)
	}
	switch {
	case tag == "AllBlocksCleared":
		return Event{Kind: Cleared}
	case tag == "BlockRemoved":
		return Event{Kind: Removed, Hashes: ev.Hashes, Tier: ev.Tier, Group: ev.Group, Window: ev.Window}
	case len(ev.Tokens) == 0 && len(ev.Hashes) > 0 && ev.Tier != GPU:
		// Offloading engines give only the names of blocks that they copy to a lower tier.
	case ev.BlockSize == 0:
		r.fail("%s without a block size", tag)
	case len(ev.Tokens) != len(ev.Hashes)*ev.BlockSize:
		r.fail("%d tokens in %d blocks of %d", len(ev.Tokens), len(ev.Hashes), ev.BlockSize)
	case ev.Extra != nil && len(ev.Extra) != len(ev.Hashes):
		r.fail("%d extra keys of %d blocks", len(ev.Extra), len(ev.Hashes))
	}
	if ev.LoRA == "" {
		ev.LoRA = d.loraID
	}
	if d.common != 0 {
		ev.Extra = make([]uint64, len(ev.Hashes))
		for i := range ev.Extra {
			ev.Extra[i] = d.common
		}
	}
	return *ev
}
