package cluster

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Late reports whether something took longer than limit, which holds on an otherwise idle machine.
// Once the limit is over it measures how starved the machine is, and extends the limit as much.
func Late(took, limit time.Duration) bool {
	return took > limit && took > time.Duration(float64(limit)*slowness())
}

// slowness is how many times slower than on an idle machine computing is now. There a cluster's
// processes and its clients share two cores and get a quarter of one each.
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
