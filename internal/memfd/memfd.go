// Package memfd allocates memory that other processes of the same user can
// map: an anonymous file that is sealed to its size and vanishes with its last
// user, however that one ends.
//
// Huge pages are taken where the system has them, small ones otherwise. On a
// machine with several NUMA nodes the pages lie on the nodes whose CPUs this
// process may run on.
//
// Non-goals: handing the descriptor to somebody (kvconn/shm does), and
// sharing by name: there is no name.
package memfd

import "errors"

// ErrUnsupported is what New returns on systems without sealed memory files.
var ErrUnsupported = errors.New("memfd: not on this system")

// Pages is what backs a Memory.
type Pages string

// Kinds of pages.
const (
	Huge        Pages = "huge"        // reserved 2 MiB pages (hugetlb)
	Transparent Pages = "transparent" // 2 MiB pages as the kernel finds them
	Small       Pages = "small"
)

// Spare is how many bytes are left to others where memory is taken at once, or as many
// as are taken, if those are fewer: more than what many processes take at a time.
const Spare = 512 << 20

// HugeBytes is the size, and the alignment, of a huge page.
const HugeBytes = 2 << 20

// Memory is one mapped allocation. Pages are given when first touched, so
// that memory which is never used costs nothing, or by Populate.
type Memory struct {
	// Bytes is the memory, zeroed, aligned to HugeBytes. It is gone after
	// Close: reading it then is a fault.
	Bytes []byte
	// FD is the descriptor, close-on-exec, valid until Close; -1 of Private memory.
	FD int
	// Size is the file's size: Bytes' length, rounded up to whole pages.
	Size  int64
	Pages Pages

	unmap func() error
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }
