package convert

import (
	"fmt"
	"sync"

	"github.com/xpyd/xpyd/kvconn"
)

// Digest hashes n contiguous rows of (layer, K or V, head) from position
// firstPos on; a head is numbered as in the model. kernels.DigestHeadRows is
// one. A kvconn.F8 row is hashed with its scale behind it.
type Digest func(layer, kv, head, firstPos, n, rowBytes int, rows []byte) uint64

// Source is a kvconn.Source that converts what another one loads.
type Source struct {
	inner    kvconn.Source
	from, to kvconn.Layout
	digest   Digest
	scratch  sync.Pool // of *buffers: loads may be concurrent
}

// buffers are what one load needs.
type buffers struct {
	rows   []byte
	sums   []uint64
	values []float32
	row    []byte // one row and its scale, to be hashed together
}

// New returns a source of rows in the form to (Outgoing.Layout) over one of
// rows in the form from, and inner itself when they are of one form. inner
// loads for the receiver's block size already. The error is a layout that
// cannot be made out of the other; the handshake lets none through.
func New(inner kvconn.Source, from, to kvconn.Layout, digest Digest) (kvconn.Source, error) {
	if len(from.Groups) != len(to.Groups) {
		return nil, fmt.Errorf("convert %d groups to %d", len(from.Groups), len(to.Groups))
	}
	same := true
	for i, f := range from.Groups {
		t := to.Groups[i]
		if f.Layers != t.Layers || f.HeadDim != t.HeadDim || f.KVHeads != t.KVHeads {
			return nil, fmt.Errorf("convert group %d: %+v to %+v", i, f, t)
		}
		if f.DType != t.DType && (kvconn.ElementBytes(f.DType)*f.HeadDim != f.RowBytes || kvconn.ElementBytes(t.DType)*t.HeadDim != t.RowBytes || f.RowBytes == 0 || t.RowBytes == 0) {
			return nil, fmt.Errorf("convert group %d: rows of %d bytes %s to %d bytes %s", i, f.RowBytes, f.DType, t.RowBytes, t.DType)
		}
		same = same && f.DType == t.DType
	}
	if same {
		return inner, nil
	}
	return &Source{inner: inner, from: from, to: to, digest: digest, scratch: sync.Pool{New: func() any { return new(buffers) }}}, nil
}

// Load implements kvconn.Source. Rows of another dtype whose digest does not
// match what lies in the inner source are an error, and end the ticket.
func (s *Source) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	f, _ := s.from.Group(layer)
	t, ok := s.to.Group(layer)
	if !ok || rows < 1 || len(dst) != t.PackedBytes(rows) || len(digests) != t.KVHeads {
		return fmt.Errorf("convert layer %d: %d bytes and %d digests for %d rows", layer, len(dst), len(digests), rows)
	}
	if f.DType == t.DType { // another group's is not
		return s.inner.Load(layer, index, firstPos, rows, dst, digests)
	}
	b := s.scratch.Get().(*buffers)
	defer s.scratch.Put(b)
	b.rows, b.sums = grow(b.rows, f.PackedBytes(rows)), grow(b.sums, f.KVHeads)
	if err := s.inner.Load(layer, index, firstPos, rows, b.rows, b.sums); err != nil {
		return err
	}
	src, out := packed{f, rows, b.rows}, packed{t, rows, dst}
	for h := range t.KVHeads {
		if s.sum(b, src, layer, h, firstPos) != b.sums[h] {
			return fmt.Errorf("convert layer %d block %d: %w", layer, index, kvconn.ErrDigest)
		}
		for kv := range 2 {
			b.convert(out, src, kv, h)
		}
		digests[h] = s.sum(b, out, layer, h, firstPos)
	}
	return nil
}

// Spans implements kvconn.SpanSource: a device takes the rows where they lie and
// converts them itself.
func (s *Source) Spans(layer, firstPos, rows int, to []kvconn.Held) ([]kvconn.Held, bool) {
	inner, ok := s.inner.(kvconn.SpanSource)
	if !ok {
		return to, false
	}
	return inner.Spans(layer, firstPos, rows, to)
}

var _ kvconn.SpanSource = (*Source)(nil)

// packed is one unit's rows: [2][kv_heads][n][row_bytes], then the scales.
type packed struct {
	g kvconn.Group
	n int
	b []byte
}

// rows are those of one head's K or V.
func (p packed) rows(kv, head int) []byte {
	size := p.n * p.g.RowBytes
	return p.b[(kv*p.g.KVHeads+head)*size:][:size]
}

// scales are those of the same rows; empty but for kvconn.F8.
func (p packed) scales(kv, head int) []byte {
	if p.g.DType != kvconn.F8 {
		return nil
	}
	size := 4 * p.n
	return p.b[2*p.g.KVHeads*p.n*p.g.RowBytes+(kv*p.g.KVHeads+head)*size:][:size]
}

// convert makes one head's K or V rows.
func (b *buffers) convert(out, src packed, kv, head int) {
	b.values = grow(b.values, src.g.HeadDim)
	rows, scales := src.rows(kv, head), src.scales(kv, head)
	dst, dstScales := out.rows(kv, head), out.scales(kv, head)
	for r := range src.n {
		decode(b.values, src.g.DType, rows[r*src.g.RowBytes:], at(scales, r))
		encode(dst[r*out.g.RowBytes:], at(dstScales, r), out.g.DType, b.values)
	}
}

// at is the scale of row r, where there are any.
func at(scales []byte, r int) []byte {
	if scales == nil {
		return nil
	}
	return scales[4*r:][:4]
}

// sum is the digest of one head, K and V together.
func (s *Source) sum(b *buffers, p packed, layer, head, firstPos int) (sum uint64) {
	g := p.g
	for kv := range 2 {
		rows, scales := p.rows(kv, head), p.scales(kv, head)
		if scales == nil {
			sum += s.digest(layer, kv, head, firstPos, p.n, g.RowBytes, rows)
			continue
		}
		for r := range p.n {
			b.row = append(append(b.row[:0], rows[r*g.RowBytes:][:g.RowBytes]...), at(scales, r)...)
			sum += s.digest(layer, kv, head, firstPos+r, 1, len(b.row), b.row)
		}
	}
	return sum
}

// grow returns a slice of n elements, of b's memory when that is enough.
func grow[T any](b []T, n int) []T {
	if cap(b) < n {
		return make([]T, n)
	}
	return b[:n]
}
