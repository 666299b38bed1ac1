//go:build !race

package h1

import (
	"syscall"
	"unsafe"
)

// sysRead and sysWrite are recv(2) and send(2) on sockets, without waiting and without the
// scheduler's bookkeeping for calls that may wait: for those an idle runtime wakes its
// monitor thread, which then looks every 20 us for a while. At a few thousand requests a
// second that was a twelfth of the router's time. read(2) and write(2) reach a socket
// through the file system, a tenth of a microsecond slower.
func sysRead(fd int, p []byte) (int, error) { return sysIO(syscall.SYS_RECVFROM, fd, p) }

func sysWrite(fd int, p []byte) (int, error) { return sysIO(syscall.SYS_SENDTO, fd, p) }

func sysIO(call uintptr, fd int, p []byte) (int, error) {
	const flags = syscall.MSG_DONTWAIT | syscall.MSG_NOSIGNAL
	n, _, err := syscall.RawSyscall6(call, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), flags, 0, 0)
	if err != 0 {
		return 0, err
	}
	return int(n), nil
}
