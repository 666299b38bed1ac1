package convert

import (
	"fmt"
	"sync"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvlayout"
)

// Digest hashes n rows of one plane of a head, from position firstPos on, with
// their scales behind them where they have any. kernels.DigestPart is one.
type Digest func(l *kvlayout.Layer, plane, head, firstPos, n int, rows, scales []byte) uint64

// Source is a kvconn.Source that converts the rows of another one.
type Source struct {
	inner    kvconn.Source
	from, to []kvlayout.Layer
	digest   Digest
	scratch  sync.Pool // of *buffers: loads may be concurrent
}

// buffers is the scratch memory of one load.
type buffers struct {
	rows   []byte
	sums   []uint64
	values []float32
}

// New returns a source of rows in the form to (Outgoing.Layout) over inner, whose rows
// have the form from, or inner itself if the forms are equal. inner already loads for
// the receiver's block size. It fails for layouts that cannot be converted; the
// handshake lets none through.
func New(inner kvconn.Source, from, to kvlayout.Layout, digest Digest) (kvconn.Source, error) {
	if field, a, b := kvlayout.Compare(from, to, true); field != "" {
		return nil, fmt.Errorf("convert a layout whose %s is %s to %s", field, a, b)
	}
	if !kvlayout.Differ(from, to) {
		return inner, nil
	}
	return &Source{inner: inner, from: from.Resolve(), to: to.Resolve(), digest: digest, scratch: sync.Pool{New: func() any { return new(buffers) }}}, nil
}

// Load implements kvconn.Source. Rows to be converted whose digest does not match are
// an error, and end the ticket.
func (s *Source) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	if layer < 0 || layer >= len(s.to) || rows < 1 || len(dst) != s.to[layer].PackedBytes(rows) || len(digests) != s.to[layer].Heads {
		return fmt.Errorf("convert layer %d: %d bytes and %d digests for %d rows", layer, len(dst), len(digests), rows)
	}
	f, t := &s.from[layer], &s.to[layer]
	if f.DType == t.DType { // another group's is not
		return s.inner.Load(layer, index, firstPos, rows, dst, digests)
	}
	b := s.scratch.Get().(*buffers)
	defer s.scratch.Put(b)
	b.rows, b.sums = grow(b.rows, f.PackedBytes(rows)), grow(b.sums, f.Heads)
	if err := s.inner.Load(layer, index, firstPos, rows, b.rows, b.sums); err != nil {
		return err
	}
	for h := range t.Heads {
		digests[h] = 0
		for plane := range t.Planes {
			src, srcScales := f.Part(b.rows, rows, plane, h)
			out, outScales := t.Part(dst, rows, plane, h)
			b.sums[h] -= s.digest(f, plane, h, firstPos, rows, src, srcScales)
			b.convert(t, out, outScales, f, src, srcScales, plane, rows)
			digests[h] += s.digest(t, plane, h, firstPos, rows, out, outScales)
		}
		if b.sums[h] != 0 {
			return fmt.Errorf("convert layer %d block %d: %w", layer, index, kvconn.ErrDigest)
		}
	}
	return nil
}

// Spans implements kvconn.SpanSource: a device takes the rows in place and converts
// them itself.
func (s *Source) Spans(layer, firstPos, rows int, to []kvlayout.Held) ([]kvlayout.Held, bool) {
	inner, ok := s.inner.(kvconn.SpanSource)
	if !ok {
		return to, false
	}
	return inner.Spans(layer, firstPos, rows, to)
}

var _ kvconn.SpanSource = (*Source)(nil)

// convert turns src into n rows of one plane of a head.
func (b *buffers) convert(t *kvlayout.Layer, dst, dstScales []byte, f *kvlayout.Layer, src, srcScales []byte, plane, n int) {
	in, out := f.RowBytes(plane), t.RowBytes(plane)
	b.values = grow(b.values, 8*in/f.DType.Bits())
	for r := range n {
		decode(b.values, f.DType, src[r*in:], at(srcScales, r))
		encode(dst[r*out:], at(dstScales, r), t.DType, b.values)
	}
}

// at is the scale of row r, if there are scales.
func at(scales []byte, r int) []byte {
	if scales == nil {
		return nil
	}
	return scales[4*r:][:4]
}

// grow returns a slice of n elements, in b's memory if that is enough.
func grow[T any](b []T, n int) []T {
	if cap(b) < n {
		return make([]T, n)
	}
	return b[:n]
}
