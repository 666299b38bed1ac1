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
		if m, err := newFile(name, size, true); err == nil {
			return m, nil
		}
	}
	return newFile(name, size, false)
}

// Private allocates size bytes that no other process can map: FD is -1. Systems
// give huge pages to such memory where they give none to files, and a device
// reads 4 KiB pages at four fifths of the link's rate.
func Private(size int) (*Memory, error) {
	if size < 1 {
		return nil, fmt.Errorf("memfd: %d bytes", size)
	}
	const flags = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	// Fails when no huge pages are reserved, which is the usual case.
	whole := roundUp(size, HugeBytes)
	m, err := newMapping(-1, size, whole, flags|unix.MAP_HUGETLB|unix.MAP_HUGE_2MB, "")
	if err != nil {
		m, err = newMapping(-1, size, whole, flags|unix.MAP_NORESERVE, "enabled")
	}
	return m, err
}

// newFile makes, sizes, seals and maps a file, of huge pages or others.
func newFile(name string, size int, huge bool) (_ *Memory, err error) {
	flags, whole, setting := unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING, roundUp(size, os.Getpagesize()), "shmem_enabled"
	if huge {
		flags, whole, setting = flags|unix.MFD_HUGETLB|unix.MFD_HUGE_2MB, roundUp(size, HugeBytes), ""
	}
	fd, err := unix.MemfdCreate(name, flags)
	if err != nil {
		return nil, fmt.Errorf("memfd: create: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err = unix.Ftruncate(fd, int64(whole)); err != nil {
		return nil, fmt.Errorf("memfd: size: %w", err)
	}
	if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, Seals); err != nil {
		return nil, fmt.Errorf("memfd: seal: %w", err)
	}
	return newMapping(fd, size, whole, unix.MAP_SHARED, setting)
}

// newMapping maps whole bytes of a file, or of private memory if fd is -1, at a multiple
// of HugeBytes. The kernel places huge pages so by itself. For others, which setting
// makes transparent huge pages, a range is taken that is large enough wherever it lies,
// and the memory put at the first multiple in it.
func newMapping(fd, size, whole, flags int, setting string) (*Memory, error) {
	const rights = unix.PROT_READ | unix.PROT_WRITE
	pages, length := Huge, uintptr(whole)
	var area, at unsafe.Pointer
	var err error
	if setting == "" {
		area, err = unix.MmapPtr(fd, 0, nil, length, rights, flags)
		at = area
	} else {
		pages, length = Small, uintptr(roundUp(whole, HugeBytes)+HugeBytes)
		if area, err = unix.MmapPtr(-1, 0, nil, length, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE); err == nil {
			// If this fails, the range stays taken, which costs addresses only: where
			// it failed may be a hole by now, and in the hole another thread's stack.
			at = unsafe.Add(area, -int(uintptr(area))&(HugeBytes-1))
			_, err = unix.MmapPtr(fd, 0, at, uintptr(whole), rights, flags|unix.MAP_FIXED)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("memfd: map: %w", err)
	}
	b := unsafe.Slice((*byte)(at), whole)
	// Only a hint: an error means that small pages are all there is.
	if pages == Small && unix.Madvise(b, unix.MADV_HUGEPAGE) == nil && allowed(setting) {
		pages = Transparent
	}
	if fd < 0 {
		_ = unix.Madvise(b, unix.MADV_DONTFORK) // a device may have the pages pinned
	}
	place(b)
	return &Memory{Bytes: b[:size:size], FD: fd, Size: int64(whole), Pages: pages, unmap: func() error { return unix.MunmapPtr(area, length) }}, nil
}

// allowed reports whether a setting lets the kernel back memory with huge pages.
func allowed(setting string) bool {
	b, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/" + setting)
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
