package cpu

import (
	"unsafe"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
)

// Multi-head latent attention. The pool keeps one latent and one rotated key a position; a head's
// keys and values are products of the latent. They are never formed: a query is multiplied by the transposed
// keys' weights once (absorbed), attends to latents, and the sum of latents is multiplied by the
// values' weights. Prefill does the same as decode, so that a chunk's end moves no bit.

// latent is what such a layer has beside qkv, which makes queries, or their latent, then the latent and
// the key to be rotated.
type latent struct {
	qNorm        []float32 // nil: qkv makes queries
	queries      matrix    // of their latent
	norm         []float32
	keys, values []matrix // a head's: [kv_rank, nope_dim], [value_dim, kv_rank]
}

// latents is the scratch of a step.
type latents struct {
	qRow  int       // padded width of queries that have a latent
	q     []float32 // [token][qRow]
	heads []float32 // [token][head][kv_rank]: absorbed queries, then sums of latents
	looks []item    // as stepState.items, of fewer query heads each
}

func (b *Backend) loadLatent(l *layer, get func(r arch.Role) kernels.Tensor) {
	a := &b.arch
	q := source{get(arch.Q), a.Heads * a.HeadDim}
	l.latent = &latent{norm: vector(get(arch.KVANorm), a.KVRank)}
	if a.QRank > 0 {
		q = source{get(arch.QA), a.QRank}
		l.latent.qNorm = vector(get(arch.QANorm), a.QRank)
		l.latent.queries = pack(a.QRank, source{get(arch.QB), a.Heads * a.HeadDim})
	}
	l.qkv = pack(a.Hidden, q, source{get(arch.KVA), a.KVRank + a.RopeDim})
	l.o = pack(a.Heads*a.ValueDim, source{get(arch.O), a.Hidden})
	kvb := get(arch.KVB)
	for h := range a.Heads {
		first := h * (a.NopeDim + a.ValueDim)
		l.latent.keys = append(l.latent.keys, pack(a.NopeDim, source{transposed(kvb, first, a.NopeDim, a.KVRank), a.KVRank}))
		l.latent.values = append(l.latent.values, pack(a.KVRank, source{rowsOf(kvb, first+a.NopeDim, a.ValueDim, a.KVRank), a.ValueDim}))
	}
}

// rowsOf are n rows of t, of width elements, from first on.
func rowsOf(t kernels.Tensor, first, n, width int) kernels.Tensor {
	size := width * t.DType.Bytes()
	t.Data = t.Data[first*size : (first+n)*size]
	return t
}

// transposed is rowsOf with rows and columns exchanged.
func transposed(t kernels.Tensor, first, n, width int) kernels.Tensor {
	from, size := rowsOf(t, first, n, width).Data, t.DType.Bytes()
	t.Data = make([]byte, len(from))
	for i := range n {
		for j := range width {
			copy(t.Data[(j*n+i)*size:][:size], from[(i*width+j)*size:])
		}
	}
	return t
}

func (x *latents) grow(a *arch.Config, n int) {
	x.q = allocFloats(n * x.qRow)
	x.heads = allocFloats(n * a.Heads * a.KVRank)
}

// plan divides the items' query heads, so that more than one thread attends to a sequence. Each
// rank has as many of the parts.
func (x *latents) plan(items []item, heads int) {
	x.looks = x.looks[:0]
	for _, it := range items {
		for left := it.queries; left > 0; left -= it.queries {
			it.queries = min(left, heads)
			x.looks = append(x.looks, it)
			it.q += it.queries
		}
	}
}

// headRows says where the heads' vectors of each token lie, with the strides from token to token and from
// head to head.
type headRows struct {
	data         []float32
	stride, head int
}

// queries are the heads' queries of all tokens.
func (b *Backend) queries(l *latent) headRows {
	s, dim := &b.step, b.arch.HeadDim
	if l.qNorm == nil {
		return headRows{data: s.qkv, stride: s.qkvRow, head: dim}
	}
	return headRows{data: s.latents.q, stride: s.latents.qRow, head: dim}
}

// row are the vectors of all heads of a token.
func (h *headRows) row(token int) []float32 { return h.data[token*h.stride:] }

// attendLatent is a layer's attention behind its first projection: from qkv to att.
func (b *Backend) attendLatent(m *member, layer int) {
	s, t, l, a := &b.step, b.team, b.layers[layer].latent, &b.arch
	n := len(s.tokens)
	if l.qNorm != nil {
		for r := range t.items(m.seat, n, t.share(n)) {
			b.normTo(s.qkv[r*s.qkvRow:][:a.QRank], l.qNorm, arch.LatentEps)
		}
		t.barrier(m.seat)
		b.project(m, &l.queries, s.qkv, s.qkvRow, s.latents.q, s.latents.qRow, n)
		t.barrier(m.seat)
	}
	q, heads := b.queries(l), headRows{data: s.latents.heads, stride: a.Heads * a.KVRank, head: a.KVRank}
	for i := range t.items(m.seat, len(s.items), t.share(len(s.items))) {
		b.appendLatent(layer, &q, &s.items[i])
	}
	t.barrier(m.seat)
	if m.seat == &t.seats[0] && s.step.OnLayer != nil {
		s.step.OnLayer(layer)
	}
	b.perHead(m, l.keys, &q, &heads, a.KVRank)
	t.barrier(m.seat)
	first, end := t.part(m.seat, len(s.latents.looks))
	for i := range t.items(m.seat, len(s.latents.looks), 1) {
		b.lookItem(m, layer, &q, &heads, &s.latents.looks[end-1-(i-first)]) // the longest first
	}
	t.barrier(m.seat)
	b.perHead(m, l.values, &heads, &headRows{data: s.att, stride: s.attRow, head: a.ValueDim}, a.ValueDim)
}

