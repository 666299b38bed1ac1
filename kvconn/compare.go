package kvconn

import (
	"strings"

	"github.com/xpyd/xpyd/kvlayout"
)

// compare returns the first field that makes the two incompatible; convert means that
// both sides allow rows of another dtype. Both sides get the same answer.
func compare(ours, theirs Identity, convert bool) *Incompatible {
	for _, f := range []struct{ name, a, b string }{
		{"model_fingerprint", ours.ModelFingerprint, theirs.ModelFingerprint},
		{"tokenizer_fingerprint", ours.TokenizerFingerprint, theirs.TokenizerFingerprint},
		{"numerics", ours.Numerics, theirs.Numerics},
	} {
		if f.a != f.b && !(f.name == "numerics" && convert && converts(ours, theirs)) {
			return &Incompatible{Field: f.name, Ours: f.a, Theirs: f.b}
		}
	}
	if field, a, b := kvlayout.Compare(ours.Layout, theirs.Layout, convert); field != "" {
		return &Incompatible{Field: "layout." + field, Ours: a, Theirs: b}
	}
	return nil
}

// converts reports whether rows change their dtype between the two. Only then
// may their numerics differ: another dtype implies others.
func converts(ours, theirs Identity) bool {
	return kvlayout.Differ(ours.Layout, theirs.Layout) && littleEndian(ours.Numerics) && littleEndian(theirs.Numerics)
}

// littleEndian reports whether rows of these numerics can be read element by
// element (kernels/DESIGN.md, section 4).
func littleEndian(numerics string) bool { return !strings.HasSuffix(numerics, "-be") }
