package local

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Map maps the memory file that was lent, if it has exactly this size and is sealed
// against shrinking: else its owner could cause SIGBUS here. The descriptor is closed
// in any case; the caller unmaps with unix.Munmap.
func (t Taken) Map(bytes int64) ([]byte, error) {
	defer unix.Close(t.FD)
	seals, err := unix.FcntlInt(uintptr(t.FD), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("offered descriptor is no memory file: %w", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return nil, errors.New("offered memory is not sealed against shrinking")
	}
	var st unix.Stat_t
	if err := unix.Fstat(t.FD, &st); err != nil {
		return nil, fmt.Errorf("offered memory: %w", err)
	}
	if bytes < 1 || st.Size != bytes || int64(int(bytes)) != bytes {
		return nil, fmt.Errorf("offered memory is of %d bytes, the peer says %d", st.Size, bytes)
	}
	b, err := unix.Mmap(t.FD, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map: %w", err)
	}
	return b, nil
}
