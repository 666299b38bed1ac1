package kvconntest

import (
	"os"
	"sync"
	"testing"
	"time"
)

// Clock counts the time that the machine has really given to this process. A
// promise such as "known within a second" cannot be kept by a process that
// does not run for two; so the bounds of cases on a real clock are measured
// with this one, which stands still meanwhile. On a quiet machine it goes like
// any other.
//
// It is made of laps: a sleep and a small exchange with another goroutine over
// a pipe of the kernel's, as peers have. A lap counts for as long as it took,
// but at most for lapLimit.
//
// A nil Clock is the time of package time: exact in a bubble of synctest.
type Clock struct {
	mu    sync.Mutex
	given time.Duration
	rate  float64 // of given time to time, over about the last half second

	ends [4]*os.File // of two pipes, there and back
	quit chan struct{}
	wg   sync.WaitGroup
}

const (
	lapSleep = 10 * time.Millisecond
	lapLimit = 13 * time.Millisecond // timers of quiet machines are up to 2 ms late
	rateSpan = 500 * time.Millisecond
)

// NewClock starts a clock; it ends with the test.
func NewClock(t testing.TB) *Clock {
	t.Helper()
	c := &Clock{rate: 1, quit: make(chan struct{})}
	var err error
	c.ends[0], c.ends[1], err = os.Pipe()
	check(t, err)
	c.ends[2], c.ends[3], err = os.Pipe()
	check(t, err)
	c.wg.Go(c.echo)
	c.wg.Go(c.run)
	t.Cleanup(c.stop)
	return c
}

// stop may be called twice.
func (c *Clock) stop() {
	c.mu.Lock()
	if c.quit != nil {
		close(c.quit)
		c.quit = nil
	}
	c.mu.Unlock()
	for _, f := range c.ends {
		f.Close()
	}
	c.wg.Wait()
}

func (c *Clock) echo() {
	var b [1]byte
	for {
		if _, err := c.ends[0].Read(b[:]); err != nil {
			return
		}
		if _, err := c.ends[3].Write(b[:]); err != nil {
			return
		}
	}
}

func (c *Clock) run() {
	c.mu.Lock()
	quit := c.quit
	c.mu.Unlock()
	var b [1]byte
	sleep := time.NewTicker(lapSleep)
	defer sleep.Stop()
	for start := time.Now(); ; {
		select {
		case <-quit:
			return
		case <-sleep.C:
		}
		if _, err := c.ends[1].Write(b[:]); err != nil {
			return
		}
		if _, err := c.ends[2].Read(b[:]); err != nil {
			return
		}
		now := time.Now()
		lap := now.Sub(start)
		start = now
		sleep.Reset(lapSleep)
		c.mu.Lock()
		c.given += min(lap, lapLimit)
		weight := min(1, lap.Seconds()/rateSpan.Seconds())
		c.rate += weight * (min(1, lapLimit.Seconds()/lap.Seconds()) - c.rate)
		c.mu.Unlock()
	}
}

// Now is the time given so far; only differences mean something.
func (c *Clock) Now() time.Duration {
	if c == nil {
		return time.Duration(time.Now().UnixNano())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.given
}

// Since is the time given since then.
func (c *Clock) Since(then time.Duration) time.Duration { return c.Now() - then }

// Rate is the share of the time of late that was given, from 0 to 1.
func (c *Clock) Rate() float64 {
	if c == nil {
		return 1
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rate
}

// stretch is how many times longer than usual deadlines have to be on this
// machine now.
func (c *Clock) stretch() float64 { return min(max(1, 1/c.Rate()), 16) }
