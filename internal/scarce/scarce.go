// Package scarce is about what a process runs out of by no peer's fault: file
// descriptors, memory of sockets, local ports. Listeners outlive the shortage,
// dialling tells its own lack from the other end's, and what is accepted is
// fitted to what may be open.
package scarce

import (
	"errors"
	"math"
	"syscall"
)

// own are the errors that speak about this process or machine only.
var own = []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL}

// Ours reports whether err is a lack of this process, which says nothing about
// whom it wanted to reach.
func Ours(err error) bool {
	for _, e := range own {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// Files is how many files and sockets this process may have open. Go raises the
// soft limit to the hard one when a program starts, and gives the children that
// it starts the limits that itself was started with; those of ours are Go
// programs, and raise it again.
func Files() int {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil || uint64(lim.Cur) > math.MaxInt32 {
		return math.MaxInt32
	}
	return int(lim.Cur)
}
