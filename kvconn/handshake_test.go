package kvconn

import (
	"testing"

	"github.com/xpyd/xpyd/kvlayout"
)

// Every pairing is judged by both sides, who must agree.
func TestCompare(t *testing.T) {
	base := func() Identity {
		return Identity{ModelFingerprint: "m", TokenizerFingerprint: "t", Numerics: "cpu-f32-1", Layout: kvlayout.Plain(2, 8, 4, 16, "f32")}
	}
	f := func(name string, convert bool, want string, change func(a, b *Identity)) {
		t.Helper()
		a, b := base(), base()
		b.Layout.Groups = append([]kvlayout.Group(nil), b.Layout.Groups...)
		change(&a, &b)
		x, y := compare(a, b, convert), compare(b, a, convert)
		if (x == nil) != (y == nil) || x != nil && (x.Field != y.Field || x.Field != want) || x == nil && want != "" {
			t.Errorf("%s: %v and %v, want %q", name, x, y, want)
		}
	}
	const strict, free = false, true
	bf16 := func(a, b *Identity) {
		b.Layout.Groups[0].DType, b.Numerics = kvlayout.BF16, "cuda-bf16-1"
	}
	for _, p := range []bool{strict, free} {
		f("equal", p, "", func(a, b *Identity) {})
		f("numerics alone", p, "numerics", func(a, b *Identity) { b.Numerics = "cuda-f32-1" })
		f("row bytes", p, "layout.groups[0].planes", func(a, b *Identity) { b.Layout.Groups[0].Planes = kvlayout.KV(8) })
		f("heads of another model", p, "layout.groups[0].heads", func(a, b *Identity) { b.Layout.Groups[0].Heads = kvlayout.Heads{Count: 4, Total: 4} })
	}
	f("dtype", strict, "numerics", bf16)
	f("dtype", free, "", bf16)
	f("dtype, equal numerics", strict, "layout.groups[0].dtype", func(a, b *Identity) { bf16(a, b); b.Numerics = a.Numerics })
	f("unknown dtype", free, "layout.groups[0].dtype", func(a, b *Identity) { bf16(a, b); b.Layout.Groups[0].DType = kvlayout.U8 })
	f("wider rows", free, "layout.groups[0].planes", func(a, b *Identity) { bf16(a, b); b.Layout.Groups[0].Planes = kvlayout.KV(6) })
	f("fp8 without scales", free, "layout.groups[0].dtype", func(a, b *Identity) { b.Layout.Groups[0].DType = kvlayout.F8E4M3 })
	f("big-endian", free, "numerics", func(a, b *Identity) { bf16(a, b); b.Numerics = "cpu-bf16-1-be" })
	f8 := func(a, b *Identity) {
		b.Layout.Groups[0].DType, b.Layout.Groups[0].Scale = kvlayout.F8E4M3, kvlayout.F32
	}
	f("fp8", strict, "", func(a, b *Identity) { f8(a, b); f8(nil, a) })
	f("fp8 and f32", free, "", f8)
}
