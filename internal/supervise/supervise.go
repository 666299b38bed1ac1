// Package supervise keeps the child processes of `xpyd up` running: it starts them, restarts those
// that fail, kills those that are silent, scales, and stops all in order. Children die with their
// parent, however that ends. The caller says when children are ready and passes on their signs of
// life.
//
// Goroutines: one per child, awaited by Stop, with helpers while the process runs, which wait for its
// exit, for it to be ready, and for its first sign of dying; and one tied to the OS thread that starts all processes.
package supervise

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// Child describes one process.
type Child struct {
	Name string   // unique; also the prefix of its output
	Role string   // what Scale counts and StopOrder orders
	Path string   // of the executable
	Args []string // without the executable
	Env  []string // added to Config.Env
	// Ready blocks until the process with that pid serves. On an error it is killed. ctx ends with
	// the process. Nil: ready at once.
	Ready func(ctx context.Context, pid int) error
	// Again returns role and arguments for a restart; pid was the last process. Nil: they stay the
	// same.
	Again func(pid int) (role string, args []string)
}

// Use is how useful a child is now. If there are too many, the least useful go first.
type Use int

// Uses, the least first.
const (
	Idle    Use = iota // takes no work: the first to go
	Coming             // does not work yet
	Working            // the last to go
)

// Config of a Supervisor; zero fields take their defaults.
type Config struct {
	Env    []string  // of all children; nil: the parent's own
	Output io.Writer // gets the children's lines, one per Write; nil drops them
	// Templates make the i-th child of a role, for Scale.
	Templates map[string]func(i int) Child
	// Doing returns a child's current role and its use in it. Nil: its original role, where it
	// works once ready. It is called under the Supervisor's lock: it must not block or call it.
	Doing func(Status) (role string, use Use)
	// Taken reports whether a process of somebody else's has that name, so that Scale gives it to
	// none. Nil: none has. Like Doing it must not block.
	Taken func(name string) bool
	// Seats, unless nil, are what there is only so much of, such as GPUs.
	Seats Seats
	// StopOrder is the order of roles in Stop: each stops when those before it have exited. Other
	// roles stop last, together.
	StopOrder []string

	BackoffMin   time.Duration // first wait before a restart, doubling; default 100 ms
	BackoffMax   time.Duration // longest wait; default 5 s
	DrainTimeout time.Duration // from SIGTERM to SIGKILL; default 30 s
	MaxChildren  int           // default 256

	// OnEvent is called at each change of a child, in order per child. It must not block.
	OnEvent func(Event)
	// OnDying is called when a process that was ready and not asked to exit has begun to die, or
	// has died. It must not block.
	OnDying  func(name string, pid int)
	Launcher Launcher // for tests; default starts real processes
	Log      *slog.Logger
}

const (
	resetAfter  = 5 * time.Second // of being ready; then the wait before a restart starts over
	silentAfter = 3 * time.Second // from the last Heartbeat to the kill
	killTimeout = 5 * time.Second // from SIGKILL until Stop gives up
	maxLine     = 16 << 10        // bytes; longer lines of output are split
)

