package kvconntest

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/xpyd/xpyd/kvconn"
)

// replayWait bounds how long a recorded peer waits for a live one.
const replayWait = 20 * time.Second

// player plays one side of a recording to a live other side. It sends each recorded frame
// after all that the other side had sent before it, and compares what the live side sends
// with the recording. It renews what differs from run to run: the session key, the
// tickets' tags, and the sequence numbers, which pings shift.
type player struct {
	rec  Recording
	side Direction // the frames that this side writes

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at every change
	conns   map[int]*playConn
	heard   map[string][][]byte // bodies by key
	key     [16]byte            // of the latest hello
	secrets map[uint64][16]byte // of the tickets since
	wg      sync.WaitGroup      // readers
}

type playConn struct {
	*RawConn
	write sync.Mutex
}

func newPlayer(rec Recording, side Direction) *player {
	return &player{rec: rec, side: side, changed: make(chan struct{}), conns: map[int]*playConn{},
		heard: map[string][][]byte{}, secrets: map[uint64][16]byte{}}
}

// ReplaySender plays the recorded sender on ln until ctx ends or all is said.
func ReplaySender(ctx context.Context, ln net.Listener, rec Recording) error {
	p := newPlayer(rec, ToReceiver)
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for n := 0; ; n++ {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			p.converse(n, c)
		}
	})
	err := p.play(ctx, nil)
	if err == nil {
		<-ctx.Done() // the live side may still read
	}
	ln.Close()
	accepting.Wait()
	p.close()
	return err
}

// ReplayReceiver plays the recorded receiver against addr; over returns when the live
// sender has nothing more to do.
func ReplayReceiver(ctx context.Context, tr kvconn.Transport, addr string, rec Recording, over func()) error {
	p := newPlayer(rec, ToSender)
	err := p.play(ctx, func(n int) error {
		c, err := tr.Dial(ctx, addr)
		if err != nil {
			return err
		}
		p.converse(n, c)
		return nil
	})
	if err == nil {
		over()
	}
	p.close()
	return err
}

// converse starts the reader of connection n.
func (p *player) converse(n int, c net.Conn) {
	pc := &playConn{RawConn: NewRawConn(c)}
	p.update(func() { p.conns[n] = pc })
	p.wg.Go(func() {
		line, err := pc.r.ReadString('\n')
		if err != nil {
			return
		}
		p.update(func() { p.hear(n, Frame{Step: Banner, Body: []byte(line)}) })
		for {
			f, err := pc.Next()
			if err != nil {
				return // the script says whether that was too early
			}
			if f.Step == Ping {
				pc.write.Lock()
				pc.Send(Pong, nil)
				pc.write.Unlock()
			}
			p.update(func() { p.hear(n, f) })
		}
	})
}

func (p *player) update(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	close(p.changed)
	p.changed = make(chan struct{})
}

// hear notes a frame of the live side; needs mu.
func (p *player) hear(conn int, f Frame) {
	switch f.Step {
	case Hello:
		p.key = HelloSession(f.Body) // zero from a receiver; ours is said by say
		clear(p.secrets)
	case Ticket:
		p.secrets[binary.LittleEndian.Uint64(f.Body)] = [16]byte(f.Body[8:24])
	}
	k := identify(conn, f)
	p.heard[k] = append(p.heard[k], f.Body)
}

// identify names a frame by its subject. Units may take any connection.
func identify(conn int, f Frame) string {
	switch f.Step {
	case Banner, Hello, Ready, Bind, Bound, Refuse, Goaway:
		return fmt.Sprintf("%s of connection %d", f.Step, conn)
	case Unit:
		return fmt.Sprintf("unit %x of ticket %x", f.Body[16:24], f.Body[:8])
	case Ping, Pong, Beat:
		return f.Step.String()
	}
	return fmt.Sprintf("%s of ticket %x", f.Step, f.Body[:8])
}

// play follows the recording. dial makes connection n; without it the live
// side dials.
func (p *player) play(ctx context.Context, dial func(n int) error) error {
	ctx, cancel := context.WithTimeout(ctx, replayWait)
	defer cancel()
	need, dialled := map[string]int{}, map[int]bool{}
	for n, r := range p.rec {
		f := Frame{Step: Banner, Body: r.Bytes}
		if r.Step != Banner {
			var err error
			if f, err = ParseFrame(r.Bytes); err != nil {
				return fmt.Errorf("frame %d: %w", n, err)
			}
		}
		if dial != nil && r.Step == Banner && !dialled[r.Conn] {
			dialled[r.Conn] = true
			if err := dial(r.Conn); err != nil {
				return err
			}
		}
		if r.To == p.side {
			if err := p.say(ctx, r.Conn, f); err != nil {
				return fmt.Errorf("frame %d, %s: %w", n, r.Step, err)
			}
			continue
		}
		switch r.Step {
		case Ping, Pong, Beat, Sent: // as time and luck have it
			continue
		}
		k := identify(r.Conn, f)
		if err := p.await(ctx, k, need[k], f); err != nil {
			return fmt.Errorf("frame %d, %s: %w", n, k, err)
		}
		need[k]++
	}
	return nil
}

// say sends a recorded frame with the live session's secrets.
func (p *player) say(ctx context.Context, conn int, f Frame) error {
	var c *playConn
	if err := p.until(ctx, func() bool { c = p.conns[conn]; return c != nil }); err != nil {
		return fmt.Errorf("no connection %d: %w", conn, err)
	}
	c.write.Lock()
	defer c.write.Unlock()
	body := bytes.Clone(f.Body)
	p.mu.Lock()
	switch f.Step {
	case Hello:
		if p.side == ToReceiver {
			p.key = HelloSession(body)
		}
	case Bind:
		copy(body, p.key[:])
	case Unit, Batch, Sent:
		id := binary.LittleEndian.Uint64(body)
		binary.LittleEndian.PutUint64(body[8:], UnitTag(p.secrets[id], p.key, id))
	}
	p.mu.Unlock()
	switch f.Step {
	case Banner:
		_, err := c.Write(body)
		return err
	case Pong: // each ping is answered when it comes
		return nil
	}
	c.Version = f.Version
	return c.Send(f.Step, body)
}

// await waits for the nth frame of a key and compares it with the recorded.
func (p *player) await(ctx context.Context, key string, n int, want Frame) error {
	var got []byte
	if err := p.until(ctx, func() bool {
		if len(p.heard[key]) > n {
			got = p.heard[key][n]
		}
		return len(p.heard[key]) > n
	}); err != nil {
		return fmt.Errorf("did not come: %w", err)
	}
	if a, b := plain(want.Step, got), plain(want.Step, want.Body); !bytes.Equal(a, b) {
		return fmt.Errorf("is\n%x, recorded was\n%x", a, b)
	}
	return nil
}

func (p *player) until(ctx context.Context, f func() bool) error {
	for {
		p.mu.Lock()
		ok, changed := f(), p.changed
		p.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// plain is a body without secrets, deadlines and the build's name, which differ from run
// to run.
func plain(step Step, body []byte) []byte {
	b := bytes.Clone(body)
	switch step {
	case Banner, Hello:
		return nil
	case Refuse: // the range of a newer build is another one: compare the field
		n := 4 + binary.LittleEndian.Uint32(b)
		return b[:n+4+binary.LittleEndian.Uint32(b[n:])]
	case Bind:
		clear(b[:16])
	case Ticket:
		clear(b[8:44])
	case Unit, Batch:
		clear(b[8:16])
	}
	return b
}

// close hangs up and waits for the readers.
func (p *player) close() {
	p.mu.Lock()
	for _, c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}
