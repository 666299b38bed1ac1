// Package handover has a new process of the same program take over from a running one: it gives
// the new one descriptors and a line of messages, and keeps what was started first in place of both.
//
// The first process of a chain is the one that a shell or a service manager waits on. It stays, with
// nothing of its own, for as long as a successor runs (Stay): signals to it go to the successor, its
// end is theirs, and its exit code is that of the last one. Successors are one process group, which
// is how signals reach them, and become children of the first process when the one that started them
// has ended.
//
// Goroutines: one per successor, which waits for its exit; one per heir, which waits for the first
// process's end, and ends with its context.
package handover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// variable names a process that is to take over the descriptors which it gets: a version of this
// package's protocol, and names of the descriptors from firstFile on.
const variable = "XPYD_HANDOVER"

const (
	version   = "1"
	firstFile = 3 // descriptor of ExtraFiles[0] in a child
	nameLife  = "life"
	nameTalk  = "talk"
)

// File is a descriptor with the name under which the other process finds it.
type File struct {
	Name string
	File *os.File
}

// Socket is ln's descriptor, for File. The caller closes it; ln is not changed.
func Socket(ln net.Listener) (*os.File, error) {
	raw, ok := ln.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("a listener of type %T has no descriptor", ln)
	}
	c, err := raw.SyscallConn()
	if err != nil {
		return nil, err
	}
	var fd int
	var dupErr error
	// net's own File would be made blocking when a child gets it, and ln with it.
	if err = c.Control(func(of uintptr) { fd, dupErr = unix.FcntlInt(of, unix.F_DUPFD_CLOEXEC, 0) }); err == nil {
		err = dupErr
	}
	if err != nil {
		return nil, fmt.Errorf("copy a listener's descriptor: %w", err)
	}
	return os.NewFile(uintptr(fd), "listener"), nil
}

// Place is this process's place in a chain.
type Place struct {
	life *os.File // ends with the first process; that one has the other end, and this one for its successors
	kept *os.File // the other end, in the first process
	heir map[string]*os.File
	talk *Talk
}

// Here finds this process's place. It must be called once, before anything is started: it also keeps
// the descriptors from other children.
func Here() (*Place, error) {
	text := os.Getenv(variable)
	if text == "" {
		return &Place{}, nil
	}
	if err := os.Unsetenv(variable); err != nil {
		return nil, err
	}
	v, list, _ := strings.Cut(text, ":")
	names := strings.Split(list, ",")
	switch {
	case v != version:
		return nil, fmt.Errorf("%s: the running process hands over by version %q, and this is version %s", variable, v, version)
	case !slices.Contains(names, nameLife) || !slices.Contains(names, nameTalk):
		return nil, fmt.Errorf("%s=%q: no line to the running process", variable, text)
	}
	for i, name := range names {
		if _, err := unix.FcntlInt(uintptr(firstFile+i), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return nil, fmt.Errorf("%s: descriptor %d (%s): %w", variable, firstFile+i, name, err)
		}
	}
	p := &Place{heir: map[string]*os.File{}}
	for i, name := range names {
		p.heir[name] = os.NewFile(uintptr(firstFile+i), name)
	}
	p.life = p.File(nameLife)
	var err error
	p.talk, err = newTalk(p.File(nameTalk))
	return p, err
}

// Heir returns the line to the process that this one is to take over from; nil if there is none.
func (p *Place) Heir() *Talk { return p.talk }

// File is a descriptor that this process was given, nil if there is none of that name. It is the
// caller's from now on.
func (p *Place) File(name string) *os.File {
	f := p.heir[name]
	delete(p.heir, name)
	return f
}

// Listener is the listener of that name; nil if none was given.
func (p *Place) Listener(name string) (net.Listener, error) {
	f := p.File(name)
	if f == nil {
		return nil, nil
	}
	defer f.Close()
	ln, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("take over the listener %s: %w", name, err)
	}
	return ln, nil
}

// First reports whether this process is the first of its chain.
func (p *Place) First() bool { return p.talk == nil }

