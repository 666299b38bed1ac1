package router

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/router/flight"
)

// TestCutShortWaitsForNothing: a shutdown that cuts what still runs is over with it.
func TestCutShortWaitsForNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var why error
		r := &Router{flights: &flight.Service{}, cancel: func(err error) { why = err }}
		start := time.Now()
		if r.cutShort(); time.Since(start) != 0 || why != flight.ErrShutdown {
			t.Errorf("with nothing to cut it takes %v: %v", time.Since(start), why)
		}
	})
}
