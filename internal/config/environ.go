package config

import (
	"fmt"
	"reflect"
	"strings"
)

// Environ returns the variables that make Load return to where it would return from without them.
// A process hands settings to its children this way.
func Environ[T any](from, to *T) ([]string, error) {
	return environ("XPYD_", reflect.ValueOf(from).Elem(), reflect.ValueOf(to).Elem())
}

func environ(prefix string, from, to reflect.Value) (vars []string, err error) {
	for _, f := range fields(to.Type()) {
		name, a, b := prefix+strings.ToUpper(f.name), from.FieldByIndex(f.index), to.FieldByIndex(f.index)
		switch {
		case reflect.DeepEqual(a.Interface(), b.Interface()):
		case isScalar(f.typ):
			text, _, err := format(b, f.unit)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			vars = append(vars, name+"="+text)
		case f.typ.Kind() == reflect.Struct:
			inner, err := environ(name+"__", a, b)
			if err != nil {
				return nil, err
			}
			vars = append(vars, inner...)
		default:
			return nil, fmt.Errorf("%s: cannot be handed on: %v", name, f.typ)
		}
	}
	return vars, nil
}
