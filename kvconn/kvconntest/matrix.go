package kvconntest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// matrix collects the verdicts on faults.
type matrix struct {
	rows []phase

	mu      sync.Mutex
	columns []Action
	cells   map[cell]string
}

type cell struct {
	row    string
	column Action
}

// verdict is the result of a fault.
type verdict struct {
	outcome ticket.Outcome
	took    time.Duration // until the transfer it hit was over
	back    time.Duration // from the heal to the next complete transfer
	note    string
	late    error // what took too long
}

func (v verdict) String() string {
	s := fmt.Sprintf("%s %v", v.outcome, v.took.Round(time.Millisecond))
	if v.note != "" {
		s += ", " + v.note
	}
	if v.back > 0 {
		s += ", back " + v.back.Round(time.Millisecond).String()
	}
	return s
}

func (m *matrix) note(t testing.TB, row string, column Action, v verdict) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cells == nil {
		m.cells = map[cell]string{}
	}
	if !slices.Contains(m.columns, column) {
		m.columns = append(m.columns, column)
	}
	verdict := "ok"
	if t.Failed() || v.late != nil {
		verdict = "FAIL"
	}
	m.cells[cell{row, column}] = verdict + " " + v.String()
}

// String is the table, in the order of the protocol.
func (m *matrix) String() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	slices.SortFunc(m.columns, func(a, b Action) int {
		return cmp.Or(cmp.Compare(slices.Index(everyAction, a), slices.Index(everyAction, b)), cmp.Compare(a, b))
	})
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 1, ' ', 0)
	for _, c := range m.columns {
		fmt.Fprintf(w, "\t| %s", c)
	}
	for _, p := range m.rows {
		fmt.Fprintf(w, "\n%s", p.name)
		for _, c := range m.columns {
			fmt.Fprintf(w, "\t| %s", cmp.Or(m.cells[cell{p.name, c}], "-"))
		}
	}
	w.Flush()
	return b.String()
}

// phase is a step of the protocol at which faults are injected. Where both sides
// write such a frame, the name ends with the writer, r or s.
type phase struct {
	name string
	step Step
	to   Direction
	nth  int
	tune func(r, s *kvconn.Config)
	// fatal: losing or repeating this frame may fail the ticket; otherwise it must be
	// repaired.
	fatal bool
	// answer and drive, when set, replace the two sides of the transfer.
	answer answerFunc
	drive  func(w *World, ctx context.Context, spec kvconn.TicketSpec) error
	want   ticket.Outcome // of drive without harm; "" is done
	// process: real processes suffer here too.
	process bool
}

var everyAction = []Action{Kill, Pause, Stall, Drop, Duplicate, Reorder, Truncate, FlipHead, FlipBody, FlipTail, Slow, Partition, Blip}

func (p phase) actions() []Action {
	return slices.DeleteFunc(slices.Clone(everyAction), func(a Action) bool {
		return p.step == Banner && (a == Reorder || a == FlipHead) // text has neither
	})
}

func twoBulk(r, s *kvconn.Config) { r.BulkConns = 2 }

// batches makes frames of about three blocks each.
func batches(r, s *kvconn.Config) {
	s.BatchBytes = 3*layerOf(s.Identity.Layout, 0).BlockBytes() - 1
}

