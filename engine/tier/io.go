package tier

import (
	"context"
	"errors"
	"fmt"

	"github.com/xpyd/xpyd/engine/tier/uring"
)

// IO says how the SSD tier reads and writes. What it has under way is bounded
// all the same: 32 reads, 4 writers.
type IO string

// The ways.
const (
	IOAuto  IO = "auto"     // the one that was measured to be better for the size of units
	IOUring IO = "io_uring" // through a ring: no thread for each transfer
	IOPread IO = "pread"    // pread and pwrite, as many at a time as goroutines
)

// crossover is the size of records, bytes, from which IOAuto is IOPread. Of 64
// KiB io_uring writes more and takes a fifth less processor time, of 2 MiB it
// moves as much and takes a tenth to a fifth more (scripts/bench kvio).
const crossover = 256 << 10

// diskIO is the way in force. The zero value is IOPread.
type diskIO struct {
	ring *uring.Ring // nil: IOPread
	why  error       // there is no ring; nil: none was asked for
}

// newDiskIO sets a ring up for so many transfers of so many bytes; without one
// IOAuto does with pread.
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

// open opens a segment's file, past the page cache where the file system can.
func (e *diskIO) open(path string, flag int) (file, error) {
	f, err := openDirect(path, flag)
	if err != nil {
		return nil, err // and no file that is not nil
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

// close cancels what has not begun, and waits for the rest as long as ctx
// lasts. Files may be closed before or after.
func (e *diskIO) close(ctx context.Context) error {
	if e.ring == nil {
		return nil
	}
	return e.ring.Close(ctx)
}
