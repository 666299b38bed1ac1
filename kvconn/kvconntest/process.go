//go:build linux

package kvconntest

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// childEnv makes a test binary one peer of a world: "sender" or "receiver", the stretch
// of its deadlines, and the phase and the signal of its fault, if any.
const childEnv = "XPYD_KVCONNTEST_CHILD"

// Signals that end or stop a process; the columns of the process matrix.
const (
	ProcessKill  Action = "SIGKILL"
	ProcessPause Action = "SIGSTOP"
)

var signals = map[Action]syscall.Signal{ProcessKill: syscall.SIGKILL, ProcessPause: syscall.SIGSTOP}

// Main is a transport's TestMain, which also runs the other process of Processes and
// Lossy. The cases that may run in parallel are more than the cores: they wait for
// deadlines more than they compute.
func Main(m *testing.M, f Factory, parallel int) {
	args := strings.Fields(os.Getenv(childEnv))
	if len(args) == 0 {
		flag.Parse()
		flag.Set("test.parallel", strconv.Itoa(parallel))
		os.Exit(m.Run())
	}
	run := child
	if args[0] == "lossy" {
		run, args = lossy, args[1:]
	}
	if err := run(f, args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// orphan is the testing.TB that World needs in a process without a test.
type orphan struct{ testing.TB }

func (orphan) Helper()                        {}
func (orphan) Errorf(f string, args ...any)   { fmt.Fprintf(os.Stdout, "error "+f+"\n", args...) }
func (orphan) Error(args ...any)              { fmt.Fprintln(os.Stdout, "error", args) }
func (orphan) Fatal(args ...any)              { fmt.Fprintln(os.Stdout, "error", args); os.Exit(1) }
func (o orphan) Fatalf(f string, args ...any) { o.Errorf(f, args...); os.Exit(1) }
func (orphan) Context() context.Context       { return context.Background() }
func (orphan) Cleanup(func())                 {}
func (orphan) TempDir() string                { return os.TempDir() }
func (orphan) Name() string                   { return "child" }
func (orphan) Logf(format string, a ...any)   {}
func (orphan) Log(a ...any)                   {}

// child serves until its standard input ends. A receiver first reads the
// sender's address, then fetches once a line: name, seed, first block.
func child(f Factory, args []string) error {
	f, tr, addr := f.transport(orphan{})
	ch := NewChaos(tr)
	if _, err := fmt.Sscan(args[1], &f.stretch); err != nil {
		return err
	}
	arm := func() {}
	if len(args) == 4 {
		all := processPhases()
		p := all[slices.IndexFunc(all, func(p phase) bool { return p.name == args[2] })]
		arm = beforeFrame(ch, p, func() { strike(signals[Action(args[3])]) })
	}
	w := f.world(orphan{}, ch, addr)
	in := bufio.NewReader(os.Stdin)
	if args[0] == "sender" {
		fmt.Fprintln(os.Stdout, w.Addr)
	} else if _, err := fmt.Fscanln(in, &w.Addr); err != nil {
		return err
	}
	for {
		var name string
		var seed int32
		var first int
		if _, err := fmt.Fscanln(in, &name, &seed, &first); err != nil {
			return nil
		}
		if name == armNow {
			arm()
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), hangs)
		err := w.Fetch(ctx, w.Spec(name, seed, 18, first))
		w.Release(ctx)
		cancel()
		for _, e := range w.Pool.Errors() {
			fmt.Fprintln(os.Stdout, "error", e)
		}
		if err != nil {
			fmt.Fprintln(os.Stdout, "why", err)
		}
		fmt.Fprintln(os.Stdout, "outcome", kvconn.OutcomeOf(err, "untyped"))
	}
}

// strike signals the calling thread, so that this very frame is not written: a signal to
// the process may hit another thread first.
func strike(s syscall.Signal) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	syscall.RawSyscall(syscall.SYS_TGKILL, uintptr(os.Getpid()), uintptr(syscall.Gettid()), uintptr(s))
}

// idle reports whether a step also comes between transfers: its fault is armed when the
// first transfer is over, however long that takes.
func idle(step Step) bool { return step == Ping || step == Beat }

// armNow tells a child, once it is idle, that its fault is due.
const armNow = "arm"

// beforeFrame calls f before the phase's frame is written, counted from arm on if the
// phase is idle.
func beforeFrame(ch *Chaos, p phase, f func()) (arm func()) {
	var armed atomic.Bool
	armed.Store(!idle(p.step))
	n := 0
	ch.Trace(func(_ int, to Direction, step Step, _ []byte) {
		if to == p.to && p.step.matches(step) && armed.Load() {
			if n == p.nth {
				f()
			}
			n++
		}
	})
	return func() { armed.Store(true) }
}

