package pick

import (
	"cmp"
	"math"
	"slices"
)

// Consistent hashing after Appleton and O'Reilly, "Multi-probe consistent hashing" (2015): each
// member has one point, each key several probes, and the one that lands nearest before a point
// wins. Loads are bounded as by Mirrokni, Thorup and Zadimoghaddam (2016): a member with 1.25 times
// the mean is passed over for the next on the ring. Points depend on ids only, so routers agree.
const (
	probes = 21
	bound  = 1.25
)

// hashString is FNV-1a, then mixed: neighbours by name must not be neighbours on the ring.
func hashString[T string | []byte](s T) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return mix(h)
}

func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

func byPoint(n *node, point uint64) int { return cmp.Compare(n.point, point) }

func (c *class) addPoint(n *node) {
	i, _ := slices.BinarySearchFunc(c.ring, n.point, byPoint)
	c.ring = slices.Insert(c.ring, i, n)
}

func (c *class) removePoint(n *node) {
	i, _ := slices.BinarySearchFunc(c.ring, n.point, byPoint)
	for ; i < len(c.ring); i++ { // of several epochs of one id
		if c.ring[i] == n {
			c.ring = slices.Delete(c.ring, i, i+1)
			return
		}
	}
}

// onRing returns the member that a key belongs to and that will have it.
func (c *class) onRing(key uint64, will func(*node) bool) *node {
	size := len(c.ring)
	if size == 0 {
		return nil
	}
	start, near := 0, uint64(math.MaxUint64)
	for i := range uint64(probes) {
		probe := mix(key + i*0x9e3779b97f4a7c15)
		at, _ := slices.BinarySearchFunc(c.ring, probe, byPoint)
		if at == size {
			at = 0
		}
		if d := c.ring[at].point - probe; d < near { // wraps as the ring does
			start, near = at, d
		}
	}
	most := int(math.Ceil(bound * float64(c.legs+1) / float64(size)))
	var full *node
	for i := range size {
		n := c.ring[(start+i)%size]
		if !will(n) {
			continue
		}
		if n.legsAll() < most {
			return n
		}
		if full == nil {
			full = n
		}
	}
	return full
}
