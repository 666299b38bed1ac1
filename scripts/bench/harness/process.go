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

// Process is a child with all its descendants; it does not outlive this program.
type Process struct {
	Name, Addr string
	cmd        *exec.Cmd
	log        string
	began      time.Time
	killed     bool
	done       chan struct{} // closed when it has been waited for
}

// Spec says what to start.
type Spec struct {
	Name string
	Argv []string
	Env  []string // nil: this program's, with OPENAI_API_KEY, which a peer wants
	CPU  string   // the processors that it may use, for taskset; "": all
}

// ready bounds the wait for a process to be there.
const ready = time.Minute

// Start starts a process whose output goes to a log of its own.
func (b *Bench) Start(s Spec) (*Process, error) {
	b.serial++
	out, err := os.Create(filepath.Join(b.Dir, fmt.Sprintf("%03d-%s.log", b.serial, s.Name)))
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
	go func() { _ = cmd.Wait(); close(p.done) }() // its state is kept in cmd, its words in the log
	b.procs = append(b.procs, p)
	return p, nil
}

// Listening starts a process and waits until addr takes connections.
func (b *Bench) Listening(ctx context.Context, addr string, s Spec) (*Process, error) {
	p, err := b.Start(s)
	if err != nil {
		return nil, err
	}
	p.Addr = addr
	err = p.Until(ctx, ready, func() error {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
	if err != nil {
		p.Kill()
		return nil, err
	}
	return p, nil
}

// Saying starts a process and waits for a line with this beginning, of which it
// returns the rest, and how long that took.
func (b *Bench) Saying(ctx context.Context, beginning string, s Spec) (p *Process, rest string, took time.Duration, err error) {
	if p, err = b.Start(s); err != nil {
		return nil, "", 0, err
	}
	err = p.Until(ctx, ready, func() error {
		text, err := os.ReadFile(p.log)
		if err != nil {
			return err
		}
		for line := range bytes.Lines(text) {
			if after, ok := bytes.CutPrefix(line, []byte(beginning)); ok && bytes.HasSuffix(after, []byte("\n")) {
				rest, took = string(bytes.TrimSpace(after)), time.Since(p.began)
				return nil
			}
		}
		return fmt.Errorf("it did not say %q", beginning)
	})
	if err != nil {
		p.Kill()
		return nil, "", 0, err
	}
	return p, rest, took, nil
}

// Until tries f until it succeeds, the process has ended, or the time is over.
func (p *Process) Until(ctx context.Context, limit time.Duration, f func() error) error {
	return Until(ctx, limit, f, p)
}

// Until tries f until it succeeds, one of the processes has ended, or the time is over.
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
				return fmt.Errorf("%s has ended: %w\n%s", p.Name, err, Logs(of))
			default:
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w\n%s", ctx.Err(), err, Logs(of))
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// Logs are the ends of what processes have said.
func Logs(of []*Process) (text string) {
	for _, p := range of {
		text += fmt.Sprintf("--- %s\n%s", p.Name, p.Log())
	}
	return text
}

// Log is the end of what it has said.
func (p *Process) Log() string {
	text, _ := os.ReadFile(p.log)
	return string(text[max(0, len(text)-2000):])
}

// Kill ends the process and its descendants, and waits for it. Once is enough.
func (p *Process) Kill() {
	if p.killed {
		return
	}
	p.killed = true
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // it may be gone
	<-p.done
}

// Stop asks the process to end, and kills what has not ended in 20 s. Its error is how
// the process ended.
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
		return fmt.Errorf("%s: %v\n%s", p.Name, p.cmd.ProcessState, p.Log())
	}
	return nil
}

// Used is the processor time, user and system, of a process that has ended and of its
// children that it has waited for.
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
		after := text[strings.LastIndexByte(string(text), ')')+2:]
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
func (p *Process) CPU() time.Duration {
	var sum time.Duration
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
func (p *Process) RSS() int {
	sum := 0
	for _, pid := range p.tree() {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if f := strings.Fields(string(text)); len(f) > 1 {
			pages, _ := strconv.Atoi(f[1])
			sum += pages * os.Getpagesize()
		}
	}
	return sum
}

// FreeAddr is a loopback address that nobody listens on now.
func FreeAddr() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}
