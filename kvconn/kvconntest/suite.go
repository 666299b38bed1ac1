package kvconntest

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
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
// fences, negotiation, and every fault at every step of the protocol. After
// each, no wrong byte was believed, every failure was typed and in time, both
// ledgers are empty, no goroutine is left, and both peers still work.
func Run(t *testing.T, f Factory) {
	f.Shrink = max(f.Shrink, 1)
	before := runtime.NumGoroutine()
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
		for _, p := range phases {
			for _, a := range p.actions() {
				r := Rule{Step: p.step, To: p.to, Nth: p.nth, Action: a}
				f.leaf(t, fmt.Sprintf("fault/%s/%s", p.name, a), p.tune, func(t *testing.T, f Factory, w *World, ch *Chaos) { faultCase(t, w, ch, p, r) })
			}
		}
	})
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

// phase is one step of the protocol at which faults are made.
type phase struct {
	name string
	step Step
	to   Direction
	nth  int
	tune func(r, s *kvconn.Config)
	// fatal says that losing or repeating this frame may fail the ticket; for
	// the others it must be repaired.
	fatal bool
}

var everyAction = []Action{Kill, Pause, Stall, Drop, Duplicate, Reorder, Truncate, FlipHead, FlipBody, FlipTail, Slow}

func (p phase) actions() []Action {
	return slices.DeleteFunc(slices.Clone(everyAction), func(a Action) bool {
		return p.step == Banner && (a == Reorder || a == FlipHead) // text has neither
	})
}

func twoBulk(r, s *kvconn.Config) { r.BulkConns = 2 }

// batches makes frames of about three blocks each.
func batches(r, s *kvconn.Config) {
	s.BatchBytes = 3*s.Identity.Layout.RowsBytes(0, s.Identity.Layout.BlockTokens) - 1
}

var phases = []phase{
	{name: "handshake-banner-r", step: Banner, to: ToSender, fatal: true},
	{name: "handshake-banner-s", step: Banner, to: ToReceiver, fatal: true},
	{name: "handshake-hello-r", step: Hello, to: ToSender, fatal: true},
	{name: "handshake-hello-s", step: Hello, to: ToReceiver, fatal: true},
	{name: "handshake-ready", step: Ready, to: ToSender, fatal: true},
	{name: "handshake-bind", step: Bind, to: ToSender, fatal: true},
	{name: "handshake-bound", step: Bound, to: ToReceiver, fatal: true},
	{name: "ticket", step: Ticket, to: ToSender, fatal: true},
	{name: "ticket-accepted", step: Accepted, to: ToReceiver, fatal: true},
	{name: "data-first", step: Unit, to: ToReceiver},
	{name: "data-middle", step: Unit, to: ToReceiver, nth: 7},
	{name: "data-last", step: Unit, to: ToReceiver, nth: 14},
	{name: "data-two-conns", step: Unit, to: ToReceiver, nth: 3, tune: twoBulk},
	{name: "data-batch", step: Batch, to: ToReceiver, nth: 2, tune: batches},
	{name: "data-sent", step: Sent, to: ToReceiver},
	{name: "data-sent-two-conns", step: Sent, to: ToReceiver, tune: twoBulk},
	{name: "commit", step: Commit, to: ToReceiver, fatal: true},
	{name: "release", step: Received, to: ToSender, fatal: true},
	{name: "idle-ping", step: Ping, to: ToSender, fatal: true},
	{name: "idle-pong", step: Pong, to: ToReceiver, fatal: true},
	{name: "idle-beat", step: Beat, to: ToReceiver},
}

// faultCase makes one fault during a transfer, then heals and transfers again.
func faultCase(t *testing.T, w *World, ch *Chaos, p phase, r Rule) {
	idle := strings.HasPrefix(p.name, "idle")
	ch.Delay = w.RConfig.KeepAlive / 50
	limit := w.RConfig.HandshakeTimeout + w.RConfig.TicketTimeout + 2*w.RConfig.PeerSilence
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if idle {
		if err := w.Fetch(ctx, w.Spec("before", 50, 18, 0)); err != nil {
			t.Fatalf("before the fault: %v", err)
		}
	}
	ch.Arm(r)
	start := time.Now()
	if idle {
		time.Sleep(3 * w.RConfig.KeepAlive)
	}
	err := w.Fetch(ctx, w.Spec("during", 100, 18, 16))
	took := time.Since(start)
	if ctx.Err() != nil {
		t.Errorf("not over after %v", took)
	}
	for by := time.Now().Add(w.RConfig.PeerSilence); ch.Hits() == 0; time.Sleep(w.RConfig.KeepAlive / 4) {
		if time.Now().After(by) {
			if p.step != Sent { // a ticket that is received first needs no marks
				t.Error("no frame was hit")
			}
			break
		}
	}
	if err == nil && slices.Contains([]Step{Received, Sent, Ping, Pong, Beat}, p.step) { // it may show only now
		time.Sleep(w.RConfig.PeerSilence + 2*w.RConfig.KeepAlive)
	}
	allowed := []ticket.Outcome{ticket.Done, ticket.Dead, ticket.Late, ticket.Corrupt, ticket.Incompatible}
	if got := kvconn.OutcomeOf(err, "untyped"); !slices.Contains(allowed, got) {
		t.Errorf("outcome %q: %v", got, err)
	}
	repaired := slices.Contains([]Action{Drop, Duplicate, Reorder, Slow}, r.Action) && !p.fatal
	repaired = repaired || r.Action == FlipTail && (p.step == Unit || p.step == Batch) || r.Action == Slow
	if repaired && err != nil {
		t.Errorf("must be repaired, not failed: %v", err)
	}
	w.Empty(time.Second)
	ch.Heal()
	if err := w.settledFetch(ctx, t); err != nil {
		t.Errorf("peers do not work after the fault: %v", err)
	}
}

// settledFetch transfers once more on the healed transport. A session that
// the fault has wounded may have to be found dead first.
func (w *World) settledFetch(_ context.Context, t *testing.T) error {
	ctx, cancel := context.WithTimeout(t.Context(), 4*w.RConfig.TicketTimeout)
	defer cancel()
	var err error
	for n := range 3 {
		if err = w.Fetch(ctx, w.Spec(fmt.Sprintf("after-%d", n), int32(200+n), 18, 32+8*n)); err == nil {
			return nil
		}
	}
	return err
}
