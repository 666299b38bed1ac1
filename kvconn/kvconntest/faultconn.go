package kvconntest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// chaosConn applies the rule to what is written into it.
type chaosConn struct {
	net.Conn
	c    *Chaos
	to   Direction
	n    int
	once sync.Once
	gone chan struct{}

	part    []byte // of a frame
	said    Step   // what was last said before the frames; 0: nothing, Hello: frames follow
	held    []byte // reordered frame
	stalled bool
	muted   bool // paused: what is written vanishes

	out     chan struct{} // full while somebody writes to Conn; a mutex would hold a bubble's clock
	backlog []byte        // written during a partition
	closing bool          // closed during one: the peer hears of it when it is over

	mu      sync.Mutex
	writeBy time.Time
}

// NetConn leads to the connection that can share memory.
func (cc *chaosConn) NetConn() net.Conn { return cc.Conn }

// Read ends with Close, also when the peer cannot be told yet.
func (cc *chaosConn) Read(b []byte) (int, error) {
	select {
	case <-cc.gone:
		return 0, net.ErrClosed
	default:
		return cc.Conn.Read(b)
	}
}

func (cc *chaosConn) SetDeadline(t time.Time) error {
	return errors.Join(cc.SetReadDeadline(t), cc.SetWriteDeadline(t))
}

func (cc *chaosConn) SetWriteDeadline(t time.Time) error {
	cc.mu.Lock()
	defer cc.mu.Unlock()
	cc.writeBy = t
	return cc.Conn.SetWriteDeadline(t)
}

func (cc *chaosConn) Close() error {
	cc.once.Do(func() { close(cc.gone) })
	cc.c.mu.Lock()
	if cc.c.cut != nil {
		cc.closing = true
		cc.c.mu.Unlock()
		return cc.Conn.SetReadDeadline(time.Unix(1, 0)) // wakes our reader
	}
	delete(cc.c.conns, cc)
	cc.c.mu.Unlock()
	return cc.Conn.Close()
}

// hold keeps b until the partition is over. It reports false when there is none: then
// the caller writes b.
func (cc *chaosConn) hold(b []byte) (bool, error) {
	for {
		cc.out <- struct{}{}
		cut := cc.c.severed()
		if cut == nil {
			cc.deliver(onTheWay)
			<-cc.out
			return false, nil
		}
		if len(cc.backlog) == 0 || len(cc.backlog)+len(b) <= held {
			cc.backlog = append(cc.backlog, b...)
			<-cc.out
			return true, nil
		}
		<-cc.out
		if err := cc.block(cut); err != nil {
			return false, err
		}
	}
}

const (
	// lastWords is how long a closed connection tries to say what it had to.
	lastWords = 10 * time.Millisecond
	// onTheWay bounds the delivery of what a partition has held up: long for a starved
	// machine, as a kernel tries for minutes.
	onTheWay = 10 * time.Second
)

// deliver writes the backlog; needs out. The writer, told that it is written, may be past
// its deadline: delivery has its own.
func (cc *chaosConn) deliver(limit time.Duration) {
	if len(cc.backlog) == 0 {
		return
	}
	cc.Conn.SetWriteDeadline(time.Now().Add(limit))
	cc.Conn.Write(cc.backlog)
	cc.backlog = nil
	cc.mu.Lock()
	defer cc.mu.Unlock()
	cc.Conn.SetWriteDeadline(cc.writeBy)
}

// flush delivers what a partition has held up.
func (cc *chaosConn) flush() {
	cc.out <- struct{}{}
	defer func() { <-cc.out }()
	cc.c.mu.Lock()
	closing := cc.closing
	if closing {
		delete(cc.c.conns, cc)
	}
	cc.c.mu.Unlock()
	limit := onTheWay
	if closing { // its peer may have closed too, and read no more
		limit = lastWords
		defer cc.Conn.Close()
	}
	cc.deliver(limit)
}

// Write cuts b into frames; one that is not whole waits for the next Write.
func (cc *chaosConn) Write(b []byte) (int, error) {
	cc.part = append(cc.part, b...)
	for {
		n, step := cc.whole()
		if n == 0 {
			return len(b), nil
		}
		frame := append([]byte(nil), cc.part[:n]...)
		cc.part = append(cc.part[:0], cc.part[n:]...)
		if err := cc.writeFrame(step, frame); err != nil {
			return 0, err
		}
	}
}

// whole returns the length and the step of what part begins with; 0: not all of it is
// there yet.
func (cc *chaosConn) whole() (int, Step) {
	switch cc.said {
	case 0, Proved:
		line := bytes.IndexByte(cc.part, '\n') + 1
		switch {
		case line == 0:
			return 0, 0
		case cc.said == 0 && string(cc.part[:line]) == wants:
			return cc.before(Challenged, challengeSize)
		}
		return cc.before(Banner, line)
	case Challenged:
		return cc.before(Proved, proofSize)
	}
	if len(cc.part) < headerSize {
		return 0, 0
	}
	if n := headerSize + int(binary.LittleEndian.Uint32(cc.part[4:])); len(cc.part) >= n {
		return n, Step(cc.part[1])
	}
	return 0, 0
}

// before notes what comes before the frames, once it is there.
func (cc *chaosConn) before(step Step, n int) (int, Step) {
	if len(cc.part) < n {
		return 0, 0
	}
	if cc.said = step; step == Banner {
		cc.said = Hello // and all that follows
	}
	return n, step
}

// writeFrame writes a frame, or makes the fault that hits it.
func (cc *chaosConn) writeFrame(step Step, frame []byte) error {
	act, delay := cc.c.judge(cc, step, frame)
	if cc.muted {
		return nil
	}
	if cc.stalled {
		return cc.block(nil)
	}
	if delay > 0 {
		select {
		case <-time.After(delay):
		case <-cc.gone:
			return net.ErrClosed
		}
	}
	out := frame
	switch act {
	case Kill:
		cc.c.killAll()
		return net.ErrClosed
	case Stall:
		cc.stalled = true
		return cc.block(nil)
	case Pause, Drop:
		return nil
	case Duplicate:
		out = append(frame, frame...)
	case Reorder:
		cc.held = frame
		return nil
	case Truncate:
		cc.Conn.Write(frame[:(len(frame)+1)/2])
		cc.Close()
		return net.ErrClosed
	case FlipHead:
		out[min(5, len(out)-1)] ^= 4
	case FlipBody:
		if step != Banner && len(frame) > 16 {
			out[16+(len(frame)-16)/4] ^= 16
		} else {
			out[len(frame)/4] ^= 16
		}
	case FlipTail:
		if step == Placed || step == Pushed {
			cc.c.Memory.flip(out)
		} else {
			out[len(out)-1] ^= 1
		}
	}
	if act == "" && cc.held != nil {
		out = append(frame, cc.held...)
		cc.held = nil
	}
	if kept, err := cc.hold(out); kept || err != nil {
		return err
	}
	cc.out <- struct{}{}
	defer func() { <-cc.out }()
	_, err := cc.Conn.Write(out)
	return err
}

// after fires at a deadline; the zero time is none.
func after(by time.Time) <-chan time.Time {
	if by.IsZero() {
		return nil
	}
	return time.After(time.Until(by))
}

// block waits until the write deadline, the end of the connection, or until is closed.
func (cc *chaosConn) block(until chan struct{}) error {
	cc.mu.Lock()
	by := cc.writeBy
	cc.mu.Unlock()
	select {
	case <-cc.gone:
		return net.ErrClosed
	case <-after(by):
		return os.ErrDeadlineExceeded
	case <-until:
		return nil
	}
}
