package kvconntest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// caseFunc is one case, in a world of its own.
type caseFunc func(t *testing.T, f Factory, w *World, ch *Chaos)

type leafCase struct {
	name string
	tune func(r, s *kvconn.Config)
	run  caseFunc
	// direct cases watch the order of writes, which buffers on the way hide.
	direct bool
	// loses cases lose frames and want the rows again.
	loses bool
	// waits cases wait for a deadline, or are about one.
	waits bool
}

// transfers are the cases without faults of the path.
var transfers = []leafCase{
	{name: "rows", run: rows},
	{name: "one", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		for _, n := range []int{1, 3, 4, 5, 40} {
			w.expect(ticket.Done, w.Spec(fmt.Sprintf("n-%d", n), int32(n), n, 20*(n%7)))
			w.Pool.Reclaim(w.Pool.Dest(20*(n%7), (n+3)/4))
		}
		w.Empty(w.RConfig.PeerSilence)
		w.allEnded(ticket.Done)
	}},
	{name: "batches", tune: batches, run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		for i, n := range []int{1, 7, 24, 41} {
			w.expect(ticket.Done, w.Spec(fmt.Sprintf("n-%d", n), int32(n), n, 16*i))
		}
	}},
	{name: "many", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		var wg sync.WaitGroup
		for n := range 24 {
			spec := w.Spec(fmt.Sprintf("many-%d", n), int32(1000*n), 37, 10*n)
			wg.Go(func() { w.expect(ticket.Done, spec) })
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
		for _, o := range []ticket.Outcome{ticket.NoSpace, ticket.Late, ticket.Refused, ticket.Corrupt, ticket.Cancelled, ticket.Shed} {
			w.Answer = func(ctx context.Context, g *kvconn.Outgoing, src *Source) { g.Fail(o, "as told") }
			w.expect(o, w.Spec("fails", 1, 9, 0))
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
		w.expect(ticket.Corrupt, w.Spec("fails", 1, 9, 0))
	}},
	{name: "always-corrupt", run: alwaysCorrupt},
	{name: "handler-mute", waits: true, run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		w.Answer = func(ctx context.Context, g *kvconn.Outgoing, src *Source) { <-ctx.Done() }
		start := w.Clock.Now()
		spec := w.Spec("mute", 1, 9, 0)
		spec.Deadline = time.Now().Add(w.RConfig.PeerSilence)
		w.expect(ticket.Late, spec)
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
		w.expect(ticket.Done, w.Spec("first", 1, 9, 0))
		if err := w.Server.Drain(t.Context()); err != nil {
			t.Error(err)
		}
		w.expect(ticket.NoSpace, w.Spec("second", 1, 9, 8))
	}},
	{name: "double-close", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		w.expect(ticket.Done, w.Spec("first", 1, 9, 0))
		for range 2 {
			if err := w.Receiver.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		w.expect(ticket.Cancelled, w.Spec("second", 1, 9, 8))
	}},
	{name: "no-listener", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		w.stop()
		w.wg.Wait()
		w.expect(ticket.Dead, w.Spec("first", 1, 9, 0))
	}},
	{name: "stranger", waits: true, run: stranger},
	{name: "no-room", tune: func(r, s *kvconn.Config) { s.MaxTickets = 1 }, run: noRoom},
	{name: "fair", direct: true, run: fair},
	{name: "marks-tell-what-was-lost", loses: true, tune: func(r, s *kvconn.Config) { r.RepairTimeout = time.Hour; r.BulkConns = 2 }, run: marks},
	{name: "idle-session-closes", tune: func(r, s *kvconn.Config) { r.IdleTimeout = 3 * r.KeepAlive }, run: idleCloses},
}

// rows checks that rows come the way the transport is made for.
func rows(t *testing.T, f Factory, w *World, ch *Chaos) {
	placed, sent := 0, 0
	ch.Trace(func(conn int, to Direction, step Step, frame []byte) {
		switch step {
		case Placed, Pushed:
			placed++
		case Unit:
			sent++
		}
	})
	check(t, w.Fetch(t.Context(), w.Spec("rows", 1, 18, 0))) // 4 whole blocks and a part of one, of 3 layers
	ch.Trace(nil)
	want := 0
	switch {
	case f.Memory != nil:
		want = 12
	case f.Device != nil: // a device also pushes a part of a block
		want = 15
	}
	if placed != want || placed+sent != 15 {
		t.Errorf("%d blocks placed and %d sent, want %d placed of 15", placed, sent, want)
	}
}

