package kvconntest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// Scene is a short deterministic session of a world. It is recorded once for each released
// version of the protocol; later builds play either side of it against the recorded other
// one.
type Scene struct {
	Name string
	tune func(r, s *kvconn.Config)
	// prepare may change the sender's part, which is inOrder.
	prepare func(w *World)
	// drive is the receiver's part, with its checks.
	drive func(w *World)
	// ends is how the sender's tickets end, in any order.
	ends []ticket.Outcome
	// refused is the handshake field that both sides must name.
	refused string
}

// World starts the scene's two sides over tr.
func (s Scene) World(t testing.TB, tr kvconn.Transport) *World {
	w := NewWorld(t, tr, "", 1, func(rc, sc *kvconn.Config) {
		for _, c := range []*kvconn.Config{rc, sc} {
			c.Identity.Layout = kvlayout.Plain(2, 2, 2, 4, kvlayout.F32)
			c.Identity.Build = "recorded"
			c.TicketTimeout = time.Minute
			c.Ring = nil // so that both ends say the same each time; and the first releases had none
		}
		if s.tune != nil {
			s.tune(rc, sc)
		}
	})
	w.Answer = inOrder
	if s.prepare != nil {
		s.prepare(w)
	}
	return w
}

// Drive plays the receiver's part.
func (s Scene) Drive(w *World) {
	if s.drive != nil {
		s.drive(w)
		return
	}
	err := w.Fetch(w.T.Context(), w.Spec("refused", 1, 4, 0))
	var d *kvconn.Incompatible
	if kvconn.OutcomeOf(err, "") != ticket.Incompatible || !errors.As(err, &d) || !strings.HasPrefix(d.Field, s.refused) {
		w.T.Errorf("want incompatible by %s, have %v", s.refused, err)
	}
}

// Judge compares how the sender's tickets have ended; call it when they have.
func (s Scene) Judge(w *World) {
	got, want := w.Ends(), slices.Clone(s.ends)
	slices.Sort(got) // handlers end when they end
	slices.Sort(want)
	if !slices.Equal(got, want) {
		w.T.Errorf("the sender's tickets ended %v, want %v", got, want)
	}
	if s.refused != "" && w.Value(w.SMetrics, "xpyd_kvconn_handshake_refusals_total", s.refused) != 1 {
		w.T.Errorf("the sender did not count a refusal for %s", s.refused)
	}
}

// inOrder is World.Compute with the blocks in the prompt's order.
func inOrder(_ context.Context, o *kvconn.Outgoing, src *Source) {
	pushInOrder(o, src, src.Layout.Layers())
}

func pushInOrder(o *kvconn.Outgoing, src kvconn.Source, layers int) {
	if o.Accept(src) != nil {
		return
	}
	all := make([]int, len(o.Ticket().Dest))
	for i := range all {
		all[i] = i
	}
	for l := range layers {
		o.Push(l, all)
	}
	o.Commit([]byte("commit of " + o.Ticket().RequestID))
}

func answers(answer answerFunc) func(w *World) { return func(w *World) { w.Answer = answer } }

