//go:build linux

package nccl_test

import (
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/kvconntest"
	"github.com/xpyd/xpyd/kvconn/kvconntest/fakegpu"
	"github.com/xpyd/xpyd/kvconn/stage"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

const silence = 800 * time.Millisecond

func short(r, s *kvconn.Config) {
	for _, c := range []*kvconn.Config{r, s} {
		c.PeerSilence, c.KeepAlive, c.RepairTimeout = silence, silence/4, silence/2
	}
}

// TestSlowDevice: devices that others keep busy for longer than a peer may be silent
// cost time and nothing else: neither a session nor a ticket. Of the connections that
// have something to push two have a slot; the others have nothing to say.
func TestSlowDevice(t *testing.T) {
	for _, side := range []string{"sender", "receiver"} {
		t.Run(side, func(t *testing.T) {
			r, s := fakegpu.Pair(t)
			many := func(r, s *kvconn.Config) {
				short(r, s)
				r.BulkConns, s.BulkConns = 8, 8
			}
			fakegpu.Run(t, r, s, over(t, r, s, stage.Ring{Slots: 2, SlotBytes: 4 << 10}), many, func(w *kvconntest.World) {
				session, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
				if err != nil {
					t.Fatal(err)
				}
				stall := s.StallLinks
				if side == "receiver" {
					stall = r.StallLinks
				}
				release := stall()
				stalled := time.AfterFunc(silence*3/2, release)
				defer stalled.Stop()
				defer release()
				began := time.Now()
				var all []*kvconn.Incoming
				for n := range 4 { // a connection pushes a ticket
					in, err := session.Request(t.Context(), w.Spec("slow", int32(n), 18, 8*n))
					if err != nil {
						t.Fatal(err)
					}
					all = append(all, in)
				}
				for _, in := range all {
					if _, err := in.Wait(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				if took := time.Since(began); took < silence {
					t.Errorf("it took %v: nothing was slow", took)
				}
				select {
				case <-session.Done():
					t.Error("the session is over")
				default:
				}
			})
		})
	}
}

// TestBrokenWay: when NCCL refuses a transfer its session ends at once, at both ends,
// and with it all that it holds; the ticket may be tried elsewhere.
func TestBrokenWay(t *testing.T) {
	r, s := fakegpu.Pair(t)
	fakegpu.Run(t, r, s, over(t, r, s, small), short, func(w *kvconntest.World) {
		session, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
		if err != nil {
			t.Fatal(err)
		}
		s.BreakLinks()
		began := time.Now()
		in, err := session.Request(t.Context(), w.Spec("broken", 1, 18, 0))
		if err != nil {
			t.Fatal(err)
		}
		_, err = in.Wait(t.Context())
		if o := kvconn.OutcomeOf(err, ""); o != ticket.Dead && o != ticket.Late {
			t.Errorf("%v, want dead or late", err)
		}
		select {
		case <-session.Done():
		default:
			t.Error("the session goes on")
		}
		if took := time.Since(began); took > 2*silence {
			t.Errorf("it ended after %v", took)
		}
	})
}

// TestSlowJoin: the two ends of a link may take longer to come together than a peer
// may be silent.
func TestSlowJoin(t *testing.T) {
	r, s := fakegpu.Pair(t)
	fakegpu.Run(t, r, s, over(t, r, s, small), short, func(w *kvconntest.World) {
		release := s.StallLinks()
		defer release()
		stalled := time.AfterFunc(silence*3/2, release)
		defer stalled.Stop()
		began := time.Now()
		if _, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took < silence {
			t.Errorf("it took %v: nothing was slow", took)
		}
		if err := w.Fetch(t.Context(), w.Spec("after", 1, 18, 0)); err != nil {
			t.Error(err)
		}
	})
}
