//go:build race

package local

import "syscall"

// received tells the race detector that what the peer's process did before it wrote
// happened before what we do next: it knows this of read(2), but not of recvmsg(2).
func (c *Conn) received() {
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _, _ = syscall.Read(int(fd), nil) }) // of nothing: returns at once
	}
}
