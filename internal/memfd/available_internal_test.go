//go:build linux

package memfd

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The least of the machine and of every control group counts; what is no number bounds nothing.
func TestAvailable(t *testing.T) {
	const mib = 1 << 20
	meminfo := "MemTotal:       9999999 kB\nMemFree:          11 kB\nMemAvailable:    1048576 kB\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"nothing known": {nil, 0},
		"the machine":   {map[string]string{"proc/meminfo": meminfo}, 1024 * mib},
		"no limits": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n",
			"sys/fs/cgroup/a/b/memory.current": "5000000000\n"}, 1024 * mib},
		"a group of its own, with pages of files": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "536870912\n",
			"sys/fs/cgroup/a/memory.current": "209715200\n", "sys/fs/cgroup/a/memory.stat": "anon 5\nactive_file 7\ninactive_file 104857600\n"}, (512 - 200 + 100) * mib},
		"its parent's": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "536870912\n",
			"sys/fs/cgroup/a/memory.max": "104857600\n", "sys/fs/cgroup/a/memory.current": "52428800\n"}, 50 * mib},
		"a container that sees the host's path": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/docker/77\n", "sys/fs/cgroup/memory.max": "104857600\n",
			"sys/fs/cgroup/memory.current": "0\n"}, 100 * mib},
		"version 1": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "5:cpu:/x\n4:hugetlb,memory:/x\n1:name=systemd:/y\n",
			"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "104857600\n", "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "52428800\n",
			"sys/fs/cgroup/memory/x/memory.stat": "inactive_file 3\ntotal_inactive_file 1048576\n"}, 51 * mib},
		"full": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "100\n", "sys/fs/cgroup/a/memory.current": "100\n"}, 1},
	} {
		root := t.TempDir()
		for at, text := range c.files {
			at = filepath.Join(root, at)
			if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, []byte(text), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		if got := available(root); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
	if got := Available(); got < mib {
		t.Errorf("here: %d", got)
	}
}

// Memory has its pages, and takes none that others have taken meanwhile.
func TestPopulate(t *testing.T) {
	const size, part, spare = 8 << 20, 1 << 20, 8 << 20
	resident := func(m *Memory) (n int) {
		pages := make([]byte, size/os.Getpagesize())
		if _, _, errno := unix.Syscall(unix.SYS_MINCORE, addressOf(m.Bytes), size, addressOf(pages)); errno != 0 {
			t.Fatal(errno)
		}
		for _, p := range pages {
			n += int(p&1) * os.Getpagesize()
		}
		return n
	}
	open := func() *Memory {
		b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err = errors.Join(err, unix.Madvise(b, unix.MADV_NOHUGEPAGE)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Munmap(b) })
		return &Memory{Bytes: b, FD: -1, Pages: Small}
	}
	m := open()
	if err := m.populate(t.Context(), func() int64 { return spare + size }, part); err != nil || resident(m) != size {
		t.Errorf("%v, %d of %d bytes there", err, resident(m), size)
	}
	m = open()
	if err := m.populate(t.Context(), func() int64 { return 0 }, part); err != nil || resident(m) != size {
		t.Errorf("where nothing is known: %v, %d of %d bytes there", err, resident(m), size)
	}
	var lack *ShortError
	m = open()
	if err := m.populate(t.Context(), func() int64 { return spare + size - 1 }, part); !errors.As(err, &lack) || *lack != (ShortError{size, spare, spare + size - 1}) || resident(m) != 0 {
		t.Errorf("more than there is: %v, %d bytes there", err, resident(m))
	}
	if err := short(4*Spare, 4*Spare, 5*Spare-1); !errors.As(err, &lack) || lack.Spare != Spare {
		t.Errorf("a large one leaves %v to others", err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	m = open()
	if err := m.populate(ended, func() int64 { return 0 }, part); !errors.Is(err, context.Canceled) || resident(m) != 0 {
		t.Errorf("after the end: %v, %d bytes there", err, resident(m))
	}
	m = open()
	var asked atomic.Int64
	others := func() int64 { // they take it after the third time
		if asked.Add(1) > 3 {
			return spare
		}
		return spare + size
	}
	if err := m.populate(t.Context(), others, part); !errors.As(err, &lack) || resident(m) > 4*part {
		t.Errorf("taken by others: %v, %d bytes there", err, resident(m))
	}
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
