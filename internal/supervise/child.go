package supervise

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// backoff is the wait before each restart.
type backoff struct {
	min, max time.Duration
	last     time.Duration
}

// next returns the wait after a process that was ready for so long.
func (b *backoff) next(ready time.Duration) time.Duration {
	if b.last == 0 || ready >= resetAfter {
		b.last = b.min
	} else {
		b.last = min(2*b.last, b.max)
	}
	return b.last
}

// child is a Child and the state of the goroutine that keeps it running.
type child struct {
	Child
	seat  []string // arguments from Config.Seats
	s     *Supervisor
	wait  backoff
	beats atomic.Uint64

	endOnce, killOnce sync.Once
	endNow, killNow   chan struct{} // closed to make it exit, or die
	done              chan struct{} // closed when it has ended for good

	status  Status // guarded by s.mu
	lastPID int    // of the goroutine that keeps it running
}

func newChild(s *Supervisor, c Child) *child {
	return &child{
		Child: c, s: s,
		wait:   backoff{min: s.cfg.BackoffMin, max: s.cfg.BackoffMax},
		endNow: make(chan struct{}), killNow: make(chan struct{}),
		done:   make(chan struct{}),
		status: Status{Name: c.Name, Role: c.Role, State: Starting, Since: time.Now()},
	}
}

func (c *child) end()  { c.endOnce.Do(func() { close(c.endNow) }) }
func (c *child) kill() { c.killOnce.Do(func() { close(c.killNow) }) }

func (c *child) ending() bool {
	select {
	case <-c.endNow:
		return true
	default:
		return false
	}
}

// set changes the status and tells everybody.
func (c *child) set(change func(*Status)) {
	s := c.s
	s.mu.Lock()
	now := time.Now()
	old := c.status.State
	change(&c.status)
	if c.status.State != old {
		c.status.Since = now
	}
	e := Event{Status: c.status, At: now}
	close(s.changed)
	s.changed = make(chan struct{})
	s.mu.Unlock()

	args := []any{"child", c.Name, "state", string(e.State), "pid", e.PID}
	if e.Exit != nil && e.PID == 0 {
		args = append(args, "exit", e.Exit.String(), "reason", e.Reason, "wait", e.Wait)
	}
	level := slog.LevelInfo
	if e.State == Backoff && e.WasReady { // nobody asked it to end; a failed start is reported as an error
		level = slog.LevelWarn
	}
	s.cfg.Log.Log(context.Background(), level, "supervise", args...)
	if s.cfg.OnEvent != nil {
		s.cfg.OnEvent(e)
	}
}

// keepRunning restarts the child until it is to end.
func (c *child) keepRunning() {
	for !c.over() {
		exit, ready := c.runOnce()
		if c.over() {
			c.set(func(s *Status) { s.State, s.Wait, s.PID, s.Exit = Stopped, 0, 0, &exit })
			return
		}
		wait := c.wait.next(ready)
		c.set(func(s *Status) { s.State, s.Wait, s.PID, s.Exit = Backoff, wait, 0, &exit })
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-c.endNow:
		}
		timer.Stop()
	}
	c.set(func(s *Status) { s.State, s.Wait = Stopped, 0 })
}

// over reports whether the child is not to be started again.
func (c *child) over() bool {
	c.s.mu.Lock()
	stopping := c.s.stopping
	c.s.mu.Unlock()
	return stopping || c.ending()
}

// runOnce runs one process to its end, and returns how long it was ready.
func (c *child) runOnce() (exit Exit, ready time.Duration) {
	lines := c.s.out.lines(c.Name)
	args := c.Args
	if c.status.Starts > 0 && c.Again != nil { // only this goroutine writes it
		var role string
		role, args = c.Again(c.lastPID)
		c.s.mu.Lock()
		c.status.Role = role
		c.s.mu.Unlock()
	}
	p, err := c.s.cfg.Launcher.Launch(Spec{
		Path: c.Path, Args: slices.Concat(args, c.seat), Env: c.Env, Base: c.s.cfg.Env, Output: lines,
	})
	if err != nil {
		c.set(func(s *Status) { s.Starts++; s.Reason, s.LastLine = "", "" })
		return Exit{Code: -1, Err: fmt.Sprintf("start: %v", err)}, 0
	}
	c.lastPID = p.PID()
	c.set(func(s *Status) {
		s.State, s.PID, s.Wait, s.Reason, s.LastLine = Starting, p.PID(), 0, "", ""
		s.Starts++
	})
	exit, ready = c.attend(p)
	lines.flush()
	c.s.mu.Lock()
	c.status.LastLine = lines.last
	c.s.mu.Unlock()
	return exit, ready
}

// attend looks after a running process until it has exited.
func (c *child) attend(p Process) (exit Exit, ready time.Duration) {
	ctx, cancel := context.WithCancel(context.Background())
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer cancel()
	exited, isReady := make(chan Exit, 1), make(chan error, 1)
	helpers.Go(func() { exited <- p.Wait() })
	helpers.Go(func() {
		var err error
		if c.Ready != nil {
			err = c.Ready(ctx, p.PID())
		}
		isReady <- err
	})

	kill := func(reason string) {
		c.s.mu.Lock()
		if c.status.Reason == "" {
			c.status.Reason = reason
		}
		c.s.mu.Unlock()
		if err := p.Kill(); err != nil {
			c.s.cfg.Log.Warn("kill", "child", c.Name, "pid", p.PID(), "err", err)
		}
	}
	endNow, killNow := c.endNow, c.killNow
	var drained <-chan time.Time
	var readySince time.Time
	pulse := pulse{beats: c.beats.Load()}
	ticker := time.NewTicker(silentAfter / pulseTicks)
	defer ticker.Stop()
	for {
		select {
		case exit = <-exited:
			if !readySince.IsZero() {
				ready = time.Since(readySince)
			}
			return exit, ready
		case err := <-isReady:
			isReady = nil
			if err != nil {
				kill(fmt.Sprintf("not ready: %v", err))
				continue
			}
			readySince = time.Now()
			c.set(func(s *Status) {
				if s.WasReady = true; !c.ending() {
					s.State = Ready
				}
			})
			helpers.Go(func() {
				if p.AwaitDying(ctx) && !c.ending() && c.s.cfg.OnDying != nil {
					c.s.cfg.OnDying(c.Name, p.PID())
				}
			})
		case <-endNow:
			endNow = nil
			c.set(func(s *Status) { s.State = Draining })
			if err := p.Terminate(); err != nil {
				c.s.cfg.Log.Warn("terminate", "child", c.Name, "pid", p.PID(), "err", err)
			}
			timer := time.NewTimer(c.s.cfg.DrainTimeout)
			defer timer.Stop()
			drained = timer.C
		case <-drained:
			kill(fmt.Sprintf("did not exit within %v", c.s.cfg.DrainTimeout))
		case <-killNow:
			killNow = nil
			kill("stopped at once")
		case <-ticker.C:
			if pulse.lost(c.beats.Load()) {
				kill(fmt.Sprintf("silent for %v", silentAfter))
			}
		}
	}
}

// pulse notices that heartbeats have stopped. It counts ticks, not time, so that a supervisor that
// was itself stopped blames nobody.
type pulse struct {
	beats uint64
	alive bool // there was a beat
	ticks int  // since the last beat
}

// pulseTicks make silentAfter.
const pulseTicks = 12

// lost is called at each tick.
func (p *pulse) lost(beats uint64) bool {
	if beats != p.beats {
		p.beats, p.alive, p.ticks = beats, true, 0
		return false
	}
	p.ticks++
	return p.alive && p.ticks == pulseTicks
}
