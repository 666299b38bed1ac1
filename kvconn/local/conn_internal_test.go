//go:build linux

package local

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/memfd"
)

// plain is a transport whose connections are only ours.
func plain(t *testing.T) *Transport {
	t.Helper()
	tr, err := New("shm", "", func(c *Conn) net.Conn { return c })
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// pair returns both ends of a new connection; the first is the dialler's.
func pair(t *testing.T) (*Conn, *Conn) {
	t.Helper()
	tr := plain(t)
	ln, err := tr.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a, err := tr.Dial(t.Context(), ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	for _, c := range []net.Conn{a, b} {
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	return a.(*Conn), b.(*Conn)
}

// descriptors counts what this process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

// Memory that one end offers is the memory that the other maps; the hold ends
// when it is unmapped, and not when the connection is closed.
func TestOffer(t *testing.T) {
	before := descriptors(t)
	m, err := memfd.New("xpyd-offer", 8192)
	if err != nil {
		t.Fatal(err)
	}
	a, b := pair(t)
	h, err := a.Lend(m.FD)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 16)
	if n, err := b.Read(buf); err != nil || string(buf[:n]) != "hello" {
		t.Fatalf("read %q, %v", buf[:n], err)
	}
	taken, err := b.Take()
	if err != nil {
		t.Fatal(err)
	}
	w, err := taken.Map(m.Size)
	if err != nil {
		t.Fatal(err)
	}
	w[100] = 42
	if m.Bytes[100] != 42 {
		t.Error("what the peer wrote is not in our memory")
	}
	if _, err := b.Take(); err == nil {
		t.Error("taken twice")
	}
	if _, err := a.Lend(m.FD); err == nil {
		t.Error("offered twice")
	}
	a.Close()
	b.Close()
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := h.Wait(short); err != context.DeadlineExceeded {
		t.Errorf("the hold of mapped memory ended: %v", err)
	}
	if err := errors.Join(unix.Munmap(w), taken.End()); err != nil {
		t.Error(err)
	}
	if err := h.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if now := descriptors(t); now != before {
		t.Errorf("%d descriptors open, %d before", now, before)
	}
}

// The bare end of the pipe proves nothing: a process that dies closes it
// before its device has stopped.
func TestBareEnd(t *testing.T) {
	before := descriptors(t)
	m, err := memfd.New("xpyd-bare", 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	a, b := pair(t)
	h, err := a.Lend(m.FD)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	taken, err := b.Take()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Close(taken.FD), unix.Close(taken.pipe)); err != nil { // and no word
		t.Fatal(err)
	}
	b.Close()
	for range 2 {
		short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := h.Wait(short); err != context.DeadlineExceeded {
			t.Errorf("the hold of a process that lives ended: %v", err)
		}
		cancel()
	}
	a.Close()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if now := descriptors(t); now != before+1 {
		t.Errorf("%d descriptors open, %d before", now, before+1)
	}
}

// What was offered and never taken is given back with the connection, at whatever point of the
// hand-over that ends: nothing was mapped, so nobody has to die for the lender to know. It
// goes with the first bytes after it was offered, whatever has been said before.
func TestNeverTaken(t *testing.T) {
	m, err := memfd.New("xpyd-untaken", 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	write := func(c *Conn, text string) {
		if _, err := c.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	f := func(name string, end func(a, b *Conn)) {
		t.Helper()
		before := descriptors(t)
		a, b := pair(t)
		write(a, strings.Repeat("before", 2_000))
		h, err := a.Lend(m.FD)
		if err != nil {
			t.Fatal(err)
		}
		end(a, b)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := h.Wait(ctx); err != nil {
			t.Fatalf("%s: the hold does not end: %v", name, err)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		a.Close()
		if now := descriptors(t); now != before {
			t.Errorf("%s: %d descriptors open, %d before", name, now, before)
		}
	}
	read := func(a, b *Conn) {
		write(a, "with")
		for got := ""; !strings.Contains(got, "with"); {
			buf := make([]byte, 16)
			n, err := b.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			got += string(buf[:n])
		}
	}
	f("read", func(a, b *Conn) { read(a, b); b.Close() })
	f("not read", func(a, b *Conn) { write(a, "with"); b.Close() })
	f("never sent", func(a, b *Conn) { a.Close(); b.Close() })
	f("the peer is gone before it is sent", func(a, b *Conn) {
		b.Close()
		if _, err := a.Write([]byte("with")); err == nil {
			t.Fatal("written to nobody")
		}
		a.Close()
	})
	f("read too late", func(a, b *Conn) {
		write(a, "with")
		if err := b.SetReadDeadline(time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Read(make([]byte, 1)); err == nil {
			t.Fatal("read behind the deadline")
		}
		b.Close()
	})
	f("read while it is closed", func(a, b *Conn) {
		write(a, "with")
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for {
				if _, err := b.Read(make([]byte, 1)); err != nil {
					return
				}
			}
		}()
		b.Close()
		<-ended
	})
	f("the lender has hung up", func(a, b *Conn) { read(a, b); a.Close(); b.Close() })
}

// A peer may say and offer what it likes: it is refused, nothing stays open,
// and nothing is mapped that could be cut under us.
func TestRefused(t *testing.T) {
	file := func(size int64, seals int) int {
		fd, err := unix.MemfdCreate("xpyd-refused", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err == nil {
			err = unix.Ftruncate(fd, size)
		}
		if err == nil && seals != 0 {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		}
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	f := func(name, text string, fds []int, want string, more ...int) {
		t.Helper()
		before := descriptors(t)
		a, b := pair(t)
		var oob, again []byte
		if len(fds) > 0 {
			oob = unix.UnixRights(fds...)
		}
		if len(more) > 0 {
			again = unix.UnixRights(more...)
		}
		if _, _, err := a.WriteMsgUnix([]byte(text), oob, nil); err != nil {
			t.Fatal(err)
		}
		a.greeted = true
		if _, _, err := a.WriteMsgUnix([]byte("x"), again, nil); err != nil {
			t.Fatal(err)
		}
		var err error
		for got := byte(0); err == nil && got != 'x'; {
			var one [1]byte
			_, err = b.Read(one[:])
			got = one[0]
		}
		var taken Taken
		if err == nil {
			taken, err = b.Take()
		}
		if err == nil {
			_, err = taken.Map(4096)
			err = errors.Join(err, taken.End())
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
		a.Close()
		b.Close()
		if now := descriptors(t); now != before {
			t.Errorf("%s: %d descriptors open, %d before", name, now, before)
		}
	}
	good, loose, long := file(4096, memfd.Seals), file(4096, 0), file(8192, memfd.Seals)
	const hello = preamble + "shm"
	f("another protocol", "GET / HTT", nil, "preamble")
	f("another transport", preamble+"cudaipc", nil, "preamble")
	f("too many", hello, []int{good, good, good, good, good}, "should not")
	f("too few", hello, []int{good}, "should not")
	f("twice", hello, []int{good, good}, "should not", good, good)
	f("too many the second time", hello, []int{good, good}, "should not", good, good, good, good)
	f("nothing", hello, nil, "no memory")
	f("no memory file", hello, []int{1, good}, "no memory file")
	f("not sealed", hello, []int{loose, good}, "not sealed")
	f("another size", hello, []int{long, good}, "8192 bytes")
	for _, fd := range []int{good, loose, long} {
		unix.Close(fd)
	}
}

// A preamble that does not come is bounded by the connection's deadline, and
// one that comes in pieces is read.
func TestSlowPreamble(t *testing.T) {
	_, mute := pair(t)
	if err := mute.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := mute.Read(make([]byte, 1)); err == nil {
		t.Fatal("read without a preamble")
	}
	a, b := pair(t)
	a.greeted = true
	for _, c := range preamble + a.name + "x" {
		if _, err := a.Write([]byte(string(c))); err != nil {
			t.Fatal(err)
		}
	}
	buf := make([]byte, 4)
	if n, err := b.Read(buf); err != nil || string(buf[:n]) != "x" {
		t.Errorf("read %q, %v", buf[:n], err)
	}
}

func TestAddresses(t *testing.T) {
	tr := plain(t)
	for _, addr := range []string{"", "x", "shm:", "tcp:x", "shm:" + strings.Repeat("x", maxName+1), "shm:@x", "shm:\x00"} {
		if _, err := tr.Dial(t.Context(), addr); err == nil {
			t.Errorf("dialled %q", addr)
		}
		if addr != "" {
			if ln, err := tr.Listen(addr); err == nil {
				ln.Close()
				t.Errorf("listened on %q", addr)
			}
		}
	}
	ln, err := tr.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if _, err := tr.Listen(ln.Addr().String()); err == nil {
		t.Error("two listeners of one name")
	}
}

// FuzzRights: control messages of any form give descriptors or an error, and
// never a panic. The descriptors in them are not opened, so none are closed.
func FuzzRights(f *testing.F) {
	f.Add([]byte{})
	f.Add(unix.UnixRights(1, 2))
	f.Add(append(unix.UnixRights(1), 1, 2, 3))
	f.Fuzz(func(t *testing.T, oob []byte) {
		if fds, err := rights(oob); err == nil && 4*len(fds) > len(oob) {
			t.Errorf("%d descriptors in %d bytes", len(fds), len(oob))
		}
	})
}
