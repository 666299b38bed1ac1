package kvconntest

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kvconn"
)

// Step names a frame by its type byte, as DESIGN.md lists them.
type Step uint8

// Steps of the protocol.
const (
	Banner    Step = 0 // the line of text before the frames
	Hello     Step = 1
	Refuse    Step = 2
	Ready     Step = 3
	Bind      Step = 4
	Bound     Step = 5
	Ticket    Step = 16
	Revoke    Step = 17
	Resend    Step = 18
	Received  Step = 19
	Ping      Step = 20
	Accepted  Step = 32
	Commit    Step = 33
	Failed    Step = 34
	RevokeAck Step = 35
	Pong      Step = 36
	Goaway    Step = 37
	Unit      Step = 48
	Sent      Step = 49
	Beat      Step = 50
	Batch     Step = 52
)

func (s Step) String() string {
	names := map[Step]string{Banner: "banner", Hello: "hello", Refuse: "refuse", Ready: "ready", Bind: "bind", Bound: "bound",
		Ticket: "ticket", Revoke: "revoke", Resend: "resend", Received: "received", Ping: "ping", Accepted: "accepted",
		Commit: "commit", Failed: "failed", RevokeAck: "revoke-ack", Pong: "pong", Goaway: "goaway", Unit: "unit", Sent: "sent", Beat: "beat",
		Batch: "batch"}
	if n, ok := names[s]; ok {
		return n
	}
	return fmt.Sprintf("step-%d", uint8(s))
}

// Direction is who writes the frame.
type Direction string

// Directions.
const (
	ToSender   Direction = "to-sender"
	ToReceiver Direction = "to-receiver"
)

// Action is what happens to a frame.
type Action string

// Actions.
const (
	Kill      Action = "kill"      // close every connection at once, the frame is lost
	Pause     Action = "pause"     // nothing is delivered any more, either way, on any connection
	Stall     Action = "stall"     // this connection takes no more bytes in this direction
	Drop      Action = "drop"      // the frame is lost
	Duplicate Action = "duplicate" // the frame comes twice
	Reorder   Action = "reorder"   // the frame comes after the next one
	Truncate  Action = "truncate"  // half the frame, then the connection closes
	FlipHead  Action = "flip-head" // one bit of the header's length
	FlipBody  Action = "flip-body" // one bit in the first quarter of the body
	FlipTail  Action = "flip-tail" // the last bit of the frame
	Slow      Action = "slow"      // this frame and all after it take Chaos.Delay each
)

// Rule is one fault: the Nth frame (from 0) of a step in a direction. Times is
// how many frames from there on are hit; 0 means 1.
type Rule struct {
	Step   Step
	To     Direction
	Nth    int
	Times  int
	Action Action
}

// Chaos is a transport whose frames suffer one rule. It parses what it
// carries, so that a fault hits a whole frame wherever the writes are cut.
type Chaos struct {
	kvconn.Transport
	Delay time.Duration // of Slow

	mu     sync.Mutex
	rule   Rule
	armed  bool
	seen   int
	hits   int
	slow   bool
	paused bool
	trace  func(int, Direction, Step, []byte)
	conns  map[*chaosConn]struct{}
	count  map[Direction]int // connections so far, by the direction written
}

// NewChaos wraps tr; it is transparent until Arm.
func NewChaos(tr kvconn.Transport) *Chaos {
	return &Chaos{Transport: tr, Delay: 5 * time.Millisecond, conns: map[*chaosConn]struct{}{}, count: map[Direction]int{}}
}

// Arm sets the rule; counting starts now.
func (c *Chaos) Arm(r Rule) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.Times == 0 {
		r.Times = 1
	}
	c.rule, c.armed, c.seen = r, true, 0
}

// Heal ends the rule for connections made from now on.
func (c *Chaos) Heal() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed, c.slow, c.paused = false, false, false
}

// Hits is how many frames a rule has hit.
func (c *Chaos) Hits() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hits
}

// Trace calls f for every frame that is written, before any fault. conn counts
// the connections: both ends of one have the same number, as long as they are
// dialled one after the other.
func (c *Chaos) Trace(f func(conn int, to Direction, step Step, frame []byte)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trace = f
}

// Dial wraps the receiver's end.
func (c *Chaos) Dial(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := c.Transport.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	return c.wrap(conn, ToSender), nil
}

