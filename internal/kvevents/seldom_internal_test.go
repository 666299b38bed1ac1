package kvevents

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s seldom
		due := func(left int, ok bool) {
			t.Helper()
			if n, yes := s.due(); n != left || yes != ok {
				t.Errorf("%d, %t; want %d, %t", n, yes, left, ok)
			}
		}
		due(0, true)
		due(0, false)
		due(0, false)
		time.Sleep(saidEvery)
		due(2, true)
		due(0, false)
	})
}
