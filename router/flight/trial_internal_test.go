package flight

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/xpyd/xpyd/internal/fleet"
)

// TestBlames: who loses a worker under somebody else's trial is not to blame, whichever of the two
// notices first; the memory of such workers is bounded.
func TestBlames(t *testing.T) { synctest.Test(t, testBlames) }

func testBlames(t *testing.T) {
	s := &Service{trials: newTrials()}
	suspect, other := &request{s: s, seam: &seam{breaks: maxTakeovers}}, &request{s: s, seam: &seam{}}
	d := func(n int) *fleet.Instance { return &fleet.Instance{ID: fmt.Sprint(n), Epoch: 1} }
	lose := func(q *request, by *fleet.Instance, more int) {
		t.Helper()
		was := q.seam.breaks
		if q.lostBy(by); q.seam.breaks != was+more || more > 0 == q.seam.broke.IsZero() && was == 0 {
			t.Errorf("the loss of %s counted %d", by.ID, q.seam.breaks-was)
		}
	}
	for n := range trialsKept + 4 {
		if !suspect.onTrial() || suspect.trial == 0 {
			t.Fatal("no place")
		}
		s.trials.sits(suspect, d(n))
		s.trials.sits(other, d(99)) // it is not on trial
		if at := s.trials.where(); at != fmt.Sprint(n) {
			t.Errorf("at %s", at)
		}
		lose(other, d(n), 0)
		lose(suspect, d(n), 1)
		if lose(other, d(n), 0); len(s.trials.lost) > trialsKept {
			t.Errorf("%d are kept", len(s.trials.lost))
		}
		suspect.proceeds(trialTokens - 1)
		if s.trials.where() == "" || suspect.trial != 1 {
			t.Error("it is over too early")
		}
		if suspect.proceeds(1); s.trials.where() != "" || suspect.trial != 0 || len(s.trials.place) > 0 {
			t.Error("it is not over")
		}
		lose(other, d(n), 0)
	}
	lose(other, d(0), 1) // long ago
	again := *d(5)
	again.Epoch = 2
	lose(other, &again, 1)
	if suspect.ctx.End(errClientGone); suspect.onTrial() {
		t.Error("a request that is over is on trial")
	}
	if len(s.trials.place) > 0 {
		t.Error("a place is held by nobody")
	}
}
