package kvconntest

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
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
	Placed    Step = 51
	Batch     Step = 52
	Pushed    Step = 53

	// What comes before the banners, between peers of a fleet.
	Challenged Step = 253
	Proved     Step = 254

	// Rows is, in a Rule, any frame that brings rows: Unit, Batch, Placed or Pushed.
	Rows Step = 255
)

func (s Step) String() string {
	names := map[Step]string{Banner: "banner", Hello: "hello", Refuse: "refuse", Ready: "ready", Bind: "bind", Bound: "bound",
		Ticket: "ticket", Revoke: "revoke", Resend: "resend", Received: "received", Ping: "ping", Accepted: "accepted",
		Commit: "commit", Failed: "failed", RevokeAck: "revoke-ack", Pong: "pong", Goaway: "goaway", Unit: "unit", Sent: "sent", Beat: "beat",
		Placed: "placed", Batch: "batch", Pushed: "pushed", Challenged: "challenge", Proved: "proof"}
	if n, ok := names[s]; ok {
		return n
	}
	return fmt.Sprintf("step-%d", uint8(s))
}

// matches reports whether a frame of step is what the rule step means.
func (s Step) matches(step Step) bool { return s == step || s == Rows && step.CarriesRows() }

// CarriesRows reports whether a frame brings rows, or says that they are there.
func (s Step) CarriesRows() bool { return s == Unit || s == Batch || s == Placed || s == Pushed }

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
	FlipTail  Action = "flip-tail" // the last bit of the frame; of a placed or pushed one, a bit of its rows in memory
	Slow      Action = "slow"      // this frame and all after it take Chaos.Delay each
	Partition Action = "partition" // from this frame on nothing passes, either way, until Heal; then what waited does
	Blip      Action = "blip"      // a partition of Chaos.Blip
)

// held is how many bytes a partitioned connection buffers before it blocks, as the
// kernel's socket buffers do.
const held = 256 << 10

// Rule is one fault: the Nth frame (from 0) of a step in a direction. Times is
// how many frames from there on are hit; 0 means 1.
type Rule struct {
	Step   Step
	To     Direction
	Nth    int
	Times  int
	Action Action
}

// Chaos is a transport whose frames suffer one rule. It parses what it carries, so that a
// fault hits a whole frame however the writes are cut.
type Chaos struct {
	kvconn.Transport
	Delay time.Duration // of Slow
	Blip  time.Duration // how long one lasts
	// Memory is where placed or pushed rows lie; nil: nothing is.
	Memory *Pool

	mu     sync.Mutex
	rule   Rule
	armed  bool
	seen   int
	hits   int
	slow   bool
	paused bool
	cut    chan struct{} // closed when the partition ends; nil: there is none
	trace  func(int, Direction, Step, []byte)
	conns  map[*chaosConn]struct{}
	count  map[Direction]int // connections so far, by the direction written
}

// NewChaos wraps tr; it is transparent until Arm.
func NewChaos(tr kvconn.Transport) *Chaos {
	return &Chaos{Transport: tr, Delay: 5 * time.Millisecond, Blip: 50 * time.Millisecond, conns: map[*chaosConn]struct{}{}, count: map[Direction]int{}}
}

// Arm sets the rule; counting starts now.
func (c *Chaos) Arm(r Rule) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r.Times = max(r.Times, 1)
	c.rule, c.armed, c.seen = r, true, 0
}

// Heal ends the rule for new connections, and a partition for all: what was written
// meanwhile arrives.
func (c *Chaos) Heal() {
	c.mu.Lock()
	c.armed, c.slow, c.paused = false, false, false
	c.mu.Unlock()
	c.mend()
}

// mend ends a partition.
func (c *Chaos) mend() {
	c.mu.Lock()
	cut := c.cut
	c.cut = nil
	all := slices.Collect(maps.Keys(c.conns))
	c.mu.Unlock()
	if cut == nil {
		return
	}
	var wg sync.WaitGroup
	for _, cc := range all { // at once: the reader of one may be closed by the flush of another
		wg.Go(cc.flush)
	}
	wg.Wait()
	close(cut)
}

// Sever makes a partition now.
func (c *Chaos) Sever() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sever()
}

// sever needs mu.
func (c *Chaos) sever() {
	if c.cut == nil {
		c.cut = make(chan struct{})
	}
}

// severed returns the partition's channel, or nil.
func (c *Chaos) severed() chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cut
}

// Hits returns how many frames rules have hit.
func (c *Chaos) Hits() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hits
}

// Trace calls f for every frame that is written, before any fault. conn counts the
// connections: both ends of one have the same number if they are dialled one at a time.
func (c *Chaos) Trace(f func(conn int, to Direction, step Step, frame []byte)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trace = f
}

// counter counts the frames of a step that are written from now on.
func (c *Chaos) counter(step Step) (count func() int) {
	var n atomic.Int32
	c.Trace(func(_ int, _ Direction, written Step, _ []byte) {
		if step.matches(written) {
			n.Add(1)
		}
	})
	return func() int { return int(n.Load()) }
}

// Dial wraps the receiver's end.
func (c *Chaos) Dial(ctx context.Context, addr string) (net.Conn, error) {
	for cut := c.severed(); cut != nil; cut = c.severed() {
		select {
		case <-cut:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
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
	cc := &chaosConn{Conn: conn, c: c, to: to, gone: make(chan struct{}), out: make(chan struct{}, 1)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns[cc] = struct{}{}
	cc.n = c.count[to]
	c.count[to]++
	return cc
}

// judge decides what happens to the frame.
func (c *Chaos) judge(cc *chaosConn, step Step, frame []byte) (act Action, delay time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.trace != nil {
		c.trace(cc.n, cc.to, step, frame)
	}
	if c.armed && c.rule.Step.matches(step) && c.rule.To == cc.to {
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
	case Partition, Blip:
		c.sever()
		if act == Blip {
			time.AfterFunc(c.Blip, c.mend)
		}
	}
	if c.paused {
		cc.muted = true // for good: Heal is for new connections
	}
	if c.slow {
		delay = c.Delay
	}
	return act, delay
}

// killAll closes every connection, as the end of a process does.
func (c *Chaos) killAll() {
	c.mu.Lock()
	all := slices.Collect(maps.Keys(c.conns))
	c.mu.Unlock()
	for _, cc := range all {
		cc.Close()
	}
}
