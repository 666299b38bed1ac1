package fakenet

import (
	"cmp"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
)

// half is one direction of a connection.
type half struct {
	limit int
	delay time.Duration

	mu      sync.Mutex
	change  chan struct{} // closed and replaced at every change
	sent    []sending     // oldest first
	bytes   int
	eof     bool // the writer has closed
	closed  bool // the reader has closed
	reset   bool
	readBy  time.Time
	writeBy time.Time
	gone    func() // called when the writer has closed, or reset; may be nil
}

// sending is bytes on their way.
type sending struct {
	at   time.Time // they arrive
	held bool      // until the host that wrote them goes on
	data []byte
}

func (s *sending) here(now time.Time) bool { return !s.held && !s.at.After(now) }

func newHalf(limit int, delay time.Duration) *half {
	return &half{limit: limit, delay: delay, change: make(chan struct{})}
}

// update applies f and wakes all that wait.
func (h *half) update(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
	h.wake()
}

func (h *half) wake() {
	close(h.change)
	h.change = make(chan struct{})
}

// await repeats step after each change until it succeeds, or until the deadline *by. A step returns
// when to repeat it without a change, if there is such a time. It waits for goesOn, if that is not nil.
func (h *half) await(goesOn func() <-chan struct{}, by *time.Time, step func(now time.Time) (done bool, again time.Time)) error {
	for {
		goesOn := goesOn()
		h.mu.Lock()
		now, done, again := time.Now(), false, time.Time{}
		if late := *by; !late.IsZero() && !now.Before(late) {
			h.mu.Unlock()
			return os.ErrDeadlineExceeded
		}
		if goesOn == nil {
			done, again = step(now)
		}
		if done {
			h.wake()
		}
		change, until := h.change, *by
		h.mu.Unlock()
		if done {
			return nil
		}
		if until.IsZero() || !again.IsZero() && again.Before(until) {
			until = again
		}
		pause(until, change, goesOn)
	}
}

// pause waits for a time, if it is not zero, or for one of the channels.
func pause(until time.Time, change, goesOn <-chan struct{}) {
	var late <-chan time.Time
	if !until.IsZero() {
		t := time.NewTimer(time.Until(until))
		defer t.Stop()
		late = t.C
	}
	select {
	case <-change:
	case <-goesOn:
	case <-late:
	}
}

func (h *half) read(host *Host, b []byte) (n int, err error) {
	late := h.await(host.Stopped, &h.readBy, func(now time.Time) (bool, time.Time) {
		switch {
		case h.closed:
			err = net.ErrClosed
		case h.reset:
			err = syscall.ECONNRESET
		case len(h.sent) > 0 && h.sent[0].held:
			return false, time.Time{}
		case len(h.sent) > 0 && !h.sent[0].here(now):
			return false, h.sent[0].at
		case len(b) == 0:
		case len(h.sent) > 0:
			for len(h.sent) > 0 && n < len(b) && h.sent[0].here(now) {
				first := &h.sent[0]
				k := copy(b[n:], first.data)
				n += k
				if first.data = first.data[k:]; len(first.data) == 0 {
					h.sent = h.sent[1:]
				}
			}
			h.bytes -= n
		case h.eof:
			err = io.EOF
		default:
			return false, time.Time{}
		}
		return true, time.Time{}
	})
	return n, cmp.Or(err, late)
}

// write does not wait for a stopped host to go on: locks are held meanwhile, and for them time in a
// bubble does not pass.
func (h *half) write(host *Host, b []byte) (n int, err error) {
	for len(b) > 0 && err == nil {
		late := h.await(func() <-chan struct{} { return nil }, &h.writeBy, func(now time.Time) (bool, time.Time) {
			room := min(h.limit-h.bytes, len(b))
			switch {
			case h.eof:
				err = net.ErrClosed
			case h.reset:
				err = syscall.ECONNRESET
			case h.closed:
				err = syscall.EPIPE
			case room > 0:
				h.sent = append(h.sent, sending{now.Add(h.delay), host.Stopped() != nil, append([]byte(nil), b[:room]...)})
				h.bytes += room
				b, n = b[room:], n+room
			default:
				return false, time.Time{}
			}
			return true, time.Time{}
		})
		err = cmp.Or(err, late)
	}
	return n, err
}

// Conn is one end of a connection.
type Conn struct {
	h             *Host
	r, w          *half
	local, remote netip.AddrPort
	port          uint16
	since         time.Time
}

// Port is the one that was dialled.
func (c *Conn) Port() int { return int(c.port) }

// Since is when it was dialled.
func (c *Conn) Since() time.Time { return c.since }

func (c *Conn) Read(b []byte) (int, error) { n, err := c.r.read(c.h, b); return n, wrap("read", err) }
func (c *Conn) Write(b []byte) (int, error) {
	n, err := c.w.write(c.h, b)
	return n, wrap("write", err)
}
func (c *Conn) LocalAddr() net.Addr  { return net.TCPAddrFromAddrPort(c.local) }
func (c *Conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.remote) }

func wrap(op string, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Err: err}
}

// Close ends both directions. What was written still arrives.
func (c *Conn) Close() error {
	c.h.forget(c)
	c.w.update(func() { c.w.eof = true })
	c.w.tell()
	c.r.update(func() { c.r.closed, c.r.sent, c.r.bytes = true, nil, 0 })
	return nil
}

// release lets go of what was held, or drops it.
func (c *Conn) release(drop bool) {
	c.w.update(func() {
		for i := range c.w.sent {
			switch s := &c.w.sent[i]; {
			case !s.held:
			case drop:
				c.w.sent = c.w.sent[:i] // what follows is held too
				return
			default:
				s.at, s.held = time.Now().Add(c.w.delay), false
			}
		}
	})
}

func (c *Conn) reset() {
	for _, h := range []*half{c.r, c.w} {
		h.update(func() { h.reset, h.sent, h.bytes = true, nil, 0 })
		h.tell()
	}
}

// tell calls who wants to know of the writer's end, when the news arrives.
func (h *half) tell() {
	time.AfterFunc(h.delay, func() {
		h.mu.Lock()
		gone := h.gone
		h.gone = nil
		h.mu.Unlock()
		if gone != nil {
			gone()
		}
	})
}

// OnPeerClose implements clientwatch.Teller.
func (c *Conn) OnPeerClose(gone func()) (stop func()) {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	c.r.gone = gone
	if c.r.eof || c.r.reset {
		c.r.tell()
	}
	return func() {
		c.r.mu.Lock()
		defer c.r.mu.Unlock()
		c.r.gone = nil
	}
}

func (c *Conn) SetDeadline(t time.Time) error {
	_ = c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

func (c *Conn) SetReadDeadline(t time.Time) error {
	c.r.update(func() { c.r.readBy = t })
	return nil
}

func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.w.update(func() { c.w.writeBy = t })
	return nil
}
