//go:build unix

package supervise

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// adopt takes over an inherited pipe, non-blocking so that Close ends Read.
func adopt(fd int) (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return nil, errors.New("not a pipe")
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "parent"), nil
}
