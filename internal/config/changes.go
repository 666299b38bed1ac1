package config

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

const maxChanges = 32

// Changes lists the differences of two configurations of one type, with keys as in Print:
// "limits.max_queue: 1024 -> 4096". Secrets are masked; a change that the mask hides is not
// listed. Only the first maxChanges are listed.
func Changes(old, next any) ([]string, error) {
	a, err := node(reflect.Indirect(reflect.ValueOf(old)), unit{})
	if err != nil {
		return nil, err
	}
	b, err := node(reflect.Indirect(reflect.ValueOf(next)), unit{})
	if err != nil {
		return nil, err
	}
	out := compare("", a, b)
	if n := len(out) - maxChanges; n > 0 {
		out = append(out[:maxChanges], fmt.Sprintf("and %d more", n))
	}
	return out, nil
}

// compare compares two values of a key; nil: not there.
func compare(key string, a, b *yaml.Node) (out []string) {
	if a != nil && b != nil && a.Kind == b.Kind && a.Kind != yaml.ScalarNode {
		below, keys := parts(key, a)
		next, more := parts(key, b)
		for _, k := range append(keys, more...) {
			if x, ok := below[k]; ok || next[k] != nil {
				out = append(out, compare(k, x, next[k])...)
				delete(below, k)
				delete(next, k)
			}
		}
	} else if was, is := text(a), text(b); was != is {
		out = append(out, fmt.Sprintf("%s: %s -> %s", key, was, is))
	}
	return out
}

// parts returns the values below a key, by their own keys.
func parts(key string, n *yaml.Node) (by map[string]*yaml.Node, keys []string) {
	by = map[string]*yaml.Node{}
	for i := 0; i < len(n.Content); i++ {
		k, v := key+"["+strconv.Itoa(i)+"]", n.Content[i]
		if n.Kind == yaml.MappingNode {
			if k, v = n.Content[i].Value, n.Content[i+1]; key != "" {
				k = key + "." + k
			}
			i++
		}
		by[k], keys = v, append(keys, k)
	}
	return by, keys
}

// text returns a value in one line.
func text(n *yaml.Node) string {
	if n == nil {
		return "none"
	}
	if n.Kind == yaml.ScalarNode {
		if n.Value == "" {
			return `""`
		}
		return n.Value
	}
	flow := *n
	flow.Style = yaml.FlowStyle
	b, err := yaml.Marshal(&flow)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}
