package kvconntest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

type leafCase struct {
	name string
	tune func(r, s *kvconn.Config)
	run  func(t *testing.T, f Factory, w *World, ch *Chaos)
	// direct cases watch the order of writes, which buffers on the way hide.
	direct bool
	// loses cases lose frames and want the rows again.
	loses bool
	// waits says that the case waits for a deadline, or is about one.
	waits bool
}

// transfers are the cases without faults of the path.
var transfers = []leafCase{
	{name: "one", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		for _, n := range []int{1, 3, 4, 5, 40} {
			if err := w.Fetch(t.Context(), w.Spec(fmt.Sprintf("n-%d", n), int32(n), n, 20*(n%7))); err != nil {
				t.Errorf("%d tokens: %v", n, err)
			}
			w.Pool.Reclaim(w.Pool.Dest(20*(n%7), (n+3)/4))
		}
		w.Empty(w.RConfig.PeerSilence)
		for _, o := range w.Ends() {
			if o != ticket.Done {
				t.Errorf("sender saw %q", o)
			}
		}
	}},
	{name: "batches", tune: batches, run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		for i, n := range []int{1, 7, 24, 41} {
			if err := w.Fetch(t.Context(), w.Spec(fmt.Sprintf("n-%d", n), int32(n), n, 16*i)); err != nil {
				t.Errorf("%d tokens: %v", n, err)
			}
		}
	}},
	{name: "many", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		var wg sync.WaitGroup
		for n := range 24 {
			spec := w.Spec(fmt.Sprintf("many-%d", n), int32(1000*n), 37, 10*n)
			wg.Go(func() {
				if err := w.Fetch(t.Context(), spec); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}},
	{name: "set-delta", run: setDelta},
	{name: "resume", run: resume},
	{name: "revoke-is-a-fence", run: revokeFence},
	{name: "revoke-with-a-stalled-link", waits: true, run: revokeStalled},
	{name: "acknowledged-when-quiet", run: acknowledged},
	{name: "slow-link-and-long-partition", waits: true, run: longPartition},
	{name: "sender-fails", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		for _, o := range []ticket.Outcome{ticket.NoSpace, ticket.Late, ticket.Refused, ticket.Corrupt, ticket.Cancelled} {
			w.Answer = func(ctx context.Context, g *kvconn.Outgoing, src *Source) { g.Fail(o, "as told") }
			err := w.Fetch(t.Context(), w.Spec("fails", 1, 9, 0))
			if kvconn.OutcomeOf(err, "") != o {
				t.Errorf("want %s, have %v", o, err)
			}
		}
	}},
	{name: "model-fails", run: modelFails},
	{name: "source-fails", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		w.Answer = func(ctx context.Context, g *kvconn.Outgoing, src *Source) {
			src.Hook = func(layer, index int) error {
				if layer == 1 {
					return errors.New("cannot read")
				}
				return nil
			}
			w.Compute(ctx, g, src)
		}
		if err := w.Fetch(t.Context(), w.Spec("fails", 1, 9, 0)); kvconn.OutcomeOf(err, "") != ticket.Corrupt {
			t.Errorf("want corrupt, have %v", err)
		}
	}},
	{name: "always-corrupt", run: alwaysCorrupt},
	{name: "handler-mute", waits: true, run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		w.Answer = func(ctx context.Context, g *kvconn.Outgoing, src *Source) { <-ctx.Done() }
		start := w.Clock.Now()
		spec := w.Spec("mute", 1, 9, 0)
		spec.Deadline = time.Now().Add(w.RConfig.PeerSilence)
		if err := w.Fetch(t.Context(), spec); kvconn.OutcomeOf(err, "") != ticket.Late {
			t.Errorf("want late, have %v", err)
		}
		if took := w.Clock.Since(start); took > 2*w.RConfig.PeerSilence {
			t.Errorf("took %v", took)
		}
	}},
	{name: "slow-compute-is-not-death", waits: true, run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		w.Answer = func(ctx context.Context, g *kvconn.Outgoing, src *Source) {
			time.Sleep(2 * w.RConfig.PeerSilence)
			w.Compute(ctx, g, src)
		}
		if err := f.tries(w, 1, func(int) error { return w.Fetch(t.Context(), w.Spec("slow", 1, 9, 0)) }); err != nil {
			t.Error(err)
		}
	}},
	{name: "drain", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		if err := w.Fetch(t.Context(), w.Spec("first", 1, 9, 0)); err != nil {
			t.Error(err)
		}
		if err := w.Server.Drain(t.Context()); err != nil {
			t.Error(err)
		}
		if err := w.Fetch(t.Context(), w.Spec("second", 1, 9, 8)); kvconn.OutcomeOf(err, "") != ticket.NoSpace {
			t.Errorf("want no_space, have %v", err)
		}
	}},
	{name: "double-close", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		if err := w.Fetch(t.Context(), w.Spec("first", 1, 9, 0)); err != nil {
			t.Error(err)
		}
		for range 2 {
			if err := w.Receiver.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if err := w.Fetch(t.Context(), w.Spec("second", 1, 9, 8)); kvconn.OutcomeOf(err, "") != ticket.Cancelled {
			t.Errorf("want cancelled, have %v", err)
		}
	}},
	{name: "no-listener", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		w.stop()
		w.wg.Wait()
		if err := w.Fetch(t.Context(), w.Spec("first", 1, 9, 0)); kvconn.OutcomeOf(err, "") != ticket.Dead {
			t.Errorf("want dead, have %v", err)
		}
	}},
	{name: "stranger", waits: true, run: stranger},
	{name: "no-room", tune: func(r, s *kvconn.Config) { s.MaxTickets = 1 }, run: noRoom},
	{name: "fair", direct: true, run: fair},
	{name: "marks-tell-what-was-lost", loses: true, tune: func(r, s *kvconn.Config) { r.RepairTimeout = time.Hour; r.BulkConns = 2 }, run: marks},
	{name: "idle-session-closes", tune: func(r, s *kvconn.Config) { r.IdleTimeout = 3 * r.KeepAlive }, run: idleCloses},
}

