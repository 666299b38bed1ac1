package kvconntest

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/kvlayout"
)

// negotiations are handshakes that agree, convert or refuse.
var negotiations = []leafCase{
	{name: "same-version", run: speaks(kvconn.ProtocolMax)},
	{name: "older-receiver", tune: func(r, s *kvconn.Config) { r.ProtocolMin = past }, run: speaks(kvconn.ProtocolMax)},
	{name: "older-sender", tune: func(r, s *kvconn.Config) { s.ProtocolMin = past }, run: speaks(kvconn.ProtocolMax)},
	{name: "newer-receiver", tune: func(r, s *kvconn.Config) { r.ProtocolMax = future }, run: speaks(kvconn.ProtocolMax)},
	{name: "newer-sender", tune: func(r, s *kvconn.Config) { s.ProtocolMax = future }, run: speaks(kvconn.ProtocolMax)},
	{name: "no-common-version-receiver-behind", tune: func(r, s *kvconn.Config) { r.ProtocolMin, r.ProtocolMax = 1, past },
		run: refused("protocol", protocols(1, past), protocols(kvconn.ProtocolMin, kvconn.ProtocolMax))},
	{name: "no-common-version-sender-behind", tune: func(r, s *kvconn.Config) { s.ProtocolMin, s.ProtocolMax = 1, past },
		run: refused("protocol", protocols(kvconn.ProtocolMin, kvconn.ProtocolMax), protocols(1, past))},
	{name: "no-common-version-receiver-ahead", tune: func(r, s *kvconn.Config) { r.ProtocolMin, r.ProtocolMax = future, future+1 },
		run: refused("protocol", protocols(future, future+1), protocols(kvconn.ProtocolMin, kvconn.ProtocolMax))},
	{name: "no-common-version-sender-ahead", tune: func(r, s *kvconn.Config) { s.ProtocolMin, s.ProtocolMax = future, future+1 },
		run: refused("protocol", protocols(kvconn.ProtocolMin, kvconn.ProtocolMax), protocols(future, future+1))},
	{name: "model", tune: func(r, s *kvconn.Config) { s.Identity.ModelFingerprint = "other" }, run: refused("model_fingerprint", "model", "other")},
	{name: "tokenizer", tune: func(r, s *kvconn.Config) { s.Identity.TokenizerFingerprint = "other" }, run: refused("tokenizer_fingerprint", "tokenizer", "other")},
	{name: "numerics", tune: func(r, s *kvconn.Config) { s.Identity.Numerics = "test-2" }, run: refused("numerics", "test-1", "test-2")},
	{name: "dtype", tune: func(r, s *kvconn.Config) { s.Identity.Layout.Groups[0].DType = "bf16" }, run: refused("layout.groups[0].dtype", "f32", "bf16")},
	{name: "heads", tune: func(r, s *kvconn.Config) { s.Identity.Layout.Groups[0].Heads = kvlayout.Heads{Count: 4, Total: 4} }, run: refused("layout.groups[0].heads", "0+2 of 2", "0+4 of 4")},
	{name: "block-size-is-converted", tune: func(r, s *kvconn.Config) { s.Identity.Layout.BlockTokens = 16 }, run: anotherSize},
	{name: "two-groups", tune: twoGroups, run: works},
	{name: "four-bulk-connections", tune: func(r, s *kvconn.Config) { r.BulkConns = 4; s.BatchBytes = 1 }, run: works},
	{name: "other-epoch", run: func(t *testing.T, f Factory, w *World, ch *Chaos) {
		w.SConfig.Identity.Epoch = 9 // what we expect; the sender says 1
		differs(t, w.Fetch(t.Context(), w.Spec("epoch", 1, 9, 0)), ticket.Dead, "epoch")
	}},
}

func twoGroups(r, s *kvconn.Config) {
	for _, c := range []*kvconn.Config{r, s} {
		l := &c.Identity.Layout
		l.Groups = append(l.Groups, kvlayout.Group{Kind: kvlayout.Window, Layers: kvlayout.Run(l.Layers(), 2), Planes: kvlayout.KV(4),
			Heads: kvlayout.Heads{Count: 1, Total: 1}, DType: kvlayout.BF16, Window: 128})
	}
}

// past and future are the versions before and after all of this build's.
const (
	past   = kvconn.ProtocolMin - 1
	future = kvconn.ProtocolMax + 1
)

func protocols(lo, hi int) string { return fmt.Sprintf("%d-%d", lo, hi) }

// speaks expects transfers to work, in frames of one version only.
func speaks(version int) caseFunc {
	return func(t *testing.T, f Factory, w *World, ch *Chaos) {
		var frames atomic.Int64
		ch.Trace(func(_ int, to Direction, step Step, frame []byte) {
			if step != Banner && step != Challenged && step != Proved && int(frame[0]) != version {
				t.Errorf("%s %s under version %d, want %d", step, to, frame[0], version)
			}
			frames.Add(1)
		})
		works(t, f, w, ch)
		ch.Trace(nil)
		if frames.Load() < 20 {
			t.Errorf("%d frames seen", frames.Load())
		}
	}
}

func works(t *testing.T, f Factory, w *World, ch *Chaos) {
	for n := range 3 {
		w.expect(ticket.Done, w.Spec("works", int32(n), 41, 16*n))
	}
}

// anotherSize expects transfers to work, or the session to be refused where slots have
// one size.
func anotherSize(t *testing.T, f Factory, w *World, ch *Chaos) {
	if !f.Joined {
		works(t, f, w, ch)
		return
	}
	if _, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{}); kvconn.OutcomeOf(err, "") != ticket.Refused {
		t.Errorf("want refused, have %v", err)
	}
}

// refused expects the same refusal on both sides, each with its own value
// first; the sender's shows in its metrics.
func refused(field, ours, theirs string) caseFunc {
	return func(t *testing.T, f Factory, w *World, ch *Chaos) {
		d := differs(t, w.Fetch(t.Context(), w.Spec("refused", 1, 9, 0)), ticket.Incompatible, field)
		if d.Ours != ours || d.Theirs != theirs {
			t.Errorf("have %+v, want ours %s, theirs %s", d, ours, theirs)
		}
		if n := w.Pool.Stores(); n != 0 {
			t.Errorf("%d stores", n)
		}
		label, _, _ := strings.Cut(field, "[")
		w.within(w.RConfig.PeerSilence, func() bool { return w.Value(w.SMetrics, refusals, label) > 0 })
		if r, s := w.Value(w.RMetrics, refusals, label), w.Value(w.SMetrics, refusals, label); r != 1 || s != 1 {
			t.Errorf("refusals counted for %s: %v by the receiver, %v by the sender", field, r, s)
		}
	}
}

const refusals = "xpyd_kvconn_handshake_refusals_total"

// differs checks that an error names the field by which the peers do not match, and
// returns what it says.
func differs(t testing.TB, err error, want ticket.Outcome, field string) kvconn.Incompatible {
	t.Helper()
	var d *kvconn.Incompatible
	if !errors.As(err, &d) || kvconn.OutcomeOf(err, "") != want || d.Field != field {
		t.Fatalf("want %s by %s, have %v", want, field, err)
	}
	return *d
}
