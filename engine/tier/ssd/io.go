package ssd

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/xpyd/xpyd/engine/tier/ssd/uring"
)

// IO says how the SSD tier reads and writes. It has 32 reads and 4 writes under way at most
// either way.
type IO string

const (
	IOAuto  IO = "auto"     // io_uring for records below crossover, if available
	IOUring IO = "io_uring" // through a ring: no thread for each transfer
	IOPread IO = "pread"    // pread and pwrite: a thread for each transfer
)

// crossover is the size of records from which IOAuto is IOPread. At 64 KiB io_uring writes more
// and takes a fifth less processor time; at 2 MiB it moves as much and takes a tenth to a fifth
// more (scripts/bench kvio).
const crossover = 256 << 10

// diskIO opens files for the chosen IO. The zero value is IOPread.
type diskIO struct {
	ring *uring.Ring // nil: IOPread
	why  error       // why there is no ring; nil: none was asked for
}

// newDiskIO sets up a ring for depth transfers. Without one IOAuto is IOPread.
func newDiskIO(want IO, depth, bytes int, ring func(depth int) (*uring.Ring, error)) (e diskIO, err error) {
	switch {
	case want == IOPread:
		return e, nil
	case want != IOUring && bytes >= crossover:
		e.why = fmt.Errorf("auto: for units of %d bytes pread takes less processor time", bytes)
		return e, nil
	}
	if e.ring, e.why = ring(depth); want == IOUring && e.why != nil {
		return e, fmt.Errorf("tier: the SSD by io_uring: %w", e.why)
	}
	return e, nil
}

func (e *diskIO) way() IO {
	if e.ring != nil {
		return IOUring
	}
	return IOPread
}

// Open opens a segment's file, bypassing the page cache where the file system can.
func (e *diskIO) Open(path string, flag int) (File, error) {
	f, err := openDirect(path, flag)
	if err != nil {
		return nil, err // f would make a File that is not nil
	}
	if e.ring == nil {
		return f, nil
	}
	u, err := e.ring.File(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return u, nil
}

// Remove deletes a file.
func (e *diskIO) Remove(path string) error { return os.Remove(path) }

// close cancels transfers that have not begun, and waits for the others until ctx ends. Files
// may be closed before or after.
func (e *diskIO) close(ctx context.Context) error {
	if e.ring == nil {
		return nil
	}
	return e.ring.Close(ctx)
}
