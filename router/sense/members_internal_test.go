package sense

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
)

// TestForgetMarks: a drain goes on for the epoch that it was given to, and for a later
// one that its worker began drained.
func TestForgetMarks(t *testing.T) {
	for name, c := range map[string]struct {
		members []fleet.Member
		want    uint64 // zero: forgotten
	}{
		"same epoch":           {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 3}, State: fleet.Live}}, 3},
		"dead":                 {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 3}, State: fleet.Dead}}, 3},
		"next epoch, drained":  {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 4, Draining: true}, State: fleet.Live}}, 4},
		"next epoch":           {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 4}, State: fleet.Live}}, 0},
		"older epoch, drained": {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 2, Draining: true}, State: fleet.Live}}, 0},
		"gone":                 {[]fleet.Member{{Instance: fleet.Instance{ID: "d0", Epoch: 3}, State: fleet.Gone}}, 0},
		"left":                 {nil, 0},
	} {
		r := &Members{marked: map[string]mark{"d0": {epoch: 3, stays: true}}}
		r.forgetMarks(fleet.NewSnapshot(1, time.Now(), c.members))
		if got, ok := r.marked["d0"]; ok != (c.want != 0) || got.epoch != c.want || ok && !got.stays {
			t.Errorf("%s: %+v, %t", name, got, ok)
		}
		if forgot := r.marks == 1; forgot != (c.want == 0) {
			t.Errorf("%s: marked %d times", name, r.marks)
		}
	}
}
