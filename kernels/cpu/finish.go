package cpu

import "github.com/xpyd/xpyd/kernels"

// finish computes the wanted hidden states, then the wanted logits, a tile of rows at a time,
// and everything asked of them.
func (b *Backend) finish(m *member) {
	s, t := &b.step, b.team
	n := len(s.finals)
	if n+len(s.states) == 0 {
		return
	}
	b.lastNorm(m)
	t.barrier(m.seat)
	row := b.head.outRows()
	for lo := 0; lo < n; lo += headTile {
		hi := min(lo+headTile, n)
		b.project(m, &b.head, s.last[lo*s.hidden:], s.hidden, s.logits, row, hi-lo)
		t.barrier(m.seat)
		for i := range t.items(m.seat, hi-lo, 1) {
			b.fillResult(m, &s.finals[lo+i], s.logits[i*row:i*row+b.arch.Vocab])
		}
		t.barrier(m.seat)
	}
}

// lastNorm applies the last residual and the final norm to wanted rows only.
func (b *Backend) lastNorm(m *member) {
	s := &b.step
	n := len(s.finals)
	for i := range b.team.items(m.seat, n+len(s.states), b.team.share(n+len(s.states))) {
		row := 0
		if i < n {
			row = s.finals[i].row
		} else {
			row = s.states[i-n]
		}
		at := row * s.hidden
		sum := b.addRow(at, b.layers[len(b.layers)-1].mlpPost)
		b.rmsNorm(s.last[i*s.hidden:], s.x[at:], b.norm, sum)
	}
}

// fillResult fills in what was asked of one row of logits.
func (b *Backend) fillResult(m *member, f *final, logits []float32) {
	s := &b.step
	q, r := &s.step.Seqs[f.seq], &s.results[f.seq]
	var lse float64
	have := false
	sum := func() float64 {
		if !have {
			lse, have = logSumExp(logits), true
		}
		return lse
	}
	tops := s.tops[f.tops:]
	take := func(n int) []kernels.TokenLogprob {
		n = min(max(n, 0), len(logits))
		top := tops[:n:n]
		tops = tops[n:]
		if n == 0 {
			return nil
		}
		topLogprobs(logits, sum(), top)
		return top
	}
	if len(q.Targets) > 0 && q.Targets[f.index] >= 0 {
		p := &r.Prompt[f.index]
		p.Self = logprob(logits, sum(), q.Targets[f.index])
		p.Top = take(q.TargetLogprobs)
	}
	for i := f.first; i < f.end; i++ {
		m.progress()
		p, out := &q.Samples[i], &r.Samples[i]
		*out = kernels.Sampled{Token: m.draw.token(logits, p)}
		if p.Logprobs >= 0 && out.Token != kernels.NoToken {
			out.Self = logprob(logits, sum(), out.Token)
			out.Top = take(p.Logprobs)
		}
	}
	if f.last && q.WantLogits {
		copy(r.Logits, logits)
	}
}