// Gone is closed when the first process has ended; nil in that process. Its goroutine ends with ctx.
// Call it once at most.
func (p *Place) Gone(ctx context.Context) (<-chan struct{}, error) {
	if p.First() {
		return nil, nil
	}
	// A copy with a deadline of its own; successors get p.life.
	fd, err := unix.FcntlInt(p.life.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		return nil, fmt.Errorf("watch the first process: %w", err)
	}
	life := os.NewFile(uintptr(fd), nameLife)
	gone := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { life.Close() })
	go func() {
		defer stop()
		defer life.Close()
		if _, err := life.Read(make([]byte, 1)); errors.Is(err, io.EOF) {
			close(gone)
		}
	}()
	return gone, nil
}

// Successor is a process that is to take over from this one.
type Successor struct {
	*Talk
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// Start starts a successor. It gets the files, stays in this process's terminal, and ends with the
// first process.
func (p *Place) Start(path string, args []string, files []File) (_ *Successor, err error) {
	if p.life == nil {
		// Else whom a successor starts would become a child of init when that successor ends.
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return nil, fmt.Errorf("become the parent of all successors: %w", err)
		}
		if p.life, p.kept, err = os.Pipe(); err != nil {
			return nil, err
		}
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("make a line to the new process: %w", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), nameTalk)
	defer theirs.Close()
	s := &Successor{done: make(chan struct{})}
	if s.Talk, err = newTalk(os.NewFile(uintptr(pair[0]), nameTalk)); err != nil {
		return nil, err
	}
	s.cmd = exec.Command(path, args...)
	s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// The first one begins the group of all, which no terminal signals: the first process does.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: p.First()}
	var names []string
	for _, f := range append([]File{{nameLife, p.life}, {nameTalk, theirs}}, files...) {
		names, s.cmd.ExtraFiles = append(names, f.Name), append(s.cmd.ExtraFiles, f.File)
	}
	s.cmd.Env = append(slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, variable+"=") }),
		variable+"="+version+":"+strings.Join(names, ","))
	if err := s.cmd.Start(); err != nil {
		return nil, errors.Join(err, s.Talk.Close())
	}
	go func() {
		defer close(s.done)
		_ = s.cmd.Wait() // see Ended
	}()
	return s, nil
}

// PID of the successor.
func (s *Successor) PID() int { return s.cmd.Process.Pid }

// Done is closed when the successor has ended.
func (s *Successor) Done() <-chan struct{} { return s.done }

// Ended is how it ended, after Done; nil for exit code 0.
func (s *Successor) Ended() error {
	if state := s.cmd.ProcessState; state == nil || !state.Success() {
		return errors.New(state.String())
	}
	return nil
}

// End has the successor end, kills it if it takes longer than patience, and waits.
func (s *Successor) End(patience time.Duration) error {
	_ = s.cmd.Process.Signal(syscall.SIGTERM) // fails if it has ended
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-s.done:
	case <-timer.C:
		_ = s.cmd.Process.Kill()
		<-s.done
	}
	return s.Talk.Close()
}

// Forward sends a signal to all successors of the first process, which calls it.
func (s *Successor) Forward(sig syscall.Signal) {
	_ = syscall.Kill(-s.PID(), sig) // fails if all have ended
}

// Stay is for the first process once it has nothing left but its successor. It returns when that one,
// and all who took over in turn, have ended; the error says how the last one did.
func (p *Place) Stay(s *Successor) error {
	<-s.done
	err := s.Ended()
	for {
		var status syscall.WaitStatus
		_, werr := syscall.Wait4(-s.PID(), &status, 0, nil)
		switch {
		case errors.Is(werr, syscall.EINTR):
		case werr != nil: // none is left
			return err
		case status.ExitStatus() == 0:
			err = nil
		case status.Signaled():
			err = errors.New("signal: " + status.Signal().String())
		default:
			err = errors.New("exit status " + strconv.Itoa(status.ExitStatus()))
		}
	}
}

// Close gives up the descriptors that were given and not used, and the line.
func (p *Place) Close() {
	for _, f := range p.heir {
		f.Close()
	}
	if p.talk != nil {
		p.talk.Close()
	}
}
