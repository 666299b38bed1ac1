//go:build cgo && linux

package cuda

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
)

// Ranks' packed rows, put together, are those of all heads, scales too; also where several ranks
// have a head.
func TestRanksHeads(t *testing.T) {
	for _, opt := range []Options{{BlockTokens: 16}, {BlockTokens: 16, KVFP8: true}} {
		for _, n := range []int{2, 4, 8} {
			a := arch.Config{Layers: 1, Heads: 8, KVHeads: 4, HeadDim: 32, Intermediate: 64, Vocab: 64}
			g := &Ranks{layout: opt.layout(&a)}
			g.rows, _ = g.layout.Uniform()
			const rows = 5
			all, back := make([]byte, g.rows.PackedBytes(rows)), make([]byte, g.rows.PackedBytes(rows))
			r := rand.New(rand.NewPCG(1, uint64(n)))
			for i := range all {
				all[i] = byte(r.Uint32())
			}
			for rank := range n {
				s, err := shardOf(&a, rank, n)
				if err != nil {
					t.Fatal(err)
				}
				b := &Backend{shard: s}
				l := s.layout(g.layout)
				b.rows, _ = l.Uniform()
				if err := l.Validate(); err != nil || l.Groups[0].Heads.Total != a.KVHeads || !strings.Contains(g.layout.String(), "0+4 of 4") {
					t.Errorf("layout %v of %v: %v", l, g.layout, err)
				}
				own := make([]byte, b.rows.PackedBytes(rows))
				g.heads(b, rows, own, all, func(own, all []byte) { copy(own, all) })
				plane, head := r.IntN(2), r.IntN(s.kv.n)
				x, _ := b.rows.Part(own, rows, plane, head)
				y, _ := g.rows.Part(all, rows, plane, s.kv.first+head)
				if !bytes.Equal(x, y) {
					t.Errorf("rank %d of %d, plane %d: head %d is not the model's %d", rank, n, plane, head, s.kv.first+head)
				}
				g.heads(b, rows, own, back, func(own, all []byte) { copy(all, own) })
			}
			if !bytes.Equal(back, all) {
				t.Errorf("%d ranks, %s: other rows came back", n, g.rows.DType)
			}
		}
	}
}

// Pools of several ranks look as one rank's do, whose blocks are the same.
func TestRankNumerics(t *testing.T) {
	for _, c := range []struct {
		opt  Options
		want string
	}{{Options{}, Numerics}, {Options{KVFP8: true}, "cuda-bf16-kv8-1"}, {Options{BatchInvariant: true}, InvariantNumerics + "tp4-00000007"}, {Options{BatchInvariant: true, FP16: true}, "cuda-fp16-invariant-2-tp4-00000007"}} {
		if got := c.opt.rankNumerics(7, 4); got != c.want {
			t.Errorf("%+v: %q, want %q", c.opt, got, c.want)
		}
	}
}
