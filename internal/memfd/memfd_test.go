//go:build linux

package memfd_test

import (
	"errors"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/memfd"
)

func TestNew(t *testing.T) {
	for _, size := range []int{1, 4096, 5 << 20} {
		m, err := memfd.New("xpyd-test", size)
		if runtime.GOOS != "linux" {
			if !errors.Is(err, memfd.ErrUnsupported) {
				t.Fatal(err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Bytes) != size || uintptr(unsafe.Pointer(&m.Bytes[0]))%memfd.HugeBytes != 0 {
			t.Errorf("%d bytes at %p, want %d at a multiple of %d", len(m.Bytes), &m.Bytes[0], size, memfd.HugeBytes)
		}
		m.Bytes[0], m.Bytes[size-1] = 1, 2
		// A second mapping sees the same bytes.
		b, err := unix.Mmap(m.FD, 0, int(m.Size), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		if b[size-1] != 2 {
			t.Error("another mapping shows other bytes")
		}
		unix.Munmap(b)
		for _, n := range []int64{0, m.Size + 4096} {
			if err := unix.Ftruncate(m.FD, n); err == nil {
				t.Errorf("size could be changed to %d", n)
			}
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if err := m.Close(); err != nil {
			t.Errorf("second close: %v", err)
		}
	}
	if _, err := memfd.New("none", 0); err == nil {
		t.Error("no error for 0 bytes")
	}
}

func TestPrivate(t *testing.T) {
	for _, size := range []int{1, 5 << 20} {
		m, err := memfd.Private(size)
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Bytes) != size || uintptr(unsafe.Pointer(&m.Bytes[0]))%memfd.HugeBytes != 0 || m.FD != -1 {
			t.Errorf("%d bytes at %p, descriptor %d", len(m.Bytes), &m.Bytes[0], m.FD)
		}
		m.Bytes[0], m.Bytes[size-1] = 1, 2
		if err := errors.Join(m.Close(), m.Close()); err != nil {
			t.Error(err)
		}
	}
	if _, err := memfd.Private(0); err == nil {
		t.Error("no error for 0 bytes")
	}
}