// setDelta moves exactly the blocks that the receiver does not have.
func setDelta(t *testing.T, f Factory, w *World, ch *Chaos) {
	units := ch.counter(Rows)
	spec := w.Spec("delta", 7, 30, 0) // 8 blocks, the last one partly filled
	spec.Have = []bool{true, false, true, true, false, false, true, false}
	check(t, w.Fetch(t.Context(), spec))
	if n, want := units(), 4*w.RConfig.Identity.Layout.Layers(); n != want {
		t.Errorf("%d units moved, want %d", n, want)
	}
	spec = w.Spec("nothing to move", 7, 8, 16)
	spec.Have = []bool{true, true}
	w.expect(ticket.Done, spec)
	spec = w.Spec("has a partly filled block", 7, 30, 24)
	spec.Have = []bool{7: true}
	w.expect(ticket.Refused, spec)
}

// resume asks a second time for what a broken transfer has not brought.
func resume(t *testing.T, f Factory, w *World, ch *Chaos) {
	spec := w.Spec("resume", 7, 30, 0)
	ch.Arm(Rule{Step: Rows, To: ToReceiver, Nth: 9, Action: Kill})
	in := w.request(spec)
	w.ended(ticket.Dead, in)
	check(t, in.Revoke(t.Context()))
	ch.Heal()
	done := in.Stored().Len()
	spec.Stored = in.Stored()
	c, err := w.request(spec).Wait(t.Context())
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
		spec := w.Spec("revoked", int32(n), 160, 0)
		in := w.request(spec)
		time.Sleep(time.Duration(n) * w.RConfig.KeepAlive / 30)
		check(t, in.Revoke(t.Context()))
		w.Pool.Reclaim(spec.Dest)
		before := w.Pool.Stores()
		w.ended(ticket.Cancelled, in)
		w.Empty(w.RConfig.PeerSilence)
		if now := w.Pool.Stores(); now != before {
			t.Errorf("%d stores after the fence", now-before)
		}
	}
	w.allEnded(ticket.Cancelled)
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
	acks := ch.counter(RevokeAck)
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
	in := w.request(w.Spec("revoked", 1, 9, 0))
	<-inside
	revoked := make(chan error, 1)
	go func() { revoked <- in.Revoke(t.Context()) }() // over shared memory it waits for the acknowledgement
	time.Sleep(w.RConfig.KeepAlive)
	if acks() > 0 {
		t.Error("acknowledged while a load was running")
	}
	close(leave)
	check(t, <-revoked)
	w.Empty(w.RConfig.PeerSilence)
	if n := acks(); n != 1 {
		t.Errorf("%d acknowledgements", n)
	}
}

// revokeStalled: a link that takes no bytes does not hold the fence up.
func revokeStalled(t *testing.T, f Factory, w *World, ch *Chaos) {
	ch.Arm(Rule{Step: Rows, To: ToReceiver, Nth: 2, Action: Stall})
	spec := w.Spec("stalled", 1, 160, 0)
	in := w.request(spec)
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
	resends := ch.counter(Resend)
	ch.Arm(Rule{Step: Rows, To: ToReceiver, Times: 1 << 20, Action: FlipTail})
	err := w.Fetch(t.Context(), w.Spec("corrupt", 1, 4, 0))
	if kvconn.OutcomeOf(err, "") != ticket.Corrupt || !errors.Is(err, kvconn.ErrDigest) {
		t.Errorf("want corrupt by digest, have %v", err)
	}
	if n := w.Pool.Stores(); n != 0 {
		t.Errorf("%d stores", n)
	}
	if n, most := resends(), 3*w.RConfig.Resends; n == 0 || n > most {
		t.Errorf("%d resends, want 1..%d", n, most)
	}
	ch.Heal()
	w.expect(ticket.Done, w.Spec("again", 1, 4, 8))
}

