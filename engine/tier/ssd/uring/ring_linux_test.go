package uring

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ring opens one, or ends the test where the machine has none.
func ring(t *testing.T, depth int) *Ring {
	t.Helper()
	return ringOf(t, depth, system)
}

func ringOf(t *testing.T, depth int, k kernel) *Ring {
	t.Helper()
	r, err := open(depth, k)
	if errors.Is(err, ErrUnavailable) {
		t.Skip(err) // a container without it; the fallback is tested all the same
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// ends closes a ring, and looks whether everything came back once.
func ends(t *testing.T, r *Ring) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := r.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if s := r.Stats(); s.Submitted != s.Completed || s.Stray != 0 {
		t.Errorf("%+v", s)
	}
	if len(r.places) != cap(r.places) {
		t.Errorf("%d places of %d free", len(r.places), cap(r.places))
	}
}

func file(t *testing.T, r *Ring, path string, flag int) *File {
	t.Helper()
	f, err := os.OpenFile(path, flag, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	u, err := r.File(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.Close() })
	return u
}

// TestFile: what goes through the ring is what a plain file has, with more
// callers than places, past the page cache and through it.
func TestFile(t *testing.T) {
	for _, direct := range []int{0, unix.O_DIRECT} {
		t.Run(fmt.Sprint(direct), func(t *testing.T) {
			r := ring(t, 3)
			path := filepath.Join(t.TempDir(), "x")
			f := file(t, r, path, os.O_RDWR|os.O_CREATE|direct)
			const size, parts = 16 << 10, 64
			var wg sync.WaitGroup
			for i := range parts {
				wg.Go(func() {
					b := aligned(size)
					for j := range b {
						b[j] = byte(i*31 + j>>8)
					}
					if n, err := f.WriteAt(b, int64(i*size)); n != size || err != nil {
						t.Errorf("part %d: %d bytes: %v", i, n, err)
					}
				})
			}
			wg.Wait()
			whole, err := os.ReadFile(path)
			if err != nil || len(whole) != parts*size {
				t.Fatalf("%d bytes: %v", len(whole), err)
			}
			for i := range 256 {
				wg.Go(func() {
					gen := rand.New(rand.NewPCG(uint64(i), 1))
					b, at := aligned(4096*(1+gen.IntN(8))), 4096*gen.IntN(parts*size/4096)
					n, err := f.ReadAt(b, int64(at))
					want := min(len(b), len(whole)-at)
					if n != want || (err == nil) != (n == len(b)) || err != nil && !errors.Is(err, io.EOF) || !bytes.Equal(b[:n], whole[at:at+n]) {
						t.Errorf("%d of %d bytes at %d: %v", n, len(b), at, err)
					}
				})
			}
			wg.Wait()
			if s := r.Stats(); s.Submitted < 256+parts {
				t.Errorf("%+v", s)
			}
			ends(t, r)
			if _, err := f.ReadAt(aligned(4096), 0); err != nil {
				t.Errorf("after the ring: %v", err) // by pread
			}
		})
	}
}

func aligned(n int) []byte {
	b := make([]byte, n+4096)
	off := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & 4095
	return b[off : off+n]
}

// TestErrors: they are what a plain file's are.
func TestErrors(t *testing.T) {
	r := ring(t, 8)
	full := file(t, r, "/dev/full", os.O_WRONLY)
	if n, err := full.WriteAt(make([]byte, 100), 0); n != 0 || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%d bytes to a full device: %v", n, err)
	}
	if _, err := full.ReadAt(make([]byte, 100), 0); !errors.Is(err, unix.EBADF) {
		t.Errorf("read from what is only written: %v", err)
	}
	f := file(t, r, filepath.Join(t.TempDir(), "x"), os.O_RDWR|os.O_CREATE)
	if n, err := f.ReadAt(nil, 0); n != 0 || err != nil {
		t.Errorf("nothing: %d, %v", n, err)
	}
	if _, err := f.ReadAt(make([]byte, 10), 0); err != io.EOF {
		t.Errorf("an empty file: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if _, err := f.WriteAt(make([]byte, 10), 0); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a closed file: %v", err)
	}
	ends(t, r)
}

// soon waits until the ring has taken what callers have asked for.
func soon(t *testing.T, taken func() bool) {
	t.Helper()
	for by := time.Now().Add(time.Minute); !taken(); time.Sleep(time.Millisecond) {
		if time.Now().After(by) {
			t.Fatal("after a minute not all is under way")
		}
	}
}

