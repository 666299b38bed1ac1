package kvconn

import "testing"

// Every pairing is judged by both sides, who must agree.
func TestCompare(t *testing.T) {
	base := func() Identity {
		return Identity{ModelFingerprint: "m", TokenizerFingerprint: "t", Numerics: "cpu-f32-1", Layout: Layout{BlockTokens: 16,
			Groups: []Group{{Kind: "full", Layers: 2, KVHeads: 8, HeadDim: 4, RowBytes: 16, DType: "f32"}}}}
	}
	f := func(name string, p pairing, want string, change func(a, b *Identity)) {
		t.Helper()
		a, b := base(), base()
		b.Layout.Groups = append([]Group(nil), b.Layout.Groups...)
		change(&a, &b)
		x, y := p.compare(a, b), p.compare(b, a)
		if (x == nil) != (y == nil) || x != nil && (x.Field != y.Field || x.Field != want) || x == nil && want != "" {
			t.Errorf("%s: %v and %v, want %q", name, x, y, want)
		}
	}
	one, two, free := pairing{version: 1, convert: true}, pairing{version: 2}, pairing{version: 2, convert: true}
	bf16 := func(a, b *Identity) {
		b.Layout.Groups[0].DType, b.Layout.Groups[0].RowBytes, b.Numerics = "bf16", 8, "cuda-bf16-1"
	}
	slice := func(first, heads, total int) func(a, b *Identity) {
		return func(a, b *Identity) {
			g := &b.Layout.Groups[0]
			g.HeadFirst, g.KVHeads, g.HeadsTotal = first, heads, total
		}
	}
	for _, p := range []pairing{one, two, free} {
		f("equal", p, "", func(a, b *Identity) {})
		f("numerics alone", p, "numerics", func(a, b *Identity) { b.Numerics = "cuda-f32-1" })
		f("row bytes", p, "layout.groups[0].row_bytes", func(a, b *Identity) { b.Layout.Groups[0].RowBytes = 32 })
		f("heads of another model", p, "layout.groups[0].kv_heads", slice(0, 4, 0))
	}
	f("dtype", one, "numerics", bf16)
	f("dtype", two, "numerics", bf16)
	f("dtype", free, "", bf16)
	f("dtype, equal numerics", two, "layout.groups[0].dtype", func(a, b *Identity) { bf16(a, b); b.Numerics = a.Numerics })
	f("unknown dtype", free, "layout.groups[0].dtype", func(a, b *Identity) { bf16(a, b); b.Layout.Groups[0].DType = "i4" })
	f("padded rows", free, "layout.groups[0].dtype", func(a, b *Identity) { bf16(a, b); b.Layout.Groups[0].RowBytes = 12 })
	f("big-endian", free, "numerics", func(a, b *Identity) { bf16(a, b); b.Numerics = "cpu-bf16-1-be" })
	f("slice", one, "layout.groups[0].kv_heads", slice(4, 4, 8))
	f("slice", two, "", slice(4, 4, 8))
	f("slices apart", two, "layout.groups[0].kv_heads", func(a, b *Identity) { slice(4, 4, 8)(a, b); slice(0, 4, 8)(nil, a) })
	f("slices that overlap", two, "", func(a, b *Identity) { slice(3, 4, 8)(a, b); slice(0, 4, 8)(nil, a) })
	f("equal slices", two, "", func(a, b *Identity) { slice(4, 4, 8)(a, b); slice(4, 4, 8)(nil, a) })
	f("equal slices, which 1 cannot say", one, "layout.groups[0].kv_heads", func(a, b *Identity) { slice(4, 4, 8)(a, b); slice(4, 4, 8)(nil, a) })
	f8 := func(a, b *Identity) { b.Layout.Groups[0].DType, b.Layout.Groups[0].RowBytes = F8, 4 }
	f("fp8", one, "layout.groups[0].dtype", func(a, b *Identity) { f8(a, b); f8(nil, a) })
	f("fp8", two, "", func(a, b *Identity) { f8(a, b); f8(nil, a) })
	f("fp8 and f32", free, "", f8)
}

func TestCut(t *testing.T) {
	l := Layout{BlockTokens: 16, Groups: []Group{{KVHeads: 4, HeadFirst: 4, HeadsTotal: 16}}}
	other := Layout{Groups: []Group{{KVHeads: 6, HeadFirst: 2, HeadsTotal: 16}}}
	f := func(ok bool, ranges ...HeadRange) {
		t.Helper()
		c, err := l.cut(ranges, other)
		if (err == nil) != ok {
			t.Errorf("%v: %v", ranges, err)
		}
		if err == nil && (c.Groups[0].HeadFirst != max(4, ranges0(ranges).First) || c.Groups[0].HeadsTotal != 16) {
			t.Errorf("%v: %+v", ranges, c)
		}
	}
	f(true)
	f(true, HeadRange{4, 1})
	f(true, HeadRange{6, 2})
	f(false, HeadRange{4, 5})
	f(false, HeadRange{3, 2})
	f(false, HeadRange{4, 0})
	f(false, HeadRange{4, 1}, HeadRange{4, 1})
	other.Groups[0].KVHeads = 5
	f(false)
}

func ranges0(r []HeadRange) HeadRange {
	if len(r) == 0 {
		return HeadRange{}
	}
	return r[0]
}
