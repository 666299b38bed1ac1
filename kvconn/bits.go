package kvconn

import "math/bits"

// bitmap is a set of small numbers; bit n is b[n/8]>>(n%8).
type bitmap []byte

func newBitmap(n int) bitmap { return make(bitmap, (n+7)/8) }

func (b bitmap) has(n int) bool { return b[n>>3]>>(n&7)&1 != 0 }
func (b bitmap) set(n int)      { b[n>>3] |= 1 << (n & 7) }

func (b bitmap) count() int {
	n := 0
	for _, v := range b {
		n += bits.OnesCount8(v)
	}
	return n
}

// UnitSet is a set of units: (layer, destination block index) pairs. The zero
// value is empty.
type UnitSet struct {
	layers, blocks int
	bits           bitmap
}

// Len is the number of units in the set.
func (u UnitSet) Len() int { return u.bits.count() }

// Has reports whether block index of layer is in the set.
func (u UnitSet) Has(layer, index int) bool {
	if layer < 0 || layer >= u.layers || index < 0 || index >= u.blocks {
		return false
	}
	return u.bits.has(layer*u.blocks + index)
}

// Only returns the units whose block index keep accepts.
func (u UnitSet) Only(keep func(index int) bool) UnitSet {
	out := UnitSet{u.layers, u.blocks, newBitmap(u.layers * u.blocks)}
	for index := range u.blocks {
		if !keep(index) {
			continue
		}
		for layer := range u.layers {
			if u.Has(layer, index) {
				out.bits.set(layer*u.blocks + index)
			}
		}
	}
	return out
}

// Block counts the layers of a block that are in the set.
func (u UnitSet) Block(index int) int {
	n := 0
	for layer := range u.layers {
		if u.Has(layer, index) {
			n++
		}
	}
	return n
}
