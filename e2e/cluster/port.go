package cluster

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// Port reserves an address of a free port until t ends, for a server that must
// be told where to listen, or to be found there again after a restart. A socket
// that is bound and does not listen holds it: whoever asks for that port gets
// it (Go sets SO_REUSEADDR), and nobody who asks for any.
func Port(t testing.TB) (addr string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", name.(*unix.SockaddrInet4).Port)
}
