package tokenizer

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"slices"
)

// finish computes the fingerprint, once everything else is set.
func (t *Tokenizer) finish() {
	h := sha256.New()
	w := bufio.NewWriterSize(h, 1<<16) // writes to a hash cannot fail
	num := func(n int64) {
		var b [8]byte
		w.Write(binary.LittleEndian.AppendUint64(b[:0], uint64(n)))
	}
	str := func(s string) {
		num(int64(len(s)))
		w.WriteString(s)
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
	slices.SortFunc(merges, func(a, b pairSlot) int {
		if a.key < b.key {
			return -1
		}
		return 1 // keys are unique
	})
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
	w.Flush()
	t.fingerprint = hex.EncodeToString(h.Sum(nil))
}