var phases = []phase{
	{name: "handshake-challenge-r", step: Challenged, to: ToSender, fatal: true},
	{name: "handshake-challenge-s", step: Challenged, to: ToReceiver, fatal: true},
	{name: "handshake-proof-r", step: Proved, to: ToSender, fatal: true},
	{name: "handshake-proof-s", step: Proved, to: ToReceiver, fatal: true},
	{name: "handshake-banner-r", step: Banner, to: ToSender, fatal: true},
	{name: "handshake-banner-s", step: Banner, to: ToReceiver, fatal: true},
	{name: "handshake-hello-r", step: Hello, to: ToSender, fatal: true, process: true},
	{name: "handshake-hello-s", step: Hello, to: ToReceiver, fatal: true, process: true},
	{name: "handshake-ready", step: Ready, to: ToSender, fatal: true, process: true},
	{name: "handshake-bind", step: Bind, to: ToSender, fatal: true, process: true},
	{name: "handshake-bound", step: Bound, to: ToReceiver, fatal: true, process: true},
	{name: "ticket", step: Ticket, to: ToSender, fatal: true, process: true},
	{name: "ticket-accepted", step: Accepted, to: ToReceiver, fatal: true, process: true},
	{name: "data-first", step: Rows, to: ToReceiver, process: true},
	{name: "data-middle", step: Rows, to: ToReceiver, nth: 7, process: true},
	{name: "data-last", step: Rows, to: ToReceiver, nth: 14, process: true},
	{name: "data-two-conns", step: Rows, to: ToReceiver, nth: 3, tune: twoBulk},
	{name: "data-batch", step: Rows, to: ToReceiver, nth: 2, tune: batches},
	{name: "data-sent", step: Sent, to: ToReceiver},
	{name: "data-sent-two-conns", step: Sent, to: ToReceiver, tune: twoBulk},
	{name: "resend", step: Resend, to: ToSender, fatal: true, answer: wrongOnce},
	{name: "revoke", step: Revoke, to: ToSender, fatal: true, answer: firstLayer, drive: (*World).revokeHalfway, want: ticket.Cancelled},
	{name: "revoke-ack", step: RevokeAck, to: ToReceiver, fatal: true, answer: firstLayer, drive: (*World).revokeHalfway, want: ticket.Cancelled},
	{name: "commit", step: Commit, to: ToReceiver, fatal: true, process: true},
	{name: "release", step: Received, to: ToSender, fatal: true, process: true},
	{name: "idle-ping", step: Ping, to: ToSender, fatal: true, process: true},
	{name: "idle-pong", step: Pong, to: ToReceiver, fatal: true},
	{name: "idle-beat", step: Beat, to: ToReceiver, process: true},
}

// faultCase injects one fault into a transfer, then heals and transfers again.
func faultCase(t *testing.T, f Factory, w *World, ch *Chaos, p phase, act Action) (v verdict) {
	slow := func(format string, args ...any) { v.late = errors.Join(v.late, fmt.Errorf(format, args...)) }
	idle := strings.HasPrefix(p.name, "idle")
	ch.Delay, ch.Blip = w.RConfig.KeepAlive/50, w.RConfig.KeepAlive
	limit := w.RConfig.HandshakeTimeout + w.RConfig.TicketTimeout + 2*w.RConfig.PeerSilence
	if idle {
		f.friend(t, w, "before", 0)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience*limit) // bounds what hangs; the clock judges
	defer cancel()
	if p.answer != nil {
		w.Answer = answerTo("during", p.answer, w.Compute)
	}
	drive := p.drive
	if drive == nil {
		drive = (*World).Fetch
	}
	ch.Arm(Rule{Step: p.step, To: p.to, Nth: p.nth, Action: act})
	start, began := w.Clock.Now(), time.Now()
	if idle {
		time.Sleep(3 * w.RConfig.KeepAlive)
	}
	err := drive(w, ctx, w.Spec("during", 100, 18, 16))
	v.took, v.outcome = time.Since(began), kvconn.OutcomeOf(err, "untyped")
	if took := w.Clock.Since(start); took >= limit {
		slow("not over after %v", took)
	}
	hit := w.within(w.RConfig.PeerSilence, func() bool { return ch.Hits() > 0 })
	if !hit && p.step != Sent && !f.outcomeIs(v.outcome, "") { // a ticket that is received first needs no marks
		slow("no frame was hit")
	}
	if err == nil && slices.Contains([]Step{Received, Sent, Ping, Pong, Beat}, p.step) { // it may show only now
		time.Sleep(w.RConfig.PeerSilence + 2*w.RConfig.KeepAlive)
	}
	unharmed := cmp.Or(p.want, ticket.Done)
	allowed := []ticket.Outcome{unharmed, ticket.Dead, ticket.Late, ticket.Corrupt, ticket.Incompatible}
	repaired := slices.Contains([]Action{Drop, Duplicate, Reorder}, act) && !p.fatal || act == FlipTail && p.step == Rows ||
		act == Slow || act == Blip
	apart := f.apart(err) // by a fault of the handshake, else by a slow machine
	meant := strings.HasPrefix(p.name, "handshake") && !repaired
	early := errors.Is(err, errEarly) || !f.Bubble && apart && !meant
	if early {
		slow("outcome %q: %v", v.outcome, err)
	} else if !apart && !slices.Contains(allowed, v.outcome) {
		t.Errorf("outcome %q: %v", v.outcome, err)
	}
	if repaired && !early && !f.outcomeIs(v.outcome, unharmed) {
		t.Errorf("must be repaired, not failed: %v", err)
	}
	known := w.long(time.Second)
	if p.want == ticket.Cancelled { // the revoke comes before the fault is known
		known += w.RConfig.PeerSilence + 2*w.RConfig.KeepAlive
	}
	w.Empty(known)
	ch.Heal()
	healed, began := w.Clock.Now(), time.Now()
	if err := f.settledFetch(t, w); err != nil {
		slow("peers do not work after the fault: %v", err)
	}
	v.back = time.Since(began)
	if back := w.Clock.Since(healed); back > w.long(recovery) {
		slow("peers worked again %v after the heal", back)
	}
	return v
}

