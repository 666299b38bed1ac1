package nccl

import (
	"bytes"
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvlayout"
)

var geo = stage.NewGeometry(kvlayout.Plain(3, 2, 8, 4, "f32"), stage.Ring{Slots: 4, SlotBytes: 1 << 16})

func good() grant {
	s := &kvconn.Shared{Blocks: 256, Epoch: 7, BlockBytes: 512, Layers: []kvconn.Span{{Stride: 512}}}
	return grant{stage.GrantOf(grantForm, s, geo, geo.Bytes()), []byte("name")}
}

func TestGrant(t *testing.T) {
	g := good()
	b := g.encode()
	got, err := decodeGrant(b)
	if err != nil || got.Grant != g.Grant || string(got.id) != "name" {
		t.Fatalf("%+v, %v", got, err)
	}
	for n := range b {
		if _, err := decodeGrant(b[:n]); err == nil {
			t.Errorf("accepted %d of %d bytes", n, len(b))
		}
	}
	for name, id := range map[string][]byte{"no name": nil, "a long name": make([]byte, kernels.MaxHandle+1)} {
		g.id = id
		if _, err := decodeGrant(g.encode()); err == nil {
			t.Errorf("accepted %s", name)
		}
	}
	if _, err := decodeGrant(append(b, 0)); err == nil {
		t.Error("accepted a trailing byte")
	}
}

// FuzzGrant: what is accepted encodes to the same bytes.
func FuzzGrant(f *testing.F) {
	g := good()
	f.Add(g.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if g, err := decodeGrant(b); err == nil && !bytes.Equal(g.encode(), b) {
			t.Errorf("%x became %+v", b, g)
		}
	})
}
