package kvconn

import "sync"

// fence guards one ticket's memory, which is touched only between enter and leave.
// After shut nobody enters, and quiet is closed when the last one inside has left: from
// then on the memory is no longer touched on behalf of this ticket.
type fence struct {
	mu     sync.Mutex
	inside int
	closed bool
	quiet  chan struct{}
	then   func() // called once, without mu, just before quiet is closed; may be nil
}

func newFence(then func()) *fence {
	return &fence{quiet: make(chan struct{}), then: then}
}

// enter reports whether the memory may be touched; if so, leave must follow.
func (f *fence) enter() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return false
	}
	f.inside++
	return true
}

func (f *fence) leave() {
	f.mu.Lock()
	f.inside--
	last := f.closed && f.inside == 0
	f.mu.Unlock()
	if last {
		f.settle()
	}
}

// shut is idempotent and never blocks.
func (f *fence) shut() {
	f.mu.Lock()
	first := !f.closed
	f.closed = true
	last := first && f.inside == 0
	f.mu.Unlock()
	if last {
		f.settle()
	}
}

func (f *fence) settle() {
	if f.then != nil {
		f.then()
	}
	close(f.quiet)
}