// Listen wraps the sender's ends.
func (c *Chaos) Listen(addr string) (net.Listener, error) {
	ln, err := c.Transport.Listen(addr)
	if err != nil {
		return nil, err
	}
	return &chaosListener{ln, c}, nil
}

type chaosListener struct {
	net.Listener
	c *Chaos
}

func (l *chaosListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.c.wrap(conn, ToReceiver), nil
}

func (c *Chaos) wrap(conn net.Conn, to Direction) net.Conn {
	cc := &chaosConn{Conn: conn, c: c, to: to, gone: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns[cc] = struct{}{}
	cc.n = c.count[to]
	c.count[to]++
	return cc
}

// chaosConn applies the rule to what is written into it.
type chaosConn struct {
	net.Conn
	c    *Chaos
	to   Direction
	n    int
	once sync.Once
	gone chan struct{}

	part    []byte // of a frame
	text    bool   // the banner is over
	held    []byte // reordered frame
	stalled bool
	muted   bool // paused: what is written vanishes

	mu      sync.Mutex
	writeBy time.Time
}

func (cc *chaosConn) SetDeadline(t time.Time) error {
	cc.mu.Lock()
	cc.writeBy = t
	cc.mu.Unlock()
	return cc.Conn.SetDeadline(t)
}

func (cc *chaosConn) SetWriteDeadline(t time.Time) error {
	cc.mu.Lock()
	cc.writeBy = t
	cc.mu.Unlock()
	return cc.Conn.SetWriteDeadline(t)
}

func (cc *chaosConn) Close() error {
	cc.once.Do(func() { close(cc.gone) })
	cc.c.mu.Lock()
	delete(cc.c.conns, cc)
	cc.c.mu.Unlock()
	return cc.Conn.Close()
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
		if err := cc.pass(step, frame); err != nil {
			return 0, err
		}
	}
}

func (cc *chaosConn) whole() (int, Step) {
	if !cc.text {
		for i, c := range cc.part {
			if c == '\n' {
				cc.text = true
				return i + 1, Banner
			}
		}
		return 0, 0
	}
	if len(cc.part) < 16 {
		return 0, 0
	}
	if n := 16 + int(binary.LittleEndian.Uint32(cc.part[4:])); len(cc.part) >= n {
		return n, Step(cc.part[1])
	}
	return 0, 0
}

func (cc *chaosConn) pass(step Step, frame []byte) error {
	act, delay := cc.c.judge(cc, step, frame)
	if cc.muted {
		return nil
	}
	if cc.stalled {
		return cc.block()
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
		return cc.block()
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
		out[len(out)-1] ^= 1
	}
	if act == "" && cc.held != nil {
		out = append(frame, cc.held...)
		cc.held = nil
	}
	_, err := cc.Conn.Write(out)
	return err
}

// judge says what happens to the frame.
func (c *Chaos) judge(cc *chaosConn, step Step, frame []byte) (Action, time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.trace != nil {
		c.trace(cc.n, cc.to, step, frame)
	}
	var act Action
	if c.armed && c.rule.Step == step && c.rule.To == cc.to {
		if c.seen >= c.rule.Nth && c.seen < c.rule.Nth+c.rule.Times {
			act = c.rule.Action
			c.hits++
		}
		c.seen++
	}
	switch act {
	case Pause:
		c.paused = true
	case Slow:
		c.slow = true
	}
	if c.paused {
		cc.muted = true // for good: Heal is for new connections
	}
	if c.slow {
		return act, c.Delay
	}
	return act, 0
}

// killAll closes every connection, as the end of a process does.
func (c *Chaos) killAll() {
	c.mu.Lock()
	all := make([]*chaosConn, 0, len(c.conns))
	for cc := range c.conns {
		all = append(all, cc)
	}
	c.mu.Unlock()
	for _, cc := range all {
		cc.Close()
	}
}

// block takes nothing until the write deadline or the end of the connection.
func (cc *chaosConn) block() error {
	cc.mu.Lock()
	by := cc.writeBy
	cc.mu.Unlock()
	if by.IsZero() {
		<-cc.gone
		return net.ErrClosed
	}
	t := time.NewTimer(time.Until(by))
	defer t.Stop()
	select {
	case <-cc.gone:
		return net.ErrClosed
	case <-t.C:
		return os.ErrDeadlineExceeded
	}
}
