// Package uring reads and writes files through Linux's io_uring: many transfers at once without a
// thread for each.
//
// A ring has a fixed number of places, one for each transfer under way. A caller without a place
// waits for one, so neither queue can overflow. A transfer ends when the kernel says so, never by a
// timeout: until then its buffer is the kernel's.
//
//	Open    sets up a ring and tests it: the kernel has the operations, and one completes.
//	        ErrUnavailable with the reason if not (an old kernel, seccomp,
//	        kernel.io_uring_disabled).
//	File    a file that is read and written through the ring. Transfers that the ring does not
//	        take go by pread and pwrite, and are counted.
//	Close   cancels transfers that the kernel has not begun, and waits for the others until its
//	        context ends.
//
// # Order of memory accesses
//
// Queues are shared with the kernel, which accesses their heads and tails with acquire and release.
// sync/atomic is at least that:
//
//	submit  the entry is written, then the submission tail is stored (release);
//	        the kernel loads the tail (acquire) and then reads the entry. One
//	        producer at a time, under a mutex. Without a polling thread the kernel
//	        looks only inside io_uring_enter, which would do as well.
//	reap    the completion tail is loaded (acquire), then entries are copied, then
//	        the head is stored (release): only then may the kernel use their places.
//	        One goroutine does this.
//	buffer  the kernel has written it before it stores the completion tail; the
//	        waiter hears of it through a channel after that.
//
// Non-goals: registered buffers and files, polling, anything but files.
package uring

import "errors"

// ErrUnavailable says that io_uring cannot be used here; the error it is wrapped with says why.
var ErrUnavailable = errors.New("io_uring is not available")

// ErrClosed says that the ring is closed, or a transfer was cancelled for that.
var ErrClosed = errors.New("the ring is closed")

// Stats counts transfers of one ring since it was opened.
type Stats struct {
	Submitted uint64 // that the kernel took
	Completed uint64 // those of them that ended, well or not
	Direct    uint64 // that went by pread or pwrite, because the ring did not take them
	Stray     uint64 // completions of no transfer; always 0
}