// setDelta moves exactly the blocks that the receiver does not have.
func setDelta(t *testing.T, f Factory, w *World, ch *Chaos) {
	var units int
	ch.Trace(func(_ int, to Direction, step Step, frame []byte) {
		if step.CarriesRows() {
			units++
		}
	})
	spec := w.Spec("delta", 7, 30, 0) // 8 blocks, the last one partly filled
	spec.Have = []bool{true, false, true, true, false, false, true, false}
	if err := w.Fetch(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	ch.Trace(nil)
	if want := 4 * w.RConfig.Identity.Layout.Layers(); units != want {
		t.Errorf("%d units moved, want %d", units, want)
	}
	spec = w.Spec("all", 7, 8, 16)
	spec.Have = []bool{true, true}
	if err := w.Fetch(t.Context(), spec); err != nil {
		t.Errorf("nothing to move: %v", err)
	}
	spec = w.Spec("tail", 7, 30, 24)
	spec.Have = []bool{7: true}
	if err := w.Fetch(t.Context(), spec); kvconn.OutcomeOf(err, "") != ticket.Refused {
		t.Errorf("have of a partly filled block: %v", err)
	}
}

// resume asks a second time for what a broken transfer has not brought.
func resume(t *testing.T, f Factory, w *World, ch *Chaos) {
	s, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
	check(t, err)
	spec := w.Spec("resume", 7, 30, 0)
	ch.Arm(Rule{Step: Rows, To: ToReceiver, Nth: 9, Action: Kill})
	in, err := s.Request(t.Context(), spec)
	check(t, err)
	if _, err = in.Wait(t.Context()); kvconn.OutcomeOf(err, "") != ticket.Dead {
		t.Fatalf("want dead, have %v", err)
	}
	check(t, in.Revoke(t.Context()))
	ch.Heal()
	done := in.Stored().Len()
	spec.Stored = in.Stored()
	s, err = w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
	check(t, err)
	in, err = s.Request(t.Context(), spec)
	check(t, err)
	c, err := in.Wait(t.Context())
	check(t, err)
	if want := 24 - done; c.Units != want {
		t.Errorf("%d units pushed, want %d", c.Units, want)
	}
	if err := w.Pool.Check(Seed(spec.Tokens), spec.Dest, 30, nil); err != nil {
		t.Error(err)
	}
}

// revokeFence revokes in the middle of a push and then watches the blocks.
func revokeFence(t *testing.T, f Factory, w *World, ch *Chaos) {
	w.Answer = func(ctx context.Context, g *kvconn.Outgoing, src *Source) {
		if g.Accept(src) != nil {
			return
		}
		for l := range 3 {
			for i := range g.Ticket().Dest {
				g.Push(l, []int{i})
				if i%5 == 4 {
					time.Sleep(w.RConfig.KeepAlive / 50)
				}
			}
		}
		<-ctx.Done()
		g.Push(0, []int{0}) // late: does nothing
		g.Commit(nil)
	}
	for n := range 6 {
		s, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
		check(t, err)
		spec := w.Spec("revoked", int32(n), 160, 0)
		in, err := s.Request(t.Context(), spec)
		check(t, err)
		time.Sleep(time.Duration(n) * w.RConfig.KeepAlive / 30)
		check(t, in.Revoke(t.Context()))
		w.Pool.Reclaim(spec.Dest)
		before := w.Pool.Stores()
		if _, err := in.Wait(t.Context()); kvconn.OutcomeOf(err, "") != ticket.Cancelled {
			t.Errorf("want cancelled, have %v", err)
		}
		w.Empty(w.RConfig.PeerSilence)
		if now := w.Pool.Stores(); now != before {
			t.Errorf("%d stores after the fence", now-before)
		}
	}
	for _, o := range w.Ends() {
		if o != ticket.Cancelled {
			t.Errorf("sender saw %q", o)
		}
	}
}

// longPartition: on a link with 20 ms of delay, a partition of five silences in
// the middle of transfers costs them, and nothing else.
func longPartition(t *testing.T, f Factory, w *World, ch *Chaos) {
	ch.Delay = 20 * time.Millisecond
	ch.Arm(Rule{Step: Banner, To: ToSender, Action: Slow})
	f.friend(t, w, "before", 0)
	var wg sync.WaitGroup
	var severed atomic.Bool
	start := time.Now()
	for n := range 4 {
		wg.Go(func() {
			// A starved machine may sever the link late: what is whole before goes again.
			for i := int32(0); ; i++ {
				over := severed.Load()
				err := w.Fetch(t.Context(), w.Spec("cut", 4*i+int32(n), 40, 16+10*n))
				if err == nil && !over {
					continue
				}
				if o := kvconn.OutcomeOf(err, "untyped"); o != ticket.Dead && o != ticket.Late {
					t.Errorf("cut off in the middle: %v", err)
				}
				return
			}
		})
	}
	time.Sleep(w.RConfig.KeepAlive / 4)
	ch.Sever()
	severed.Store(true)
	wg.Wait()
	w.Empty(w.long(time.Second))
	time.Sleep(time.Until(start.Add(5 * w.RConfig.PeerSilence)))
	ch.Heal()
	healed := w.Clock.Now()
	check(t, f.settledFetch(t, w))
	if back := w.Clock.Since(healed); back > w.long(recovery) {
		t.Errorf("worked again %v after the heal", back)
	}
}

// acknowledged: the sender says that it has stopped once it has, and not while
// a load runs.
func acknowledged(t *testing.T, f Factory, w *World, ch *Chaos) {
	var acks atomic.Int32
	ch.Trace(func(_ int, _ Direction, step Step, _ []byte) {
		if step == RevokeAck {
			acks.Add(1)
		}
	})
	inside, leave := make(chan struct{}, 99), make(chan struct{})
	w.Answer = func(ctx context.Context, g *kvconn.Outgoing, src *Source) {
		src.Hook = func(layer, index int) error {
			inside <- struct{}{}
			<-leave
			return nil
		}
		if g.Accept(src) == nil {
			g.Push(0, []int{0})
			<-ctx.Done()
		}
	}
	s, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
	check(t, err)
	in, err := s.Request(t.Context(), w.Spec("revoked", 1, 9, 0))
	check(t, err)
	<-inside
	revoked := make(chan error, 1)
	go func() { revoked <- in.Revoke(t.Context()) }() // over shared memory it waits for the acknowledgement
	time.Sleep(w.RConfig.KeepAlive)
	if n := acks.Load(); n > 0 {
		t.Error("acknowledged while a load was running")
	}
	close(leave)
	check(t, <-revoked)
	w.Empty(w.RConfig.PeerSilence)
	ch.Trace(nil)
	if n := acks.Load(); n != 1 {
		t.Errorf("%d acknowledgements", n)
	}
}

// revokeStalled: a link that takes no bytes does not hold the fence up.
func revokeStalled(t *testing.T, f Factory, w *World, ch *Chaos) {
	s, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
	check(t, err)
	ch.Arm(Rule{Step: Rows, To: ToReceiver, Nth: 2, Action: Stall})
	spec := w.Spec("stalled", 1, 160, 0)
	in, err := s.Request(t.Context(), spec)
	check(t, err)
	time.Sleep(w.RConfig.KeepAlive / 2)
	start := w.Clock.Now()
	check(t, in.Revoke(t.Context()))
	if took := w.Clock.Since(start); took > w.RConfig.KeepAlive {
		t.Errorf("revoke took %v", took)
	}
	w.Pool.Reclaim(spec.Dest)
	w.Empty(2 * w.RConfig.PeerSilence)
}

// alwaysCorrupt: a unit that is wrong each time ends the ticket after the
// bounded number of tries, and nothing of it is stored.
func alwaysCorrupt(t *testing.T, f Factory, w *World, ch *Chaos) {
	resends := 0
	ch.Trace(func(_ int, to Direction, step Step, frame []byte) {
		if step == Resend {
			resends++
		}
	})
	ch.Arm(Rule{Step: Rows, To: ToReceiver, Times: 1 << 20, Action: FlipTail})
	err := w.Fetch(t.Context(), w.Spec("corrupt", 1, 4, 0))
	ch.Trace(nil)
	if kvconn.OutcomeOf(err, "") != ticket.Corrupt || !errors.Is(err, kvconn.ErrDigest) {
		t.Errorf("want corrupt by digest, have %v", err)
	}
	if n := w.Pool.Stores(); n != 0 {
		t.Errorf("%d stores", n)
	}
	if most := 3 * w.RConfig.Resends; resends == 0 || resends > most {
		t.Errorf("%d resends, want 1..%d", resends, most)
	}
	ch.Heal()
	if err := w.Fetch(t.Context(), w.Spec("again", 1, 4, 8)); err != nil {
		t.Error(err)
	}
}

// noRoom: a ticket too many is refused as no_space, by whichever side is full.
func noRoom(t *testing.T, f Factory, w *World, ch *Chaos) {
	hold := make(chan struct{})
	w.Answer = func(ctx context.Context, g *kvconn.Outgoing, src *Source) {
		<-hold
		w.Compute(ctx, g, src)
	}
	s, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
	check(t, err)
	spec := w.Spec("first", 1, 9, 0)
	in, err := s.Request(t.Context(), spec)
	check(t, err)
	second, err := s.Request(t.Context(), w.Spec("second", 1, 9, 8))
	check(t, err)
	if _, err := second.Wait(t.Context()); kvconn.OutcomeOf(err, "") != ticket.NoSpace {
		t.Errorf("want no_space, have %v", err)
	}
	close(hold)
	if _, err := in.Wait(t.Context()); err != nil {
		t.Error(err)
	}
}

// fair: a short ticket does not wait for a long one that came before it. Both
// have queued all that they have before the sender's first block goes out.
func fair(t *testing.T, f Factory, w *World, ch *Chaos) {
	var queued sync.WaitGroup
	queued.Add(2)
	begun, both := make(chan struct{}), make(chan struct{})
	var once sync.Once
	w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *Source) {
		src.Hook = func(layer, index int) error {
			once.Do(func() { close(begun) })
			<-both
			return nil
		}
		w.Compute(ctx, o, src)
		queued.Done()
	}
	var order []uint64 // the tickets of the frames with rows
	ch.Trace(func(_ int, _ Direction, step Step, frame []byte) {
		if step.CarriesRows() {
			order = append(order, binary.LittleEndian.Uint64(frame[headerSize:]))
		}
	})
	s, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
	check(t, err)
	long, err := s.Request(t.Context(), w.Spec("long", 1, 240, 0))
	check(t, err)
	<-begun
	short, err := s.Request(t.Context(), w.Spec("short", 1, 8, 100))
	check(t, err)
	queued.Wait()
	close(both)
	for _, in := range []*kvconn.Incoming{short, long} {
		if _, err := in.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	}
	ch.Trace(nil)
	if other := slices.IndexFunc(order, func(id uint64) bool { return id != order[0] }); other < 0 || order[len(order)-1] != order[0] {
		t.Errorf("the short ticket had to wait for the long one: %d", order)
	}
}

