package memfd

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Seals fix a file's size for good: a peer that has it mapped cannot be hit by
// SIGBUS because the owner cut it.
const Seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// New allocates size bytes; name is what /proc shows.
func New(name string, size int) (*Memory, error) {
	if size < 1 {
		return nil, fmt.Errorf("memfd: %d bytes", size)
	}
	if size >= HugeBytes {
		// Fails when no huge pages are reserved, which is the usual case.
		if m, err := create(name, size, roundUp(size, HugeBytes), unix.MFD_HUGETLB|unix.MFD_HUGE_2MB); err == nil {
			m.Pages = Huge
			return m, nil
		}
	}
	m, err := create(name, size, roundUp(size, os.Getpagesize()), 0)
	if err != nil {
		return nil, err
	}
	m.Pages = Small
	// Only hints: errors mean that small pages are all there is.
	if unix.Madvise(m.Bytes, unix.MADV_HUGEPAGE) == nil && allowed("shmem_enabled") {
		m.Pages = Transparent
	}
	return m, nil
}

// Private allocates size bytes that no other process can map: FD is -1. Systems
// give huge pages to such memory where they give none to files, and a device
// reads 4 KiB pages at four fifths of the link's rate.
func Private(size int) (*Memory, error) {
	if size < 1 {
		return nil, fmt.Errorf("memfd: %d bytes", size)
	}
	const rights, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	whole := roundUp(size, HugeBytes)
	m := &Memory{FD: -1, Size: int64(whole), Pages: Huge}
	// Fails when no huge pages are reserved, which is the usual case.
	at, err := unix.MmapPtr(-1, 0, nil, uintptr(whole), rights, flags|unix.MAP_HUGETLB|unix.MAP_HUGE_2MB)
	area, length := at, uintptr(whole)
	if err != nil {
		length += HugeBytes
		if area, err = unix.MmapPtr(-1, 0, nil, length, rights, flags|unix.MAP_NORESERVE); err != nil {
			return nil, fmt.Errorf("memfd: map: %w", err)
		}
		at = unsafe.Add(area, -int(uintptr(area))&(HugeBytes-1))
		m.Pages = Small
	}
	b := unsafe.Slice((*byte)(at), whole)
	if m.Pages == Small && unix.Madvise(b, unix.MADV_HUGEPAGE) == nil && allowed("enabled") {
		m.Pages = Transparent
	}
	_ = unix.Madvise(b, unix.MADV_DONTFORK) // a device may have the pages pinned
	place(b)
	m.Bytes, m.unmap = b[:size:size], func() error { return unix.MunmapPtr(area, length) }
	return m, nil
}

// create makes, sizes, maps and seals one file.
func create(name string, size, whole, flags int) (_ *Memory, err error) {
	fail := func(op string, err error) (*Memory, error) { return nil, fmt.Errorf("memfd: %s: %w", op, err) }
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fail("create", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err = unix.Ftruncate(fd, int64(whole)); err != nil {
		return fail("size", err)
	}
	if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, Seals); err != nil {
		return fail("seal", err)
	}
	at, unmap, err := mapAligned(fd, whole, flags&unix.MFD_HUGETLB != 0)
	if err != nil {
		return fail("map", err)
	}
	b := unsafe.Slice((*byte)(at), whole)
	place(b)
	return &Memory{Bytes: b[:size:size], FD: fd, Size: int64(whole), unmap: unmap}, nil
}

// mapAligned maps a file at a multiple of HugeBytes. The kernel places huge
// pages so by itself. For others it takes a range that is large enough wherever
// it lies, then puts the file at the first multiple.
func mapAligned(fd, size int, huge bool) (unsafe.Pointer, func() error, error) {
	const rights = unix.PROT_READ | unix.PROT_WRITE
	if huge {
		at, err := unix.MmapPtr(fd, 0, nil, uintptr(size), rights, unix.MAP_SHARED)
		return at, func() error { return unix.MunmapPtr(at, uintptr(size)) }, err
	}
	length := uintptr(roundUp(size, HugeBytes) + HugeBytes)
	area, err := unix.MmapPtr(-1, 0, nil, length, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, nil, err
	}
	at := unsafe.Add(area, -int(uintptr(area))&(HugeBytes-1))
	if _, err := unix.MmapPtr(fd, 0, at, uintptr(size), rights, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		// The range stays taken, which costs addresses only: where this failed
		// may be a hole by now, and in the hole another thread's stack.
		return nil, nil, err
	}
	return at, func() error { return unix.MunmapPtr(area, length) }, nil
}

// allowed says whether the kernel may back memory of a kind with huge pages.
func allowed(kind string) bool {
	b, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/" + kind)
	return err == nil && !strings.Contains(string(b), "[never]") && !strings.Contains(string(b), "[deny]")
}

// Close unmaps the memory and closes the descriptor. Peers that have it mapped
// keep it until they unmap it.
func (m *Memory) Close() error {
	if m.unmap == nil {
		return nil
	}
	err := m.unmap()
	if m.FD >= 0 {
		err = errors.Join(err, unix.Close(m.FD))
	}
	m.unmap, m.Bytes, m.FD = nil, nil, -1
	return err
}
