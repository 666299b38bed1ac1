package jinja

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// FromJSON reads a JSON value; objects become *Dict in the order of the text,
// numbers are integers of any size where they are written as such, else float64.
func FromJSON(raw []byte) (any, error) {
	s := jsonscan.Scanner{Lenient: true}
	s.Reset(raw)
	v := fromJSON(&s, s.Next())
	if err := s.End(); err != nil {
		return nil, fmt.Errorf("read JSON: %w", err)
	}
	return v, nil
}

// fromJSON reads the value that begins with a token.
func fromJSON(s *jsonscan.Scanner, k jsonscan.Kind) value {
	switch k {
	case jsonscan.String:
		return decoded(s)
	case jsonscan.Number:
		return fromNumber(string(s.Text()))
	case jsonscan.True, jsonscan.False:
		return k == jsonscan.True
	case jsonscan.Array:
		l := &List{}
		for s.Item() {
			l.items = append(l.items, fromJSON(s, s.Next()))
		}
		return l
	case jsonscan.Object:
		o := &Dict{}
		for s.Next() == jsonscan.Key {
			key := decoded(s)
			o.set(key, fromJSON(s, s.Next()))
		}
		return o
	}
	return nil
}

func decoded(s *jsonscan.Scanner) string {
	return strings.ToValidUTF8(string(s.Decoded()), "\ufffd")
}

// fromNumber reads a number as Python's json does.
func fromNumber(text string) value {
	if strings.ContainsAny(text, ".eE") {
		f, _ := strconv.ParseFloat(text, 64) // too large is infinite
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

// FromGo converts the permitted types of a template's variables: values that FromJSON,
// NewList and FromGo return, json.RawMessage, and lists of it.
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
