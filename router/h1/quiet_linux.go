package h1

import (
	"net"

	"golang.org/x/sys/unix"
)

// quiet reports whether an idle connection has neither ended nor received bytes
// that nobody asked for.
func quiet(conn net.Conn) bool {
	rc := socket(conn)
	if rc == nil {
		return true
	}
	quiet := false
	err := rc.Control(func(fd uintptr) { quiet = sysPeek(int(fd)) == unix.EAGAIN })
	return err == nil && quiet
}

// unsentMost is how much may wait in the kernel for a client that does not
// read; left to itself the kernel takes megabytes.
const unsentMost = 64 << 10

// boundUnsent makes writes to conn wait once so much waits there.
func boundUnsent(conn net.Conn) {
	if rc := socket(conn); rc != nil {
		_ = rc.Control(func(fd uintptr) { // an old kernel has no such bound
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsentMost)
		})
	}
}
