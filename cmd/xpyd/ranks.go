package main

import (
	"errors"
	"strconv"
	"strings"

	"github.com/xpyd/xpyd/internal/fleet"
)

// ranks are the tensor-parallel ranks of each worker of `up`, by the role in which it starts.
type ranks struct{ Prefill, Decode int }

// UnmarshalText reads N, or P:D.
func (r *ranks) UnmarshalText(text []byte) error {
	p, d, apart := strings.Cut(strings.TrimSpace(string(text)), ":")
	if !apart {
		d = p
	}
	prefill, err1 := strconv.Atoi(p)
	decode, err2 := strconv.Atoi(d)
	if err1 != nil || err2 != nil {
		return errors.New(`want a number of ranks, or two such as "1:4": of prefill and of decode workers`)
	}
	*r = ranks{prefill, decode}
	return nil
}

// String is the text that UnmarshalText reads.
func (r ranks) String() string {
	if r.Prefill == r.Decode {
		return strconv.Itoa(r.Prefill)
	}
	return strconv.Itoa(r.Prefill) + ":" + strconv.Itoa(r.Decode)
}

// MarshalText is String.
func (r ranks) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// of is how many a worker of that role has.
func (r ranks) of(role fleet.Role) int {
	if role == fleet.Prefill {
		return r.Prefill
	}
	return r.Decode
}

// gpus is how many GPUs so many workers take.
func (r ranks) gpus(prefill, decode int) int { return prefill*r.Prefill + decode*r.Decode }
