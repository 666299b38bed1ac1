//go:build !linux || race

package h1

import "syscall"

// The race detector takes these calls, but not bare ones, for an order between two
// goroutines that speak over a socket.
func sysRead(fd int, p []byte) (int, error)  { return syscall.Read(fd, p) }
func sysWrite(fd int, p []byte) (int, error) { return syscall.Write(fd, p) }