// Scenes are what is recorded of a released version.
var Scenes = []Scene{
	{Name: "push", ends: []ticket.Outcome{ticket.Done, ticket.Done}, drive: func(w *World) {
		w.expect(ticket.Done, w.Spec("ten", 1, 10, 0))
		w.expect(ticket.Done, w.Spec("four", 2, 4, 8))
	}},
	{Name: "batch", tune: batches, ends: []ticket.Outcome{ticket.Done}, drive: func(w *World) {
		w.expect(ticket.Done, w.Spec("batched", 10, 22, 0))
	}},
	{Name: "two-bulk", tune: twoBulk, ends: []ticket.Outcome{ticket.Done}, drive: func(w *World) {
		w.expect(ticket.Done, w.Spec("twelve", 3, 12, 0))
	}},
	{Name: "set-delta", ends: []ticket.Outcome{ticket.Done}, drive: func(w *World) {
		spec := w.Spec("delta", 4, 18, 0)
		spec.Have = []bool{true, false, true, false, false}
		w.expect(ticket.Done, spec)
	}},
	{Name: "resend", prepare: answers(wrongOnce), ends: []ticket.Outcome{ticket.Done}, drive: func(w *World) {
		w.expect(ticket.Done, w.Spec("resent", 5, 8, 0))
	}},
	{Name: "revoke-resume", prepare: answers(answerTo("revoked", firstBlocks, inOrder)), ends: []ticket.Outcome{ticket.Cancelled, ticket.Done}, drive: driveResume},
	{Name: "failed", prepare: answers(func(_ context.Context, o *kvconn.Outgoing, _ *Source) {
		o.Fail(ticket.Outcome(o.Ticket().RequestID), "as told")
	}), ends: failures, drive: func(w *World) {
		for n, o := range failures {
			w.expect(o, w.Spec(string(o), 6, 4, 4*n))
		}
	}},
	{Name: "shed", prepare: answers(func(_ context.Context, o *kvconn.Outgoing, _ *Source) { o.Fail(ticket.Shed, "as told") }),
		ends: []ticket.Outcome{ticket.Shed}, drive: func(w *World) { w.expect(ticket.Shed, w.Spec("shed", 10, 4, 0)) }},
	{Name: "goaway", ends: []ticket.Outcome{ticket.Done}, prepare: func(w *World) {
		w.Answer = func(ctx context.Context, o *kvconn.Outgoing, src *Source) {
			over, cancel := context.WithCancel(ctx)
			cancel()
			w.Server.Drain(over) // says goodbye, and does not wait
			inOrder(ctx, o, src)
		}
	}, drive: func(w *World) {
		w.expect(ticket.Done, w.Spec("last", 7, 4, 0))
		w.expect(ticket.NoSpace, w.Spec("too-late", 7, 4, 4))
	}},
	{Name: "idle", ends: []ticket.Outcome{ticket.Done, ticket.Done}, drive: func(w *World) {
		w.expect(ticket.Done, w.Spec("before", 8, 4, 0))
		time.Sleep(3 * w.RConfig.KeepAlive)
		w.expect(ticket.Done, w.Spec("after", 9, 4, 4))
	}},
	{Name: "refuse-protocol", refused: "protocol", tune: func(r, s *kvconn.Config) { r.ProtocolMin, r.ProtocolMax = 200, 201 }},
	{Name: "refuse-model", refused: "model_fingerprint", tune: func(r, s *kvconn.Config) { s.Identity.ModelFingerprint = "other" }},
	{Name: "refuse-tokenizer", refused: "tokenizer_fingerprint", tune: func(r, s *kvconn.Config) { s.Identity.TokenizerFingerprint = "other" }},
	{Name: "refuse-numerics", refused: "numerics", tune: func(r, s *kvconn.Config) { s.Identity.Numerics = "other" }},
	{Name: "refuse-dtype", refused: "layout.groups", tune: func(r, s *kvconn.Config) { s.Identity.Layout.Groups[0].DType = "f16" }},
	{Name: "refuse-heads", refused: "layout.groups", tune: func(r, s *kvconn.Config) { s.Identity.Layout.Groups[0].Heads = kvlayout.Heads{Count: 4, Total: 4} }},
	{Name: "refuse-epoch", refused: "epoch", drive: func(w *World) {
		w.SConfig.Identity.Epoch = 9 // what we expect; the sender says 1
		differs(w.T, w.Fetch(w.T.Context(), w.Spec("dead", 1, 4, 0)), ticket.Dead, "epoch")
	}},
	{Name: "refuse-id", refused: "id", drive: func(w *World) {
		w.SConfig.Identity.ID = "prefill-9"
		differs(w.T, w.Fetch(w.T.Context(), w.Spec("dead", 1, 4, 0)), ticket.Dead, "id")
	}},
}

var failures = []ticket.Outcome{ticket.NoSpace, ticket.Late, ticket.Dead, ticket.Corrupt, ticket.Cancelled, ticket.Refused, ticket.Invalid}

// wrongOnce is inOrder with a wrong byte in the first load of layer 0, block 1.
func wrongOnce(_ context.Context, o *kvconn.Outgoing, src *Source) {
	pushInOrder(o, &flaky{Source: src}, src.Layout.Layers())
}

// flaky is read by one bulk writer only: it has no lock.
type flaky struct {
	kvconn.Source
	done bool
}

func (f *flaky) Load(layer, index, firstPos, rows int, dst []byte, digests []uint64) error {
	err := f.Source.Load(layer, index, firstPos, rows, dst, digests)
	if layer == 0 && index == 1 && !f.done {
		f.done = true
		dst[0] ^= 1
	}
	return err
}

// firstBlocks pushes three blocks of one layer and nothing more.
func firstBlocks(ctx context.Context, o *kvconn.Outgoing, src *Source) {
	if o.Accept(src) == nil {
		o.Push(0, []int{0, 1, 2})
		<-ctx.Done()
	}
}

// driveResume revokes a ticket of which one layer has come, then asks for the
// rest.
func driveResume(w *World) {
	spec := w.Spec("revoked", 10, 11, 0)
	in := w.request(spec)
	w.Until("the first layer", func() bool { return in.Stored().Len() >= 3 })
	check(w.T, in.Revoke(w.T.Context()))
	w.Empty(hangs) // the acknowledgement comes before the next ticket goes
	spec.RequestID, spec.Stored = "resumed", in.Stored()
	w.expect(ticket.Done, spec)
}
