package kvlayout_test

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/kvlayout"
)

// models has one layout of each kind that there is.
func models() map[string]kvlayout.Layout {
	heads := func(n int) kvlayout.Heads { return kvlayout.Heads{Count: n, Total: n} }
	return map[string]kvlayout.Layout{
		"llama-3-8b":    kvlayout.Plain(32, 8, 128, 16, kvlayout.BF16),
		"llama-3-8b-f8": kvlayout.Plain(32, 8, 128, 16, kvlayout.F8E4M3),
		"deepseek-v3": {BlockTokens: 64, Groups: []kvlayout.Group{{Kind: kvlayout.Latent, Layers: kvlayout.Run(0, 61),
			Planes: []kvlayout.Plane{{Name: "latent", Dim: 512}, {Name: "rope", Dim: 64}}, Heads: heads(1), DType: kvlayout.BF16}}},
		"gpt-oss-20b": {BlockTokens: 16, Groups: []kvlayout.Group{
			{Kind: kvlayout.Window, Layers: kvlayout.Every(0, 2, 12), Planes: kvlayout.KV(64), Heads: heads(8), Window: 128, DType: kvlayout.BF16},
			{Kind: kvlayout.Full, Layers: kvlayout.Every(1, 2, 12), Planes: kvlayout.KV(64), Heads: heads(8), DType: kvlayout.BF16}}},
		"gemma-3-4b": {BlockTokens: 16, Groups: []kvlayout.Group{ // every sixth of 34 layers is full
			{Kind: kvlayout.Full, Layers: kvlayout.Every(5, 6, 5), Planes: kvlayout.KV(256), Heads: heads(4), DType: kvlayout.BF16},
			{Kind: kvlayout.Window, Layers: slices.DeleteFunc(kvlayout.Run(0, 34), func(n int) bool { return n%6 == 5 }),
				Planes: kvlayout.KV(256), Heads: heads(4), Window: 1024, DType: kvlayout.BF16}}},
		"tp-rank-2-of-4": {BlockTokens: 16, Groups: []kvlayout.Group{{Kind: kvlayout.Full, Layers: kvlayout.Run(0, 32), Planes: kvlayout.KV(128),
			Heads: kvlayout.Heads{First: 4, Count: 2, Total: 8}, DType: kvlayout.F16}}},
		"wide-k-narrow-v-f8": {BlockTokens: 5, Groups: []kvlayout.Group{{Kind: kvlayout.Full, Layers: kvlayout.Run(0, 3),
			Planes: []kvlayout.Plane{{Name: "k", Dim: 24}, {Name: "v", Dim: 16}, {Name: "index", Dim: 3}}, Heads: heads(3), DType: kvlayout.F8E4M3, Scale: kvlayout.F32}}},
		"4-bit": kvlayout.Plain(2, 2, 6, 4, kvlayout.U4),
	}
}

func each(t *testing.T, f func(t *testing.T, l kvlayout.Layout)) {
	for name, l := range models() {
		t.Run(name, func(t *testing.T) { f(t, l) })
	}
}

