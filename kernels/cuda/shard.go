package cuda

import (
	"fmt"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvlayout"
)

// MaxRanks bounds Options.Devices.
const MaxRanks = 8

// span is a range of heads, of the intermediate width, or of the vocabulary.
type span struct{ first, n int }

// shard is what a rank has of a model: its query and KV heads, its part of the intermediate
// width, and the rows of the head. Everything else every rank has, the embedding too.
type shard struct {
	rank, ranks int
	heads, kv   span
	ff, ids     span
}

// shardOf divides a model: query heads evenly; KV heads too or, where ranks are more, each
// is several ranks'; widths in multiples of a vector, so that the last rank may have less.
func shardOf(a *arch.Config, rank, ranks int) (s shard, err error) {
	s = shard{rank: rank, ranks: ranks}
	switch {
	case ranks < 1 || ranks > MaxRanks || rank < 0 || rank >= ranks:
		return s, fmt.Errorf("rank %d of %d: at most %d ranks", rank, ranks, MaxRanks)
	case a.Heads%ranks != 0:
		return s, fmt.Errorf("%d heads cannot be divided among %d ranks", a.Heads, ranks)
	case a.KVHeads%ranks == 0:
		s.kv = span{rank * (a.KVHeads / ranks), a.KVHeads / ranks}
	case ranks%a.KVHeads == 0:
		s.kv = span{rank / (ranks / a.KVHeads), 1}
	default:
		return s, fmt.Errorf("%d KV heads and %d ranks: one must divide the other", a.KVHeads, ranks)
	}
	s.heads = span{rank * (a.Heads / ranks), a.Heads / ranks}
	s.ff, s.ids = part(width(a), rank, ranks), part(a.Vocab, rank, ranks)
	if s.ff.n < 1 || s.ids.n < 1 {
		return s, fmt.Errorf("an intermediate width of %d and a vocabulary of %d leave nothing for rank %d of %d", width(a), a.Vocab, rank, ranks)
	}
	return s, nil
}

// width is that of a feed-forward: of each expert's, in a mixture.
func width(a *arch.Config) int {
	if a.Experts > 0 {
		return a.ExpertWidth
	}
	return a.Intermediate
}

// part is a rank's range of n values: a multiple of 8, which kernels take at a time, or of
// 64 where that is little of it.
func part(n, rank, ranks int) span {
	if ranks == 1 {
		return span{0, n}
	}
	each, grain := (n+ranks-1)/ranks, 8
	if each >= 1024 {
		grain = 64
	}
	each = (each + grain - 1) / grain * grain
	first := min(rank*each, n)
	return span{first, min(each, n-first)}
}

// layout is the rank's part of the model's.
func (s *shard) layout(l kvlayout.Layout) kvlayout.Layout {
	if s.ranks == 1 {
		return l
	}
	g := l.Groups[0]
	g.Heads = kvlayout.Heads{First: s.kv.first, Count: s.kv.n, Total: g.Heads.Total}
	l.Groups = []kvlayout.Group{g}
	return l
}

// cut is the rank's part of a tensor, in place: n elements, whose rows begin stride elements
// apart in Data. Rows are cut by output, those of O and Down by input.
func (s *shard) cut(a *arch.Config, r arch.Role, t kernels.Tensor) (_ kernels.Tensor, n, stride int) {
	size := t.DType.Bytes()
	n = len(t.Data) / size
	if s.ranks == 1 {
		return t, n, 0
	}
	rows, cols := a.Hidden, 0 // of the matrices that are cut by columns
	var own span
	switch r {
	case arch.Q, arch.QBias:
		rows, own = a.Heads*a.HeadDim, span{s.heads.first * a.HeadDim, s.heads.n * a.HeadDim}
	case arch.K, arch.V, arch.KBias, arch.VBias:
		rows, own = a.KVHeads*a.HeadDim, span{s.kv.first * a.HeadDim, s.kv.n * a.HeadDim}
	case arch.Gate, arch.Up:
		rows, own = width(a), s.ff
	case arch.Head:
		rows, own = a.Vocab, s.ids
	case arch.O:
		cols, own = a.Heads*a.HeadDim, span{s.heads.first * a.HeadDim, s.heads.n * a.HeadDim}
	case arch.Down:
		cols, own = width(a), s.ff
	default:
		return t, n, 0
	}
	if cols > 0 {
		if n != rows*cols { // the library says what is wrong
			return t, n, 0
		}
		t.Data = t.Data[own.first*size : ((rows-1)*cols+own.first+own.n)*size]
		return t, rows * own.n, cols
	}
	if n%rows != 0 {
		return t, n, 0
	}
	cols = n / rows
	t.Data = t.Data[own.first*cols*size : (own.first+own.n)*cols*size]
	if len(t.Scale) == rows {
		t.Scale = t.Scale[own.first : own.first+own.n]
	}
	return t, own.n * cols, 0
}
