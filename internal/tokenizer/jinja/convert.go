package jinja

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
)

// FromJSON reads a JSON value; objects become *Dict in the order of the text,
// numbers are integers of any size where they are written as such, else float64.
func FromJSON(raw []byte) (any, error) {
	d := decoder{s: strings.ToValidUTF8(string(raw), "\ufffd")}
	v, err := d.value(0)
	if err == nil && (d.peek() != 0 || d.at < len(d.s)) {
		err = d.bad()
	}
	if err != nil {
		return nil, fmt.Errorf("read JSON: %w", err)
	}
	return v, nil
}

// decoder reads a JSON text. Strings are most of it, and encoding/json would
// take longer over them than a template does.
type decoder struct {
	s  string
	at int
}

func (d *decoder) bad() error {
	if d.at >= len(d.s) {
		return errors.New("unexpected end")
	}
	return fmt.Errorf("unexpected %q at byte %d", d.s[d.at], d.at)
}

// peek skips white space and returns the next byte, 0 at the end.
func (d *decoder) peek() byte {
	for ; d.at < len(d.s); d.at++ {
		if c := d.s[d.at]; c != ' ' && c != '\n' && c != '\r' && c != '\t' {
			return c
		}
	}
	return 0
}

func (d *decoder) value(depth int) (value, error) {
	if depth > maxNest {
		return nil, fmt.Errorf("nested deeper than %d", maxNest)
	}
	switch d.peek() {
	case '"':
		return d.str()
	case '[':
		l := &List{}
		err := d.group(']', func() error {
			v, err := d.value(depth + 1)
			l.items = append(l.items, v)
			return err
		})
		return l, err
	case '{':
		o := &Dict{}
		err := d.group('}', func() error {
			if d.peek() != '"' {
				return d.bad()
			}
			k, err := d.str()
			if err != nil {
				return err
			}
			if d.peek() != ':' {
				return d.bad()
			}
			d.at++
			v, err := d.value(depth + 1)
			o.set(k, v)
			return err
		})
		return o, err
	}
	word := d.s[d.at:]
	if n := strings.IndexAny(word, ",]} \t\r\n"); n >= 0 {
		word = word[:n]
	}
	if !json.Valid([]byte(word)) {
		return nil, d.bad()
	}
	d.at += len(word)
	switch word {
	case "null":
		return nil, nil
	case "true", "false":
		return word == "true", nil
	}
	return fromNumber(word), nil
}

// group reads what stands between brackets, with commas between.
func (d *decoder) group(closing byte, item func() error) error {
	d.at++
	if d.peek() == closing {
		d.at++
		return nil
	}
	for {
		if err := item(); err != nil {
			return err
		}
		switch d.peek() {
		case ',':
			d.at++
		case closing:
			d.at++
			return nil
		default:
			return d.bad()
		}
	}
}

func (d *decoder) str() (string, error) {
	var b strings.Builder // what has been read, once there was an escape
	from := d.at + 1
	for i := from; i < len(d.s); i++ {
		switch c := d.s[i]; {
		case c == '"':
			d.at = i + 1
			if b.Len() == 0 {
				return d.s[from:i], nil
			}
			b.WriteString(d.s[from:i])
			return b.String(), nil
		case c == '\\':
			b.WriteString(d.s[from:i])
			n := unescape(&b, d.s[i+1:])
			if d.at = i; n == 0 {
				return "", d.bad()
			}
			i += n
			from = i + 1
		case c < ' ':
			d.at = i
			return "", d.bad()
		}
	}
	d.at = len(d.s)
	return "", d.bad()
}

// unescape writes what the escape after a backslash means and returns its
// length, 0 if it is none.
func unescape(b *strings.Builder, s string) int {
	if s == "" {
		return 0
	}
	if i := strings.IndexByte(`"\/bfnrt`, s[0]); i >= 0 {
		b.WriteByte("\"\\/\b\f\n\r\t"[i])
		return 1
	}
	unit := func(s string) rune { // of uXXXX; -1 for anything else
		if len(s) < 5 || s[0] != 'u' {
			return -1
		}
		n, err := strconv.ParseUint(s[1:5], 16, 16)
		if err != nil {
			return -1
		}
		return rune(n)
	}
	r := unit(s)
	if r < 0 {
		return 0
	}
	if low, ok := strings.CutPrefix(s[5:], `\`); ok && utf16.IsSurrogate(r) {
		if pair := utf16.DecodeRune(r, unit(low)); pair != '\ufffd' {
			b.WriteRune(pair)
			return 11
		}
	}
	b.WriteRune(r) // U+FFFD of a lone surrogate
	return 5
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
