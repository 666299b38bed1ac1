package memfd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const piece = 8 << 20 // bytes that are taken at a time

// A ShortError reports that the system lacks the memory that was asked for.
type ShortError struct {
	Want, Spare, Have int64 // bytes
}

func (e *ShortError) Error() string {
	return fmt.Sprintf("%d MiB wanted, and %d MiB to spare for others, where %d MiB are to be had", e.Want>>20, e.Spare>>20, e.Have>>20)
}

// short is a *ShortError if what is available (0: unknown) is less than the rest of what
// is wanted and what is left to others.
func short(want, rest, have int64) error {
	if spare := min(Spare, want); have > 0 && have < rest+spare {
		return &ShortError{Want: want, Spare: spare, Have: have}
	}
	return nil
}

// Room returns a *ShortError if Populate would find less than this.
func Room(bytes int64) error { return short(bytes, bytes, Available()) }

// Populate gives the memory its pages now: whoever counts on them later could
// be killed for them. It takes them piece by piece, and none that the machine or
// the process's control group has not (Available), so that processes which start
// together do not all get what only one can have. After an error the memory is to
// be closed. Reserved huge pages are always there to take.
func (m *Memory) Populate(ctx context.Context) error {
	available := Available
	if m.Pages == Huge { // they are reserved
		available = func() int64 { return 0 }
	}
	return m.populate(ctx, available, piece)
}

func (m *Memory) populate(ctx context.Context, available func() int64, piece int) error {
	short := func(rest int) error { return short(int64(len(m.Bytes)), int64(rest), available()) }
	if err := short(len(m.Bytes)); err != nil {
		return err
	}
	var next atomic.Int64
	var all sync.WaitGroup
	errs := make([]error, min(4, runtime.GOMAXPROCS(0)))
	for i := range errs {
		all.Go(func() {
			for {
				at := int(next.Add(int64(piece))) - piece
				if at >= len(m.Bytes) {
					return
				}
				b := m.Bytes[at:min(at+piece, len(m.Bytes))]
				if errs[i] = errors.Join(ctx.Err(), short(len(b))); errs[i] == nil {
					errs[i] = touch(b)
				}
				if errs[i] != nil {
					next.Store(int64(len(m.Bytes))) // enough for the others
					return
				}
			}
		})
	}
	all.Wait()
	return cmp.Or(errs...) // the others' are of the same kind
}

// touch has the kernel give b its pages.
func touch(b []byte) error {
	err := unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, unix.EINVAL):
		return fmt.Errorf("memfd: pages: %w", err)
	}
	for i := 0; i < len(b); i += os.Getpagesize() { // before Linux 5.14
		b[i] = 0
	}
	return nil
}