// appendLatent norms and rotates an item's latents and keys where they lie in the pool, and rotates its rank's queries.
func (b *Backend) appendLatent(layer int, queries *headRows, it *item) {
	s, a, pool, l := &b.step, &b.arch, b.ranks[it.rank], b.layers[layer].latent
	at := a.Heads * a.HeadDim
	if l.qNorm != nil {
		at = a.QRank
	}
	q, size := &s.step.Seqs[it.seq], b.layout.BlockTokens
	pos := q.Pos + it.index
	for i := 0; i < it.n; {
		block, row := q.Blocks[(pos+i)/size], (pos+i)%size
		n := min(size-row, it.n-i)
		rows, keys := pool.floats(layer, block, 0, it.own, row, n), pool.floats(layer, block, 1, it.own, row, n)
		for j := range n {
			r := it.row + i + j
			cosSin := s.cosSin[r*a.RopeDim:][:a.RopeDim]
			for h := it.q; h < it.q+it.queries; h++ {
				rotatePairs(queries.row(r)[h*a.HeadDim+a.NopeDim:][:a.RopeDim], cosSin)
			}
			// In the pool, as elsewhere: all ranks take the same latent from qkv.
			from, row, key := s.qkv[r*s.qkvRow+at:], rows[j*a.KVRank:][:a.KVRank], keys[j*a.RopeDim:][:a.RopeDim]
			copy(row, from)
			b.normTo(row, l.norm, arch.LatentEps)
			copy(key, from[a.KVRank:])
			rotatePairs(key, cosSin)
		}
		pool.appended(layer, block, it.own, pos+i-row, row, n)
		i += n
	}
}

// lookItem replaces an item's absorbed queries by the sums of latents that they attend to.
func (b *Backend) lookItem(m *member, layer int, queries, heads *headRows, it *item) {
	s, a, pool := &b.step, &b.arch, b.ranks[it.rank]
	q, area := &s.step.Seqs[it.seq], &pool.areas[layer]
	of := func(plane int) scoreArgs {
		return scoreArgs{k: pool.base(layer, plane, it.own), blocks: &q.Blocks[0], blockStride: area.BlockBytes(),
			rowBytes: area.RowBytes(plane), blockTokens: b.layout.BlockTokens, scale: 1}
	}
	score, rope, pv := &m.score, &m.rope, &m.pv
	*score, *rope = of(0), of(1)
	rope.out = &m.ropes[0]
	*pv = pvArgs{p: unsafe.Pointer(&m.scores[0]), blocks: score.blocks, blockStride: score.blockStride, rowBytes: score.rowBytes,
		blockTokens: score.blockTokens, pStride: 4 * m.row, inv: &m.inv[0], outStride: 4 * a.KVRank}
	for i := range it.n {
		r, n := it.row+i, q.Pos+it.index+i+1
		score.n, rope.n, pv.n = n, n, n
		for h, left := it.q, it.queries; left > 0; {
			rows := 1
			for rows*2 <= min(left, b.pvRows) {
				rows *= 2
			}
			for j := range rows {
				score.q, score.out = unsafe.Pointer(&heads.row(r)[(h+j)*a.KVRank]), &m.scores[j*m.row]
				rope.q = unsafe.Pointer(&queries.row(r)[(h+j)*a.HeadDim+a.NopeDim])
				b.ops.scores(score)
				b.ops.scores(rope)
				sums, more := m.scores[j*m.row:][:n], m.ropes[:n]
				for t, v := range more {
					sums[t] = (sums[t] + v) * b.scale
				}
				m.inv[j] = 1 / b.softmax(m.scores[j*m.row:], n)
			}
			out := unsafe.Pointer(&heads.row(r)[h*a.KVRank])
			for k := range b.pvPasses {
				p := &b.pvPasses[k]
				pv.v, pv.out = unsafe.Add(score.k, 4*p.at), unsafe.Add(out, 4*p.at)
				p.rows[rows](pv)
			}
			h, left = h+rows, left-rows
			m.progress()
		}
	}
	*score, *rope, *pv = scoreArgs{}, scoreArgs{}, pvArgs{}
}

// perHead multiplies each head's vectors of all tokens by its own matrix, whose outputs are width wide.
func (b *Backend) perHead(m *member, w []matrix, from, to *headRows, width int) {
	t, n, panels := b.team, len(b.step.tokens), w[0].panels
	total := len(w) * panels
	chunk := min(t.share(total), t.mostPanels(w[0].k, n))
	for lo, hi := t.claim(m.seat, total, chunk); lo < hi; lo, hi = t.claim(m.seat, total, chunk) {
		for ; lo < hi; lo++ {
			h, p := lo/panels, lo%panels
			w[h].mul(b.ops, m.seat, from.data[h*from.head:], from.stride, m.gated, panelRows, n, p, p+1)
			at := h*to.head + p*panelRows
			for r := range n {
				copy(to.row(r)[at:][:min(panelRows, width-p*panelRows)], m.gated[r*panelRows:])
			}
			m.progress()
		}
	}
}

// latentMACs is how many multiply-adds a token's attention takes in a layer, without the scores.
func latentMACs(a *arch.Config) int {
	q := a.Heads * a.HeadDim
	macs := a.Hidden*(a.KVRank+a.RopeDim) + a.Heads*(a.NopeDim+a.ValueDim)*a.KVRank + a.Heads*a.ValueDim*a.Hidden
	if a.QRank > 0 {
		return macs + a.QRank*(a.Hidden+q)
	}
	return macs + a.Hidden*q
}
