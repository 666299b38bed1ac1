package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Process is one process that a test started.
type Process struct {
	Cmd            *exec.Cmd
	Stdout, Stderr *Output
	Started        time.Time

	done chan struct{} // closed when it was waited for
}

// Start runs xpyd with these arguments, in an environment without settings
// of its own but env. It is killed when the test ends, if it still runs.
func Start(t testing.TB, env []string, args ...string) *Process {
	t.Helper()
	return start(t, exec.Command(Binary(t), args...), env)
}

// StartCommand is Start for another program.
func StartCommand(t testing.TB, cmd *exec.Cmd, env []string) *Process {
	t.Helper()
	return start(t, cmd, env)
}

func start(t testing.TB, cmd *exec.Cmd, env []string) *Process {
	t.Helper()
	p := &Process{Cmd: cmd, Stdout: &Output{}, Stderr: &Output{}, done: make(chan struct{})}
	clean := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "XPYD_") })
	cmd.Env = append(clean, env...)
	cmd.Stdout, cmd.Stderr = p.Stdout, p.Stderr
	if os.Getenv("XPYD_E2E_LOG") != "" {
		cmd.Stdout, cmd.Stderr = io.MultiWriter(p.Stdout, os.Stderr), io.MultiWriter(p.Stderr, os.Stderr)
	}
	// A group of its own, so that a signal to the test's terminal or group
	// does not reach it: the tests decide who gets one.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// Children hold the pipes of a process that was killed until they end.
	cmd.WaitDelay = 2 * time.Second
	p.Started = time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		_ = cmd.Wait() // the state says all
	}()
	t.Cleanup(func() {
		p.Kill()
		<-p.done
		for _, line := range strings.Split(p.Stderr.String(), "\n") {
			// Also of its children: a supervisor restarts them, and nobody
			// would notice.
			if strings.Contains(line, "DATA RACE") || strings.Contains(line, "panic: ") || strings.Contains(line, "fatal error: ") {
				t.Errorf("%s: %s", cmd.Args[1], line)
			}
		}
		if t.Failed() {
			t.Logf("%s printed:\n%s%s", strings.Join(cmd.Args[1:], " "), p.Stdout, p.Stderr)
		}
	})
	return p
}

// PID of the process.
func (p *Process) PID() int { return p.Cmd.Process.Pid }

// Signal sends s; a process that has ended gets nothing.
func (p *Process) Signal(s os.Signal) { _ = p.Cmd.Process.Signal(s) }

// Kill is kill -9.
func (p *Process) Kill() { p.Signal(syscall.SIGKILL) }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit waits for the end and returns the exit code, -1 for a signal.
func (p *Process) Exit(t testing.TB, limit time.Duration) int {
	t.Helper()
	Wait(t, limit, strings.Join(p.Cmd.Args, " "), func() error {
		select {
		case <-p.done:
			return nil
		default:
			return errors.New("it still runs")
		}
	})
	return p.Cmd.ProcessState.ExitCode()
}

// Line waits for a line of standard output with this beginning and returns
// the rest of it.
func (p *Process) Line(t testing.TB, limit time.Duration, beginning string) string {
	t.Helper()
	var rest string
	Wait(t, limit, fmt.Sprintf("line %q", beginning), func() error {
		for _, line := range strings.Split(p.Stdout.String(), "\n") {
			if after, ok := strings.CutPrefix(line, beginning); ok {
				rest = strings.TrimSpace(after)
				return nil
			}
		}
		select {
		case <-p.done:
			t.Fatalf("%s ended: %v", strings.Join(p.Cmd.Args[1:], " "), p.Cmd.ProcessState)
		default:
		}
		return fmt.Errorf("printed %q", p.Stdout)
	})
	return rest
}

// Run runs xpyd to its end, with its standard input closed.
func Run(t testing.TB, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	p := Start(t, nil, args...)
	code = p.Exit(t, time.Minute)
	return p.Stdout.String(), p.Stderr.String(), code
}

// Alive says whether a process of that pid runs; a zombie does not.
func Alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	rest := b[bytes.LastIndexByte(b, ')')+1:]
	return !bytes.HasPrefix(rest, []byte(" Z")) && !bytes.HasPrefix(rest, []byte(" X"))
}

// Output keeps what a process printed.
type Output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}
