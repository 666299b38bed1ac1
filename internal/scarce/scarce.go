// Package scarce handles a process's lack of file descriptors, socket memory or local ports.
// Listeners outlive the shortage, diallers tell it from the other end's failures, and limits follow
// how many files may be open.
package scarce

import (
	"errors"
	"math"
	"slices"
	"syscall"
)

// own are the errors that speak about this process or machine only.
var own = []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL}

// Ours reports whether err is a lack of this process, which says nothing about its peer.
func Ours(err error) bool {
	return slices.ContainsFunc(own, func(e error) bool { return errors.Is(err, e) })
}

// Files returns how many files and sockets this process may have open. Go raises the soft limit to
// the hard one when a program starts, and gives children the original limits; ours are Go programs,
// and raise them again.
func Files() int {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil || uint64(lim.Cur) > math.MaxInt32 {
		return math.MaxInt32
	}
	return int(lim.Cur)
}
