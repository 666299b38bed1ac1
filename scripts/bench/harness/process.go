package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a child and all its descendants. It does not outlive this program.
type Process struct {
	Name, Addr string
	cmd        *exec.Cmd
	log        string
	began      time.Time
	killed     bool
	done       chan struct{} // closed once the child is waited for
}

// Spec says what to start.
type Spec struct {
	Name string
	Argv []string
	Env  []string // nil: this program's, with OPENAI_API_KEY, which a peer wants
	CPU  string   // the processors it may use, for taskset; "": all
}

// ready bounds the wait for a process to serve.
const ready = time.Minute

// Start starts a process whose output goes to its own log.
func (b *Bench) Start(s Spec) (*Process, error) {
	out, err := os.Create(filepath.Join(b.Dir, fmt.Sprintf("%03d-%s.log", len(b.procs), s.Name)))
	if err != nil {
		return nil, err
	}
	defer out.Close()
	if s.CPU != "" {
		s.Argv = append([]string{"taskset", "-c", s.CPU}, s.Argv...)
	}
	if s.Env == nil {
		s.Env = append(os.Environ(), "OPENAI_API_KEY=none")
	}
	cmd := exec.Command(s.Argv[0], s.Argv[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Env = out, out, s.Env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p := &Process{Name: s.Name, cmd: cmd, log: out.Name(), began: time.Now(), done: make(chan struct{})}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Name, err)
	}
	go func() { _ = cmd.Wait(); close(p.done) }() // cmd keeps the state, the log what it printed
	b.procs = append(b.procs, p)
	return p, nil
}

// startUntil starts a process and waits until check passes; it kills one that never does.
func (b *Bench) startUntil(ctx context.Context, s Spec, check func(*Process) error) (*Process, error) {
	p, err := b.Start(s)
	if err != nil {
		return nil, err
	}
	if err := p.Until(ctx, ready, func() error { return check(p) }); err != nil {
		p.Kill()
		return nil, err
	}
	return p, nil
}

// Listening starts a process and waits until addr accepts connections.
func (b *Bench) Listening(ctx context.Context, addr string, s Spec) (*Process, error) {
	return b.startUntil(ctx, s, func(p *Process) error {
		p.Addr = addr
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
}

// Saying starts a process and waits for a line that starts with prefix. It returns the rest
// of the line and how long that took.
func (b *Bench) Saying(ctx context.Context, prefix string, s Spec) (p *Process, rest string, took time.Duration, err error) {
	p, err = b.startUntil(ctx, s, func(p *Process) error {
		text, err := os.ReadFile(p.log)
		if err != nil {
			return err
		}
		for line := range bytes.Lines(text) {
			if after, ok := bytes.CutPrefix(line, []byte(prefix)); ok && bytes.HasSuffix(after, []byte("\n")) {
				rest, took = string(bytes.TrimSpace(after)), time.Since(p.began)
				return nil
			}
		}
		return fmt.Errorf("it did not say %q", prefix)
	})
	return p, rest, took, err
}

// Until retries f until it succeeds, the process ends or limit is over.
func (p *Process) Until(ctx context.Context, limit time.Duration, f func() error) error {
	return Until(ctx, limit, f, p)
}

// Until retries f until it succeeds, one of the processes ends or limit is over.
func Until(ctx context.Context, limit time.Duration, f func() error, of ...*Process) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		for _, p := range of {
			select {
			case <-p.done:
				return fmt.Errorf("%s has ended: %w\n%s", p.Name, err, Logs(of...))
			default:
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w\n%s", ctx.Err(), err, Logs(of...))
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// Logs returns the last 2,000 bytes that each process printed.
func Logs(of ...*Process) (all string) {
	for _, p := range of {
		text, _ := os.ReadFile(p.log)
		all += fmt.Sprintf("--- %s\n%s", p.Name, text[max(0, len(text)-2000):])
	}
	return all
}

// Kill ends the process and its descendants, and waits for it. Further calls do nothing.
func (p *Process) Kill() {
	if p.killed {
		return
	}
	p.killed = true
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // it may be gone
	<-p.done
}

// Stop asks the process to end, kills it after 20 s, and returns an error unless it exited
// with 0.
func (p *Process) Stop() error {
	defer p.Kill()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.done:
	case <-time.After(20 * time.Second):
		return fmt.Errorf("%s does not end", p.Name)
	}
	if !p.cmd.ProcessState.Success() {
		return fmt.Errorf("%s: %v\n%s", p.Name, p.cmd.ProcessState, Logs(p))
	}
	return nil
}

// Used is the processor time, user and system, of an ended process and of the children it
// waited for.
func (p *Process) Used() time.Duration {
	<-p.done
	return p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
}

// tree is the process and its descendants.
func (p *Process) tree() []int {
	parents := map[int]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it ended
		}
		pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
		after := text[bytes.LastIndexByte(text, ')')+2:]
		parents[pid], _ = strconv.Atoi(strings.Fields(string(after))[1])
	}
	all := []int{p.cmd.Process.Pid}
	for i := 0; i < len(all); i++ {
		for pid, parent := range parents {
			if parent == all[i] {
				all = append(all, pid)
			}
		}
	}
	return all
}

// CPU is the processor time, user and system, that the running tree has used.
func (p *Process) CPU() (sum time.Duration) {
	for _, pid := range p.tree() {
		var ts unix.Timespec
		clock := int32(^pid)<<3 | 2 // the kernel's id of a process's CPU clock (man clock_getcpuclockid)
		if unix.ClockGettime(clock, &ts) == nil {
			sum += time.Duration(ts.Nano())
		}
	}
	return sum
}

// RSS is the resident memory of the tree in bytes.
func (p *Process) RSS() (sum int) {
	for _, pid := range p.tree() {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if f := strings.Fields(string(text)); len(f) > 1 {
			pages, _ := strconv.Atoi(f[1])
			sum += pages * os.Getpagesize()
		}
	}
	return sum
}

// FreeAddr is a loopback address on which nothing listens now.
func FreeAddr() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}
