package cudaipc

import (
	"bytes"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
)

const goodHeads = 4

// good is the grant of a pool of 4 heads by so many ranks.
func good(ranks int) grant {
	g := grant{head: head{Line: 3, Lines: 4, Epoch: 7, FlagBytes: kernels.FlagLines * kernels.FlagStride, Blocks: 256, Layers: 3, Heads: goodHeads}}
	for i := range ranks {
		first, n := share(goodHeads, i, ranks)
		g.ranks = append(g.ranks, rank{part{First: int32(first), Heads: int32(n), BlockBytes: int64(128 * n)}, []byte("handle")[:2+i%4]})
	}
	return g
}

// described is the pool that the good grant is of.
func described(ranks int) *kvconn.Shared {
	s := &kvconn.Shared{Blocks: 256, Epoch: 7, Ranks: ranks}
	for i := range ranks {
		_, n := share(goodHeads, i, ranks)
		for range 3 {
			s.Layers = append(s.Layers, kvconn.Span{Stride: int64(128 * n)})
		}
	}
	return s
}

func TestGrantRoundTrip(t *testing.T) {
	for _, ranks := range []int{1, 2, 4, 8} {
		g := good(ranks)
		b := g.encode()
		got, err := decodeGrant(b)
		if err != nil || !bytes.Equal(got.encode(), b) {
			t.Fatalf("%+v, %v", got, err)
		}
		if err := got.describes(described(ranks), goodHeads); err != nil {
			t.Error(err)
		}
		for n := range b {
			if _, err := decodeGrant(b[:n]); err == nil {
				t.Errorf("accepted %d of %d bytes", n, len(b))
			}
		}
		if _, err := decodeGrant(append(b, 0)); err == nil {
			t.Error("accepted a trailing byte")
		}
	}
}

// A grant says nothing that the frames do not say too, and nothing out of range.
func TestGrantRefused(t *testing.T) {
	f := func(name, want string, bend func(g *grant)) {
		t.Helper()
		g := good(2)
		bend(&g)
		got, err := decodeGrant(g.encode())
		if err == nil {
			err = got.describes(described(2), goodHeads)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	f("a line too many", "line", func(g *grant) { g.Line = kernels.FlagLines })
	f("a line below zero", "line", func(g *grant) { g.Line = -1 })
	f("no line", "line", func(g *grant) { g.Lines = 0 })
	f("lines below zero", "line", func(g *grant) { g.Lines = -1 })
	f("lines past the end", "line", func(g *grant) { g.Line, g.Lines = kernels.FlagLines-3, 4 })
	f("of another run", "epoch", func(g *grant) { g.Epoch++ })
	f("no flags", "flags", func(g *grant) { g.FlagBytes = 0 })
	f("too few flags", "flags", func(g *grant) { g.FlagBytes-- })
	f("flags without end", "flags", func(g *grant) { g.FlagBytes = 1 << 40 })
	f("negative flags", "flags", func(g *grant) { g.FlagBytes = -1 })
	f("more blocks", "blocks", func(g *grant) { g.Blocks++ })
	f("no blocks", "blocks", func(g *grant) { g.Blocks = 0 })
	f("blocks below zero", "blocks", func(g *grant) { g.Blocks = -1 })
	f("fewer layers", "layers", func(g *grant) { g.Layers-- })
	f("longer blocks", "bytes", func(g *grant) { g.ranks[1].BlockBytes++ })
	f("blocks without bytes", "bytes", func(g *grant) { g.ranks[0].BlockBytes = 0 })
	f("blocks without end", "bytes", func(g *grant) { g.ranks[0].BlockBytes = 1 << 50 })
	f("no handle", "handle", func(g *grant) { g.ranks[1].handle = nil })
	f("a long handle", "handle", func(g *grant) { g.ranks[0].handle = make([]byte, kernels.MaxHandle+1) })
	f("no rank", "0 ranks", func(g *grant) { g.ranks = nil })
	f("a rank less", "of 1 ranks", func(g *grant) { *g = good(1) })
	f("more ranks", "of 4 ranks", func(g *grant) { *g = good(4) })
	f("ranks without end", "9 ranks", func(g *grant) { g.ranks = append(good(8).ranks, g.ranks[0]) })
	f("heads of another model", "8 heads, ours are 4", func(g *grant) { g.Heads = 8 })
	f("no heads", "0 heads", func(g *grant) { g.Heads = 0 })
	f("heads of another rank", "rank 1 of 2 has 2 heads from 0 on", func(g *grant) { g.ranks[1].First = 0 })
	f("heads below zero", "from -1 on", func(g *grant) { g.ranks[1].First = -1 })
	f("heads past the end", "3 heads from 2 on of 4", func(g *grant) { g.ranks[1].Heads = 3 })
	f("a rank without heads", "0 heads from 2 on", func(g *grant) { g.ranks[1].Heads = 0 })
}

// FuzzGrant: what is accepted is in bounds and encodes to the same bytes.
func FuzzGrant(f *testing.F) {
	for _, ranks := range []int{1, 2, 8} {
		g := good(ranks)
		f.Add(g.encode())
	}
	f.Add([]byte{})
	f.Add(make([]byte, 45))
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := decodeGrant(b)
		if err != nil {
			return
		}
		if !bytes.Equal(g.encode(), b) {
			t.Errorf("%x became %x", b, g.encode())
		}
		if g.Line < 0 || g.Lines < 1 || int64(g.Line)+int64(g.Lines) > kernels.FlagLines || g.FlagBytes < 1 || g.FlagBytes > maxFlagBytes ||
			g.Blocks < 1 || g.Layers < 1 || g.Heads < 1 || len(g.ranks) < 1 || len(g.ranks) > maxRanks {
			t.Errorf("%+v", g)
		}
		for _, r := range g.ranks {
			if len(r.handle) < 1 || len(r.handle) > kernels.MaxHandle || r.BlockBytes < 1 || r.First < 0 || r.Heads < 1 || int64(r.First)+int64(r.Heads) > int64(g.Heads) {
				t.Errorf("%+v", r)
			}
		}
	})
}