// What known models keep of a position, in bytes of all layers.
func TestSizes(t *testing.T) {
	for name, want := range map[string]struct{ layers, position, heads int }{
		"llama-3-8b":     {32, 32 * 2 * 8 * 128 * 2, 8},
		"llama-3-8b-f8":  {32, 32 * 2 * 8 * (128 + 4), 8},
		"deepseek-v3":    {61, 61 * (512 + 64) * 2, 1},
		"gpt-oss-20b":    {24, 24 * 2 * 8 * 64 * 2, 8},
		"gemma-3-4b":     {34, 34 * 2 * 4 * 256 * 2, 4},
		"tp-rank-2-of-4": {32, 32 * 2 * 2 * 128 * 2, 2},
		"4-bit":          {2, 2 * 2 * 2 * 3, 2},
	} {
		l := models()[name]
		layers := l.Resolve()
		if err := l.Validate(); err != nil || l.Layers() != want.layers || len(layers) != want.layers {
			t.Errorf("%s: %d layers, want %d (%v)", name, l.Layers(), want.layers, err)
		}
		if got := l.BlockBytes(); got != want.position*l.BlockTokens {
			t.Errorf("%s: blocks of %d bytes, want %d", name, got, want.position*l.BlockTokens)
		}
		for i := range layers {
			if layers[i].Heads != want.heads || layers[i].DigestBytes() != 8*want.heads || layers[i].Number != i {
				t.Errorf("%s: layer %d has number %d and %d heads", name, i, layers[i].Number, layers[i].Heads)
			}
		}
	}
	if l := models()["tp-rank-2-of-4"].Resolve()[3]; l.FirstHead != 4 || l.Coordinates(1, 1, 7) != kvlayout.Coordinates(3, 1, 5, 7) {
		t.Error("a rank's heads are not numbered as the model's")
	}
	if l := models()["gpt-oss-20b"].Resolve(); l[2].Group != 0 || l[3].Group != 1 {
		t.Error("layers do not alternate")
	}
}

// Parts are the whole of the packed bytes, each byte once, rows before scales.
func TestPartsCover(t *testing.T) {
	each(t, func(t *testing.T, l kvlayout.Layout) {
		for _, layer := range l.Resolve() {
			for _, n := range []int{1, l.BlockTokens} {
				packed := make([]byte, layer.PackedBytes(n))
				next := 0 // byte of the next part's rows
				layer.Parts(packed, n, func(plane, head int, rows, scales []byte) {
					if len(rows) != n*layer.RowBytes(plane) || len(scales) != n*layer.ScaleBytes() || cap(rows) != len(rows) {
						t.Fatalf("plane %d head %d: %d bytes of rows, %d of scales", plane, head, len(rows), len(scales))
					}
					for _, part := range [][]byte{rows, scales} {
						for i := range part {
							part[i]++
						}
					}
					if &packed[next] != &rows[0] {
						t.Fatalf("plane %d head %d lies elsewhere", plane, head)
					}
					next += len(rows)
				})
				if bytes.Count(packed, []byte{1}) != len(packed) {
					t.Fatalf("%d of %d bytes are one part's", bytes.Count(packed, []byte{1}), len(packed))
				}
			}
		}
	})
}

// Positions that are copied to another packing and back are what they were, and
// nothing beside them changes.
func TestCopy(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	each(t, func(t *testing.T, l kvlayout.Layout) {
		for _, layer := range l.Resolve()[:2] {
			whole := make([]byte, layer.BlockBytes())
			for i := range whole {
				whole[i] = byte(r.Uint32())
			}
			bt := layer.BlockTokens
			again := make([]byte, len(whole))
			for at := 0; at < bt; {
				n := 1 + r.IntN(bt-at)
				part := make([]byte, layer.PackedBytes(n))
				layer.Copy(part, n, 0, whole, bt, at, n)
				layer.Copy(again, bt, at, part, n, 0, n)
				for plane := range layer.Planes {
					size := layer.RowBytes(plane)
					a, _ := layer.Part(whole, bt, plane, layer.Heads-1)
					b, _ := layer.Part(part, n, plane, layer.Heads-1)
					if !bytes.Equal(a[at*size:(at+n)*size], b) {
						t.Fatalf("positions %d+%d of plane %d differ", at, n, plane)
					}
				}
				at += n
			}
			if !bytes.Equal(again, whole) {
				t.Fatal("what was cut and put together again differs")
			}
		}
	})
}

// K and V have the coordinates that they have always had; no two rows share any.
func TestCoordinates(t *testing.T) {
	if got, want := kvlayout.Coordinates(3, 1, 2, 77), uint64(77|2<<32|1<<47|3<<48); got != want {
		t.Errorf("%x, want %x", got, want)
	}
	seen := map[uint64]bool{}
	for _, layer := range []int{0, 1, kvlayout.MaxLayers - 1} {
		for plane := range kvlayout.MaxPlanes {
			for _, head := range []int{0, 1, 1<<14 - 1} {
				for _, pos := range []int{0, 1, 1<<32 - 1} {
					seen[kvlayout.Coordinates(layer, plane, head, pos)] = true
				}
			}
		}
	}
	if len(seen) != 3*kvlayout.MaxPlanes*3*3 {
		t.Errorf("%d coordinates", len(seen))
	}
}

