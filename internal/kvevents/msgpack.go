package kvevents

import (
	"errors"
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// ErrMalformed is wrapped by all errors of Decode.
var ErrMalformed = errors.New("malformed KV events")

// reader reads msgpack from the front of b. Its first error sticks: b is then empty, and
// every method returns nothing. Sizes are checked against the bytes left before anything is
// stored: an element takes at least a byte.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
	}
	r.b = nil
}

// read advances past a value.
func (r *reader) read(rest []byte, err error) {
	if r.b = rest; err != nil {
		r.fail("%v", err)
	}
}

// end refuses bytes behind the value.
func (r *reader) end() error {
	if len(r.b) > 0 {
		r.fail("%d bytes too many", len(r.b))
	}
	return r.err
}

func (r *reader) isInteger() bool {
	t := msgp.NextType(r.b)
	return t == msgp.IntType || t == msgp.UintType
}

func (r *reader) isText() bool {
	t := msgp.NextType(r.b)
	return t == msgp.StrType || t == msgp.BinType
}

// integer reads an integer; negative ones are in two's complement.
func (r *reader) integer() uint64 {
	if msgp.NextType(r.b) == msgp.IntType {
		v, rest, err := msgp.ReadInt64Bytes(r.b)
		r.read(rest, err)
		return uint64(v)
	}
	v, rest, err := msgp.ReadUint64Bytes(r.b)
	r.read(rest, err)
	return v
}

// count reads an integer from 0 to most.
func (r *reader) count(most uint64) int {
	v, rest, err := msgp.ReadUint64Bytes(r.b)
	if r.read(rest, err); v > most {
		r.fail("%d is out of range", v)
		return 0
	}
	return int(v)
}

// float reads a number.
func (r *reader) float() float64 {
	if msgp.NextType(r.b) == msgp.UintType {
		return float64(r.integer())
	}
	if r.isInteger() {
		return float64(int64(r.integer()))
	}
	v, rest, err := msgp.ReadFloat64Bytes(r.b)
	r.read(rest, err)
	return v
}

// bytes reads a str or bin; it aliases the input.
func (r *reader) bytes() []byte {
	v, rest, err := msgp.ReadMapKeyZC(r.b)
	r.read(rest, err)
	return v
}

func (r *reader) text() string { return string(r.bytes()) }

// list reads the head of a list.
func (r *reader) list() int {
	n, rest, err := msgp.ReadArrayHeaderBytes(r.b)
	return r.head(n, 1, rest, err)
}

// fields reads the head of a map.
func (r *reader) fields() int {
	n, rest, err := msgp.ReadMapHeaderBytes(r.b)
	return r.head(n, 2, rest, err)
}

// head reads a head of n elements, each of at least least bytes.
func (r *reader) head(n uint32, least int, rest []byte, err error) int {
	if r.read(rest, err); int(n) > len(r.b)/least {
		r.fail("%d elements in %d bytes", n, len(r.b))
		return 0
	}
	return int(n)
}

// null reads a nil, and reports whether there was one.
func (r *reader) null() bool {
	if !msgp.IsNil(r.b) {
		return false
	}
	r.b = r.b[1:]
	return true
}

// skip passes over one value of any kind and returns its msgpack.
func (r *reader) skip() []byte {
	before := r.b
	rest, err := msgp.Skip(r.b)
	r.read(rest, err)
	return before[:len(before)-len(r.b)]
}
