package scarce_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/internal/scarce"
)

// script is a listener whose Accept does what the test says.
type script struct {
	accept chan error // nil is a connection
	closed chan struct{}
}

func (s *script) Accept() (net.Conn, error) {
	select {
	case err := <-s.accept:
		if err != nil {
			return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", err)}
		}
		a, b := net.Pipe()
		b.Close()
		return a, nil
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

func (s *script) Close() error   { close(s.closed); return nil }
func (s *script) Addr() net.Addr { return &net.TCPAddr{} }

type counter int

func (c *counter) Inc() { *c++ }

// A listener waits longer and longer while accepting fails, begins anew once it
// worked, and says so at most every ten seconds.
func TestAcceptOutlivesErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		var failed counter
		s := &script{accept: make(chan error, 16), closed: make(chan struct{})}
		ln := scarce.Listener(s, slog.New(slog.NewTextHandler(&out, nil)), &failed)
		took := func(errs ...error) time.Duration {
			for _, err := range errs {
				s.accept <- err
			}
			s.accept <- nil
			start := time.Now()
			if _, err := ln.Accept(); err != nil {
				t.Fatal(err)
			}
			return time.Since(start)
		}
		if d := took(syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM); d != (5+10+20+40)*time.Millisecond {
			t.Errorf("four failures took %v", d)
		}
		if d := took(syscall.ECONNABORTED); d != 5*time.Millisecond {
			t.Errorf("one failure after a success took %v", d)
		}
		if d := took(syscall.EPROTO, syscall.EPERM, io.EOF, errors.New("x"), syscall.EMFILE, syscall.EMFILE, syscall.EMFILE, syscall.EMFILE, syscall.EMFILE, syscall.EMFILE); d != 3275*time.Millisecond {
			t.Errorf("ten failures took %v, want 1275 ms and then two seconds", d)
		}
		if failed != 15 {
			t.Errorf("counted %d", failed)
		}
		if n := strings.Count(out.String(), "\n"); n != 1 {
			t.Errorf("%d lines within four seconds:\n%s", n, &out)
		}
		time.Sleep(10 * time.Second)
		took(syscall.EMFILE)
		if !strings.HasSuffix(out.String(), "failures=15\n") {
			t.Errorf("the second line does not tell how often:\n%s", &out)
		}
	})
}

// Closing ends an Accept that waits.
func TestCloseEndsThePause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{accept: make(chan error, 1), closed: make(chan struct{})}
		ln := scarce.Listener(s, nil, nil)
		s.accept <- syscall.EMFILE
		over := make(chan error)
		go func() {
			_, err := ln.Accept()
			over <- err
		}()
		synctest.Wait()
		start := time.Now()
		if err := ln.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-over; !errors.Is(err, net.ErrClosed) || time.Since(start) != 0 {
			t.Errorf("after %v: %v", time.Since(start), err)
		}
	})
}

func TestOurs(t *testing.T) {
	dial := func(err error) error {
		return fmt.Errorf("worker w: %w", &net.OpError{Op: "dial", Err: os.NewSyscallError("socket", err)})
	}
	for _, err := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL} {
		if !scarce.Ours(dial(err)) {
			t.Errorf("%v is somebody else's", err)
		}
	}
	for _, err := range []error{nil, syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EHOSTUNREACH, syscall.ETIMEDOUT, io.EOF} {
		if scarce.Ours(dial(err)) || scarce.Ours(err) {
			t.Errorf("%v is ours", err)
		}
	}
}

// Our programs may open what the hard limit allows, and so may the children
// that they start: those get the soft limit back and raise it themselves.
func TestFilesAreRaised(t *testing.T) {
	if os.Getenv("SCARCE_TEST_CHILD") != "" {
		fmt.Println("raised:", scarce.Files() >= 199)
		grand := exec.Command("sh", "-c", "ulimit -Sn; ulimit -Hn")
		grand.Stdout = os.Stdout
		if err := grand.Run(); err != nil {
			t.Fatal(err)
		}
		os.Exit(0)
	}
	cmd := exec.Command("sh", "-c", `ulimit -Sn 64 && ulimit -Hn 200 && exec "$0" -test.run '^TestFilesAreRaised$'`, os.Args[0])
	cmd.Env = append(os.Environ(), "SCARCE_TEST_CHILD=1")
	b, err := cmd.CombinedOutput()
	if err != nil || string(b) != "raised: true\n64\n200\n" {
		t.Errorf("printed %q, %v", b, err)
	}
}
