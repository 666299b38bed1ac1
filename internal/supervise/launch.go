package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Spec is one process to start.
type Spec struct {
	Path   string
	Args   []string
	Base   []string // environment; nil is the parent's own
	Env    []string // added to it
	Output io.Writer
}

// Launcher starts processes.
type Launcher interface {
	Launch(Spec) (Process, error)
}

// Process is a running process. Wait is called once, and returns when the process is reaped and its
// output is read. The other methods may be called at any time.
type Process interface {
	PID() int
	Wait() Exit
	// AwaitDying reports whether the system has begun to end the process, which Wait reports later.
	// It returns at the latest with ctx: false if the process lives, or the system tells nothing.
	AwaitDying(ctx context.Context) bool
	Terminate() error // asks it to exit
	Kill() error      // ends it, and what it started
}

// Exit is how a process ended.
type Exit struct {
	Code int    `json:"code"` // -1 when it was killed or never started
	Err  string `json:"err,omitempty"`
}

func (e *Exit) String() string {
	switch {
	case e == nil:
		return "did not exit"
	case e.Err != "":
		return e.Err
	}
	return fmt.Sprintf("exit status %d", e.Code)
}

// outputDelay is how long output is read after the exit, if another process holds the pipe.
const outputDelay = time.Second

// launcher starts real processes, all from one OS thread, because the kernel sends the parent death
// signal when the thread that forked ends.
type launcher struct {
	pipe  [2]*os.File // children hold [0]; the parent's end closes [1]
	start chan func()
	done  chan struct{}
	close sync.Once
}

func newLauncher() (*launcher, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	l := &launcher{pipe: [2]*os.File{r, w}, start: make(chan func()), done: make(chan struct{})}
	go func() {
		defer close(l.done)
		runtime.LockOSThread() // never unlocked: the thread ends with l
		for f := range l.start {
			f()
		}
	}()
	return l, nil
}

// Close ends the launcher; its processes must have ended.
func (l *launcher) Close() (err error) {
	l.close.Do(func() {
		close(l.start)
		<-l.done
		err = errors.Join(l.pipe[0].Close(), l.pipe[1].Close())
	})
	return err
}

func (l *launcher) Launch(s Spec) (Process, error) {
	cmd := exec.Command(s.Path, s.Args...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = s.Output, s.Output, outputDelay
	cmd.Env = s.Base
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.Env = slices.Concat(cmd.Env, s.Env)
	l.prepare(cmd)
	result := make(chan error)
	l.start <- func() { result <- cmd.Start() }
	if err := <-result; err != nil {
		return nil, err
	}
	return &process{cmd: cmd}, nil
}

// process is a child process, the leader of its group.
type process struct {
	cmd *exec.Cmd

	mu     sync.Mutex
	exited bool // its pid may be reused
}

func (p *process) PID() int { return p.cmd.Process.Pid }

func (p *process) Wait() Exit {
	if p.awaitExit() {
		p.setExited()
	}
	err := p.cmd.Wait()
	p.setExited()
	exit := Exit{Code: -1}
	if s := p.cmd.ProcessState; s != nil {
		exit.Code = s.ExitCode()
		if exit.Code < 0 {
			exit.Err = s.String()
		}
	} else if err != nil {
		exit.Err = err.Error()
	}
	return exit
}

func (p *process) setExited() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.exited = true
}

func (p *process) Terminate() error { return p.signal(terminate) }
func (p *process) Kill() error      { return p.signal(killGroup) }

func (p *process) signal(f func(*os.Process) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exited {
		return nil
	}
	return f(p.cmd.Process)
}

// prepare gives the command its own process group, and the pipe that closes with the parent.
func (l *launcher) prepare(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	dieWithParent(cmd.SysProcAttr)
	const first = 3 // descriptor of ExtraFiles[0] in the child
	cmd.ExtraFiles = []*os.File{l.pipe[0]}
	cmd.Env = append(cmd.Env, fmt.Sprintf("%s=%d", parentFD, first))
}

func terminate(p *os.Process) error {
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

func killGroup(p *os.Process) error {
	if err := syscall.Kill(-p.Pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return nil
}
