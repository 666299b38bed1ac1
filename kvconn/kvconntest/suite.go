package kvconntest

import (
	"cmp"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kvconn"
)

// Factory makes the transport under test.
type Factory struct {
	// New returns a transport and an address to listen on.
	New func(t testing.TB) (tr kvconn.Transport, addr string)
	// Memory returns size bytes that the transport's two ends can share, and their
	// descriptor, until the test ends; nil: the transport shares no memory.
	Memory func(t testing.TB, size int) (fd int, mem []byte)
	// Ranks divides the receiver's pool among so many tensor-parallel ranks; 0 is 1.
	Ranks int
	// SenderRanks, if more than 1: the sender's blocks are no one run either.
	SenderRanks int
	// Device replaces New: a transport that pushes between two GPUs, and the GPUs.
	Device func(t testing.TB) (kvconn.Transport, GPUs)
	// Bubble runs every case under testing/synctest, with a fake clock: for a
	// transport made of channels and timers alone.
	Bubble bool
	// Relay injects faults between the peers, which keep the transport's own
	// connections. Otherwise faults happen in the connections themselves, which then
	// support no system calls of a socket.
	Relay bool
	// InStep: a lost frame leaves the two ends out of step and ends the session; no
	// row is sent again.
	InStep bool
	// Joined: a session opens only once the two ends of the memory between the pools
	// have met, within three times HandshakeTimeout, and blocks have one size.
	Joined bool
	// Shrink divides the default deadlines, to keep real-time runs short.
	Shrink int
	// Few leaves out hostile peers and seven faults of eight: a second factory
	// of a transport need not repeat them.
	Few bool
	// AtOnce bounds the cases without a bubble that run in parallel, 0 for 24: the
	// handshakes' computing must not eat up each other's deadlines.
	AtOnce int

	private bool    // the receiver shares no memory, whatever the transport could
	clock   *Clock  // of cases without a bubble
	stretch float64 // of their deadlines; see Clock.stretch
	turns   *turns
	gpus    GPUs // of Device
}

// realTime prepares a factory for cases on a real clock.
func (f Factory) realTime(t *testing.T) Factory {
	f.Shrink, f.AtOnce = max(f.Shrink, 1), cmp.Or(f.AtOnce, 24)
	if UnderRace {
		f.Shrink = 1
	}
	f.clock = NewClock(t)
	f.turns = &turns{clock: f.clock, slots: make(chan struct{}, f.AtOnce)}
	return f
}

// turns limits the cases that run at once, to fewAtOnce on a slow machine.
type turns struct {
	clock   *Clock
	slots   chan struct{}
	running atomic.Int32
}

const fewAtOnce = 4

func (q *turns) acquire() {
	q.slots <- struct{}{}
	for q.running.Add(1) > fewAtOnce && q.clock.Rate() < 0.5 {
		q.running.Add(-1)
		time.Sleep(lapSleep)
	}
}

func (q *turns) release() {
	q.running.Add(-1)
	<-q.slots
}

