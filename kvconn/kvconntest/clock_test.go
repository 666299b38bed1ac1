package kvconntest

import (
	"testing"
	"testing/synctest"
	"time"
)

// A clock runs, and never faster than the time.
func TestClock(t *testing.T) {
	c := NewClock(t)
	start, began := c.Now(), time.Now()
	for c.Since(start) < 5*lapSleep {
		time.Sleep(lapSleep)
		if time.Since(began) > time.Minute {
			t.Fatalf("%v given of a minute", c.Since(start))
		}
	}
	given := c.Since(start)
	if took := time.Since(began) + lapLimit; given > took { // one lap may have begun before
		t.Errorf("%v given of %v", given, took)
	}
	if r, s := c.Rate(), c.stretch(); r <= 0 || r > 1 || s < 1 || s > 16 {
		t.Errorf("rate %v, stretch %v", r, s)
	}
	c.stop()
	c.stop()
}

// No clock is the time itself, in a bubble the bubble's.
func TestNoClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c *Clock
		start := c.Now()
		time.Sleep(time.Hour)
		if d := c.Since(start); d != time.Hour || c.Rate() != 1 || c.stretch() != 1 {
			t.Errorf("%v, %v, %v", d, c.Rate(), c.stretch())
		}
	})
}
