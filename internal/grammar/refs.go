package grammar

import (
	"net/url"
	"strconv"
	"strings"
)

// target is a schema that a $ref points at.
type target struct {
	d     *doc
	path  []string
	base  string  // of the references in it
	known *schema // once it is read
	busy  bool    // being read
	rule  int32
	made  bool // its rule is, or is being, defined
}

// base of the schema that is read, from the $id above it.
func (p *schemaParser) baseOf(d *doc) string {
	for _, key := range []string{"$id", "id"} {
		if v := d.get(key); v != nil && v.kind == docString {
			return v.text
		}
	}
	return ""
}

// collect notes the schemas that have an $id or an anchor.
func (p *schemaParser) collect(d *doc, base string) {
	p.g.spend(1)
	if d.kind == docObject {
		if id := p.baseOf(d); id != "" {
			if full, ok := join(base, id); ok {
				if strings.HasPrefix(id, "#") { // an anchor, before 2019-09
					p.ids[full] = d
				} else {
					base = strings.TrimSuffix(full, "#")
					p.ids[base] = d
				}
			}
		}
		for _, key := range []string{"$anchor", "$dynamicAnchor"} {
			if a := d.get(key); a != nil && a.kind == docString {
				p.ids[base+"#"+a.text] = d
			}
		}
	}
	for i, v := range d.items {
		if d.kind == docObject && (d.keys[i] == "const" || d.keys[i] == "enum" || d.keys[i] == "default" || d.keys[i] == "examples") {
			continue
		}
		if v.kind == docObject || v.kind == docArray {
			p.collect(v, base)
		}
	}
}

func join(base, ref string) (string, bool) {
	b, err := url.Parse(base)
	if err != nil {
		return "", false
	}
	r, err := url.Parse(ref)
	if err != nil {
		return "", false
	}
	if base == "" {
		return ref, true
	}
	return b.ResolveReference(r).String(), true
}

// resolve finds what ref points at.
func (p *schemaParser) resolve(ref string) *target {
	base := p.base()
	full, ok := join(base, ref)
	if !ok {
		p.g.refuse("%q is no reference", ref)
	}
	resource, fragment, _ := strings.Cut(full, "#")
	from := p.root
	if resource != "" && resource != strings.TrimSuffix(p.rootBase(), "#") {
		from = p.ids[resource]
		if from == nil && strings.HasPrefix(ref, "#") {
			from = p.root // below an id that is none
		}
		if from == nil {
			p.g.refuse("the reference %q leads out of the schema", ref)
		}
	}
	d, path := from, []string(nil)
	if from != p.root {
		path = []string{"(" + resource + ")"}
	}
	if fragment != "" && !strings.HasPrefix(fragment, "/") {
		if d = p.ids[resource+"#"+fragment]; d == nil {
			d = p.ids["#"+fragment]
		}
		if d == nil {
			p.g.refuse("the reference %q points at nothing", ref)
		}
		return p.target(d, []string{"(#" + fragment + ")"}, resource)
	}
	if fragment != "" {
		if text, err := url.PathUnescape(fragment); err == nil {
			fragment = text
		}
		for _, part := range strings.Split(fragment[1:], "/") {
			part = strings.ReplaceAll(strings.ReplaceAll(part, "~1", "/"), "~0", "~")
			next := (*doc)(nil)
			switch d.kind {
			case docObject:
				next = d.get(part)
			case docArray:
				if i, err := strconv.Atoi(part); err == nil && i >= 0 && i < len(d.items) {
					next = d.items[i]
				}
			}
			if next == nil {
				p.g.refuse("the reference %q points at nothing", ref)
			}
			d = next
			path = append(path, part)
		}
	}
	return p.target(d, path, resource)
}

func (p *schemaParser) target(d *doc, path []string, base string) *target {
	t := p.targets[d]
	if t == nil {
		t = &target{d: d, path: path, base: base}
		p.targets[d] = t
		p.g.spend(1)
	}
	return t
}

// base is the base of the references where the parser is: that of the target being read.
func (p *schemaParser) base() string {
	if n := len(p.bases); n > 0 {
		return p.bases[n-1]
	}
	return p.rootBase()
}

func (p *schemaParser) rootBase() string {
	if p.root.kind != docObject {
		return ""
	}
	return strings.TrimSuffix(p.baseOf(p.root), "#")
}

// deref reads the schema of t, which other keywords are joined with.
func (p *schemaParser) deref(t *target) *schema {
	if t.known != nil {
		return t.known
	}
	if t.busy {
		p.g.refuse("a reference that leads back to itself, with other keywords beside it")
	}
	t.busy = true
	path := p.path
	p.path = t.path
	p.bases = append(p.bases, t.base)
	if len(p.bases) > maxDepth {
		p.g.refuse("references are nested too deeply")
	}
	s := p.parse(t.d)
	p.bases = p.bases[:len(p.bases)-1]
	p.path = path
	t.known, t.busy = s, false
	return s
}
