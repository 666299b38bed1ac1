package router

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// quiet says whether an idle connection has neither ended nor received bytes
// that nobody asked for.
func quiet(conn net.Conn) bool {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return true
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	quiet := false
	err = rc.Control(func(fd uintptr) {
		var b [1]byte
		_, _, rerr := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		quiet = rerr == unix.EAGAIN
	})
	return err == nil && quiet
}
