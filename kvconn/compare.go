package kvconn

import (
	"strconv"
	"strings"
)

// pairing is what a handshake has agreed on besides the identities.
type pairing struct {
	version uint8
	convert bool // both sides allow rows of another dtype
}

// compare returns the first field that keeps the two from being paired. Both
// sides come to the same answer.
func (p pairing) compare(ours, theirs Identity) *Incompatible {
	a, b := ours.Layout.Groups, theirs.Layout.Groups
	fields := []struct{ name, a, b string }{
		{"model_fingerprint", ours.ModelFingerprint, theirs.ModelFingerprint},
		{"tokenizer_fingerprint", ours.TokenizerFingerprint, theirs.TokenizerFingerprint},
		{"numerics", ours.Numerics, theirs.Numerics},
		{"layout.groups", strconv.Itoa(len(a)), strconv.Itoa(len(b))},
	}
	for _, f := range fields {
		if f.a != f.b && !(f.name == "numerics" && p.converts(ours, theirs)) {
			return &Incompatible{Field: f.name, Ours: f.a, Theirs: f.b}
		}
	}
	for i := range a {
		if field, x, y := p.groups(a[i], b[i]); field != "" {
			return &Incompatible{Field: "layout.groups[" + strconv.Itoa(i) + "]." + field, Ours: x, Theirs: y}
		}
	}
	return nil
}

// converts tells whether rows change their dtype between the two. Only then
// may their numerics differ: another dtype implies others.
func (p pairing) converts(ours, theirs Identity) bool {
	a, b := ours.Layout.Groups, theirs.Layout.Groups
	if p.version < 2 || !p.convert || len(a) != len(b) || !littleEndian(ours.Numerics) || !littleEndian(theirs.Numerics) {
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

// groups returns the first difference of two groups that cannot be converted.
func (p pairing) groups(a, b Group) (field, ours, theirs string) {
	for _, f := range []struct {
		name string
		a, b int
	}{{"layers", a.Layers, b.Layers}, {"head_dim", a.HeadDim, b.HeadDim}, {"window", a.Window, b.Window}} {
		if f.a != f.b {
			return f.name, strconv.Itoa(f.a), strconv.Itoa(f.b)
		}
	}
	switch {
	case a.Kind != b.Kind:
		return "kind", a.Kind, b.Kind
	case a.total() != b.total(), p.version < 2 && a.heads() != b.heads(), !a.overlaps(b):
		return "kv_heads", a.heads(), b.heads()
	case p.version < 2 && a.sliced(): // the peer's slice is not known
		return "kv_heads", a.heads(), "protocol 1"
	case p.version < 2 && a.DType == F8:
		return "dtype", a.DType, "protocol 1"
	case a.DType != b.DType && !(p.version >= 2 && p.convert && a.convertible() && b.convertible()):
		return "dtype", a.DType, b.DType
	case a.DType == b.DType && a.RowBytes != b.RowBytes:
		return "row_bytes", strconv.Itoa(a.RowBytes), strconv.Itoa(b.RowBytes)
	}
	return "", "", ""
}

// overlaps tells whether the two slices have a KV head in common.
func (g Group) overlaps(o Group) bool {
	return g.HeadFirst < o.HeadFirst+o.KVHeads && o.HeadFirst < g.HeadFirst+g.KVHeads
}
