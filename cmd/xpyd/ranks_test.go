package main

import (
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/fleet"
)

// TestRanks: a setting is read as it is written, and each worker is told the ranks of its role.
func TestRanks(t *testing.T) {
	f := func(text string, want ranks, prefill, decode []string) {
		t.Helper()
		var r ranks
		if err := r.UnmarshalText([]byte(text)); err != nil || r != want || r.String() != text {
			t.Errorf("%q is %v, written %q: %v", text, r, r, err)
		}
		c := &upConfig{TensorParallel: r}
		for role, args := range map[fleet.Role][]string{fleet.Prefill: prefill, fleet.Decode: decode} {
			child := c.child("xpyd", role, &front{}, &lastRoles{})(0)
			if got := child.Args[5:]; !slices.Equal(got, args) {
				t.Errorf("%q: %s workers are told %q, want %q", text, role, got, args)
			}
		}
	}
	two, four := []string{"--tensor-parallel", "2"}, []string{"--tensor-parallel", "4"}
	f("1", ranks{1, 1}, nil, nil)
	f("4", ranks{4, 4}, four, four)
	f("1:4", ranks{1, 4}, nil, four)
	f("2:1", ranks{2, 1}, two, nil)
	for _, text := range []string{"", ":", "2:", ":2", "a", "1:2:4", "1.5", "2 4"} {
		if err := new(ranks).UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q was read", text)
		}
	}
}