// world makes one side of a process case.
func (f Factory) world(t testing.TB, tr kvconn.Transport, addr string) *World {
	w := newWorld(t, tr, addr, f, nil)
	w.Quarantine = f.shares()
	return w
}

// peer is the other process.
type peer struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	src *os.File // of out
}

func startPeer(t *testing.T, args ...string) *peer {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+strings.Join(args, " "))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	check(t, err)
	out, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return &peer{cmd, in, bufio.NewReader(out), out.(*os.File)}
}

func (p *peer) signal(s syscall.Signal) { syscall.Kill(p.cmd.Process.Pid, s) }

func (p *peer) say(format string, args ...any) { fmt.Fprintf(p.in, format+"\n", args...) }

// line reads what the peer says next; EOF is the death of the peer.
func (p *peer) line() (string, error) {
	if err := p.src.SetReadDeadline(time.Now().Add(2 * hangs)); err != nil {
		return "", err
	}
	s, err := p.out.ReadString('\n')
	return strings.TrimSpace(s), err
}

// result is the outcome of a fetch, and the peer's complaints.
type result struct {
	outcome ticket.Outcome // "" of a peer that is gone
	why     string
	wrong   []string
}

// outcome is how the peer's fetch has ended.
func (p *peer) outcome() (a result) {
	for {
		s, err := p.line()
		if err != nil {
			return a
		}
		if o, ok := strings.CutPrefix(s, "outcome "); ok {
			a.outcome = ticket.Outcome(o)
			return a
		}
		if why, ok := strings.CutPrefix(s, "why "); ok {
			a.why = why
			continue
		}
		a.wrong = append(a.wrong, s)
	}
}

// processPhases are where a real process is ended or stopped: before a frame that it
// writes, or that its peer is about to write.
func processPhases() (all []phase) {
	for _, p := range phases {
		if idle(p.step) {
			p.nth = 2 // since it is armed
		}
		if p.process {
			all = append(all, p)
		}
	}
	return all
}

// Processes kills and stops real processes, the sender's and the receiver's, at every step
// of the protocol, and checks what Run checks. TestMain must be Main.
func Processes(t *testing.T, f Factory) {
	f.AtOnce = cmp.Or(f.AtOnce, 12) // of two processes each
	f = f.realTime(t)
	m := matrix{rows: processPhases()}
	t.Run("case", func(t *testing.T) {
		for _, victim := range []string{"sender", "receiver"} {
			for _, p := range m.rows {
				for _, act := range []Action{ProcessKill, ProcessPause} {
					t.Run(fmt.Sprintf("%s/%s/%s", victim, p.name, act), func(t *testing.T) {
						t.Parallel()
						f.patiently(t, func(t *testing.T, f Factory) error {
							v := processCase(t, f, victim, p, act)
							m.note(t, p.name, Action(victim+" "+string(act)), v)
							return v.late
						})
					})
				}
			}
		}
	})
	t.Logf("%s: outcome and time of the transfer they took part in:\n%s", t.Name(), &m)
}

// scene is this process's world and the victim.
type scene struct {
	*World
	f      Factory
	t      *testing.T
	victim string
	peer   atomic.Pointer[peer]
	idle   bool
}

func processCase(t *testing.T, f Factory, victim string, p phase, act Action) (v verdict) {
	f, tr, addr := f.transport(t)
	ch := NewChaos(tr)
	s := &scene{World: f.world(t, ch, addr), f: f, t: t, victim: victim, idle: idle(p.step)}
	arm := func() {}
	defer s.Close()
	if own := map[string]Direction{"sender": ToReceiver, "receiver": ToSender}[victim]; own == p.to {
		s.start(p.name, string(act))
	} else {
		arm = beforeFrame(ch, p, func() {
			p := s.peer.Load() // there will be another
			p.signal(signals[act])
			for by := time.Now().Add(hangs); !p.hasSuffered(act) && time.Now().Before(by); {
				time.Sleep(time.Millisecond)
			}
		})
		s.start()
	}
	if s.idle {
		if o := s.fetches("before", 50, 0, 1); o != ticket.Done {
			v.late = fmt.Errorf("before the fault: %s", o)
			return v
		}
		arm()
		s.peer.Load().say("%s 0 0", armNow)
	}
	start, began := s.Clock.Now(), time.Now()
	during, hit := s.strike(act)
	if !hit {
		v.late = fmt.Errorf("the process was not hit by %s", act)
		return v
	}
	stopped, why := time.Now(), ""
	v.outcome = ticket.Dead // of a process that cannot say
	limit := s.RConfig.HandshakeTimeout + 2*s.RConfig.PeerSilence
	if s.f.Joined {
		limit += 2 * s.RConfig.HandshakeTimeout
	}
	if s.idle && victim == "sender" {
		during = s.fetch("during", 100, 16)
	}
	if victim == "sender" {
		a := s.outcome(during)
		v.outcome, why = a.outcome, a.why
	}
	s.Empty(limit)
	v.took = time.Since(began)
	took := s.Clock.Since(start)
	if act == ProcessPause {
		// The fault lasts longer than any patience, and long enough for whoever made it to see it.
		time.Sleep(time.Until(stopped.Add(limit)))
		s.peer.Load().signal(syscall.SIGCONT)
		if victim == "receiver" && during != nil {
			a := s.outcome(during)
			v.outcome, why = a.outcome, a.why
		}
	}
	allowed := []ticket.Outcome{ticket.Done, ticket.Dead, ticket.Late, ticket.Corrupt}
	if s.f.Joined && act == ProcessPause {
		allowed = append(allowed, ticket.Refused) // a stopped sender's end does not come, as one that cannot reach us
	}
	if !slices.Contains(allowed, v.outcome) {
		t.Errorf("outcome %q: %s", v.outcome, why)
	}
	if took > limit+s.long(time.Second) {
		v.late = fmt.Errorf("over after %v", took)
	}
	healed, began := s.Clock.Now(), time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), patience*recovery)
	defer cancel()
	if n := s.Release(ctx); n > 0 {
		v.note = "quarantined"
		if act == ProcessKill {
			t.Errorf("%d tickets in quarantine for a process that is gone", n)
		}
	}
	if act == ProcessKill {
		s.start()
	}
	last := s.fetches("after", 200, 32, 3) // a wounded session may have to be found dead first
	v.back = time.Since(began)
	if back := s.Clock.Since(healed); last != ticket.Done || back > s.long(recovery) {
		v.late = errors.Join(v.late, fmt.Errorf("peers do not work after the fault: %s, after %v", last, back))
	}
	return v
}