func TestLayersText(t *testing.T) {
	for text, want := range map[string]kvlayout.Layers{
		"0-31":         kvlayout.Run(0, 32),
		"1-23/2":       kvlayout.Every(1, 2, 12),
		"0-4,6-10":     append(kvlayout.Run(0, 5), kvlayout.Run(6, 5)...),
		"7":            {7},
		"3-4":          {3, 4},
		"0,2,3-9/3,20": {0, 2, 3, 6, 9, 20},
	} {
		var got kvlayout.Layers
		if err := got.UnmarshalText([]byte(text)); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v (%v), want %v", text, got, err, want)
		}
		if again := (kvlayout.Layers)(nil); again.UnmarshalText([]byte(want.String())) != nil || !slices.Equal(again, want) {
			t.Errorf("%v is written %s, which is read as %v", want, want, again)
		}
	}
	for _, text := range []string{"", "x", "-1", "3-1", "0-1024", "0-9999999999", "5,5", "5,4", "0-4,4", "0-8/0", "1/", "0-3/-1", "1-"} {
		if err := new(kvlayout.Layers).UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q was read", text)
		}
	}
}

// A layout arrives as it was sent, over a wire and in an announcement.
func TestEncode(t *testing.T) {
	each(t, func(t *testing.T, l kvlayout.Layout) {
		got, err := kvlayout.Decode(l.Encode())
		if err != nil || !reflect.DeepEqual(got, l) || got.String() != l.String() {
			t.Errorf("%v became %v: %v", l, got, err)
		}
		var form kvlayout.Form
		b, err := json.Marshal(l.Form())
		if err != nil || !bytes.Equal(b, l.Encode()) {
			t.Errorf("announced as %s, encoded as %s (%v)", b, l.Encode(), err)
		}
		if err := json.Unmarshal(b, &form); err != nil || form != l.Form() {
			t.Errorf("%v became %v: %v", l.Form(), form, err)
		}
		if got, err := form.Layout(); err != nil || !reflect.DeepEqual(got, l) {
			t.Errorf("%v became %v: %v", l, got, err)
		}
	})
}

// A foreign engine announces no groups, and a build of another protocol other fields.
func TestFormWithoutGroups(t *testing.T) {
	var f kvlayout.Form
	if err := json.Unmarshal([]byte(`{"block_tokens":32,"layers":5}`), &f); err != nil || f != (kvlayout.Form{BlockTokens: 32}) {
		t.Errorf("%v, %v", f, err)
	}
	if b, err := json.Marshal(f); string(b) != `{"block_tokens":32}` {
		t.Errorf("%s, %v", b, err)
	}
	if _, err := f.Layout(); err == nil {
		t.Error("a layout of no groups")
	}
	if err := json.Unmarshal([]byte(`{"groups":[`+strings.Repeat(`"x",`, kvlayout.MaxEncoded/4)+`"x"]}`), &f); err == nil {
		t.Error("an endless announcement was kept")
	}
}

