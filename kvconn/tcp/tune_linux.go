package tcp

import (
	"net"

	"golang.org/x/sys/unix"
)

// withoutPacing takes a connection inside this machine off the congestion control made
// for networks: BBR's pacing timers cost a quarter of a transfer's CPU time there. Reno
// is in every kernel; where policy forbids the choice, the default stays.
func withoutPacing(c *net.TCPConn) {
	local, ok := c.LocalAddr().(*net.TCPAddr)
	remote, ok2 := c.RemoteAddr().(*net.TCPAddr)
	if !ok || !ok2 || !local.IP.Equal(remote.IP) {
		return
	}
	if rc, err := c.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { _ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno") })
	}
}
