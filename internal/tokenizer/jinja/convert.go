package jinja

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"sort"
	"strconv"
)

// FromJSON reads a JSON value; objects become *Dict in the order of the text,
// numbers int64 where they are written as integers and fit, else float64.
func FromJSON(raw []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	v, err := decodeJSON(dec, 0)
	if err != nil {
		return nil, fmt.Errorf("read JSON: %w", err)
	}
	if dec.More() {
		return nil, fmt.Errorf("read JSON: text after the value")
	}
	return v, nil
}

func decodeJSON(dec *json.Decoder, depth int) (value, error) {
	tok, err := dec.Token()
	if err != nil {
		return nil, err
	}
	if depth > maxNest {
		return nil, fmt.Errorf("nested deeper than %d", maxNest)
	}
	switch t := tok.(type) {
	case json.Number:
		return fromNumber(t)
	case json.Delim:
		if t == '[' {
			l := &List{}
			for dec.More() {
				v, err := decodeJSON(dec, depth+1)
				if err != nil {
					return nil, err
				}
				l.items = append(l.items, v)
			}
			_, err := dec.Token()
			return l, err
		}
		d := newDict()
		for dec.More() {
			k, err := dec.Token()
			if err != nil {
				return nil, err
			}
			v, err := decodeJSON(dec, depth+1)
			if err != nil {
				return nil, err
			}
			d.set(k, v) // a key of an object is a string
		}
		_, err := dec.Token()
		return d, err
	}
	return tok, nil // string, bool, nil
}

func fromNumber(n json.Number) (value, error) {
	if i, err := strconv.ParseInt(n.String(), 10, 64); err == nil {
		return i, nil
	}
	return n.Float64()
}

// FromGo converts Go values as encoding/json makes them, and json.RawMessage,
// json.Number, the integer types, []string and []map[string]any. The keys of a
// Go map come in sorted order; a json.RawMessage keeps the order it has. A
// float64 without a fraction becomes an integer.
func FromGo(v any) (any, error) { return fromGo(v, 0) }

func fromGo(v any, depth int) (value, error) {
	if depth > maxNest {
		return nil, fmt.Errorf("nested deeper than %d", maxNest)
	}
	switch v := v.(type) {
	case nil, bool, string, int64, *Dict, *List:
		return v, nil
	case json.RawMessage:
		return FromJSON(v)
	case json.Number:
		return fromNumber(v)
	case int:
		return int64(v), nil
	case int32:
		return int64(v), nil
	case float64:
		if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
			return int64(v), nil
		}
		return v, nil
	case map[string]any:
		d := newDict()
		keys := make([]string, 0, len(v))
		for k := range v {
			keys = append(keys, k)
		}
		sort.Strings(keys)
		for _, k := range keys {
			c, err := fromGo(v[k], depth+1)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", k, err)
			}
			d.set(k, c)
		}
		return d, nil
	case []any:
		return fromSlice(v, depth)
	case []map[string]any:
		return fromSlice(v, depth)
	case []string:
		return fromSlice(v, depth)
	case []json.RawMessage:
		return fromSlice(v, depth)
	}
	return nil, fmt.Errorf("a value of type %T is not supported", v)
}

func fromSlice[T any](s []T, depth int) (value, error) {
	l := &List{items: make([]value, len(s))}
	for i, x := range s {
		c, err := fromGo(x, depth+1)
		if err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		l.items[i] = c
	}
	return l, nil
}