// fetches transfers until it works; see Factory.tries.
func (s *scene) fetches(name string, seed int32, first, tries int) (o ticket.Outcome) {
	_ = s.f.tries(s.World, tries, func(n int) error {
		began := time.Now()
		a := s.outcome(s.fetch(name, seed+int32(n), first+8*(n%8)))
		if o = a.outcome; o == ticket.Done {
			return nil
		}
		s.t.Logf("%s: try %d: %s after %v: %s", name, n, o, time.Since(began).Round(time.Millisecond), a.why)
		return &kvconn.Error{Outcome: o}
	})
	return o
}

// start makes the other process.
func (s *scene) start(fault ...string) {
	s.t.Helper()
	s.peer.Store(startPeer(s.t, append([]string{s.victim, fmt.Sprint(s.stretch)}, fault...)...))
	if s.victim == "receiver" {
		s.peer.Load().say("%s", s.Addr)
		return
	}
	addr, err := s.peer.Load().line()
	if err != nil {
		s.t.Fatalf("no peer: %v", err)
	}
	s.Addr = addr
}

// strike makes transfers until the victim is hit, and returns the last one. On
// a loaded machine one may fail before it comes to the frame.
func (s *scene) strike(act Action) (during chan result, hit bool) {
	for n := range 12 {
		if during != nil {
			s.outcome(during)
		}
		if !s.idle || n > 0 {
			during = s.fetch("during", int32(100+n), 100+8*n)
		}
		wait := hangs
		if s.idle {
			wait = s.long(3 * time.Second)
		}
		for start := s.Clock.Now(); s.Clock.Since(start) < wait; time.Sleep(time.Millisecond) {
			if s.peer.Load().hasSuffered(act) {
				return during, true
			}
			if len(during) > 0 && !s.idle { // it is over: if it was not hit now, it will not be
				wait = min(wait, s.Clock.Since(start)+s.RConfig.KeepAlive)
			}
		}
	}
	return nil, false
}

// outcome waits for a transfer.
func (s *scene) outcome(c chan result) result {
	s.t.Helper()
	a := <-c
	for _, e := range a.wrong {
		s.t.Errorf("peer: %s", e)
	}
	return a
}

// fetch begins a transfer.
func (s *scene) fetch(name string, seed int32, first int) chan result {
	done := make(chan result, 1)
	if s.victim == "receiver" {
		p := s.peer.Load()
		p.say("%s %d %d", name, seed, first)
		go func() { done <- p.outcome() }() // ends with the process
		return done
	}
	spec := s.Spec(name, seed, 18, first)
	go func() {
		ctx, cancel := context.WithTimeout(s.t.Context(), hangs)
		defer cancel()
		err := s.Fetch(ctx, spec)
		done <- result{outcome: kvconn.OutcomeOf(err, "untyped"), why: fmt.Sprint(err)}
	}()
	return done
}

// hasSuffered reports whether the signal has done its work.
func (p *peer) hasSuffered(act Action) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	_, rest, _ := strings.Cut(string(stat), ") ")
	return err != nil || strings.HasPrefix(rest, map[Action]string{ProcessKill: "Z", ProcessPause: "T"}[act])
}
