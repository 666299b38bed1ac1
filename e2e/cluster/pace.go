package cluster

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Late says that something took longer than a limit which holds on a machine
// that is the tests' own. What others leave of it is measured when the limit is
// over, and a starved machine is given as many times longer.
func Late(took, limit time.Duration) bool {
	return took > limit && took > time.Duration(float64(limit)*slowness())
}

// slowness is how many times longer than on the tests' own machine computing
// takes now: there a cluster's processes and its clients share two cores, and
// each gets a quarter of one.
func slowness() float64 {
	const work, quiet, most = 10 * time.Millisecond, 4, 30
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start, before := time.Now(), threadTime()
	for threadTime()-before < work {
	}
	return min(max(float64(time.Since(start))/float64(work)/quiet, 1), most)
}

// threadTime is the processor time of this thread.
func threadTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		panic(err) // every Linux and BSD has it
	}
	return time.Duration(ts.Nano())
}
