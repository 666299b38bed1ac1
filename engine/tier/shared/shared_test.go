package shared

import (
	"bytes"
	"context"
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/xpyd/xpyd/engine/kvcache"
	"github.com/xpyd/xpyd/engine/tier/level"
	"github.com/xpyd/xpyd/engine/tier/store"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/kerneltest"
	"github.com/xpyd/xpyd/kvlayout"
)

func shape() level.Shape {
	return level.NewShape(kvlayout.Plain(3, 2, 4, 16, kvlayout.F32), 1)
}

// record makes one of a prompt's first unit, whose digests are right.
func record(s level.Shape) []byte {
	rec := make([]byte, s.Record())
	sums := make([]uint64, s.Heads)
	for layer := range s.ByLayer {
		l := &s.ByLayer[layer]
		rows := rec[l.RowsAt:][:l.BlockBytes()]
		for i := range rows {
			rows[i] = byte(7*i + layer)
		}
		kernels.DigestRows(&l.Layer, 0, s.BlockTokens, rows, sums)
		for h, d := range sums {
			binary.LittleEndian.PutUint64(rec[l.DigestsAt+8*h:], d)
		}
	}
	return rec
}

// TestLayouts: units of two layouts never share a name, even if they are equally large.
func TestLayouts(t *testing.T) {
	of := func(l kvlayout.Layout) *Shared {
		s, err := open(Config{}, &level.Env{Shape: level.NewShape(l, 1), Identity: "model and numerics"})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for name, l := range kerneltest.Layouts(16) {
		other, err := kvlayout.Decode(l.Encode())
		if err != nil {
			t.Fatal(err)
		}
		other.Groups[0].Window += 64
		ours, theirs := of(l), of(other)
		if ours.env.Shape.Record() != theirs.env.Shape.Record() || ours.prefix == theirs.prefix || ours.mark == theirs.mark {
			t.Errorf("%s: one name for units of two layouts", name)
		}
	}
}

// FuzzValue: a value has the unit's own rows and digests, or is not used.
func FuzzValue(f *testing.F) {
	s := shape()
	sh, err := open(Config{Writes: true}, &level.Env{Shape: s, Identity: "model and numerics"})
	if err != nil {
		f.Fatal(err)
	}
	rec := record(s)
	if !s.Right(0, rec) {
		f.Fatal("the record is not right")
	}
	value := make([]byte, valueBytes(&s))
	key := kvcache.Hash{1, 2, 3}
	sh.pack(level.Unit{Key: key, Born: time.Unix(1e9, 0)}, rec, value)
	f.Add(value)
	f.Add(value[:100])
	other := bytes.Clone(value)
	other[level.HeaderSize+5] ^= 1
	f.Add(other)
	f.Fuzz(func(t *testing.T, b []byte) {
		into := make([]byte, s.Record())
		if _, err := sh.unpack(&level.Read{Key: key, Rec: into}, b); err != nil || !s.Right(0, into) {
			return
		}
		if !bytes.Equal(b[level.HeaderSize:], value[level.HeaderSize:]) {
			t.Fatal("other rows with digests of their own: forged, or found by chance")
		}
	})
}

// full is a store that has every key.
type full struct{ store.Store }

func (full) Exists(_ context.Context, keys []string) ([]bool, error) {
	return slices.Repeat([]bool{true}, len(keys)), nil
}

// TestShunned: a bad value that may not be deleted counts as absent for a while, then it
// is asked for again; where it may be deleted, Delete deletes it.
func TestShunned(t *testing.T) {
	for _, writes := range []bool{false, true} {
		s, err := open(Config{Store: full{}, Writes: writes}, &level.Env{Shape: shape(), Awake: t.Context()})
		if err != nil {
			t.Fatal(err)
		}
		bad, good := kvcache.Hash{1}, kvcache.Hash{2}
		ask := func(when string, want bool) {
			t.Helper()
			if have, ok := s.Ask(t.Context(), []kvcache.Hash{bad, good}); !ok || have[0] != want || !have[1] {
				t.Errorf("writes %t, %s: %v %t", writes, when, have, ok)
			}
		}
		ask("at first", true)
		s.Forget(bad)
		ask("forgotten", writes)
		if !writes {
			s.bad[bad] = time.Now() // its time is over
		}
		ask("after a while", true)
	}
}
