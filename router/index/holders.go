package index

import (
	"slices"
	"sync/atomic"
)

// Holders of a prefix in one word. Up to two are in place, each 24 bits of source id plus one and 3
// bits of tiers. For more, bit 63 is set and the low half is the number of a set. Bit 62 says that a
// prompt asked for the prefix.
const (
	manyBit    = 1 << 63
	refBit     = 1 << 62
	holderBits = 27
	holderMask = 1<<holderBits - 1
)

func holder(id uint32, tiers uint64) uint64 { return uint64(id+1)<<3 | tiers }

// tiersIn returns a source's tiers by a word without a set.
func tiersIn(word uint64, id uint32) uint64 {
	want := uint64(id+1) << 3
	if a := word & holderMask; a&^7 == want {
		return a & 7
	}
	if b := word >> holderBits & holderMask; b&^7 == want {
		return b & 7
	}
	return 0
}

// set is the holders of a prefix that many have: sorted words of id and tiers or, if smaller
// (dense), 4 bits for each id there is.
type set struct {
	w     []uint32
	sum   uint64 // of the holders and their tiers: equal sets have equal ones
	n     int32
	dense bool
}

const setBytes = 40

// mark is a holder's part of its set's sum.
func mark(id uint32, tiers uint64) uint64 {
	if tiers == 0 {
		return 0
	}
	x := (uint64(id)<<3 | tiers) * 0x9e3779b97f4a7c15
	x = (x ^ x>>29) * 0xbf58476d1ce4e5b9
	return x ^ x>>32
}

func (s *set) tiers(id uint32) uint64 {
	if s.dense {
		if i := int(id / 8); i < len(s.w) {
			return uint64(s.w[i]>>(id%8*4)) & 7
		}
		return 0
	}
	if i, ok := s.search(id); ok {
		return uint64(s.w[i] & 7)
	}
	return 0
}

func (s *set) search(id uint32) (int, bool) {
	return slices.BinarySearchFunc(s.w, id, func(w, id uint32) int { return int(w>>3) - int(id) })
}

// put sets a source's tiers; 0 takes it out. sources is how many ids there are.
func (s *set) put(id uint32, tiers uint64, sources int) {
	if s.dense {
		for int(id/8) >= len(s.w) {
			s.w = append(s.w, 0)
		}
		at := &s.w[id/8]
		was := *at >> (id % 8 * 4) & 7
		s.sum ^= mark(id, uint64(was)) ^ mark(id, tiers)
		*at = *at&^(15<<(id%8*4)) | uint32(tiers)<<(id%8*4)
		if was != 0 {
			s.n--
		}
		if tiers != 0 {
			s.n++
		}
		if int(s.n) < len(s.w)/2 {
			s.sparsify()
		}
		return
	}
	i, ok := s.search(id)
	s.sum ^= mark(id, tiers)
	if ok {
		s.sum ^= mark(id, uint64(s.w[i]&7))
	}
	switch {
	case ok && tiers == 0:
		s.w = slices.Delete(s.w, i, i+1)
		s.n--
		if len(s.w)*3 < cap(s.w) {
			s.w = slices.Clone(s.w)
		}
	case ok:
		s.w[i] = id<<3 | uint32(tiers)
	case tiers != 0:
		s.w = slices.Insert(s.w, i, id<<3|uint32(tiers))
		if s.n++; len(s.w) > sources/8+8 {
			s.densify()
		}
	}
}

func (s *set) densify() {
	w := make([]uint32, s.w[len(s.w)-1]>>3/8+1)
	for _, h := range s.w {
		id := h >> 3
		w[id/8] |= h & 7 << (id % 8 * 4)
	}
	s.w, s.dense = w, true
}

func (s *set) sparsify() {
	w := make([]uint32, 0, s.n)
	s.each(0, func(id uint32, tiers uint64) bool {
		w = append(w, id<<3|uint32(tiers))
		return true
	})
	s.w, s.dense = w, false
}

// each yields the holders, starting at a position in the set's memory and wrapping around.
func (s *set) each(from int, yield func(id uint32, tiers uint64) bool) {
	n := len(s.w)
	for k := range n {
		i := from + k
		if i >= n {
			i -= n
		}
		if !s.dense {
			if !yield(s.w[i]>>3, uint64(s.w[i]&7)) {
				return
			}
			continue
		}
		for j := uint32(0); s.w[i]>>(j*4) != 0 && j < 8; j++ {
			if t := s.w[i] >> (j * 4) & 7; t != 0 && !yield(uint32(i)*8+j, uint64(t)) {
				return
			}
		}
	}
}

// update returns a word with a source's tiers changed.
func (sh *shard) update(word uint64, id uint32, tiers uint64, bytes *atomic.Int64, sources int) uint64 {
	if word&manyBit != 0 {
		no := uint32(word)
		s := &sh.sets[no]
		before := cap(s.w)
		s.put(id, tiers, sources)
		if s.n <= 2 {
			word &= refBit
			s.each(0, func(id uint32, tiers uint64) bool {
				word = word&refBit | (word&^refBit)<<holderBits | holder(id, tiers)
				return true
			})
			*s = set{}
			sh.free = append(sh.free, no)
		}
		bytes.Add(int64(cap(sh.sets[no].w)-before) * 4)
		return word
	}
	ref := word & refBit
	a, b := word&holderMask, word>>holderBits&holderMask
	want := uint64(id+1) << 3
	switch {
	case a != 0 && a&^7 == want:
		if a = want | tiers; tiers == 0 {
			a, b = b, 0
		}
	case b != 0 && b&^7 == want:
		if b = want | tiers; tiers == 0 {
			b = 0
		}
	case tiers == 0:
	case a == 0:
		a = want | tiers
	case b == 0:
		b = want | tiers
	default:
		no := sh.newSet(bytes)
		s := &sh.sets[no]
		for _, h := range [3]uint64{a, b, want | tiers} {
			s.put(uint32(h>>3)-1, h&7, 1<<24) // sorted at first
		}
		bytes.Add(int64(cap(s.w)) * 4)
		return manyBit | ref | uint64(no)
	}
	return ref | b<<holderBits | a
}

func (sh *shard) newSet(bytes *atomic.Int64) uint32 {
	if n := len(sh.free); n > 0 {
		no := sh.free[n-1]
		sh.free = sh.free[:n-1]
		return no
	}
	before := cap(sh.sets)
	sh.sets = append(sh.sets, set{})
	bytes.Add(int64(cap(sh.sets)-before) * setBytes)
	return uint32(len(sh.sets) - 1)
}
