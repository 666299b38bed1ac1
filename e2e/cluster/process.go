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

	done chan struct{} // closed once it is waited for
}

// Start runs xpyd with these arguments, in an environment whose only settings are env. It is killed
// when the test ends, if it still runs.
func Start(t testing.TB, env []string, args ...string) *Process {
	t.Helper()
	return StartCommand(t, exec.Command(Binary(t), args...), env)
}

// StartCommand is Start for another program.
func StartCommand(t testing.TB, cmd *exec.Cmd, env []string) *Process {
	t.Helper()
	p := &Process{Cmd: cmd, Stdout: &Output{}, Stderr: &Output{}, done: make(chan struct{})}
	clean := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "XPYD_") })
	cmd.Env = append(clean, env...)
	cmd.Stdout, cmd.Stderr = p.Stdout, p.Stderr
	if os.Getenv("XPYD_E2E_LOG") != "" {
		cmd.Stdout, cmd.Stderr = io.MultiWriter(p.Stdout, os.Stderr), io.MultiWriter(p.Stderr, os.Stderr)
	}
	// In its own group, where signals to the test's terminal or group do not reach it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// Children of a killed process keep its pipes open until they end.
	cmd.WaitDelay = 2 * time.Second
	p.Started = time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		_ = cmd.Wait() // see ProcessState
	}()
	t.Cleanup(func() {
		p.Kill()
		<-p.done
		for _, line := range strings.Split(p.Stderr.String(), "\n") {
			// Also those of its children, which a supervisor restarts quietly.
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

// Line waits for a line of standard output that starts with prefix and returns the rest of it.
func (p *Process) Line(t testing.TB, limit time.Duration, prefix string) string {
	t.Helper()
	var rest string
	Wait(t, limit, fmt.Sprintf("line %q", prefix), func() error {
		for _, line := range strings.Split(p.Stdout.String(), "\n") {
			if after, ok := strings.CutPrefix(line, prefix); ok {
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

// Run runs xpyd to its end with closed standard input.
func Run(t testing.TB, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	p := Start(t, nil, args...)
	code = p.Exit(t, time.Minute)
	return p.Stdout.String(), p.Stderr.String(), code
}

// Alive reports whether the process runs; a zombie does not.
func Alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	rest := string(b[bytes.LastIndexByte(b, ')')+1:])
	return !strings.HasPrefix(rest, " Z") && !strings.HasPrefix(rest, " X")
}

// Output collects what a process prints.
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
