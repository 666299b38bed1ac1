//go:build race

package local

import "syscall"

// received tells the race detector that what the peer's process did before it wrote came
// before what we do with it: it knows so of read(2), and not of recvmsg(2).
func (c *Conn) received() {
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _, _ = syscall.Read(int(fd), nil) }) // of nothing: returns at once
	}
}
