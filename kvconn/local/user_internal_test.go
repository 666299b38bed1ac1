package local

import (
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/memfd"
)

const nobody = 65534

// asNobody runs f on a thread of another user, which ends with it, and reports whether
// it could: as root. The kernel notes the thread's user with the sockets that it makes.
func asNobody(t *testing.T, f func()) bool {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Log("not root: nothing can be tried as another user here")
		return false
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread is not used again
		if _, _, err := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), nobody, ^uintptr(0)); err != 0 {
			t.Errorf("setresuid: %v", err)
			return
		}
		f()
	}()
	<-done
	return true
}

// Another user who connects to our socket gets nothing from it, and nothing that it sends
// is looked at, descriptors included.
func TestAnotherUserDials(t *testing.T) {
	tr := plain(t)
	ln, err := tr.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	m, err := memfd.New("xpyd-nobody", 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	before := descriptors(t)
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if !asNobody(t, func() {
		name, _ := tr.socketName(ln.Addr().String())
		err = unix.Connect(s, &unix.SockaddrUnix{Name: name})
	}) {
		unix.Close(s)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Sendmsg(s, []byte(preamble+"shm"), unix.UnixRights(m.FD, m.FD), nil, 0); err != nil {
		t.Fatal(err)
	}
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 16)); err == nil || n > 0 || !strings.Contains(err.Error(), "user 65534") {
		t.Errorf("read %d bytes of another user's: %v", n, err)
	}
	if n, err := c.Write([]byte("x")); err == nil || n > 0 {
		t.Errorf("wrote %d bytes to another user: %v", n, err)
	}
	if _, err := c.(*Conn).Take(); err == nil {
		t.Error("another user's descriptors are taken")
	}
	c.Close()
	if n, err := unix.Read(s, make([]byte, 16)); n > 0 {
		t.Errorf("another user read %d bytes, %v", n, err)
	}
	unix.Close(s)
	if now := descriptors(t); now != before {
		t.Errorf("%d descriptors open, %d before", now, before)
	}
}

// Another user who has taken our peer's name gets no byte of ours.
func TestAnotherUserListens(t *testing.T) {
	tr := plain(t)
	var ln net.Listener
	var err error
	if !asNobody(t, func() { ln, err = tr.Listen("") }) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if c, err := tr.Dial(t.Context(), ln.Addr().String()); err == nil || !strings.Contains(err.Error(), "user 65534") {
		if err == nil {
			c.Close()
		}
		t.Errorf("dialled another user's listener: %v", err)
	}
}
