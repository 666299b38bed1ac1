package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxNodes bounds the values of a file; an alias counts each time it is used.
const maxNodes = 100_000

// reader sets values from YAML nodes.
type reader struct {
	*loader
	source func(*yaml.Node) string
	nodes  int
}

// For an error in the first line the parser leaves out the line number (yamlFirst).
var (
	yamlLine  = regexp.MustCompile(`^yaml: (?:unmarshal errors:\s+)?(?:line (\d+): )?`)
	yamlFirst = regexp.MustCompile(`^(mapping|block|found|did not find|could not find) `)
)

// yaml sets root from a file's text.
func (l *loader) yaml(path string, text []byte) {
	doc, err := parseYAML(text)
	if err != nil {
		source, msg := path, err.Error()
		if m := yamlLine.FindStringSubmatch(msg); m != nil {
			msg = msg[len(m[0]):]
			switch {
			case m[1] != "":
				source += ":" + m[1]
			case yamlFirst.MatchString(msg):
				source += ":1"
			}
		}
		l.fail(source, "", "%s", msg)
		return
	}
	if doc == nil {
		return
	}
	r := &reader{loader: l, source: func(n *yaml.Node) string { return fmt.Sprintf("%s:%d", path, n.Line) }}
	r.assign(l.root, doc, "", unit{})
}

// parseYAML reads one document; without any it returns nil.
func parseYAML(text []byte) (*yaml.Node, error) {
	d := yaml.NewDecoder(bytes.NewReader(text))
	var doc, more yaml.Node
	if err := d.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if err := d.Decode(&more); !errors.Is(err, io.EOF) {
		if err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("yaml: line %d: a second document", more.Line)
	}
	if doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 {
		return nil, nil
	}
	return doc.Content[0], nil
}

// assign sets v from a node. It reports false if the node is null or was refused. Pointers,
// lists and maps are made anew, since the defaults may share them.
func (r *reader) assign(v reflect.Value, n *yaml.Node, key string, u unit) bool {
	refused := len(r.errs)
	if r.nodes++; r.nodes > maxNodes {
		r.fail(r.source(n), key, "more than %d values", maxNodes)
		return false
	}
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return false
	}
	for v.Kind() == reflect.Pointer {
		v = renew(v)
	}
	t := v.Type()
	switch {
	case isScalar(t):
		if n.Kind != yaml.ScalarNode {
			r.fail(r.source(n), key, "want one value")
		} else if err := parse(v, n.Value, u); err != nil {
			r.refuse(n, key, u, err)
		}
	case t.Kind() == reflect.Slice:
		r.list(v, n, key, u)
	case t.Kind() == reflect.Struct || t.Kind() == reflect.Map && t.Key().Kind() == reflect.String:
		r.mapping(v, n, key, u)
	default:
		r.fail(r.source(n), key, "cannot be configured")
	}
	return len(r.errs) == refused
}

// renew points v at a copy of its target, and returns the copy.
func renew(v reflect.Value) reflect.Value {
	next := reflect.New(v.Type().Elem())
	if !v.IsNil() {
		next.Elem().Set(v.Elem())
	}
	v.Set(next)
	return next.Elem()
}

func (r *reader) refuse(n *yaml.Node, key string, u unit, err error) {
	if u.secret != "" {
		r.fail(r.source(n), key, "%v", err)
		return
	}
	r.fail(r.source(n), key, "%q: %v", clip(n.Value), err)
}

func (r *reader) list(v reflect.Value, n *yaml.Node, key string, u unit) {
	if n.Kind != yaml.SequenceNode {
		r.fail(r.source(n), key, "want a list")
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
	for i, c := range n.Content {
		at := fmt.Sprintf("%s[%d]", key, i)
		r.origin[at] = r.source(c)
		refused := len(r.errs)
		if !r.assign(v.Index(i), c, at, u) && len(r.errs) == refused {
			r.fail(r.source(c), at, "is empty")
		}
	}
}

// mapping sets a struct's fields, or adds to a map.
func (r *reader) mapping(v reflect.Value, n *yaml.Node, key string, u unit) {
	if n.Kind != yaml.MappingNode {
		r.fail(r.source(n), key, "want a section of keys")
		return
	}
	isMap := v.Kind() == reflect.Map
	var known []field
	if !isMap {
		known = fields(v.Type())
	} else {
		next := reflect.MakeMap(v.Type())
		for _, k := range v.MapKeys() {
			next.SetMapIndex(k, v.MapIndex(k))
		}
		v.Set(next)
	}
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, value := n.Content[i], n.Content[i+1]
		name := k.Value
		if k.Kind != yaml.ScalarNode {
			r.fail(r.source(k), key, "want a plain key")
			continue
		}
		full := join(key, name)
		if first, ok := lines[name]; ok {
			r.fail(r.source(k), full, "set twice, first in line %d", first)
			continue
		}
		lines[name] = k.Line
		if !isMap {
			if i := slices.IndexFunc(known, func(f field) bool { return f.name == name }); i >= 0 {
				r.origin[full] = r.source(k)
				r.assign(v.FieldByIndex(known[i].index), value, full, known[i].unit)
			} else {
				r.fail(r.source(k), full, "unknown key%s", didYouMean(name, known))
			}
			continue
		}
		r.origin[full] = r.source(k)
		at, elem := reflect.ValueOf(name).Convert(v.Type().Key()), reflect.New(v.Type().Elem()).Elem()
		if old := v.MapIndex(at); old.IsValid() {
			elem.Set(old)
		}
		if r.assign(elem, value, full, u) {
			v.SetMapIndex(at, elem)
		}
	}
}

// didYouMean suggests the nearest known key, if one is near.
func didYouMean(name string, known []field) string {
	best, least := "", 1+max(1, len(name)/3)
	for _, f := range known {
		if d := distance(name, f.name); d < least {
			best, least = f.name, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %q?)", best)
}

// distance is Levenshtein's, where a swap of neighbours counts once.
func distance(a, b string) int {
	if len(a) > 64 {
		return len(a)
	}
	var rows [3][]int
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
	}
	for j := range rows[1] {
		rows[1][j] = j
	}
	for i := 1; i <= len(a); i++ {
		older, old, row := rows[0], rows[1], rows[2]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(old[j]+1, row[j-1]+1, old[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], older[j-2]+1)
			}
		}
		rows[0], rows[1], rows[2] = old, row, older
	}
	return rows[1][len(b)]
}

func clip(s string) string {
	if len(s) > 64 {
		return strings.ToValidUTF8(s[:64], "") + "..."
	}
	return s
}
