package flight

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// TestSweep: a leg ends with its worker as soon as a snapshot at least as new as the
// one that it was sent by knows of the worker's end, and only then.
func TestSweep(t *testing.T) {
	member := func(epoch uint64, state fleet.State) fleet.Member {
		return fleet.Member{Instance: fleet.Instance{ID: "d0", Epoch: epoch}, State: state}
	}
	for name, c := range map[string]struct {
		version uint64
		members []fleet.Member
		ends    bool
	}{
		"lives":              {7, []fleet.Member{member(3, fleet.Live)}, false},
		"suspect":            {7, []fleet.Member{member(3, fleet.Suspect)}, false},
		"dead, same version": {7, []fleet.Member{member(3, fleet.Dead)}, true},
		"dead":               {8, []fleet.Member{member(3, fleet.Dead)}, true},
		"removed":            {8, nil, true},
		"restarted":          {8, []fleet.Member{member(4, fleet.Live)}, true},
		"an older snapshot":  {6, nil, false},
	} {
		l := newLeg(fleet.Decode, &fleet.Instance{ID: "d0", Epoch: 3}, 7)
		r := &legs{open: map[*leg]struct{}{}}
		r.add(l)
		r.sweep(fleet.NewSnapshot(c.version, time.Now(), c.members))
		if ended := l.Cause(); (ended != nil) != c.ends {
			t.Errorf("%s: %v, want an end: %t", name, ended, c.ends)
		}
		if r.remove(l); r.count() != 0 {
			t.Errorf("%s: %d legs are left", name, r.count())
		}
	}
}
