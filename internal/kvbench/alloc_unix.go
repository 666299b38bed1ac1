//go:build unix

package kvbench

import "golang.org/x/sys/unix"

// alloc maps zeroed private memory, in huge pages where the system has any:
// ours and the limits' alike.
func alloc(n int) (mem []byte, free func(), err error) {
	mem, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, nil, err
	}
	adviseHuge(mem)
	return mem, func() { _ = unix.Munmap(mem) }, nil
}
