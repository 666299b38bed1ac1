package kvevents

import (
	"hash/fnv"
	"strconv"
	"strings"
)

// draft is an event while its fields are read, in any order.
type draft struct {
	ev     Event
	hashes bool // block_hashes was there
	loraID string
	common uint64 // what all blocks depend on
}

// field reads one field; those that are not known are skipped.
func (d *draft) field(r *reader, name string) (err error) {
	if r.null() {
		return nil
	}
	switch name {
	case "block_hashes":
		d.hashes = true
		err = d.readHashes(r)
	case "parent_block_hash":
		d.ev.HasParent = true
		d.ev.Parent, err = r.hash()
	case "token_ids":
		err = d.readTokens(r)
	case "block_size":
		d.ev.BlockSize, err = r.count(maxBlockSize)
	case "lora_id":
		if r.peek() != kindInt {
			return r.skip()
		}
		var v uint64
		v, _, err = r.integer()
		d.loraID = strconv.FormatUint(v, 10)
	case "lora_name":
		if r.peek() != kindText {
			return r.skip()
		}
		var b []byte
		b, err = r.text()
		d.ev.LoRA = string(b)
	case "medium":
		if r.peek() != kindText {
			return r.skip()
		}
		var b []byte
		b, err = r.text()
		d.ev.Tier = tierOf(string(b))
	case "extra_keys":
		err = d.readExtra(r)
	case "group_idx":
		if r.peek() != kindInt {
			return r.skip()
		}
		d.ev.Group, err = r.count(1 << 16)
	case "kv_cache_spec_kind":
		if r.peek() != kindText {
			return r.skip()
		}
		var b []byte
		b, err = r.text()
		d.ev.Window = forgets(string(b))
	case "metadata":
		err = d.metadata(r)
	default:
		err = r.skip()
	}
	return err
}

// tierOf reads vLLM's GPU, CPU, STORAGE and SGLang's GPU, CPU_PINNED, DISK,
// EXTERNAL.
func tierOf(medium string) Tier {
	switch m := strings.ToUpper(medium); {
	case strings.HasPrefix(m, "GPU"), m == "":
		return GPU
	case strings.HasPrefix(m, "CPU"):
		return Host
	}
	return Disk
}

// forgets says whether a group of that kind keeps less than the whole prefix.
func forgets(spec string) bool {
	s := strings.ToLower(spec)
	return strings.Contains(s, "window") || strings.Contains(s, "mamba") || strings.Contains(s, "chunked")
}

// hash reads a block's name.
func (r *reader) hash() (uint64, error) {
	if r.peek() == kindInt {
		v, _, err := r.integer()
		return v, err
	}
	b, err := r.text()
	if err != nil {
		return 0, err
	}
	if len(b) == 0 || len(b) > 64 {
		return 0, malformed("a block hash of %d bytes", len(b))
	}
	var v uint64
	for _, c := range b[max(0, len(b)-8):] {
		v = v<<8 | uint64(c)
	}
	return v, nil
}

func (d *draft) readHashes(r *reader) error {
	n, err := r.list()
	if err != nil {
		return err
	}
	d.ev.Hashes = make([]uint64, n)
	for i := range d.ev.Hashes {
		if d.ev.Hashes[i], err = r.hash(); err != nil {
			return err
		}
	}
	return nil
}

func (d *draft) readTokens(r *reader) error {
	n, err := r.list()
	if err != nil {
		return err
	}
	d.ev.Tokens = make([]uint32, n)
	for i := range d.ev.Tokens {
		v, err := r.count(1<<32 - 1)
		if err != nil {
			return err
		}
		d.ev.Tokens[i] = uint32(v)
	}
	return nil
}

// readExtra reads what each block depends on beside its tokens: for each nil,
// or a list. Only equality matters, so what is not nil is hashed as it came.
func (d *draft) readExtra(r *reader) error {
	if r.peek() != kindList {
		return r.skip()
	}
	n, err := r.list()
	if err != nil {
		return err
	}
	d.ev.Extra = make([]uint64, n)
	any := false
	for i := range d.ev.Extra {
		if r.null() {
			continue
		}
		before := r.b
		if err := r.skip(); err != nil {
			return err
		}
		d.ev.Extra[i] = ExtraOf(before[:len(before)-len(r.b)])
		any = true
	}
	if !any {
		d.ev.Extra = nil
	}
	return nil
}

// metadata reads SGLang's map of what a block depends on.
func (d *draft) metadata(r *reader) error {
	before := r.b
	if err := r.skip(); err != nil {
		return err
	}
	if raw := before[:len(before)-len(r.b)]; len(raw) > 1 { // not the empty map
		d.common = ExtraOf(raw)
	}
	return nil
}

// ExtraOf hashes the msgpack of extra keys; never 0.
func ExtraOf(raw []byte) uint64 {
	h := fnv.New64a()
	h.Write(raw)
	return max(h.Sum64(), 1)
}

// SaltExtra is the Extra of the first block of a prompt with that cache salt
// and no other extra keys, as vLLM has it.
func SaltExtra(salt string) uint64 {
	return ExtraOf(appendText(appendList(nil, 1), salt))
}

// event checks what has been read.
func (d *draft) event(tag string) (Event, bool, error) {
	ev := &d.ev
	switch tag {
	case "AllBlocksCleared":
		return Event{Kind: Cleared}, true, nil
	case "BlockRemoved":
		ev.Kind = Removed
		if !d.hashes {
			return Event{}, false, malformed("%s without block_hashes", tag)
		}
		return Event{Kind: Removed, Hashes: ev.Hashes, Tier: ev.Tier, Group: ev.Group, Window: ev.Window}, true, nil
	}
	switch {
	case !d.hashes:
		return Event{}, false, malformed("%s without block_hashes", tag)
	case len(ev.Tokens) == 0 && len(ev.Hashes) > 0 && ev.Tier != GPU:
		// Offloading engines name what they copy to a lower tier, and no more.
	case ev.BlockSize == 0:
		return Event{}, false, malformed("%s without a block size", tag)
	case len(ev.Tokens) != len(ev.Hashes)*ev.BlockSize:
		return Event{}, false, malformed("%d tokens in %d blocks of %d", len(ev.Tokens), len(ev.Hashes), ev.BlockSize)
	case ev.Extra != nil && len(ev.Extra) != len(ev.Hashes):
		return Event{}, false, malformed("%d extra keys of %d blocks", len(ev.Extra), len(ev.Hashes))
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
	return *ev, true, nil
}
