package router

import (
	"syscall"
	"unsafe"
)

// sysRead and sysWrite are read(2) and write(2) on descriptors that never block,
// less the scheduler's bookkeeping of calls that may: told of one, an idle runtime
// wakes its monitor thread, which then looks every 20 us for a while. At a few
// thousand requests a second that was a twelfth of the router's time.
func sysRead(fd int, p []byte) (int, error) { return sysIO(syscall.SYS_READ, fd, p) }

func sysWrite(fd int, p []byte) (int, error) { return sysIO(syscall.SYS_WRITE, fd, p) }

func sysIO(call uintptr, fd int, p []byte) (int, error) {
	n, _, err := syscall.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	if err != 0 {
		return 0, err
	}
	return int(n), nil
}

// sysPeek is what a read would say now, without waiting: EAGAIN where there is
// nothing to read, 0 for bytes or the end.
func sysPeek(fd int) syscall.Errno {
	var b [1]byte
	_, _, err := syscall.RawSyscall6(syscall.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b)), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	return err
}
