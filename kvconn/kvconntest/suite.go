package kvconntest

import (
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kvconn"
)

// Factory makes the transport under test.
type Factory struct {
	// New returns a transport and an address to listen on.
	New func(t testing.TB) (tr kvconn.Transport, addr string)
	// Bubble runs every case under testing/synctest, with a fake clock. Only
	// a transport that is made of channels and timers can.
	Bubble bool
	// Relay makes the faults between the peers, which keep the transport's own
	// connections; else the connections themselves make them, and cannot be
	// used with the system calls of a socket.
	Relay bool
	// Shrink divides the default deadlines, to keep real-time runs short.
	// Cases without a bubble run in parallel: they wait more than they work.
	Shrink int
}

// Run checks the contract's invariants on a transport: ordinary transfers,
// fences, negotiation, hostile peers, and every fault at every step of the
// protocol. After each, no wrong byte was believed, every failure was typed
// and in time, both ledgers are empty, no goroutine is left, and both peers
// still work. Verbose runs print the faults as a table.
func Run(t *testing.T, f Factory) {
	f.Shrink = max(f.Shrink, 1)
	before := runtime.NumGoroutine()
	m := matrix{order: phases}
	t.Run("case", func(t *testing.T) {
		for _, c := range transfers {
			if c.direct && f.Relay {
				continue
			}
			f.leaf(t, "transfer/"+c.name, c.tune, c.run)
		}
		for _, c := range negotiations {
			f.leaf(t, "handshake/"+c.name, c.tune, c.run)
		}
		hostile := func(name string, body func(*testing.T, Factory, *World, *Chaos)) { f.leaf(t, name, nil, body) }
		hostileReceiverCases(hostile)
		hostileSenderCases(hostile)
		for _, p := range phases {
			for _, a := range p.actions() {
				f.leaf(t, fmt.Sprintf("fault/%s/%s", p.name, a), p.tune, func(t *testing.T, f Factory, w *World, ch *Chaos) { m.note(t, p.name, a, faultCase(t, w, ch, p, a)) })
			}
		}
	})
	t.Logf("faults, what the transfer they hit came to, and when:\n%s", &m)
	if !f.Bubble { // a bubble fails by itself when a goroutine stays
		settle(t, before)
	}
}

// leaf runs one case in a world of its own.
func (f Factory) leaf(t *testing.T, name string, tune func(r, s *kvconn.Config), run func(*testing.T, Factory, *World, *Chaos)) {
	t.Run(name, func(t *testing.T) {
		body := func(t *testing.T) {
			tr, addr := f.New(t)
			ch := NewChaos(tr)
			path, between := kvconn.Transport(ch), &relay{Transport: tr, ch: ch, addr: addr}
			if f.Relay {
				path = between
			}
			w := NewWorld(t, path, addr, f.Shrink, tune)
			run(t, f, w, ch)
			ch.Heal()
			w.Empty(w.RConfig.PeerSilence)
			w.Close()
			between.wg.Wait()
		}
		if f.Bubble {
			synctest.Test(t, body)
		} else {
			t.Parallel()
			body(t)
		}
	})
}

// settle waits for the goroutine count to come back.
func settle(t *testing.T, before int) {
	for range 200 {
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	buf := make([]byte, 1<<20)
	t.Errorf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
}