// Run checks a transport: ordinary transfers, fences, negotiation, hostile peers,
// and every fault at every step of the protocol. After each case no wrong byte was
// believed, every failure was typed and in time, both ledgers are empty, no
// goroutine is left, and both peers still work. Verbose runs print the faults as a
// table.
func Run(t *testing.T, f Factory) {
	before := runtime.NumGoroutine()
	f.Shrink, f.stretch = max(f.Shrink, 1), 1
	if !f.Bubble {
		f = f.realTime(t)
	}
	m := matrix{rows: phases}
	t.Run("case", func(t *testing.T) {
		for _, g := range []struct {
			name  string
			cases []leafCase
		}{{"transfer", transfers}, {"handshake", negotiations}, {"fleet", fleets}} {
			for _, c := range g.cases {
				if c.direct && f.Relay || c.loses && f.InStep {
					continue
				}
				tune := c.tune
				if !c.waits {
					tune = f.patient(tune)
				}
				f.leaf(t, g.name+"/"+c.name, tune, c.run)
			}
		}
		hostile := func(name string, body caseFunc) { f.leaf(t, name, nil, body) }
		if !f.Few {
			hostileReceiverCases(hostile)
			alone := f
			alone.private = true
			hostileSenderCases(func(name string, body caseFunc) { alone.leaf(t, name, nil, body) }, hostile)
		}
		if f.Memory != nil {
			hostileSharedCases(hostile)
		}
		for i, p := range phases {
			for j, a := range p.actions() {
				if f.Few && (i+j)%8 > 0 || UnderRace && !f.Bubble && (i+j)%3 > 0 { // the whole runs without the detector
					continue
				}
				f.leaf(t, fmt.Sprintf("fault/%s/%s", p.name, a), p.tune, func(t *testing.T, f Factory, w *World, ch *Chaos) {
					v := faultCase(t, f, w, ch, p, a)
					m.note(t, p.name, a, v)
					w.late = v.late
				})
			}
		}
	})
	t.Logf("%s: faults, and the outcome and time of the transfer they hit:\n%s", t.Name(), &m)
	if !f.Bubble { // a bubble fails by itself when a goroutine stays
		f.settle(t, before)
	}
}

// patient lengthens, on a real clock, the deadlines of cases that wait for none of
// them: a loaded machine must not pass for a silent peer.
func (f Factory) patient(tune func(r, s *kvconn.Config)) func(r, s *kvconn.Config) {
	return func(r, s *kvconn.Config) {
		if !f.Bubble {
			for _, c := range []*kvconn.Config{r, s} {
				for _, d := range []*time.Duration{&c.DialTimeout, &c.HandshakeTimeout, &c.PeerSilence, &c.AcceptTimeout, &c.TicketTimeout, &c.RevokeTimeout} {
					*d *= patience
				}
			}
		}
		if tune != nil {
			tune(r, s)
		}
	}
}

// leaf runs one case in a world of its own.
func (f Factory) leaf(t *testing.T, name string, tune func(r, s *kvconn.Config), run caseFunc) {
	t.Run(name, func(t *testing.T) {
		body := func(t *testing.T, f Factory) error {
			f, tr, addr := f.transport(t)
			ch := NewChaos(tr)
			path, between := kvconn.Transport(ch), &relay{Transport: tr, ch: ch, addr: addr}
			if f.Relay {
				path = between
			}
			w := newWorld(t, path, addr, f, tune)
			run(t, f, w, ch)
			ch.Heal()
			w.Empty(w.RConfig.PeerSilence)
			w.Close()
			between.wg.Wait()
			return w.late
		}
		if f.Bubble {
			synctest.Test(t, func(t *testing.T) { check(t, body(t, f)) })
		} else {
			t.Parallel()
			f.patiently(t, body)
		}
	})
}

// patiently runs a case, and again with longer deadlines while something took too
// long: a machine may have become slow after the case began; a defect stays.
func (f Factory) patiently(t *testing.T, body func(*testing.T, Factory) error) {
	f.turns.acquire()
	defer f.turns.release()
	f.stretch = f.clock.stretch()
	for {
		late := body(t, f)
		if late == nil {
			return
		}
		if f.stretch >= mostStretch {
			t.Fatal(late)
		}
		f.stretch = min(4*f.stretch, mostStretch)
		t.Logf("once more, deadlines %.1f times as long: %v", f.stretch, late)
	}
}

// settle waits for the goroutine count to come back.
func (f Factory) settle(t *testing.T, before int) {
	before += 2 // the clock's
	for start := f.clock.Now(); f.clock.Since(start) < time.Second; time.Sleep(5 * time.Millisecond) {
		if runtime.NumGoroutine() <= before {
			return
		}
	}
	buf := make([]byte, 1<<20)
	t.Errorf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
}
