package tokenizer

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"slices"
)

// finish computes the fingerprint, once everything else is set.
func (t *Tokenizer) finish() {
	h := sha256.New()
	var buf []byte
	num := func(n int64) { buf = binary.LittleEndian.AppendUint64(buf, uint64(n)) }
	str := func(s string) {
		num(int64(len(s)))
		if buf = append(buf, s...); len(buf) > 1<<16 {
			h.Write(buf)
			buf = buf[:0]
		}
	}
	ids := func(list []int32) {
		num(int64(len(list)))
		for _, id := range list {
			num(int64(id))
		}
	}
	str("xpyd tokenizer 1")
	num(int64(len(t.pieces)))
	for i := range t.pieces {
		str(t.pieces[i])
		str(t.texts[i])
		num(int64(t.flags[i]))
	}
	var merges []pairSlot
	for _, s := range t.model.merges.slots {
		if s.key != noPair {
			merges = append(merges, s)
		}
	}
	slices.SortFunc(merges, func(a, b pairSlot) int { return cmp.Compare(a.key, b.key) })
	num(int64(len(merges)))
	for _, s := range merges {
		num(int64(s.key))
		num(int64(s.val))
	}
	for _, list := range [][]string{t.model.hidden, t.description, t.chat.sources()} {
		num(int64(len(list)))
		for _, s := range list {
			str(s)
		}
	}
	ids(t.prefix)
	ids(t.suffix)
	ids(t.eos)
	if t.hasBOS {
		num(int64(t.bos))
	}
	h.Write(buf)
	t.fingerprint = hex.EncodeToString(h.Sum(nil))
}