func (c *Config) defaults() {
	c.BackoffMin = cmp.Or(c.BackoffMin, 100*time.Millisecond)
	c.BackoffMax = cmp.Or(c.BackoffMax, 5*time.Second)
	c.DrainTimeout = cmp.Or(c.DrainTimeout, 30*time.Second)
	c.MaxChildren = cmp.Or(c.MaxChildren, 256)
	if c.Output == nil {
		c.Output = io.Discard
	}
	if c.Doing == nil {
		c.Doing = func(s Status) (string, Use) {
			if s.State == Ready {
				return s.Role, Working
			}
			return s.Role, Coming
		}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

// State of a child.
type State string

// States.
const (
	Starting State = "starting" // runs, not yet ready
	Ready    State = "ready"
	Backoff  State = "backoff"  // does not run, will be started
	Draining State = "draining" // was asked to exit
	Stopped  State = "stopped"  // does not run, and will not
)

// Event is a change of a child.
type Event struct {
	Status
	At time.Time
}

// Status of a child.
type Status struct {
	Name     string        `json:"name"`
	Role     string        `json:"role"`
	State    State         `json:"state"`
	PID      int           `json:"pid,omitempty"` // 0 when it does not run
	Since    time.Time     `json:"since"`         // when State began
	Starts   int           `json:"starts"`
	WasReady bool          `json:"was_ready"`           // in any of its starts
	Exit     *Exit         `json:"exit,omitempty"`      // of the last process
	Reason   string        `json:"reason,omitempty"`    // why it was killed
	LastLine string        `json:"last_line,omitempty"` // of its output
	Wait     time.Duration `json:"wait,omitempty"`      // in state Backoff: until the next start
}

// StartError means that a child ended before it was ever ready.
type StartError struct{ Status Status }

// Error is one line: the child's last output, if any.
func (e *StartError) Error() string {
	if e.Status.LastLine != "" {
		return fmt.Sprintf("%s: %s", e.Status.Name, e.Status.LastLine)
	}
	return fmt.Sprintf("%s: %v before it was ready", e.Status.Name, e.Status.Exit)
}

// Errors of Add and Scale.
var (
	ErrStopping = errors.New("supervisor is stopping")
	ErrTooMany  = errors.New("too many children")
)

// Supervisor runs children until Stop. It is safe for concurrent use.
type Supervisor struct {
	cfg Config
	out *output
	own io.Closer // the launcher, if ours
	wg  sync.WaitGroup

	mu       sync.Mutex
	children map[string]*child
	stopping bool
	changed  chan struct{} // closed and renewed at each event
}

// New makes a supervisor without children; the caller must Stop it.
func New(cfg Config) (*Supervisor, error) {
	cfg.defaults()
	s := &Supervisor{
		cfg:      cfg,
		out:      &output{w: cfg.Output, max: maxLine},
		children: map[string]*child{},
		changed:  make(chan struct{}),
	}
	if cfg.Launcher == nil {
		l, err := newLauncher()
		if err != nil {
			return nil, fmt.Errorf("supervise: %w", err)
		}
		s.cfg.Launcher, s.own = l, l
	}
	return s, nil
}

// add starts a child, whose name nobody has, and keeps it running. seat are arguments that it has
// from Seats.
func (s *Supervisor) add(c Child, seat []string) {
	ch := newChild(s, c)
	ch.seat = seat
	s.children[c.Name] = ch
	s.wg.Go(func() {
		ch.keepRunning()
		s.forget(ch)
	})
}

// forget drops a removed child that has ended. After Stop the last status stays.
func (s *Supervisor) forget(ch *child) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopping {
		delete(s.children, ch.Name)
	}
	s.give(ch.Name)
	close(ch.done)
}

// Heartbeat is a child's sign of life. After its first, a process that is silent for silentAfter is
// killed.
func (s *Supervisor) Heartbeat(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ch := s.children[name]; ch != nil {
		ch.beats.Add(1)
	}
}

// Status lists the children by name.
func (s *Supervisor) Status() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Status, 0, len(s.children))
	for _, ch := range s.children {
		st := ch.status
		if ch.ending() && (st.State == Starting || st.State == Ready) { // its goroutine will say so soon
			st.State = Draining
		}
		out = append(out, st)
	}
	slices.SortFunc(out, func(a, b Status) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// WaitReady waits until all children have been ready. It fails with a *StartError as soon as one
// ends before.
func (s *Supervisor) WaitReady(ctx context.Context) error {
	for {
		s.mu.Lock()
		changed, waiting := s.changed, false
		var failed *StartError
		for _, ch := range s.children {
			if st := ch.status; !st.WasReady && !ch.ending() {
				waiting = true
				if st.Exit != nil && (failed == nil || st.Since.Before(failed.Status.Since)) {
					failed = &StartError{st}
				}
			}
		}
		s.mu.Unlock()
		if failed != nil {
			return failed
		}
		if !waiting {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for children: %w", ctx.Err())
		}
	}
}

// Stop asks the children to exit, role after role, kills those left when ctx ends, and waits for
// all. Nothing starts from now on. An error means that a process could not be killed.
func (s *Supervisor) Stop(ctx context.Context) error {
	s.mu.Lock()
	s.stopping = true
	all := slices.Collect(maps.Values(s.children))
	s.mu.Unlock()

	for _, role := range append(slices.Clone(s.cfg.StopOrder), "") {
		var now []*child
		for _, ch := range all {
			if role == "" || s.role(ch) == role {
				now = append(now, ch)
				ch.end()
			}
		}
		for _, ch := range now {
			select {
			case <-ch.done:
			case <-ctx.Done():
				s.Kill()
			}
		}
	}
	return s.finish(all)
}

// role is a child's current role.
func (s *Supervisor) role(ch *child) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	role, _ := s.cfg.Doing(ch.status)
	return role
}

// finish waits for all children, which have exited or were killed.
func (s *Supervisor) finish(all []*child) error {
	limit := time.NewTimer(killTimeout)
	defer limit.Stop()
	for _, ch := range all {
		select {
		case <-ch.done:
		case <-limit.C:
			s.mu.Lock()
			defer s.mu.Unlock()
			return fmt.Errorf("stop: %s (pid %d) does not die", ch.Name, ch.status.PID)
		}
	}
	s.wg.Wait()
	if s.own != nil {
		return s.own.Close()
	}
	return nil
}

// Kill kills all processes at once, so that a waiting Stop returns soon.
func (s *Supervisor) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopping = true
	for _, ch := range s.children {
		ch.end()
		ch.kill()
	}
}
