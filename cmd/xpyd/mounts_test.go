package main

import (
	"maps"
	"slices"
	"testing"

	"github.com/xpyd/xpyd/internal/handover"
	"github.com/xpyd/xpyd/router"
)

// TestMounts: the router's table has what is mounted on it, and nothing else that is to be.
func TestMounts(t *testing.T) {
	mounts := (&scaler{}).mounts()
	maps.Copy(mounts, (&fleetSecret{}).mounts())
	mounts = newUpgrader(&handover.Place{}, nil, &upConfig{}, nil).mounts(mounts)
	got := slices.Sorted(maps.Keys(mounts))
	var want []string
	for _, r := range router.Routes() {
		if r.Mounted {
			want = append(want, r.Method+" "+r.Path)
		}
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("mounted are %q, the router knows of %q", got, want)
	}
}
