package h1

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

type closes struct{ n atomic.Int32 }

func (c *closes) Close() error { c.n.Add(1); return nil }

func TestLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := errors.New("first"), errors.New("second")
		var l Life
		var conn, later closes
		var calls atomic.Int32
		if !l.hold(&conn) || l.Cause() != nil {
			t.Error("ended before its end")
		}
		stop := l.OnEnd(func() { calls.Add(1) })
		l.OnEnd(func() { calls.Add(10) })
		if !stop() || !l.release() || !l.hold(&later) {
			t.Error("not alive")
		}
		ctx, cancel := context.WithCancel(&l)
		defer cancel()
		l.End(first)
		l.End(second)
		synctest.Wait()
		if l.Cause() != first || context.Cause(ctx) != first || calls.Load() != 10 {
			t.Errorf("cause %v and %v, %d calls", l.Cause(), context.Cause(ctx), calls.Load())
		}
		if conn.n.Load() != 0 || later.n.Load() != 1 {
			t.Errorf("%d closes of what was released, %d of what was held", conn.n.Load(), later.n.Load())
		}
		if l.hold(&conn) || l.release() {
			t.Error("alive after its end")
		}
		stop = l.OnEnd(func() { calls.Add(100) })
		synctest.Wait()
		if stop() || calls.Load() != 110 {
			t.Errorf("%d calls", calls.Load())
		}
	})
}

func TestLifeWithin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		why := errors.New("why")
		ctx, cancel := context.WithCancelCause(t.Context())
		var l, m Life
		l.Within(ctx)
		m.Within(ctx)()
		cancel(why)
		synctest.Wait()
		if l.Cause() != why || m.Cause() != nil {
			t.Errorf("%v, %v", l.Cause(), m.Cause())
		}
	})
}

// TestLifeAsParent: a context that follows a life has its own deadline, and ends with the life.
func TestLifeAsParent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Life
		start := time.Now()
		early, cancel := context.WithTimeout(&l, time.Second)
		defer cancel()
		late, cancel := context.WithTimeout(&l, time.Hour)
		defer cancel()
		if <-early.Done(); time.Since(start) != time.Second || !errors.Is(early.Err(), context.DeadlineExceeded) {
			t.Errorf("%v after %v", early.Err(), time.Since(start))
		}
		l.End(io.EOF)
		if <-late.Done(); time.Since(start) != time.Second || context.Cause(late) != io.EOF || l.Err() != io.EOF {
			t.Errorf("%v and %v after %v", context.Cause(late), l.Err(), time.Since(start))
		}
	})
}

// However a hold and an end meet, what is held is closed once or released.
func TestLifeRace(t *testing.T) {
	for range 2000 {
		var l Life
		var c closes
		var wg sync.WaitGroup
		var mine bool
		wg.Go(func() { l.End(io.EOF) })
		wg.Go(func() { mine = !l.hold(&c) || l.release() })
		wg.Wait()
		if got := c.n.Load(); mine != (got == 0) {
			t.Fatalf("released %v, closed %d times", mine, got)
		}
	}
}
