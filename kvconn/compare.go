package kvconn

import (
	"strconv"
	"strings"
)

// compare returns the first field that keeps the two from being paired; convert
// says that both sides allow rows of another dtype. Both come to the same answer.
func compare(ours, theirs Identity, convert bool) *Incompatible {
	a, b := ours.Layout.Groups, theirs.Layout.Groups
	fields := []struct{ name, a, b string }{
		{"model_fingerprint", ours.ModelFingerprint, theirs.ModelFingerprint},
		{"tokenizer_fingerprint", ours.TokenizerFingerprint, theirs.TokenizerFingerprint},
		{"numerics", ours.Numerics, theirs.Numerics},
		{"layout.groups", strconv.Itoa(len(a)), strconv.Itoa(len(b))},
	}
	for _, f := range fields {
		if f.a != f.b && !(f.name == "numerics" && convert && converts(ours, theirs)) {
			return &Incompatible{Field: f.name, Ours: f.a, Theirs: f.b}
		}
	}
	for i := range a {
		if field, x, y := differ(a[i], b[i], convert); field != "" {
			return &Incompatible{Field: "layout.groups[" + strconv.Itoa(i) + "]." + field, Ours: x, Theirs: y}
		}
	}
	return nil
}

// converts tells whether rows change their dtype between the two. Only then
// may their numerics differ: another dtype implies others.
func converts(ours, theirs Identity) bool {
	a, b := ours.Layout.Groups, theirs.Layout.Groups
	if len(a) != len(b) || !littleEndian(ours.Numerics) || !littleEndian(theirs.Numerics) {
		return false
	}
	for i := range a {
		if a[i].DType != b[i].DType {
			return true
		}
	}
	return false
}

// littleEndian tells whether rows of these numerics can be read element by
// element (kernels/DESIGN.md, section 4).
func littleEndian(numerics string) bool { return !strings.HasSuffix(numerics, "-be") }

// differ returns the first difference of two groups that cannot be converted.
func differ(a, b Group, convert bool) (field, ours, theirs string) {
	for _, f := range []struct {
		name string
		a, b int
	}{{"layers", a.Layers, b.Layers}, {"kv_heads", a.KVHeads, b.KVHeads}, {"head_dim", a.HeadDim, b.HeadDim}, {"window", a.Window, b.Window}} {
		if f.a != f.b {
			return f.name, strconv.Itoa(f.a), strconv.Itoa(f.b)
		}
	}
	switch {
	case a.Kind != b.Kind:
		return "kind", a.Kind, b.Kind
	case a.DType != b.DType && !(convert && a.convertible() && b.convertible()):
		return "dtype", a.DType, b.DType
	case a.DType == b.DType && a.RowBytes != b.RowBytes:
		return "row_bytes", strconv.Itoa(a.RowBytes), strconv.Itoa(b.RowBytes)
	}
	return "", "", ""
}
