package jinja

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// FromJSON reads a JSON value; objects become *Dict in the order of the text,
// numbers are integers of any size where they are written as such, else float64.
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
		return fromNumber(t.String()), nil
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
		d := &Dict{}
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

// fromNumber reads a number as Python's json does.
func fromNumber(text string) value {
	if strings.ContainsAny(text, ".eE") {
		f, _ := strconv.ParseFloat(text, 64) // what is too large is infinite
		return f
	}
	return fromDigits(text)
}

// fromDigits reads a decimal integer of any size, without leading zeros.
func fromDigits(text string) value {
	if i, err := strconv.ParseInt(text, 10, 64); err == nil {
		return i
	}
	return bigInt(text)
}

// FromGo converts what the variables of a template may be: values that
// FromJSON, NewList and FromGo return, json.RawMessage and a list of it.
func FromGo(v any) (any, error) {
	switch v := v.(type) {
	case nil, bool, string, int64, *Dict, *List:
		return v, nil
	case json.RawMessage:
		return FromJSON(v)
	case []json.RawMessage:
		l := &List{items: make([]value, len(v))}
		for i, x := range v {
			c, err := FromJSON(x)
			if err != nil {
				return nil, fmt.Errorf("item %d: %w", i, err)
			}
			l.items[i] = c
		}
		return l, nil
	}
	return nil, fmt.Errorf("a value of type %T is not supported", v)
}
