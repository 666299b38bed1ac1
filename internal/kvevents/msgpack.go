package kvevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// ErrMalformed is wrapped by all errors of Decode.
var ErrMalformed = errors.New("malformed KV events")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

// reader reads msgpack from the front of b. Sizes are checked against what is
// left before anything is stored: an element takes at least a byte.
type reader struct{ b []byte }

// kind is the family of the next value.
type kind uint8

const (
	kindBad kind = iota
	kindNil
	kindBool
	kindInt
	kindFloat
	kindText // str or bin
	kindList
	kindMap
	kindExt
)

func (r *reader) peek() kind {
	if len(r.b) == 0 {
		return kindBad
	}
	switch c := r.b[0]; {
	case c <= 0x7f || c >= 0xe0 || c >= 0xcc && c <= 0xd3:
		return kindInt
	case c <= 0x8f || c == 0xde || c == 0xdf:
		return kindMap
	case c <= 0x9f || c == 0xdc || c == 0xdd:
		return kindList
	case c <= 0xbf || c >= 0xc4 && c <= 0xc6 || c >= 0xd9 && c <= 0xdb:
		return kindText
	case c == 0xc0:
		return kindNil
	case c == 0xc2 || c == 0xc3:
		return kindBool
	case c == 0xca || c == 0xcb:
		return kindFloat
	case c == 0xc1:
		return kindBad
	}
	return kindExt
}

// take cuts n bytes off the front.
func (r *reader) take(n uint64) ([]byte, error) {
	if n > uint64(len(r.b)) {
		return nil, malformed("cut short")
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b, nil
}

// uint reads n bytes, big endian.
func (r *reader) uint(n uint64) (uint64, error) {
	b, err := r.take(n)
	if err != nil {
		return 0, err
	}
	var v uint64
	for _, c := range b {
		v = v<<8 | uint64(c)
	}
	return v, nil
}

// integer reads an integer; negative ones are in two's complement.
func (r *reader) integer() (v uint64, negative bool, err error) {
	if r.peek() != kindInt {
		return 0, false, malformed("want an integer")
	}
	c := r.b[0]
	r.b = r.b[1:]
	switch {
	case c <= 0x7f:
		return uint64(c), false, nil
	case c >= 0xe0:
		return uint64(int64(int8(c))), true, nil
	case c <= 0xcf:
		v, err = r.uint(1 << (c - 0xcc))
		return v, false, err
	}
	size := uint64(1) << (c - 0xd0)
	v, err = r.uint(size)
	shift := 64 - 8*size
	signed := int64(v<<shift) >> shift
	return uint64(signed), signed < 0, err
}

// count reads an integer from 0 to most.
func (r *reader) count(most uint64) (int, error) {
	v, negative, err := r.integer()
	if err != nil {
		return 0, err
	}
	if negative || v > most {
		return 0, malformed("%d is out of range", int64(v))
	}
	return int(v), nil
}

// float reads a number.
func (r *reader) float() (float64, error) {
	switch r.peek() {
	case kindInt:
		v, negative, err := r.integer()
		if negative {
			return float64(int64(v)), err
		}
		return float64(v), err
	case kindFloat:
		c := r.b[0]
		r.b = r.b[1:]
		if c == 0xca {
			v, err := r.uint(4)
			return float64(math.Float32frombits(uint32(v))), err
		}
		v, err := r.uint(8)
		return math.Float64frombits(v), err
	}
	return 0, malformed("want a number")
}

// text reads a str or bin; it aliases the input.
func (r *reader) text() ([]byte, error) {
	if r.peek() != kindText {
		return nil, malformed("want text or bytes")
	}
	c := r.b[0]
	r.b = r.b[1:]
	n, err := uint64(c&0x1f), error(nil)
	switch {
	case c >= 0xd9:
		n, err = r.uint(1 << (c - 0xd9))
	case c >= 0xc4:
		n, err = r.uint(1 << (c - 0xc4))
	}
	if err != nil {
		return nil, err
	}
	return r.take(n)
}

// list reads the head of a list.
func (r *reader) list() (n int, err error) {
	if r.peek() != kindList {
		return 0, malformed("want a list")
	}
	return r.head(0x90, 0xdc, 1)
}

// fields reads the head of a map.
func (r *reader) fields() (n int, err error) {
	if r.peek() != kindMap {
		return 0, malformed("want a map")
	}
	return r.head(0x80, 0xde, 2)
}

func (r *reader) head(fixed, wide byte, least uint64) (int, error) {
	c := r.b[0]
	r.b = r.b[1:]
	n, err := uint64(c-fixed), error(nil)
	if c >= wide {
		n, err = r.uint(2 << (c - wide))
	}
	if err != nil {
		return 0, err
	}
	if n > uint64(len(r.b))/least {
		return 0, malformed("%d elements in %d bytes", n, len(r.b))
	}
	return int(n), nil
}

// null skips a nil, and says whether there was one.
func (r *reader) null() bool {
	if r.peek() != kindNil {
		return false
	}
	r.b = r.b[1:]
	return true
}

// skip passes over one value of any kind without recursion: a list is just
// more values to pass over.
func (r *reader) skip() error {
	for left := uint64(1); left > 0; left-- {
		var n int
		var err error
		switch r.peek() {
		case kindNil, kindBool:
			r.b = r.b[1:]
		case kindInt:
			_, _, err = r.integer()
		case kindFloat:
			_, err = r.float()
		case kindText:
			_, err = r.text()
		case kindList:
			n, err = r.list()
			left += uint64(n)
		case kindMap:
			n, err = r.fields()
			left += 2 * uint64(n)
		case kindExt:
			err = r.skipExt()
		default:
			err = malformed("no value")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) skipExt() error {
	c := r.b[0]
	r.b = r.b[1:]
	var n uint64
	var err error
	if c >= 0xd4 && c <= 0xd8 {
		n = 1 << (c - 0xd4)
	} else { // 0xc7 to 0xc9
		n, err = r.uint(1 << (c - 0xc7))
	}
	if err == nil {
		_, err = r.take(n + 1) // its type
	}
	return err
}

// Writers, in the shortest form.

func appendList(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, 0x90|byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, 0xdd), uint32(n))
}

func appendMap(b []byte, n int) []byte { return append(b, 0x80|byte(n)) } // below 16

func appendUint(b []byte, v uint64) []byte {
	switch {
	case v < 1<<7:
		return append(b, byte(v))
	case v < 1<<8:
		return append(b, 0xcc, byte(v))
	case v < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
	case v < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
}

func appendFloat(b []byte, v float64) []byte {
	return binary.BigEndian.AppendUint64(append(b, 0xcb), math.Float64bits(v))
}

func appendText(b []byte, s string) []byte {
	switch {
	case len(s) < 32:
		b = append(b, 0xa0|byte(len(s)))
	case len(s) < 1<<8:
		b = append(b, 0xd9, byte(len(s)))
	default:
		b = binary.BigEndian.AppendUint32(append(b, 0xdb), uint32(len(s)))
	}
	return append(b, s...)
}

func appendNil(b []byte) []byte { return append(b, 0xc0) }
