package kvlayout

// Rows is the packing of a layer's rows into bytes. n packed positions are
//
//	[plane][head][n][bytes of the plane's row]   and then, if rows have scales,
//	[plane][head][n] scales
//
// A block of a pool is BlockTokens packed positions. Rows is comparable: equal
// values are packed alike, of elements of one type.
type Rows struct {
	BlockTokens int
	Heads       int // of each plane; a block has one digest each
	Planes      int
	DType       DType

	row    [MaxPlanes]int // bytes of one row
	before [MaxPlanes]int // bytes of one row of all earlier planes
	all    int            // bytes of one row of all planes
	scale  int            // bytes of a row's scale
}

// Layer is one layer of a layout with its sizes computed. To move rows, resolve a
// layout once (Resolve) and use its layers.
type Layer struct {
	Rows
	Number    int // in the model
	FirstHead int // in the model: head 0 of the rows
	Group     int // index in Layout.Groups
}

// Resolve returns every layer, by number.
func (l Layout) Resolve() []Layer {
	out := make([]Layer, l.Layers())
	for i := range l.Groups {
		g := &l.Groups[i]
		r := g.rows(l.BlockTokens)
		for _, n := range g.Layers {
			out[n] = Layer{Rows: r, Number: n, FirstHead: g.Heads.First, Group: i}
		}
	}
	return out
}

// CopyHeads copies n positions, with their scales, of all heads that both layers have, from srcAt
// on of srcN packed ones to dstAt on of dstN. The layers differ in nothing but their heads.
func CopyHeads(to *Layer, dst []byte, dstN, dstAt int, from *Layer, src []byte, srcN, srcAt, n int) {
	first := max(to.FirstHead, from.FirstHead)
	end := min(to.FirstHead+to.Heads, from.FirstHead+from.Heads)
	if first >= end {
		return
	}
	for plane := range to.Planes {
		size := to.row[plane]
		if n == dstN && n == srcN && to.scale == 0 { // one run
			a, b := n*(to.Heads*to.before[plane]+(first-to.FirstHead)*size), n*(from.Heads*from.before[plane]+(first-from.FirstHead)*size)
			copy(dst[a:][:(end-first)*n*size], src[b:][:(end-first)*n*size])
			continue
		}
		for head := first; head < end; head++ {
			d, dScales := to.Part(dst, dstN, plane, head-to.FirstHead)
			s, sScales := from.Part(src, srcN, plane, head-from.FirstHead)
			copy(d[dstAt*size:], s[srcAt*size:(srcAt+n)*size])
			if to.scale > 0 {
				copy(dScales[dstAt*to.scale:], sScales[srcAt*to.scale:(srcAt+n)*to.scale])
			}
		}
	}
}

// Uniform returns the rows of any layer, if all layers pack theirs alike.
func (l Layout) Uniform() (r Rows, ok bool) {
	for i := range l.Groups {
		other := l.Groups[i].rows(l.BlockTokens)
		if i > 0 && other != r {
			return Rows{}, false
		}
		r = other
	}
	return r, len(l.Groups) > 0
}

func (g *Group) rows(blockTokens int) Rows {
	r := Rows{BlockTokens: blockTokens, Heads: g.Heads.Count, Planes: len(g.Planes), DType: g.DType, scale: g.Scale.Bytes(1)}
	for i, p := range g.Planes {
		r.row[i], r.before[i] = g.DType.Bytes(p.Dim), r.all
		r.all += r.row[i]
	}
	return r
}

// RowBytes is the size of one row of a plane, without its scale.
func (r *Rows) RowBytes(plane int) int { return r.row[plane] }

// ScaleBytes is the size of a row's scale; 0 without scales.
func (r *Rows) ScaleBytes() int { return r.scale }

// PackedBytes is the size of n packed positions.
func (r *Rows) PackedBytes(n int) int { return r.Heads * n * (r.all + r.Planes*r.scale) }

// BlockBytes is the size of one block of the layer.
func (r *Rows) BlockBytes() int { return r.PackedBytes(r.BlockTokens) }

// DigestBytes is the size of a block's digests, one uint64 a head.
func (r *Rows) DigestBytes() int { return 8 * r.Heads }

// Part returns the rows of one plane of one head among n packed positions, and
// their scales, which are empty where rows have none.
func (r *Rows) Part(packed []byte, n, plane, head int) (rows, scales []byte) {
	size := n * r.row[plane]
	at := n*r.Heads*r.before[plane] + head*size
	rows = packed[at : at+size : at+size]
	if r.scale > 0 {
		size = n * r.scale
		at = n*r.Heads*r.all + (plane*r.Heads+head)*size
		scales = packed[at : at+size : at+size]
	}
	return rows, scales
}

// Parts calls f for every plane of every head among n packed positions, in memory
// order.
func (r *Rows) Parts(packed []byte, n int, f func(plane, head int, rows, scales []byte)) {
	for plane := range r.Planes {
		for head := range r.Heads {
			rows, scales := r.Part(packed, n, plane, head)
			f(plane, head, rows, scales)
		}
	}
}

// Copy copies n positions, with their scales, from srcAt on of srcN packed ones to
// dstAt on of dstN.
func (r *Rows) Copy(dst []byte, dstN, dstAt int, src []byte, srcN, srcAt, n int) {
	for plane := range r.Planes {
		size := r.row[plane]
		for head := range r.Heads {
			to, toScales := r.Part(dst, dstN, plane, head)
			from, fromScales := r.Part(src, srcN, plane, head)
			copy(to[dstAt*size:], from[srcAt*size:(srcAt+n)*size])
			if r.scale > 0 {
				copy(toScales[dstAt*r.scale:], fromScales[srcAt*r.scale:(srcAt+n)*r.scale])
			}
		}
	}
}

// Coordinates packs what a row's digest depends on besides its bytes: the layer
// and the head are the model's, pos is the token's in its sequence. Plane 0 and 1
// are K and V.
//
//	pos < 2^32 | head < 2^14 << 32 | plane's high bit << 46 | its low bit << 47 | layer < 2^16 << 48
func Coordinates(layer, plane, head, pos int) uint64 {
	return uint64(uint32(pos)) | uint64(head)<<32 | uint64(plane>>1)<<46 | uint64(plane&1)<<47 | uint64(layer)<<48
}

// Coordinates are those of a row of the layer, head counted among ours.
func (l *Layer) Coordinates(plane, head, pos int) uint64 {
	return Coordinates(l.Number, plane, l.FirstHead+head, pos)
}
