package cudaipc

import (
	"bytes"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
)

func good() grant {
	return grant{head{Line: 3, Epoch: 7, FlagBytes: 1 << 17, BlockBytes: 512, Blocks: 256, Layers: 3}, []byte("handle")}
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
	if err := got.describes(described()); err != nil {
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

// A grant says nothing that the frames do not say too, and nothing out of range.
func TestGrantRefused(t *testing.T) {
	f := func(name, want string, bend func(g *grant)) {
		t.Helper()
		g := good()
		bend(&g)
		got, err := decodeGrant(g.encode())
		if err == nil {
			err = got.describes(described())
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	f("a line too many", "line", func(g *grant) { g.Line = kernels.FlagLines })
	f("a line below zero", "line", func(g *grant) { g.Line = -1 })
	f("of another run", "epoch", func(g *grant) { g.Epoch++ })
	f("no flags", "flags", func(g *grant) { g.FlagBytes = 0 })
	f("flags without end", "flags", func(g *grant) { g.FlagBytes = 1 << 40 })
	f("negative flags", "flags", func(g *grant) { g.FlagBytes = -1 })
	f("more blocks", "blocks", func(g *grant) { g.Blocks++ })
	f("no blocks", "blocks", func(g *grant) { g.Blocks = 0 })
	f("blocks below zero", "blocks", func(g *grant) { g.Blocks = -1 })
	f("fewer layers", "layers", func(g *grant) { g.Layers-- })
	f("longer blocks", "bytes", func(g *grant) { g.BlockBytes++ })
	f("no handle", "handle", func(g *grant) { g.handle = nil })
	f("a long handle", "bytes", func(g *grant) { g.handle = make([]byte, kernels.MaxHandle+1) })
}

// FuzzGrant: what is accepted is in bounds and encodes to the same bytes.
func FuzzGrant(f *testing.F) {
	g := good()
	f.Add(g.encode())
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
		if g.Line < 0 || g.Line >= kernels.FlagLines || len(g.handle) < 1 || len(g.handle) > kernels.MaxHandle ||
			g.FlagBytes < 1 || g.FlagBytes > maxFlagBytes || g.Blocks < 1 || g.Layers < 1 || g.BlockBytes < 1 {
			t.Errorf("%+v", g)
		}
	})
}
