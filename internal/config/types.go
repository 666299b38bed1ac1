package config

import (
	"encoding"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// unit is what a field's tags say about its text.
type unit struct {
	bytes  bool   // unit:"bytes": an integer is a size, as Size is
	secret string // secret:"true" or secret:"url", see Print
}

// field is one setting of a struct.
type field struct {
	name  string
	index []int
	typ   reflect.Type
	unit  unit
}

// fields lists a struct type's settings in order: its exported fields with a key tag, and
// those of embedded structs.
func fields(t reflect.Type) []field {
	var out []field
	for i := range t.NumField() {
		f := t.Field(i)
		name, option, _ := strings.Cut(f.Tag.Get("key"), ",")
		if f.Type.Kind() == reflect.Struct && f.IsExported() && (option == "inline" || f.Anonymous && name == "") {
			for _, inner := range fields(f.Type) {
				inner.index = append([]int{i}, inner.index...)
				out = append(out, inner)
			}
			continue
		}
		if name == "" || name == "-" || !f.IsExported() {
			continue
		}
		out = append(out, field{name, []int{i}, f.Type, unit{
			bytes:  f.Tag.Get("unit") == "bytes",
			secret: f.Tag.Get("secret"),
		}})
	}
	return out
}

// Size is a number of bytes, written as "64MiB", "1.5GB" or "4096".
type Size int64

var sizeUnits = []struct {
	name string
	n    int64
}{
	{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
	{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"KB", 1e3}, {"B", 1},
}

var (
	errSize    = errors.New(`want a size such as "64MiB", in B, kB, MB, GB, TB, KiB, MiB, GiB or TiB`)
	errTooMuch = errors.New("want less than 8388608TiB")
)

// ParseSize reads a size; binary and decimal units are told apart.
func ParseSize(text string) (Size, error) {
	number, scale := strings.TrimSpace(text), int64(1)
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(number, u.name); ok {
			number, scale = strings.TrimSpace(rest), u.n
			break
		}
	}
	if number == "" || strings.Trim(number, "0123456789.") != "" {
		return 0, errSize
	}
	if n, err := strconv.ParseInt(number, 10, 64); err == nil {
		if n > math.MaxInt64/scale {
			return 0, errTooMuch
		}
		return Size(n * scale), nil
	}
	f, err := strconv.ParseFloat(number, 64)
	f *= float64(scale)
	switch {
	case f >= math.MaxInt64: // also digits that no float64 holds
		return 0, errTooMuch
	case err != nil || f != math.Trunc(f):
		return 0, errSize
	}
	return Size(f), nil
}

// String is the shortest exact form with a binary unit.
func (s Size) String() string {
	for _, u := range sizeUnits[:4] {
		if n := int64(s); n >= u.n && n%u.n == 0 {
			return strconv.FormatInt(n/u.n, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// UnmarshalText is ParseSize.
func (s *Size) UnmarshalText(text []byte) (err error) {
	*s, err = ParseSize(string(text))
	return err
}

// MarshalText is String.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// AutoSize is a Size in which 0 means "auto": worked out by its user.
type AutoSize int64

// UnmarshalText is ParseSize, and takes "auto".
func (s *AutoSize) UnmarshalText(text []byte) error {
	if strings.TrimSpace(string(text)) == "auto" {
		*s = 0
		return nil
	}
	v, err := ParseSize(string(text))
	*s = AutoSize(v)
	return err
}

// String is Size's, or "auto".
func (s AutoSize) String() string {
	if s == 0 {
		return "auto"
	}
	return Size(s).String()
}

// MarshalText is String.
func (s AutoSize) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// PoolSize is a Size ("64GiB") or, below 0, thousandths of a pool's size ("2x").
type PoolSize int64

// UnmarshalText reads a size, or a multiple between 0.001x and 1000x.
func (s *PoolSize) UnmarshalText(text []byte) error {
	times, ok := strings.CutSuffix(strings.TrimSpace(string(text)), "x")
	if !ok {
		v, err := ParseSize(times)
		if err != nil {
			return fmt.Errorf(`%w, or a multiple of the pool such as "2x"`, err)
		}
		*s = PoolSize(v)
		return nil
	}
	v, err := strconv.ParseFloat(times, 64)
	if v = math.Round(1000 * v); err != nil || !(v >= 1 && v <= 1e6) {
		return errors.New("want a multiple of the pool between 0.001x and 1000x")
	}
	*s = PoolSize(-v)
	return nil
}

// String is the text that UnmarshalText reads.
func (s PoolSize) String() string {
	if s >= 0 {
		return Size(s).String()
	}
	return strconv.FormatFloat(float64(-s)/1000, 'g', -1, 64) + "x"
}

// MarshalText implements encoding.TextMarshaler.
func (s PoolSize) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Of is the size in bytes, given the pool's.
func (s PoolSize) Of(pool int64) int64 {
	if s >= 0 {
		return int64(s)
	}
	return int64(float64(pool) * float64(-s) / 1000)
}

var (
	typeDuration    = reflect.TypeFor[time.Duration]()
	typeUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// isScalar reports whether values of the type are written as one text.
func isScalar(t reflect.Type) bool {
	if reflect.PointerTo(t).Implements(typeUnmarshaler) {
		return true
	}
	switch t.Kind() {
	case reflect.Struct, reflect.Map, reflect.Slice, reflect.Pointer:
		return false
	}
	return true
}

// parse sets the scalar v from text.
func parse(v reflect.Value, text string, u unit) error {
	if m, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		return m.UnmarshalText([]byte(text))
	}
	switch t := v.Type(); {
	case t == typeDuration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return errors.New(`want a duration such as "3s" or "250ms"`)
		}
		v.SetInt(int64(d))
	case t.Kind() == reflect.String:
		v.SetString(text)
	case t.Kind() == reflect.Bool:
		if text != "true" && text != "false" {
			return errors.New("want true or false")
		}
		v.SetBool(text == "true")
	case v.CanInt(), v.CanUint():
		n, err := parseInt(text, u)
		switch {
		case err != nil:
			return err
		case v.CanInt() && v.OverflowInt(n), v.CanUint() && (n < 0 || v.OverflowUint(uint64(n))):
			return fmt.Errorf("%d does not fit", n)
		case v.CanInt():
			v.SetInt(n)
		default:
			v.SetUint(uint64(n))
		}
	case v.CanFloat():
		f, err := strconv.ParseFloat(text, 64)
		if err != nil || math.IsNaN(f) || math.IsInf(f, 0) || v.OverflowFloat(f) {
			return errors.New("want a number")
		}
		v.SetFloat(f)
	default:
		return fmt.Errorf("cannot be configured: %v", t)
	}
	return nil
}

func parseInt(text string, u unit) (int64, error) {
	if u.bytes {
		s, err := ParseSize(text)
		return int64(s), err
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, errors.New("want a whole number")
	}
	return n, nil
}

func sortedKeys(m reflect.Value) []reflect.Value {
	keys := m.MapKeys()
	slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
	return keys
}
