package kvconntest

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// Secrets of fleets besides the peers' own.
const (
	newerSecret = 0x43
	otherSecret = 0x44
)

func idOf(secrets ...byte) string { return ringOf(secrets...).IDs() }

func rings(receiver, sender []byte) func(r, s *kvconn.Config) {
	return func(r, s *kvconn.Config) { r.Ring, s.Ring = ringOf(receiver...), ringOf(sender...) }
}

// fleets are cases by the secrets of the two peers.
var fleets = []leafCase{
	{name: "no-secrets", tune: rings(nil, nil), run: works},
	{name: "receiver-has-none", tune: rings(nil, []byte{fleetSecret}), run: refused("fleet_secret", "(none)", idOf(fleetSecret))},
	{name: "sender-has-none", tune: rings([]byte{fleetSecret}, nil), run: refused("fleet_secret", idOf(fleetSecret), "(none)")},
	{name: "receiver-has-another", tune: rings([]byte{otherSecret}, []byte{fleetSecret}), run: refused("fleet_secret", idOf(otherSecret), idOf(fleetSecret))},
	{name: "sender-has-others", tune: rings([]byte{fleetSecret}, []byte{otherSecret, newerSecret}), run: refused("fleet_secret", idOf(fleetSecret), idOf(otherSecret, newerSecret))},
	{name: "receiver-is-ahead", tune: rings([]byte{newerSecret, fleetSecret}, []byte{fleetSecret}), run: works},
	{name: "sender-is-ahead", tune: rings([]byte{fleetSecret}, []byte{newerSecret, fleetSecret}), run: works},
	{name: "rotation", run: rotation},
	{name: "replayed-to-a-sender", run: replayedProof},
	{name: "replayed-to-a-receiver", run: replayedAnswer},
	{name: "reflected", run: reflected},
	{name: "echoed", run: echoed},
	{name: "named-and-not-had", run: named},
	{name: "passed-on", run: passedOn},
	{name: "bulk-of-another-member", run: bulkOfAnother},
	{name: "memory-for-nobody", run: memoryForNobody},
	{name: "old-receiver", run: oldReceiver},
	{name: "old-sender", run: oldSender},
	{name: "silent-strangers", tune: func(_, s *kvconn.Config) { s.MaxSessions = 4 }, run: silentStrangers},
	{name: "revoked-by-the-sender", run: revokedBy((*kvconn.Server).Revoke, func(w *World) *kvconn.Server { return w.Server }, "decode-0")},
	{name: "revoked-by-the-receiver", run: revokedBy((*kvconn.Receiver).Revoke, func(w *World) *kvconn.Receiver { return w.Receiver }, "prefill-0")},
}

// rotation: a new secret beside the old one, then alone, while the peers work. Open
// sessions stay open; a peer with only the old secret is refused at the end.
func rotation(t *testing.T, f Factory, w *World, ch *Chaos) {
	r, s := w.RConfig.Ring, w.SConfig.Ring
	again := func(what string, n int) {
		t.Helper()
		w.endSession()
		f.friend(t, w, what, 8*n)
	}
	f.friend(t, w, "before", 0)
	old, newer := secretOf(fleetSecret), secretOf(newerSecret)
	check(t, s.Set(newer, old))
	again("the sender has both", 1)
	check(t, r.Set(newer, old))
	again("both have both", 2)
	check(t, s.Set(newer))
	again("the sender has the new one alone", 3)
	open := w.open()
	check(t, r.Set(old))
	f.friend(t, w, "in the session that was open", 32)
	if over(open.Done()) {
		t.Error("the session has ended with its secret")
	}
	w.endSession()
	_, err := w.Receiver.Open(t.Context(), w.Addr, w.SConfig.Identity.PeerID)
	unproven(t, err, idOf(newerSecret))
	w.counted(t, "fleet_secret")
}

// endSession ends the receiver's session: the next one is new.
func (w *World) endSession() {
	w.Receiver.Revoke([]string{"prefill-0"})
	w.Receiver.Revoke(nil)
}

// silentStrangers: ten times as many connections as a server has places say nothing, or
// name the secret and no more. A friend beside them notices nothing, though each of its
// sessions is new; and the strangers hold no more connections than there are places.
func silentStrangers(t *testing.T, f Factory, w *World, ch *Chaos) {
	var strangers []*RawConn
	for n := range 10 * w.SConfig.MaxSessions {
		c := w.rawConn(t, ch.Transport)
		if strangers = append(strangers, c); n%2 > 0 {
			c.Write(Challenge(fleetSecret, kvconn.PeerID{ID: "eve", Epoch: 1}))
		}
		if n%w.SConfig.MaxSessions == w.SConfig.MaxSessions-1 {
			w.endSession()
			f.friend(t, w, "beside them", 8)
		}
	}
	there := 0
	for _, c := range strangers {
		c.SetReadDeadline(time.Now().Add(w.SConfig.KeepAlive / 4))
		if stays(c.r) {
			there++
		}
	}
	if there > w.SConfig.MaxSessions {
		t.Errorf("%d strangers are still connected", there)
	}
}

// revokedBy: a revoked peer's ticket ends as dead, its fence holds, and it gets no
// session until it is allowed again. Others notice nothing.
func revokedBy[S any](revoke func(S, []string), side func(w *World) S, id string) caseFunc {
	return func(t *testing.T, f Factory, w *World, ch *Chaos) {
		w.Answer = answerTo("during", firstLayer, w.Compute)
		f.friend(t, w, "before", 0)
		s := w.open()
		spec := w.Spec("during", 100, 18, 16)
		in, err := s.Request(t.Context(), spec)
		check(t, err)
		w.Until("the first layer", func() bool { return in.Stored().Len() > 0 })
		revoke(side(w), []string{"somebody-else"})
		if over(s.Done()) {
			t.Error("ended by another's revocation")
		}
		revoke(side(w), []string{"nobody", id})
		if _, err := in.Wait(t.Context()); !f.outcomeIs(kvconn.OutcomeOf(err, ""), ticket.Dead) {
			t.Errorf("want dead, have %v", err)
		}
		check(t, in.Revoke(t.Context()))
		w.Pool.Reclaim(spec.Dest)
		w.Empty(w.RConfig.PeerSilence + w.long(time.Second))
		_, err = w.Receiver.Open(t.Context(), w.Addr, w.SConfig.Identity.PeerID)
		differs(t, err, ticket.Incompatible, "revoked")
		w.counted(t, "revoked")
		revoke(side(w), nil)
		f.friend(t, w, "allowed again", 32)
	}
}
