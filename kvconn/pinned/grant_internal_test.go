package pinned

import (
	"bytes"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/stage"
)

var geo = stage.NewGeometry(kernels.Layout{Layers: 3, KVHeads: 2, HeadDim: 8, BlockTokens: 4, DType: "f32", RowBytes: 32}, stage.Ring{Slots: 4, SlotBytes: 1 << 16})

func good() grant {
	return grant{slots: geo.Slots, moves: geo.Moves, bytes: memoryBytes(geo), epoch: 7, blockBytes: 512, blocks: 256, layers: 3}
}

// described is the pool that the good grant is of.
func described() *kvconn.Shared {
	s := &kvconn.Shared{Blocks: 256, Epoch: 7}
	for n := range 3 {
		s.Layers = append(s.Layers, kvconn.Span{Offset: int64(n) * 512 * 256, Stride: 512})
	}
	return s
}

func TestGrantRoundTrip(t *testing.T) {
	g := good()
	b := g.encode()
	got, err := decodeGrant(b)
	if err != nil || !bytes.Equal(got.encode(), b) {
		t.Fatalf("%+v, %v", got, err)
	}
	if err := got.describes(described(), geo); err != nil {
		t.Error(err)
	}
	for n := range b {
		if _, err := decodeGrant(b[:n]); err == nil {
			t.Errorf("accepted %d of %d bytes", n, len(b))
		}
	}
}

// A grant says nothing that the frames do not say too, and is of a ring like ours.
func TestGrantRefused(t *testing.T) {
	f := func(name, want string, bend func(g *grant)) {
		t.Helper()
		g := good()
		bend(&g)
		got, err := decodeGrant(g.encode())
		if err == nil {
			err = got.describes(described(), geo)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	f("no slots", "slots", func(g *grant) { g.slots = 0 })
	f("more slots", "slots", func(g *grant) { g.slots++ })
	f("larger slots", "slots", func(g *grant) { g.moves++ })
	f("a longer ring", "bytes", func(g *grant) { g.bytes++ })
	f("a ring without end", "bytes", func(g *grant) { g.bytes = 1 << 40 })
	f("of another run", "epoch", func(g *grant) { g.epoch++ })
	f("more blocks", "blocks", func(g *grant) { g.blocks++ })
	f("blocks below zero", "blocks", func(g *grant) { g.blocks = -1 })
	f("fewer layers", "layers", func(g *grant) { g.layers-- })
	f("longer blocks", "bytes", func(g *grant) { g.blockBytes++ })
}

// FuzzGrant: what is accepted is in bounds and encodes to the same bytes.
func FuzzGrant(f *testing.F) {
	g := good()
	f.Add(g.encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := decodeGrant(b)
		if err != nil {
			return
		}
		if !bytes.Equal(g.encode(), b) || g.slots < 1 || g.moves < 1 || g.bytes < 1 || g.blocks < 1 || g.layers < 1 || g.blockBytes < 1 {
			t.Errorf("%x became %+v", b, g)
		}
	})
}