// noRoom: a ticket too many is refused as no_space, by whichever side is full.
func noRoom(t *testing.T, f Factory, w *World, ch *Chaos) {
	hold := make(chan struct{})
	w.Answer = func(ctx context.Context, g *kvconn.Outgoing, src *Source) {
		<-hold
		w.Compute(ctx, g, src)
	}
	in := w.request(w.Spec("first", 1, 9, 0))
	w.ended(ticket.NoSpace, w.request(w.Spec("second", 1, 9, 8)))
	close(hold)
	w.ended(ticket.Done, in)
}

// fair: a short ticket does not wait for a long one that came before it. Both
// have queued all that they have before the sender's first block goes out.
func fair(t *testing.T, f Factory, w *World, ch *Chaos) {
	var queued sync.WaitGroup
	queued.Add(2)
	begun, both := make(chan struct{}), make(chan struct{})
	begin := sync.OnceFunc(func() { close(begun) })
	w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *Source) {
		src.Hook = func(layer, index int) error {
			begin()
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
	long := w.request(w.Spec("long", 1, 240, 0))
	<-begun
	short := w.request(w.Spec("short", 1, 8, 100))
	queued.Wait()
	close(both)
	w.ended(ticket.Done, short)
	w.ended(ticket.Done, long)
	ch.Trace(nil)
	if other := slices.IndexFunc(order, func(id uint64) bool { return id != order[0] }); other < 0 || order[len(order)-1] != order[0] {
		t.Errorf("the short ticket had to wait for the long one: %d", order)
	}
}

// marks: a lost unit is asked for without waiting for a timeout.
func marks(t *testing.T, f Factory, w *World, ch *Chaos) {
	for n := range 4 {
		ch.Arm(Rule{Step: Rows, To: ToReceiver, Nth: 3 * n, Times: 2, Action: Drop})
		w.expect(ticket.Done, w.Spec("lost", int32(n), 20, 8*n))
	}
	if n := w.Value(w.RMetrics, "xpyd_kvconn_resent_units_total", "receiver"); n < 8 {
		t.Errorf("%v units asked for again, 8 were lost", n)
	}
}

// idleCloses: a session without tickets ends in order, and Open makes another.
func idleCloses(t *testing.T, f Factory, w *World, ch *Chaos) {
	check(t, w.Fetch(t.Context(), w.Spec("first", 1, 9, 0)))
	<-w.open().Done()
	const ends = "xpyd_kvconn_session_ends_total"
	for _, reg := range []*prometheus.Registry{w.RMetrics, w.SMetrics} {
		w.within(w.RConfig.PeerSilence, func() bool { return w.Value(reg, ends, "") > 0 })
		if n, all := w.Value(reg, ends, "done"), w.Value(reg, ends, ""); n < 1 || n != all {
			t.Errorf("%v orderly ends of %v", n, all)
		}
	}
	check(t, w.Fetch(t.Context(), w.Spec("second", 1, 9, 8)))
}

// modelFails: the ticket ends, and the session goes on.
func modelFails(t *testing.T, f Factory, w *World, ch *Chaos) {
	fail := func(_ context.Context, o *kvconn.Outgoing, _ *Source) { o.Fail(ticket.Invalid, "no number") }
	w.Answer = answerTo("invalid", fail, w.Compute)
	s := w.open()
	w.expect(ticket.Invalid, w.Spec("invalid", 1, 9, 0))
	if over(s.Done()) {
		t.Error("the session is over")
	}
	f.friend(t, w, "after", 8)
}

// stranger: connections that speak something else are shut out in time and
// harm nobody.
func stranger(t *testing.T, f Factory, w *World, ch *Chaos) {
	for _, say := range []string{"", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", wireBanner, "xpyd-kv 4-4\n\x04\x01\x00\x00\xff\xff\xff\xffaaaabbbb",
		"xpyd-kv 0-999999999999\n", "xpyd-kv 7-9\n", wireBanner + string(slices.Repeat([]byte{0}, 64))} {
		c := w.rawConn(t, ch.Transport)
		check(t, c.SetDeadline(time.Now().Add(2*w.RConfig.HandshakeTimeout)))
		c.Write([]byte(say))
		if stays(c) {
			t.Errorf("%q: still connected", say)
		}
		c.Close()
	}
	w.expect(ticket.Done, w.Spec("friend", 1, 9, 0))
}

// stays reports whether a connection is still open at its read deadline.
func stays(c io.Reader) bool {
	_, err := io.Copy(io.Discard, c)
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
