package limit_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/router/limit"
)

// TestGateGivesUp: once the last that waits has given up, however it did, the time that follows does
// not count for how fast the queue is served. While another still waits it does.
func TestGateGivesUp(t *testing.T) {
	for name, wait := range map[string]func(context.Context, *limit.Gate) error{
		"too late": func(ctx context.Context, g *limit.Gate) error {
			return g.Wait(ctx, &limit.Item{Class: limit.Normal, Cost: 10}, time.Now().Add(3*time.Second))
		},
		"the client left": func(ctx context.Context, g *limit.Gate) error {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			return g.Wait(ctx, &limit.Item{Class: limit.Normal, Cost: 10}, time.Time{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g, errs := gate(1, 100, time.Hour), make(chan error, 1)
				if !g.TryEnter() {
					t.Fatal("no place")
				}
				one := func() {
					go func() { errs <- g.Wait(t.Context(), &limit.Item{Class: limit.Normal, Cost: 10}, time.Time{}) }()
					synctest.Wait()
				}
				for range 8 {
					one()
					time.Sleep(2 * time.Second)
					g.Leave(time.Now(), false)
					<-waited(errs, t)
				}
				if wait(t.Context(), g) == nil {
					t.Fatal("it got a place")
				}
				time.Sleep(time.Hour)
				one()
				r := refused(t, g.Wait(t.Context(), &limit.Item{Class: limit.Normal, Cost: 10}, time.Now().Add(-1)), limit.Deadline)
				if r.After < time.Second || r.After > 8*time.Second {
					t.Errorf("to come back in %v", r.After)
				}
				if wait(t.Context(), g) == nil {
					t.Fatal("it got a place before another")
				}
				time.Sleep(10 * time.Minute)
				r = refused(t, g.Wait(t.Context(), &limit.Item{Class: limit.Normal, Cost: 10}, time.Now().Add(-1)), limit.Deadline)
				if r.After < 10*time.Minute {
					t.Errorf("after 10 minutes without a service, to come back in %v", r.After)
				}
				g.Leave(time.Now(), false)
				<-waited(errs, t)
				g.Leave(time.Now(), false)
				empty(t, g)
			})
		})
	}
}