// TestHung: reads that nothing answers hold their places, and no others; they
// end with the ring.
func TestHung(t *testing.T) {
	r := ring(t, 8)
	in, out, err := os.Pipe() // the one file that hangs at will
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	hung, err := r.File(in)
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close()
	n := cap(r.places) - 1
	errs := make(chan error, n)
	for range n {
		go func() {
			_, err := hung.ReadAt(make([]byte, 8), 0)
			errs <- err
		}()
	}
	soon(t, func() bool { return r.under() == uint64(n) && len(r.places) == 1 })
	f := file(t, r, filepath.Join(t.TempDir(), "x"), os.O_RDWR|os.O_CREATE)
	for i := range 100 { // in the place that is left
		if _, err := f.WriteAt([]byte{byte(i)}, int64(i)); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := r.Close(ctx); err != nil {
		t.Error(err)
	}
	for range n {
		if err := <-errs; !errors.Is(err, ErrClosed) {
			t.Errorf("cancelled: %v", err)
		}
	}
	ends(t, r)
}

// TestStuck: a read that cannot be cancelled delays Close no longer than Close's context,
// and ends when its file answers.
func TestStuck(t *testing.T) {
	var stuck atomic.Pointer[Ring]
	k := system
	k.enter = func(fd int, submit, wait, flags uint32) (int, error) {
		if r := stuck.Load(); r != nil && submit == 1 { // under the queue's lock
			if e := &r.sqes[*r.sqHead&r.sqMask]; e.opcode == opAsyncCancel {
				e.addr = 12345 // of nothing, so that it finds nothing
			}
		}
		return system.enter(fd, submit, wait, flags)
	}
	r := ringOf(t, 8, k)
	ends := make(chan error, 1)
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	hung, err := r.File(in)
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close()
	go func() {
		_, err := hung.ReadAt(make([]byte, 8), 0)
		ends <- err
	}()
	soon(t, func() bool { return r.Stats().Submitted == 2 }) // Open's own, and this read
	stuck.Store(r)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Close(ctx); err == nil {
		t.Error("closed, with a read under way")
	}
	if _, err := out.Write(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	if err := <-ends; err != nil {
		t.Error(err)
	}
	if err := r.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestRefused: what the kernel does not take goes by pread and pwrite.
func TestRefused(t *testing.T) {
	for _, errno := range []error{unix.EAGAIN, unix.EBUSY, unix.ENOMEM, nil} {
		t.Run(fmt.Sprint(errno), func(t *testing.T) {
			var refuse atomic.Bool
			k := system
			k.enter = func(fd int, n, wait, flags uint32) (int, error) {
				if n > 0 && refuse.Load() {
					return 0, errno
				}
				return system.enter(fd, n, wait, flags)
			}
			r := ringOf(t, 8, k)
			f := file(t, r, filepath.Join(t.TempDir(), "x"), os.O_RDWR|os.O_CREATE)
			refuse.Store(true)
			want := []byte("by pwrite")
			if _, err := f.WriteAt(want, 0); err != nil {
				t.Fatal(err)
			}
			refuse.Store(false)
			b := make([]byte, len(want))
			if _, err := f.ReadAt(b, 0); err != nil || !slices.Equal(b, want) {
				t.Errorf("%q %v", b, err)
			}
			if s := r.Stats(); s.Direct != 1 {
				t.Errorf("%+v", s)
			}
			ends(t, r)
		})
	}
}

// TestUnavailable: for each reason why a system has no ring, an error says so and nothing
// is left open.
func TestUnavailable(t *testing.T) {
	fds := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	for name, change := range map[string]func(k *kernel){
		"no call":  func(k *kernel) { k.setup = func(uint32, *params) (int, error) { return -1, unix.ENOSYS } },
		"disabled": func(k *kernel) { k.setup = func(uint32, *params) (int, error) { return -1, unix.EPERM } },
		"no memory": func(k *kernel) {
			k.setup = func(uint32, *params) (int, error) { return -1, unix.ENOMEM }
		},
		"old": func(k *kernel) {
			setup := k.setup
			k.setup = func(n uint32, p *params) (int, error) {
				fd, err := setup(n, p)
				p.features &^= featNoDrop
				return fd, err
			}
		},
		"no probe": func(k *kernel) { k.register = func(int, *probe) error { return unix.EINVAL } },
		"no read": func(k *kernel) {
			register := k.register
			k.register = func(fd int, p *probe) error {
				err := register(fd, p)
				p.ops[opRead].flags = 0
				return err
			}
		},
		"no enter": func(k *kernel) { // by seccomp
			k.enter = func(int, uint32, uint32, uint32) (int, error) { return 0, unix.EPERM }
		},
	} {
		t.Run(name, func(t *testing.T) {
			if name != "no call" && name != "disabled" && name != "no memory" {
				ends(t, ring(t, 1))
			}
			before, k := fds(), system
			change(&k)
			r, err := open(8, k)
			if r != nil || !errors.Is(err, ErrUnavailable) {
				t.Fatalf("%v %v", r, err)
			}
			t.Log(err)
			if n := fds(); n > before { // fewer: the collector closes what others forgot
				t.Errorf("%d descriptors, %d before", n, before)
			}
		})
	}
}

// TestSeccomp: the same under a filter like those of containers.
func TestSeccomp(t *testing.T) {
	if os.Getenv("XPYD_TEST_SECCOMP") == "1" {
		if err := forbid(unix.SYS_IO_URING_SETUP); err != nil {
			t.Skip("no filter can be set here: ", err)
		}
		if r, err := Open(8); r != nil || !errors.Is(err, ErrUnavailable) || !errors.Is(err, unix.EPERM) {
			t.Fatalf("%v %v", r, err)
		}
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSeccomp$", "-test.v")
	cmd.Env = append(os.Environ(), "XPYD_TEST_SECCOMP=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// forbid makes a system call fail with EPERM in all threads, for good.
func forbid(nr uint32) error {
	const retErrno, retAllow, setFilter, tsync = 0x00050000, 0x7fff0000, 1, 1
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // the call's number
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 0, Jf: 1, K: nr},
		{Code: unix.BPF_RET | unix.BPF_K, K: retErrno | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: retAllow},
	}
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	f := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, setFilter, tsync, uintptr(unsafe.Pointer(&f))); errno != 0 {
		return errno
	}
	return nil
}
