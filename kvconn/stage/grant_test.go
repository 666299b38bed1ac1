package stage_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvlayout"
)

var geo = stage.NewGeometry(kvlayout.Plain(3, 2, 8, 4, "f32"), stage.Ring{Slots: 4, SlotBytes: 1 << 16})

const form = 9

func good() stage.Grant { return stage.GrantOf(form, described(), geo, geo.Bytes()) }

// described is the pool that the good grant is of.
func described() *kvconn.Shared {
	s := &kvconn.Shared{Blocks: 256, Epoch: 7, BlockBytes: 512}
	for n := range 3 {
		s.Layers = append(s.Layers, kvconn.Span{Offset: int64(n) * 512 * 256, Stride: 512})
	}
	return s
}

func TestGrantRoundTrip(t *testing.T) {
	g := good()
	b := append(g.Encode(), "more"...)
	got, rest, err := stage.DecodeGrant(b, form)
	if err != nil || got != g || string(rest) != "more" {
		t.Fatalf("%+v, %q, %v", got, rest, err)
	}
	if err := got.Describes(described(), geo, geo.Bytes()); err != nil {
		t.Error(err)
	}
	ranks := described() // the same pool, divided: slots have blocks of all heads
	ranks.Ranks, ranks.Layers = 2, append(ranks.Layers, ranks.Layers...)
	if g := stage.GrantOf(form, ranks, geo, geo.Bytes()); g != good() {
		t.Errorf("of two ranks: %+v", g)
	}
	if err := got.Describes(ranks, geo, geo.Bytes()); err != nil {
		t.Error(err)
	}
	for n := range stage.GrantBytes {
		if _, _, err := stage.DecodeGrant(b[:n], form); err == nil {
			t.Errorf("accepted %d of %d bytes", n, len(b))
		}
	}
	if _, _, err := stage.DecodeGrant(b, form+1); err == nil {
		t.Error("accepted another form")
	}
}

// A grant says nothing that the frames do not say too, and is of a ring like ours.
func TestGrantRefused(t *testing.T) {
	f := func(name, want string, bend func(g *stage.Grant)) {
		t.Helper()
		g := good()
		bend(&g)
		got, _, err := stage.DecodeGrant(g.Encode(), form)
		if err == nil {
			err = got.Describes(described(), geo, geo.Bytes())
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	f("no slots", "slots", func(g *stage.Grant) { g.Slots = 0 })
	f("more slots", "slots", func(g *stage.Grant) { g.Slots++ })
	f("larger slots", "slots", func(g *stage.Grant) { g.Moves++ })
	f("a longer ring", "bytes", func(g *stage.Grant) { g.Bytes++ })
	f("a ring without end", "bytes", func(g *stage.Grant) { g.Bytes = 1 << 40 })
	f("of another run", "epoch", func(g *stage.Grant) { g.Epoch++ })
	f("more blocks", "blocks", func(g *stage.Grant) { g.Blocks++ })
	f("blocks below zero", "blocks", func(g *stage.Grant) { g.Blocks = -1 })
	f("fewer layers", "layers", func(g *stage.Grant) { g.Layers-- })
	f("longer blocks", "bytes", func(g *stage.Grant) { g.BlockBytes++ })
}

// FuzzGrant: what is accepted is in bounds and encodes to the same bytes.
func FuzzGrant(f *testing.F) {
	g := good()
	f.Add(g.Encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		g, rest, err := stage.DecodeGrant(b, form)
		if err != nil {
			return
		}
		if !bytes.Equal(append(g.Encode(), rest...), b) || g.Slots < 1 || g.Moves < 1 || g.Bytes < 1 || g.Blocks < 1 || g.Layers < 1 || g.BlockBytes < 1 {
			t.Errorf("%x became %+v", b, g)
		}
	})
}
