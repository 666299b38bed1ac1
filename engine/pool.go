package engine

import (
	"io"

	"github.com/xpyd/xpyd/kernels"
)

// pool is the sum of hidden states, added in the order of positions, in float64: so chunks and
// batches do not change a bit of it.
type pool struct {
	sum  []float64
	rows int
}

func (p *pool) add(row []float32) {
	if p.sum == nil {
		p.sum = make([]float64, len(row))
	}
	for i, v := range row {
		p.sum[i] += float64(v)
	}
	p.rows++
}

// mean of one row is the row.
func (p *pool) mean() []float32 {
	v := make([]float32, len(p.sum))
	for i, x := range p.sum {
		v[i] = float32(x / float64(p.rows))
	}
	return v
}

// states are the hidden states that a sequence's pooling needs of a step, which may be its prompt's last.
func (q *sequence) states(last bool) kernels.Hidden {
	switch p := q.h.req.Pooling; {
	case p == PoolMean:
		return kernels.HiddenAll
	case p == PoolLast && last:
		return kernels.HiddenLast
	}
	return kernels.HiddenNone
}

// pooled adds a step's hidden states to those of its prompt, and ends the request with the last of them.
func (e *Engine) pooled(q *sequence, res *kernels.Result) {
	h := q.h
	for _, row := range res.Hidden {
		h.pool.add(row)
	}
	if !q.hasRows() {
		return
	}
	e.computedPrompt(q)
	h.push(Event{Pooled: h.pool.mean(), Finish: FinishStop})
	e.finish(h, io.EOF)
}
