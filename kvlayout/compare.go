package kvlayout

import (
	"slices"
	"strconv"
)

// Compare returns the first difference because of which blocks of one layout cannot
// become blocks of the other, with both values; field is "" if there is none. Block
// sizes may always differ. Dtypes may differ when convert is set and both are numbers
// (Group.Converts). The answer is symmetric.
func Compare(a, b Layout, convert bool) (field, inA, inB string) {
	if len(a.Groups) != len(b.Groups) {
		return "groups", strconv.Itoa(len(a.Groups)), strconv.Itoa(len(b.Groups))
	}
	for i := range a.Groups {
		g, h := &a.Groups[i], &b.Groups[i]
		for _, f := range [...]struct{ name, a, b string }{
			{"layers", g.Layers.String(), h.Layers.String()},
			{"heads", g.Heads.String(), h.Heads.String()},
			{"planes", planes(g.Planes), planes(h.Planes)},
			{"window", strconv.Itoa(g.Window), strconv.Itoa(h.Window)},
			{"kind", g.Kind, h.Kind},
			{"dtype", string(g.DType), string(h.DType)},
			{"scale", string(g.Scale), string(h.Scale)},
		} {
			if f.a == f.b || (f.name == "dtype" || f.name == "scale") && convert && g.Converts(h) {
				continue
			}
			return "groups[" + strconv.Itoa(i) + "]." + f.name, f.a, f.b
		}
	}
	return "", "", ""
}

// Differ reports whether a group has different dtypes in a and b.
func Differ(a, b Layout) bool {
	return !slices.EqualFunc(a.Groups, b.Groups, func(g, h Group) bool { return g.DType == h.DType })
}

// Converts reports whether rows of g can be converted to those of o, which have another
// dtype (package kvconn/convert). Rows of F8E4M3 need their scales.
func (g *Group) Converts(o *Group) bool {
	whole := func(g *Group) bool { return g.DType.number() && (g.DType == F8E4M3) == (g.Scale != "") }
	return g.DType != o.DType && whole(g) && whole(o) && g.Heads.Count == o.Heads.Count && slices.Equal(g.Planes, o.Planes)
}
