// Package profile turns the profiling of a running process on and off: Go's CPU profiler, and beside
// it the device's (a CUDA profiler range, which nsys or ncu records). The profile is kept in memory
// until the next one.
//
// Non-goals: heap, goroutines and the like, which need no turning on: see /debug/pprof.
package profile

import (
	"bytes"
	"errors"
	"fmt"
	"runtime/pprof"
	"sync"
	"time"
)

// Limits of a profile.
const (
	Default = 30 * time.Second // before it ends by itself
	Longest = 10 * time.Minute
	most    = 32 << 20 // bytes

	deviceTime = time.Second // for the device to begin or end, which takes milliseconds
)

// ErrOn means that a profile is being made already, perhaps through /debug/pprof/profile.
var ErrOn = errors.New("a CPU profile is being made already")

// ErrDevice means that the device's profiler does not answer. It is left out from then on.
var ErrDevice = fmt.Errorf("no answer in %v; it is left out from now on", deviceTime)

// Device is a profiler of another kind that runs along; see kernels/cuda.
type Device interface{ Profile(on bool) error }

// State is what a profiler is doing.
type State struct {
	On      bool    `json:"on"`
	Seconds float64 `json:"seconds"`          // since it began, or that the last one took
	Bytes   int     `json:"bytes"`            // of the last profile; 0: there is none
	Device  bool    `json:"device,omitempty"` // the device's profiler runs along
	Error   string  `json:"error,omitempty"`  // of the last one
}

// Profiler makes one profile at a time. Close it.
type Profiler struct {
	mu     sync.Mutex
	device Device // nil: none
	on     bool
	closed bool
	run    int // number of the profile, so that a late timer ends no other
	began  time.Time
	took   time.Duration
	timer  *time.Timer
	buf    *limited
	last   []byte
	err    error
}

// New makes a profiler; device may be nil.
func New(device Device) *Profiler { return &Profiler{device: device} }

// Start begins a profile that ends after d, at most Longest, or at Stop. The error is ErrOn if one
// is being made.
func (p *Profiler) Start(d time.Duration) error {
	if d <= 0 || d > Longest {
		return fmt.Errorf("a profile of %v: want more than 0, at most %v", d, Longest)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.on || p.closed {
		return ErrOn
	}
	buf := &limited{}
	if pprof.StartCPUProfile(buf) != nil {
		return ErrOn // its only error
	}
	if p.device != nil {
		if err := p.turn(true); err != nil {
			pprof.StopCPUProfile()
			return fmt.Errorf("the device's profiler: %w", err)
		}
	}
	p.on, p.began, p.buf = true, time.Now(), buf
	p.run++
	run := p.run
	p.timer = time.AfterFunc(d, func() { p.stop(run) })
	return nil
}

// turn switches the device's profiler, under mu. A driver that hangs keeps one goroutine, which ends
// what the driver begins when nobody waits any more.
func (p *Profiler) turn(on bool) error {
	done, left := make(chan error), make(chan struct{})
	device := p.device
	go func() {
		err := device.Profile(on)
		select {
		case done <- err:
		case <-left:
			if on && err == nil {
				_ = device.Profile(false) // nobody is left to tell
			}
		}
	}()
	late := time.NewTimer(deviceTime)
	defer late.Stop()
	select {
	case err := <-done:
		return err
	case <-late.C:
		close(left)
		p.device = nil
		return ErrDevice
	}
}

// Stop ends the profile, if there is one.
func (p *Profiler) Stop() { p.stop(0) }

// stop ends the profile of that number, or any if 0.
func (p *Profiler) stop(run int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.on || run != 0 && run != p.run {
		return
	}
	p.timer.Stop()
	pprof.StopCPUProfile() // the rest is written when it returns
	p.on, p.took, p.err, p.last = false, time.Since(p.began), nil, p.buf.b.Bytes()
	if p.buf.over {
		p.last, p.err = nil, fmt.Errorf("the profile is over %d bytes", most)
	}
	if p.device != nil {
		if err := p.turn(false); err != nil {
			p.err = fmt.Errorf("the device's profiler: %w", err)
		}
	}
	p.buf = nil
}

// Close ends a profile that is being made; no other begins.
func (p *Profiler) Close() {
	p.Stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
}

// State returns what it is doing.
func (p *Profiler) State() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := State{On: p.on, Seconds: p.took.Seconds(), Bytes: len(p.last), Device: p.on && p.device != nil}
	if p.on {
		s.Seconds = time.Since(p.began).Seconds()
	}
	if p.err != nil {
		s.Error = p.err.Error()
	}
	return s
}

// Last returns the last complete profile in pprof's format, or nil. It must not be changed.
func (p *Profiler) Last() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last
}

// limited keeps up to most bytes.
type limited struct {
	b    bytes.Buffer
	over bool
}

func (l *limited) Write(b []byte) (int, error) {
	if l.over = l.over || l.b.Len()+len(b) > most; l.over {
		return 0, errors.New("too long")
	}
	return l.b.Write(b)
}
