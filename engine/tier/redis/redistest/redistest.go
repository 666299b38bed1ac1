// Package redistest runs a real Redis for a test, on a unix socket in a folder of its
// own, until the test ends; and a fake one inside the process, for tests that only need
// a store.
package redistest

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gomodule/redigo/redis"
)

// Server is one Redis, empty at first.
type Server struct {
	tb   testing.TB
	dir  string
	args []string

	mu   sync.Mutex
	proc *os.Process
	done chan struct{} // closed when proc has ended and was waited for
}

// Start runs a server until the test's end. args are more of its settings.
func Start(tb testing.TB, args ...string) *Server {
	tb.Helper()
	dir, err := os.MkdirTemp("", "redis") // a socket's path is short
	if err != nil {
		tb.Fatal(err)
	}
	s := &Server{tb: tb, dir: dir, args: args}
	tb.Cleanup(func() {
		s.Kill()
		os.RemoveAll(dir)
	})
	s.Run()
	return s
}

func (s *Server) socket() string { return filepath.Join(s.dir, "s") }

// URL is where it listens.
func (s *Server) URL() string { return "unix://" + s.socket() }

// Run starts it again after Kill, empty.
func (s *Server) Run() {
	s.tb.Helper()
	path, err := exec.LookPath("redis-server")
	if err != nil {
		s.tb.Fatal("these tests use a real Redis: install Debian's package redis-server")
	}
	cmd := exec.Command(path, append([]string{"--port", "0", "--unixsocket", s.socket(), "--dir", s.dir,
		"--save", "", "--appendonly", "no", "--daemonize", "no"}, s.args...)...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	endWithUs(cmd)
	started, done := make(chan error, 1), make(chan struct{})
	go func() { // its thread lives as long as the server: Pdeathsig is the thread's
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // it is killed
		}
	}()
	if err := <-started; err != nil {
		s.tb.Fatal(err)
	}
	s.mu.Lock()
	s.proc, s.done = cmd.Process, done
	s.mu.Unlock()
	for by := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if c, err := net.Dial("unix", s.socket()); err == nil {
			c.Close()
			return
		}
		select {
		case <-done:
			s.tb.Fatalf("redis-server ended: %s", &log)
		default:
		}
		if time.Now().After(by) {
			s.tb.Fatal("redis-server does not listen after a minute")
		}
	}
}

// Kill ends it and waits; a stopped one too.
func (s *Server) Kill() {
	s.mu.Lock()
	proc, done := s.proc, s.done
	s.proc = nil
	s.mu.Unlock()
	if proc != nil {
		_ = proc.Kill()
		<-done
		os.Remove(s.socket())
	}
}

// Stop makes it hang; its connections stay, and the kernel accepts new ones.
func (s *Server) Stop() {
	s.tb.Helper()
	s.signal(syscall.SIGSTOP)
	stat := fmt.Sprintf("/proc/%d/stat", s.proc.Pid)
	for by := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		b, err := os.ReadFile(stat)
		if _, rest, ok := bytes.Cut(b, []byte(") ")); err != nil || ok && rest[0] == 'T' {
			return // stopped, or a system without /proc
		}
		if time.Now().After(by) {
			s.tb.Fatal("redis-server does not stop")
		}
	}
}

// Continue ends Stop.
func (s *Server) Continue() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig os.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.proc.Signal(sig); err != nil {
		s.tb.Error(err)
	}
}

// Do runs a command as another client would.
func (s *Server) Do(command string, args ...any) (any, error) {
	c, err := redis.Dial("unix", s.socket(), redis.DialReadTimeout(time.Minute))
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.Do(command, args...)
}

// Keys lists all keys.
func (s *Server) Keys() []string {
	s.tb.Helper()
	keys, err := redis.Strings(s.Do("KEYS", "*"))
	if err != nil {
		s.tb.Fatal(err)
	}
	return keys
}

// Value is a key's.
func (s *Server) Value(key string) []byte {
	s.tb.Helper()
	b, err := redis.Bytes(s.Do("GET", key))
	if err != nil {
		s.tb.Fatal(fmt.Errorf("%s: %w", key, err))
	}
	return b
}

// Set changes a key's value.
func (s *Server) Set(key string, value []byte) {
	s.tb.Helper()
	if _, err := s.Do("SET", key, value); err != nil {
		s.tb.Fatal(err)
	}
}
