package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxNodes bounds the values of one file, aliases counted as often as used.
const maxNodes = 100_000

// reader turns YAML nodes into a layer and checks them against types.
type reader struct {
	*loader
	source func(*yaml.Node) string
	nodes  int
}

// The parser leaves out the line of what it finds in the first one; other
// messages never have any.
var (
	yamlLine  = regexp.MustCompile(`^yaml: (?:unmarshal errors:\s+)?(?:line (\d+): )?`)
	yamlFirst = regexp.MustCompile(`^(mapping|block|found|did not find|could not find) `)
)

// yaml reads a file's text.
func (l *loader) yaml(path string, text []byte) map[string]any {
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
		return nil
	}
	if doc == nil {
		return nil
	}
	r := &reader{loader: l, source: func(n *yaml.Node) string { return fmt.Sprintf("%s:%d", path, n.Line) }}
	m, _ := r.value(doc, l.root, "", unit{}).(map[string]any)
	return m
}

// parseYAML reads exactly one document; none is nil.
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

// value checks a node against a type and returns the layer's value, or nil
// when the node is null or refused.
func (r *reader) value(n *yaml.Node, t reflect.Type, key string, u unit) any {
	if r.nodes++; r.nodes > maxNodes {
		r.fail(r.source(n), key, "more than %d values", maxNodes)
		return nil
	}
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return nil
	}
	switch {
	case isScalar(t):
		if n.Kind != yaml.ScalarNode {
			r.fail(r.source(n), key, "want one value")
			return nil
		}
		if err := check(t, n.Value, u); err != nil {
			r.refuse(n, key, u, err)
			return nil
		}
		return n.Value
	case t.Kind() == reflect.Slice:
		return r.list(n, t, key, u)
	case t.Kind() == reflect.Struct || t.Kind() == reflect.Map && t.Key().Kind() == reflect.String:
		return r.mapping(n, t, key, u)
	}
	r.fail(r.source(n), key, "cannot be configured")
	return nil
}

func (r *reader) refuse(n *yaml.Node, key string, u unit, err error) {
	if u.secret != "" {
		r.fail(r.source(n), key, "%v", err)
		return
	}
	r.fail(r.source(n), key, "%q: %v", clip(n.Value), err)
}

func (r *reader) list(n *yaml.Node, t reflect.Type, key string, u unit) any {
	if n.Kind != yaml.SequenceNode {
		r.fail(r.source(n), key, "want a list")
		return nil
	}
	out := make([]any, 0, len(n.Content))
	for i, c := range n.Content {
		at := fmt.Sprintf("%s[%d]", key, i)
		r.set(at, r.source(c))
		refused := len(r.errs)
		if v := r.value(c, t.Elem(), at, u); v != nil {
			out = append(out, v)
		} else if len(r.errs) == refused {
			r.fail(r.source(c), at, "is empty")
		}
	}
	return out
}

func (r *reader) mapping(n *yaml.Node, t reflect.Type, key string, u unit) any {
	if n.Kind != yaml.MappingNode {
		r.fail(r.source(n), key, "want a section of keys")
		return nil
	}
	var known []field
	if t.Kind() == reflect.Struct {
		known = fields(t)
	}
	lines := map[string]int{}
	out := map[string]any{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		name := k.Value
		if k.Kind != yaml.ScalarNode || strings.Contains(name, delim) {
			r.fail(r.source(k), key, "want a plain key")
			continue
		}
		full := join(key, name)
		if first, ok := lines[name]; ok {
			r.fail(r.source(k), full, "set twice, first in line %d", first)
			continue
		}
		lines[name] = k.Line
		f := field{typ: nil, unit: u}
		if t.Kind() == reflect.Map {
			f.typ = t.Elem()
		} else {
			var ok bool
			if f, ok = find(known, name); !ok {
				r.fail(r.source(k), full, "unknown key%s", didYouMean(name, known))
				continue
			}
		}
		r.set(full, r.source(k))
		if value := r.value(v, f.typ, full, f.unit); value != nil {
			out[name] = value
		}
	}
	return out
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

// distance is Levenshtein's, with a swap of neighbours counted once.
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
