package sim

import (
	"reflect"
	"runtime"
	"testing"
	"time"

	"github.com/xpyd/xpyd/router/pick"
)

// TestLanes: workers that run side by side do what they do one after the other, also where the run ends
// early.
func TestLanes(t *testing.T) {
	cfg := like(Split{Whole: 20})
	cfg.Worker.Steps = plain{spread: time.Millisecond}
	cfg.Pick.Policy = pick.KVEvents
	requests := every(time.Millisecond, 2000, 300, 12)
	for i := range requests {
		requests[i].Prompt.blocks = []uint64{uint64(i % 50)}
	}
	for _, ended := range []int{len(requests), 700} {
		var runs [][]Outcome
		for _, procs := range []int{1, 4} {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
			n, last := 0, time.Duration(0)
			runs = append(runs, play(t, cfg, Load{Requests: requests, Ended: func(o *Outcome) bool {
				if n++; o.Last < last {
					t.Errorf("the end at %v is told behind that at %v", o.Last, last)
				}
				last = o.Last
				return n < ended
			}}))
			if n != ended {
				t.Errorf("%d of %d have ended", n, ended)
			}
		}
		failed := 0
		for _, o := range runs[0] {
			if o.Failed {
				failed++
			}
		}
		if !reflect.DeepEqual(runs[0], runs[1]) || failed != len(requests)-ended {
			t.Errorf("after %d: two runs differ, or %d have failed", ended, failed)
		}
	}
}
