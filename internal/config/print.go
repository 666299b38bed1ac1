package config

import (
	"encoding"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

const mask = "********"

// Print writes a configuration as YAML that Load accepts, in the order of its fields. It
// masks values tagged secret:"true", and the passwords in those tagged secret:"url".
func Print(w io.Writer, v any) error {
	rv := reflect.Indirect(reflect.ValueOf(v))
	if rv.Kind() != reflect.Struct {
		return fmt.Errorf("print configuration: want a struct, not %T", v)
	}
	n, err := node(rv, unit{})
	if err != nil {
		return fmt.Errorf("print configuration: %w", err)
	}
	e := yaml.NewEncoder(w)
	e.SetIndent(2)
	if err := e.Encode(n); err != nil {
		return fmt.Errorf("print configuration: %w", err)
	}
	return e.Close()
}

// nextURL matches where the next URL begins in a list.
var nextURL = regexp.MustCompile(`,\s*[a-zA-Z][a-zA-Z0-9+.-]*://`)

// Redact hides the passwords in a URL or a comma-separated list of them, and users without a
// password, which are tokens. All before a URL's last @ counts as user and password.
func Redact(text string) string {
	rest := ""
	if at := nextURL.FindStringIndex(text); at != nil {
		text, rest = text[:at[0]], ","+Redact(text[at[0]+1:])
	}
	at := strings.LastIndexByte(text, '@')
	if at < 0 {
		return text + rest
	}
	from := 0
	if i := strings.Index(text[:at], "://"); i >= 0 {
		from = i + len("://")
	}
	if i := strings.IndexByte(text[from:at], ':'); i >= 0 {
		from += i + 1
	}
	return text[:from] + mask + text[at:] + rest
}

func node(v reflect.Value, u unit) (*yaml.Node, error) {
	if isScalar(v.Type()) {
		text, tag, err := format(v, u)
		switch {
		case err != nil:
			return nil, err
		case u.secret == "url":
			text = Redact(text)
		case u.secret != "" && !v.IsZero():
			text, tag = mask, "!!str"
		}
		n := &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text}
		if tag == "!!str" {
			n.SetString(text)
		}
		return n, nil
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null", Value: "null"}, nil
		}
		return node(v.Elem(), u)
	case reflect.Slice:
		n := &yaml.Node{Kind: yaml.SequenceNode}
		for i := range v.Len() {
			e, err := node(v.Index(i), u)
			if err != nil {
				return nil, err
			}
			n.Content = append(n.Content, e)
		}
		if v.Len() == 0 {
			n.Style = yaml.FlowStyle
		}
		return n, nil
	}
	n := &yaml.Node{Kind: yaml.MappingNode}
	add := func(name string, v reflect.Value, u unit) error {
		e, err := node(v, u)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		k := &yaml.Node{Kind: yaml.ScalarNode}
		k.SetString(name)
		n.Content = append(n.Content, k, e)
		return nil
	}
	if v.Kind() == reflect.Map {
		for _, k := range sortedKeys(v) {
			if err := add(k.String(), v.MapIndex(k), u); err != nil {
				return nil, err
			}
		}
	} else {
		for _, f := range fields(v.Type()) {
			if err := add(f.name, v.FieldByIndex(f.index), f.unit); err != nil {
				return nil, err
			}
		}
	}
	if len(n.Content) == 0 {
		n.Style = yaml.FlowStyle
	}
	return n, nil
}

// format returns a scalar's text, as parse reads it, and its YAML tag.
func format(v reflect.Value, u unit) (text, tag string, err error) {
	if m, ok := v.Interface().(encoding.TextMarshaler); ok {
		b, err := m.MarshalText()
		return string(b), "!!str", err
	}
	switch {
	case v.Type() == typeDuration:
		return time.Duration(v.Int()).String(), "!!str", nil
	case v.Kind() == reflect.String:
		return v.String(), "!!str", nil
	case v.Kind() == reflect.Bool:
		return strconv.FormatBool(v.Bool()), "!!bool", nil
	case v.CanInt() && u.bytes:
		return Size(v.Int()).String(), "!!str", nil
	case v.CanUint() && u.bytes:
		return Size(v.Uint()).String(), "!!str", nil
	case v.CanInt():
		return strconv.FormatInt(v.Int(), 10), "!!int", nil
	case v.CanUint():
		return strconv.FormatUint(v.Uint(), 10), "!!int", nil
	case v.CanFloat():
		return strconv.FormatFloat(v.Float(), 'g', -1, v.Type().Bits()), "!!float", nil
	}
	return "", "", fmt.Errorf("cannot be configured: %v", v.Type())
}
