package kvbench

import "golang.org/x/sys/unix"

// adviseHuge asks for huge pages. It is a hint: errors mean none are given.
func adviseHuge(b []byte) { _ = unix.Madvise(b, unix.MADV_HUGEPAGE) }
