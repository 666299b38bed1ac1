package kvconntest

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
)

// Clock counts the time that the machine has really given to this process. A process
// that does not run for two seconds cannot keep a promise such as "known within a
// second"; so bounds of cases on a real clock are measured with this one, which stands
// still meanwhile. On a quiet machine it keeps real time.
//
// It counts laps: a sleep, and a byte to another goroutine and back over pipes, as peers
// exchange them. A lap counts for as long as it took, at most lapLimit, less the share of
// processor time that this process's threads have waited for, where the kernel tells
// (schedstat): a sleeper is woken in time even where computing is slow.
//
// A nil Clock is the time of package time: exact in a bubble of synctest.
type Clock struct {
	mu    sync.Mutex
	given time.Duration
	rate  float64 // of given time to time, over about the last half second

	ends [4]*os.File // of two pipes, there and back
	stop func()
}

const (
	lapSleep = 10 * time.Millisecond
	lapLimit = 13 * time.Millisecond // timers of quiet machines are up to 2 ms late
	rateSpan = 500 * time.Millisecond
	waitSpan = 100 * time.Millisecond // between two looks at the waits
	leastRun = 1.0 / 16               // what counts of a lap at least
)

// NewClock starts a clock; it ends with the test.
func NewClock(t testing.TB) *Clock {
	t.Helper()
	c := &Clock{rate: 1}
	var err error
	c.ends[0], c.ends[1], err = os.Pipe()
	check(t, err)
	c.ends[2], c.ends[3], err = os.Pipe()
	check(t, err)
	quit := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { io.Copy(struct{ io.Writer }{c.ends[3]}, struct{ io.Reader }{c.ends[0]}) }) // by this goroutine, not the kernel
	wg.Go(func() { c.countLaps(quit) })
	c.stop = sync.OnceFunc(func() {
		close(quit)
		for _, f := range c.ends {
			f.Close()
		}
		wg.Wait()
	})
	t.Cleanup(c.stop)
	return c
}

func (c *Clock) countLaps(quit chan struct{}) {
	var b [1]byte
	sleep := time.NewTicker(lapSleep)
	defer sleep.Stop()
	share := 1.0 // of the processor time that we wanted
	looked, waited := time.Now(), waits()
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
		if span := now.Sub(looked); span >= waitSpan {
			w := waits()
			share = min(1, max(leastRun, 1-float64(w-waited)/float64(span)/float64(runtime.NumCPU()))) // threads may have ended
			looked, waited = now, w
		}
		given := time.Duration(float64(min(lap, lapLimit)) * share)
		c.mu.Lock()
		c.given += given
		weight := min(1, lap.Seconds()/rateSpan.Seconds())
		c.rate += weight * (given.Seconds()/lap.Seconds() - c.rate)
		c.mu.Unlock()
	}
}

// waits sums how long this process's threads have been ready to run and did not run;
// 0 where the kernel does not say.
func waits() (sum time.Duration) {
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return 0
	}
	for _, t := range threads {
		var ran, waited int64 // ns
		b, err := os.ReadFile("/proc/self/task/" + t.Name() + "/schedstat")
		if err != nil {
			continue
		}
		if _, err := fmt.Sscan(string(b), &ran, &waited); err == nil {
			sum += time.Duration(waited)
		}
	}
	return sum
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

// stretch is how many times longer than usual deadlines have to be now.
func (c *Clock) stretch() float64 { return min(max(1, 1/c.Rate()), mostStretch) }

const mostStretch = 16