// marks: a lost unit is asked for without waiting for a timeout.
func marks(t *testing.T, f Factory, w *World, ch *Chaos) {
	for n := range 4 {
		ch.Arm(Rule{Step: Rows, To: ToReceiver, Nth: 3 * n, Times: 2, Action: Drop})
		if err := w.Fetch(t.Context(), w.Spec("lost", int32(n), 20, 8*n)); err != nil {
			t.Error(err)
		}
	}
	if n := w.Value(w.RMetrics, "xpyd_kvconn_resent_units_total", "receiver"); n < 8 {
		t.Errorf("%v units asked for again, 8 were lost", n)
	}
}

// idleCloses: a session without tickets ends in order, and Open makes another.
func idleCloses(t *testing.T, f Factory, w *World, ch *Chaos) {
	check(t, w.Fetch(t.Context(), w.Spec("first", 1, 9, 0)))
	s, err := w.Receiver.Open(t.Context(), w.Addr, w.SConfig.Identity.PeerID)
	check(t, err)
	<-s.Done()
	const ends = "xpyd_kvconn_session_ends_total"
	for _, reg := range []*prometheus.Registry{w.RMetrics, w.SMetrics} {
		for start := w.Clock.Now(); w.Value(reg, ends, "") == 0 && w.Clock.Since(start) < w.RConfig.PeerSilence; {
			time.Sleep(w.RConfig.KeepAlive / 4)
		}
		if n, all := w.Value(reg, ends, "done"), w.Value(reg, ends, ""); n < 1 || n != all {
			t.Errorf("%v orderly ends of %v", n, all)
		}
	}
	check(t, w.Fetch(t.Context(), w.Spec("second", 1, 9, 8)))
}