var errEarly = errors.New("over before the revoke")

// recovery bounds the time from the end of a fault to the next good transfer.
const recovery = 2 * time.Second

// patience multiplies a deadline to the time after which something hangs, even on a
// machine that hardly runs us.
const patience = 20

// firstLayer pushes one layer and nothing more.
func firstLayer(ctx context.Context, o *kvconn.Outgoing, src *Source) {
	if o.Accept(src) == nil {
		o.Push(0, []int{0, 1, 2, 3, 4})
		<-ctx.Done()
	}
}

// revokeHalfway revokes once something has come, and checks that the fence does not
// wait for the peer. Only where the peer writes into the blocks itself does it wait,
// at most until the session ends and with it the peer's mapping.
func (w *World) revokeHalfway(ctx context.Context, spec kvconn.TicketSpec) error {
	in, err := w.requestFrom(ctx, w.Addr, w.SConfig.Identity.PeerID, spec)
	if err != nil {
		return w.typed(err)
	}
	for in.Stored().Len() == 0 && ctx.Err() == nil {
		select {
		case <-in.Done():
			return errEarly
		case <-time.After(w.RConfig.KeepAlive / 50):
		}
	}
	start := w.Clock.Now()
	if err := in.Revoke(ctx); err != nil {
		w.T.Errorf("revoke: %v", err)
	}
	limit := w.RConfig.KeepAlive
	if w.RConfig.Shared != nil {
		limit = w.RConfig.PeerSilence + 2*w.RConfig.KeepAlive
	}
	if took := w.Clock.Since(start); took > limit {
		w.T.Errorf("revoke took %v", took)
	}
	w.Pool.Reclaim(spec.Dest)
	_, err = in.Wait(ctx)
	return w.typed(err)
}

// settledFetch transfers on the healed transport. A session that the fault has
// wounded may have to be found dead first.
func (f Factory) settledFetch(t *testing.T, w *World) error {
	return f.tries(w, 3, func(n int) error {
		ctx, cancel := context.WithTimeout(t.Context(), 4*w.RConfig.TicketTimeout)
		defer cancel()
		return w.Fetch(ctx, w.Spec(fmt.Sprintf("after-%d", n), int32(200+n), 18, 32+8*(n%3)))
	})
}

// apart reports whether a session was refused because the two ends of the memory
// between the pools did not meet in time.
func (f Factory) apart(err error) bool {
	return f.Joined && kvconn.OutcomeOf(err, "") == ticket.Refused && strings.Contains(err.Error(), context.DeadlineExceeded.Error())
}

// tries calls do until it works, n times at most. On a real clock, where a loaded
// machine may take a peer for silent or late, the tries go on for as long as a
// recovery may take.
func (f Factory) tries(w *World, n int, do func(n int) error) error {
	start := w.Clock.Now()
	for try := 0; ; try++ {
		err := do(try)
		if err == nil || try+1 >= n && (f.Bubble || !f.outcomeIs(kvconn.OutcomeOf(err, ""), "") && !f.apart(err) || w.Clock.Since(start) > w.long(recovery)) {
			return err
		}
	}
}
