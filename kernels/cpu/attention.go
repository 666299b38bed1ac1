package cpu

import (
	"math"
	"unsafe"
)

// appendRows finishes q, k and v of a layer (bias, norm, rotation) and writes
// the K and V rows with their digests.
func (b *Backend) appendRows(m *member, layer int) {
	s := &b.step
	for i := range b.team.items(m.seat, len(s.items), b.team.share(len(s.items))) {
		b.appendItem(layer, &s.items[i])
	}
}

// appendAttend does both halves of each item at once, one barrier less: for
// steps without OnLayer whose sequences are single items a head, as in decode.
func (b *Backend) appendAttend(m *member, layer int) {
	s := &b.step
	for i := range b.team.items(m.seat, len(s.items), 1) {
		b.appendItem(layer, &s.items[i])
		b.attendItem(m, layer, &s.items[i])
	}
}

func (b *Backend) appendItem(layer int, it *item) {
	s, l, pool := &b.step, &b.layers[layer], b.ranks[it.rank]
	angles := s.cosSin
	if l.window > 0 {
		angles = s.windowCosSin
	}
	dim, size := b.arch.HeadDim, b.layout.BlockTokens
	kAt := (b.arch.Heads + it.kv) * dim
	vAt := kAt + b.arch.KVHeads*dim
	q := &s.step.Seqs[it.seq]
	pos := q.Pos + it.index
	for i := 0; i < it.n; {
		// One block at a time.
		block, row := q.Blocks[(pos+i)/size], (pos+i)%size
		n := min(size-row, it.n-i)
		ks, vs := pool.floats(layer, block, 0, it.own, row, n), pool.floats(layer, block, 1, it.own, row, n)
		for j := range n {
			r := it.row + i + j
			qkv, cosSin := s.qkv[r*s.qkvRow:(r+1)*s.qkvRow], angles[r*dim:(r+1)*dim]
			for h := it.q; h < it.q+it.queries; h++ {
				b.finishHead(qkv[h*dim:(h+1)*dim], h*dim, l.bias, l.qNorm, cosSin)
			}
			// In the pool: other ranks may keep the same head, and take it from qkv, too.
			k, v := ks[j*dim:(j+1)*dim], vs[j*dim:(j+1)*dim]
			copy(k, qkv[kAt:kAt+dim])
			copy(v, qkv[vAt:vAt+dim])
			b.finishHead(k, kAt, l.bias, l.kNorm, cosSin)
			addBias(v, l.bias, vAt)
		}
		pool.appended(layer, block, it.own, pos+i-row, row, n)
		i += n
	}
}

// finishHead applies bias, norm and rotation to a head whose place in qkv is at.
func (b *Backend) finishHead(x []float32, at int, bias, norm, cosSin []float32) {
	addBias(x, bias, at)
	if norm != nil {
		b.normTo(x, norm, b.arch.NormEps)
	}
	rotate(x, cosSin)
}

// normTo norms x, of any width, in place.
func (b *Backend) normTo(x, norm []float32, eps float32) {
	n := len(x)
	if n%16 == 0 {
		b.ops.scaleMul(&x[0], &x[0], &norm[0], rsqrtMean(b.ops.sumSq(&x[0], n), n, eps), n)
	} else {
		scaleMulPortable(&x[0], &x[0], &norm[0], rsqrtMean(sumSqPortable(&x[0], n), n, eps), n)
	}
}

func addBias(x, bias []float32, at int) {
	if bias == nil {
		return
	}
	for i, v := range bias[at : at+len(x)] {
		x[i] += v
	}
}

// attend computes the attention output of a layer.
func (b *Backend) attend(m *member, layer int) {
	s := &b.step
	first, end := b.team.part(m.seat, len(s.items))
	for i := range b.team.items(m.seat, len(s.items), 1) {
		// The last items see the most positions: start with them.
		b.attendItem(m, layer, &s.items[end-1-(i-first)])
	}
}

func (b *Backend) attendItem(m *member, layer int, it *item) {
	s, pool := &b.step, b.ranks[it.rank]
	dim := b.arch.HeadDim
	q := &s.step.Seqs[it.seq]
	score, pv := &m.score, &m.pv
	*score = scoreArgs{
		k:           pool.base(layer, 0, it.own),
		blocks:      &q.Blocks[0],
		blockStride: pool.areas[layer].BlockBytes(),
		rowBytes:    pool.areas[layer].RowBytes(0),
		blockTokens: b.layout.BlockTokens,
		scale:       b.scale,
	}
	*pv = pvArgs{
		p:           unsafe.Pointer(&m.scores[0]),
		blocks:      score.blocks,
		blockStride: score.blockStride,
		rowBytes:    score.rowBytes,
		blockTokens: score.blockTokens,
		pStride:     4 * m.row,
		inv:         &m.inv[0],
		outStride:   4 * dim,
	}
	v := pool.base(layer, 1, it.own)
	for i := range it.n {
		r, n, hidden := it.row+i, q.Pos+it.index+i+1, 0
		if w := b.layers[layer].window; w > 0 && n > w {
			first := b.windowStart(n - w)
			score.blocks = &q.Blocks[first/b.layout.BlockTokens]
			pv.blocks = score.blocks
			n, hidden = n-first, n-w-first
		}
		score.n, pv.n = n, n
		for h, left := it.q, it.queries; left > 0; {
			rows := 1
			for rows*2 <= min(left, b.pvRows) {
				rows *= 2
			}
			for j := range rows {
				score.q = unsafe.Pointer(&s.qkv[r*s.qkvRow+(h+j)*dim])
				score.out = &m.scores[j*m.row]
				b.ops.scores(score)
				for t := range hidden {
					m.scores[j*m.row+t] = float32(math.Inf(-1)) // before the window
				}
				m.inv[j] = 1 / b.softmax(m.scores[j*m.row:], n)
			}
			out := unsafe.Pointer(&s.att[r*s.attRow+h*dim])
			for k := range b.pvPasses {
				p := &b.pvPasses[k]
				pv.v, pv.out = unsafe.Add(v, 4*p.at), unsafe.Add(out, 4*p.at)
				p.rows[rows](pv)
			}
			h, left = h+rows, left-rows
			m.progress()
		}
	}
	*score, *pv = scoreArgs{}, pvArgs{}
}

// windowStart is the last position up to first where a block and a group of eight lanes begin: scores
// before the window are hidden, and so every position keeps its lane whatever the block size.
func (b *Backend) windowStart(first int) int {
	grain := b.layout.BlockTokens
	for grain%8 != 0 {
		grain *= 2
	}
	return first / grain * grain
}

// softmax replaces n scores by exp(s-max) and returns their sum. The kernel
// works on whole groups of 8: the rest is -Inf, whose exponential is 0.
func (b *Backend) softmax(s []float32, n int) float32 {
	n8 := roundUp(n, 8)
	for i := n; i < n8; i++ {
		s[i] = float32(math.Inf(-1))
	}
	return b.ops.softmax(&s[0], n8)
}
