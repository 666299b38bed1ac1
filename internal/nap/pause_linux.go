package nap

import (
	"syscall"
	"time"
)

func pause(d time.Duration) {
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil) // a signal that wakes us early does no harm
}
