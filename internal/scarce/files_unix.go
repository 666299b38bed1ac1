//go:build unix

package scarce

import (
	"math"
	"syscall"
)

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
