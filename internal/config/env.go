package config

import (
	"reflect"
	"regexp"
	"slices"
	"sort"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// leaf is a setting that one variable or flag can hold.
type leaf struct {
	path []string
	field
}

func (l leaf) key() string { return strings.Join(l.path, ".") }

// leaves are all settings below a struct type but its sections.
func leaves(t reflect.Type, path []string) []leaf {
	if len(path) > maxDepth {
		return nil
	}
	var out []leaf
	for _, f := range fields(t) {
		at := append(slices.Clone(path), f.name)
		inner := f.typ
		for inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct && !isScalar(inner) {
			out = append(out, leaves(inner, at)...)
		} else {
			out = append(out, leaf{at, f})
		}
	}
	return out
}

// environ is the layer of the environment.
func (l *loader) environ(o Options) map[string]any {
	prefix := o.EnvPrefix
	if prefix == "" {
		prefix = "XPYD_"
	}
	byName := map[string]leaf{}
	var names []field
	for _, lf := range leaves(l.root, nil) {
		name := strings.ToUpper(strings.Join(lf.path, "_"))
		if other, ok := byName[name]; ok {
			l.fail(prefix+name, lf.key(), "the variable is ambiguous: it is also %s", other.key())
		}
		byName[name] = lf
		names = append(names, field{name: prefix + name})
	}
	out, used := map[string]any{}, map[string]string{}
	environ := slices.Clone(o.Environ)
	sort.Strings(environ)
	for _, kv := range environ {
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
		l.text(out, lf, name, text)
	}
	return out
}

func allowed(name string, more []string) bool {
	for _, a := range append([]string{"XPYD_ADMIN_TOKEN", "XPYD_PARENT_FD"}, more...) {
		if stem, ok := strings.CutSuffix(a, "*"); name == a || ok && strings.HasPrefix(name, stem) {
			return true
		}
	}
	return false
}

// links are what Kubernetes puts into every container for each service of its
// namespace, behind the service's name and _; of the last the value is a URL.
var (
	links    = regexp.MustCompile(`^([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$`)
	linkPort = regexp.MustCompile(`^([A-Z0-9_]+_)?PORT$`)
	linkURL  = regexp.MustCompile(`^(tcp|udp|sctp)://`)
)

// serviceLink says whether a variable is there because a service is called xpyd,
// or xpyd- and something. name is without the prefix.
func serviceLink(name, text string) bool {
	return links.MatchString(name) || linkPort.MatchString(name) && linkURL.MatchString(text)
}

// flags is the layer of the flags that were set.
func (l *loader) flags(o Options) map[string]any {
	out := map[string]any{}
	if o.Flags == nil {
		return out
	}
	all := leaves(l.root, nil)
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
			n := &yaml.Node{Kind: yaml.SequenceNode}
			for _, e := range s.GetSlice() {
				n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: e})
			}
			l.node(out, all[i], source, n)
			return
		}
		l.text(out, all[i], source, f.Value.String())
	})
	return out
}

// text adds a setting that was given as text to a layer.
func (l *loader) text(out map[string]any, lf leaf, source, text string) {
	t := lf.typ
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
	trimmed := strings.TrimSpace(text)
	switch {
	case isScalar(t):
	case strings.HasPrefix(trimmed, "[") || strings.HasPrefix(trimmed, "{"):
		var err error
		if n, err = parseYAML([]byte(trimmed)); err != nil || n == nil {
			l.fail(source, lf.key(), "is not YAML: %v", err)
			return
		}
	case t.Kind() == reflect.Slice:
		n = &yaml.Node{Kind: yaml.SequenceNode}
		for _, e := range strings.Split(text, ",") {
			if e = strings.TrimSpace(e); e != "" {
				n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: e})
			}
		}
	}
	l.node(out, lf, source, n)
}

// node adds a setting to a layer.
func (l *loader) node(out map[string]any, lf leaf, source string, n *yaml.Node) {
	key := lf.key()
	for k := range l.origin { // what an earlier layer set is no more
		if strings.HasPrefix(k, key+"[") {
			delete(l.origin, k)
		}
	}
	r := &reader{loader: l, source: func(*yaml.Node) string { return source }}
	value := r.value(n, lf.typ, key, lf.unit)
	l.set(key, source)
	if value == nil {
		return
	}
	at := out
	for _, section := range lf.path[:len(lf.path)-1] {
		next, ok := at[section].(map[string]any)
		if !ok {
			next = map[string]any{}
			at[section] = next
		}
		at = next
	}
	at[lf.path[len(lf.path)-1]] = value
}