func TestValidate(t *testing.T) {
	f := func(want string, change func(l *kvlayout.Layout, g *kvlayout.Group)) {
		t.Helper()
		l := kvlayout.Plain(4, 2, 8, 16, kvlayout.F32)
		change(&l, &l.Groups[0])
		err := l.Validate()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if _, decoded := kvlayout.Decode(l.Encode()); (decoded == nil) != (want == "") {
			t.Errorf("decoded: %v, want %q", decoded, want)
		}
	}
	f("", func(l *kvlayout.Layout, g *kvlayout.Group) {})
	f("block_tokens 0", func(l *kvlayout.Layout, g *kvlayout.Group) { l.BlockTokens = 0 })
	f("block_tokens 257", func(l *kvlayout.Layout, g *kvlayout.Group) { l.BlockTokens = 257 })
	f("0 groups", func(l *kvlayout.Layout, g *kvlayout.Group) { l.Groups = nil })
	f("17 groups", func(l *kvlayout.Layout, g *kvlayout.Group) { l.Groups = slices.Repeat(l.Groups, 17) })
	f("in two", func(l *kvlayout.Layout, g *kvlayout.Group) { l.Groups = slices.Repeat(l.Groups, 2) })
	f("layer 0 is in no group", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Layers = kvlayout.Run(1, 4) })
	f("layer 2 is in no group", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Layers = kvlayout.Layers{0, 1, 3} })
	f("layers", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Layers = nil })
	f("layers", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Layers = kvlayout.Layers{1, 0} })
	f("layers", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Layers = kvlayout.Run(-1, 4) })
	f("over 1024 layers", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Layers = kvlayout.Run(0, 1025) })
	f("0 planes", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Planes = nil })
	f("5 planes", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Planes = slices.Repeat(g.Planes[:1], 5) })
	f("planes[1]", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Planes[1].Dim = 0 })
	f("planes[1]", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Planes[1].Dim = 1 << 40 })
	f("planes[0]", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Planes[0].Name = "K\n" })
	f("planes[0]", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Planes[0].Dim, g.DType = 7, kvlayout.U4 })
	f("heads 0+0", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Heads.Count = 0 })
	f("heads 0+3 of 2", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Heads.Count = 3 })
	f("heads 1+2 of 2", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Heads.First = 1 })
	f("heads -1+2 of 2", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Heads.First = -1 })
	f("heads", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Heads = kvlayout.Heads{Count: 1025, Total: 2048} })
	f("heads", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Heads = kvlayout.Heads{Count: 1, Total: 1 << 15} })
	f("window", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Window = -1 })
	f("window", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Window = 1 << 31 })
	f("kind", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Kind = "" })
	f("kind", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Kind = strings.Repeat("x", 33) })
	f("dtype", func(l *kvlayout.Layout, g *kvlayout.Group) { g.DType = "f12" })
	f("scale", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Scale = kvlayout.F16 })
	f("over 268435456 bytes", func(l *kvlayout.Layout, g *kvlayout.Group) { g.Planes = kvlayout.KV(1 << 20); l.BlockTokens = 256 })
}

// Compare names the first field that differs, whoever asks.
func TestCompare(t *testing.T) {
	f := func(want, inA, inB string, convert bool, change func(l *kvlayout.Layout, g *kvlayout.Group)) {
		t.Helper()
		a, b := kvlayout.Plain(4, 2, 8, 16, kvlayout.BF16), kvlayout.Plain(4, 2, 8, 16, kvlayout.BF16)
		change(&b, &b.Groups[0])
		field, x, y := kvlayout.Compare(a, b, convert)
		back, v, u := kvlayout.Compare(b, a, convert)
		if field != want || x != inA || y != inB || back != field || u != x || v != y {
			t.Errorf("%q (%q, %q) and %q (%q, %q), want %q (%q, %q)", field, x, y, back, v, u, want, inA, inB)
		}
	}
	for _, convert := range []bool{false, true} {
		f("", "", "", convert, func(l *kvlayout.Layout, g *kvlayout.Group) {})
		f("", "", "", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { l.BlockTokens = 64 })
		f("groups", "1", "2", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { l.Groups = append(l.Groups, *g) })
		f("groups[0].layers", "0-3", "0-4", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { g.Layers = kvlayout.Run(0, 5) })
		f("groups[0].heads", "0+2 of 2", "2+2 of 4", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { g.Heads = kvlayout.Heads{First: 2, Count: 2, Total: 4} })
		f("groups[0].planes", "k:8,v:8", "k:8,v:4", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { g.Planes[1].Dim = 4 })
		f("groups[0].planes", "k:8,v:8", "k:8,rope:8", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { g.Planes[1].Name = "rope" })
		f("groups[0].planes", "k:8,v:8", "k:8", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { g.Planes = g.Planes[:1] })
		f("groups[0].window", "0", "128", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { g.Window = 128 })
		f("groups[0].kind", "full", "latent", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { g.Kind = kvlayout.Latent })
		f("groups[0].dtype", "bf16", "u8", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { g.DType = kvlayout.U8 })
		f("groups[0].scale", "", "f32", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { g.Scale = kvlayout.F32 })
		f("groups[0].dtype", "bf16", "f8e4m3", convert, func(l *kvlayout.Layout, g *kvlayout.Group) { g.DType = kvlayout.F8E4M3 }) // without scales
	}
	for _, d := range []kvlayout.DType{kvlayout.F32, kvlayout.F16, kvlayout.F8E4M3} {
		to := func(l *kvlayout.Layout, g *kvlayout.Group) { *l = kvlayout.Plain(4, 2, 8, 64, d) }
		f("groups[0].dtype", "bf16", string(d), false, to)
		f("", "", "", true, to)
	}
	a, b := kvlayout.Plain(4, 2, 8, 16, kvlayout.BF16), kvlayout.Plain(4, 2, 8, 64, kvlayout.F16)
	if !kvlayout.Differ(a, b) || kvlayout.Differ(a, a) {
		t.Error("whether rows are converted is not what is told")
	}
}

