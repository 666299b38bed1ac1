package h1

import (
	"net"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// quiet reports whether an idle connection is neither ended nor has unasked-for bytes.
func quiet(conn net.Conn) bool {
	rc := socket(conn)
	if rc == nil {
		return true
	}
	quiet := false
	err := rc.Control(func(fd uintptr) { quiet = sysPeek(int(fd)) == unix.EAGAIN })
	return err == nil && quiet
}

// unsentMost is how much the kernel may hold for a client that does not read; by default it
// takes megabytes.
const unsentMost = 64 << 10

// boundUnsent makes writes to conn wait once that much is unsent.
func boundUnsent(conn net.Conn) {
	if rc := socket(conn); rc != nil {
		_ = rc.Control(func(fd uintptr) { // an old kernel has no such bound
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsentMost)
		})
	}
}

// sysPeek is what a read would return now: EAGAIN if there is nothing to read, 0 for bytes
// or the end.
func sysPeek(fd int) syscall.Errno {
	var b [1]byte
	_, _, err := syscall.RawSyscall6(syscall.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b)), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	return err
}