// modelFails: it is the ticket's end, and the session goes on.
func modelFails(t *testing.T, f Factory, w *World, ch *Chaos) {
	w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *Source) {
		if o.Ticket().RequestID == "invalid" {
			o.Fail(ticket.Invalid, "no number")
			return
		}
		w.Compute(ctx, o, src)
	}
	s, err := w.Receiver.Open(t.Context(), w.Addr, w.SConfig.Identity.PeerID)
	check(t, err)
	if err := w.Fetch(t.Context(), w.Spec("invalid", 1, 9, 0)); kvconn.OutcomeOf(err, "") != ticket.Invalid {
		t.Errorf("want %s, have %v", ticket.Invalid, err)
	}
	select {
	case <-s.Done():
		t.Error("the session is over")
	default:
	}
	f.friend(t, w, "after", 8)
}

// stranger: connections that speak something else are shut out in time and
// harm nobody.
func stranger(t *testing.T, f Factory, w *World, ch *Chaos) {
	for _, say := range []string{"", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", wireBanner, "xpyd-kv 4-4\n\x04\x01\x00\x00\xff\xff\xff\xffaaaabbbb",
		"xpyd-kv 0-999999999999\n", "xpyd-kv 7-9\n", wireBanner + string(slices.Repeat([]byte{0}, 64))} {
		c := w.Raw(ch.Transport)
		check(t, c.SetDeadline(time.Now().Add(2*w.RConfig.HandshakeTimeout)))
		c.Write([]byte(say))
		buf := make([]byte, 4096)
		for {
			if _, err := c.Read(buf); err != nil {
				var ne interface{ Timeout() bool }
				if errors.As(err, &ne) && ne.Timeout() {
					t.Errorf("%q: still connected", say)
				}
				break
			}
		}
		c.Close()
	}
	if err := w.Fetch(t.Context(), w.Spec("friend", 1, 9, 0)); err != nil {
		t.Error(err)
	}
}