func TestUniform(t *testing.T) {
	for name, want := range map[string]bool{"llama-3-8b": true, "gpt-oss-20b": true, "gemma-3-4b": true, "deepseek-v3": true} {
		l := models()[name]
		if r, ok := l.Uniform(); ok != want || ok && r != l.Resolve()[1].Rows {
			t.Errorf("%s: %t", name, ok)
		}
	}
	l := models()["gpt-oss-20b"]
	l.Groups[1].Planes = kvlayout.KV(128)
	if _, ok := l.Uniform(); ok {
		t.Error("layers of two widths are uniform")
	}
}

// FuzzDecode: what a peer sends is refused, or is a layout whose every number can be
// used, and arrives at the next as it is.
func FuzzDecode(f *testing.F) {
	for _, l := range models() {
		f.Add(l.Encode())
	}
	f.Add([]byte(`{"block_tokens":256,"groups":[{"kind":"full","layers":"0-1023","planes":[{"name":"k","dim":1048576}],"heads":{"count":1024,"total":16384},"dtype":"f32"}]}`))
	f.Add([]byte(`{"block_tokens":-1,"groups":[{}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := kvlayout.Decode(b)
		if err != nil {
			return
		}
		again, err := kvlayout.Decode(l.Encode())
		if err != nil || again.String() != l.String() || len(l.Encode()) > kvlayout.MaxEncoded {
			t.Fatalf("%v became %v: %v", l, again, err)
		}
		layers := l.Resolve()
		if len(layers) < 1 || len(layers) > kvlayout.MaxLayers {
			t.Fatalf("%d layers", len(layers))
		}
		for i := range layers {
			r := &layers[i]
			if n := r.BlockBytes(); r.Number != i || n < 1 || n > kvlayout.MaxBlockBytes || r.Heads < 1 || r.Heads > kvlayout.MaxHeads || r.PackedBytes(1) < 1 {
				t.Fatalf("layer %d of %v: %+v", i, l, r)
			}
			if r.BlockBytes() < 1<<16 {
				r.Parts(make([]byte, r.BlockBytes()), r.BlockTokens, func(plane, head int, rows, scales []byte) {})
			}
		}
	})
}

func BenchmarkPart(b *testing.B) {
	l := kvlayout.Plain(1, 8, 128, 16, kvlayout.F8E4M3).Resolve()[0]
	packed := make([]byte, l.BlockBytes())
	for b.Loop() {
		for plane := range l.Planes {
			for head := range l.Heads {
				l.Part(packed, 16, plane, head)
			}
		}
	}
}
