package config

import (
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// leaf is a setting for one variable or flag: the sections that lead to it, and itself.
type leaf []field

func (l leaf) field() field { return l[len(l)-1] }

func (l leaf) names(sep string) string {
	var names []string
	for _, f := range l {
		names = append(names, f.name)
	}
	return strings.Join(names, sep)
}

func (l leaf) key() string { return l.names(".") }

// leaves returns all settings below a struct type, without the sections themselves.
func leaves(t reflect.Type, path leaf) []leaf {
	if len(path) > maxDepth {
		return nil
	}
	var out []leaf
	for _, f := range fields(t) {
		at := append(slices.Clone(path), f)
		inner := f.typ
		for inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct && !isScalar(inner) {
			out = append(out, leaves(inner, at)...)
		} else {
			out = append(out, at)
		}
	}
	return out
}

// environ reads the environment.
func (l *loader) environ(o Options) {
	const prefix = "XPYD_"
	byName := map[string]leaf{}
	var names []field
	for _, lf := range leaves(l.root.Type(), nil) {
		name := strings.ToUpper(lf.names("_"))
		if other, ok := byName[name]; ok {
			l.fail(prefix+name, lf.key(), "the variable is ambiguous: it is also %s", other.key())
		}
		byName[name] = lf
		names = append(names, field{name: prefix + name})
	}
	used := map[string]string{}
	for _, kv := range slices.Sorted(slices.Values(o.Environ)) {
		name, text, ok := strings.Cut(kv, "=")
		if !ok || !strings.HasPrefix(name, prefix) {
			continue
		}
		short := strings.ReplaceAll(name[len(prefix):], "__", "_")
		lf, ok := byName[short]
		if !ok {
			if !allowed(name, o.EnvAllow) && !serviceLink(name[len(prefix):], text) {
				l.fail(name, "", "unknown variable%s", didYouMean(prefix+short, names))
			}
			continue
		}
		if other, ok := used[short]; ok {
			l.fail(name, lf.key(), "also set as %s", other)
			continue
		}
		used[short] = name
		l.text(lf, name, text)
	}
}

func allowed(name string, more []string) bool {
	for _, a := range append([]string{"XPYD_ADMIN_TOKEN", "XPYD_PARENT_FD"}, more...) {
		if stem, ok := strings.CutSuffix(a, "*"); name == a || ok && strings.HasPrefix(name, stem) {
			return true
		}
	}
	return false
}

// Kubernetes gives every container these variables for each service of its namespace, behind
// the service's name and _. The value of linkPort is a URL.
var (
	links    = regexp.MustCompile(`^([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$`)
	linkPort = regexp.MustCompile(`^([A-Z0-9_]+_)?PORT$`)
	linkURL  = regexp.MustCompile(`^(tcp|udp|sctp)://`)
)

// serviceLink reports whether a variable, without the prefix, exists because a service is
// called xpyd or xpyd-something.
func serviceLink(name, text string) bool {
	return links.MatchString(name) || linkPort.MatchString(name) && linkURL.MatchString(text)
}

// flags reads the flags that were given.
func (l *loader) flags(o Options) {
	if o.Flags == nil {
		return
	}
	all := leaves(l.root.Type(), nil)
	o.Flags.Visit(func(f *pflag.Flag) {
		key, ok := o.FlagKeys[f.Name]
		if !ok {
			return
		}
		source := "--" + f.Name
		i := slices.IndexFunc(all, func(lf leaf) bool { return lf.key() == key })
		if i < 0 {
			l.fail(source, key, "no such key")
			return
		}
		if s, ok := f.Value.(pflag.SliceValue); ok {
			l.node(all[i], source, listNode(s.GetSlice()))
			return
		}
		l.text(all[i], source, f.Value.String())
	})
}

func textNode(text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
}

func listNode(items []string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.SequenceNode}
	for _, text := range items {
		n.Content = append(n.Content, textNode(text))
	}
	return n
}

// text reads a setting given as text.
func (l *loader) text(lf leaf, source, text string) {
	t := lf.field().typ
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	n, trimmed := textNode(text), strings.TrimSpace(text)
	switch {
	case isScalar(t):
	case strings.HasPrefix(trimmed, "[") || strings.HasPrefix(trimmed, "{"):
		var err error
		if n, err = parseYAML([]byte(trimmed)); err != nil || n == nil {
			l.fail(source, lf.key(), "is not YAML: %v", err)
			return
		}
	case t.Kind() == reflect.Slice:
		items := strings.FieldsFunc(text, func(c rune) bool { return c == ',' })
		for i := range items {
			items[i] = strings.TrimSpace(items[i])
		}
		n = listNode(slices.DeleteFunc(items, func(s string) bool { return s == "" }))
	}
	l.node(lf, source, n)
}

// node sets one setting.
func (l *loader) node(lf leaf, source string, n *yaml.Node) {
	key := lf.key()
	for k := range l.origin { // its former elements are gone
		if strings.HasPrefix(k, key+"[") {
			delete(l.origin, k)
		}
	}
	v := l.root
	for _, f := range lf {
		for v.Kind() == reflect.Pointer {
			v = renew(v)
		}
		v = v.FieldByIndex(f.index)
	}
	r := &reader{loader: l, source: func(*yaml.Node) string { return source }}
	r.assign(v, n, key, lf.field().unit)
	l.origin[key] = source
}
