//go:build linux

package nccl_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kernels"
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

// failing is a device whose communicators fail while they are made: no room in /dev/shm,
// another version at the peer, ...
type failing struct{ fakegpu.GPU }

type failed struct {
	kernels.Link
	at chan struct{}
}

var errSystem = errors.New("ncclCommInitRankConfig: unhandled system error")

func (l failed) Failed() <-chan struct{}     { return l.at }
func (l failed) Ready(context.Context) error { return errSystem }

func (f failing) OpenLink(id []byte, end kernels.LinkEnd, bytes int64) (kernels.Link, error) {
	l, err := f.GPU.OpenLink(id, end, bytes)
	if err != nil {
		return nil, err
	}
	at := make(chan struct{})
	close(at)
	return failed{l, at}, nil
}

// TestNCCLFails: where NCCL fails at one end while the session is made, it is refused for
// that end's reason, so that another way is taken, and at once: an abort may hang.
func TestNCCLFails(t *testing.T) {
	for _, side := range []string{"receiver", "sender"} {
		t.Run(side, func(t *testing.T) {
			r, s := fakegpu.Pair(t)
			var ours, theirs kernels.Linker = r, s
			if side == "receiver" {
				ours = failing{r}
			} else {
				theirs = failing{s}
			}
			release := []func(){r.HangAborts(), s.HangAborts()}
			fakegpu.Run(t, r, s, between(t, ours, theirs, small), nil, func(w *kvconntest.World) {
				defer release[0]()
				defer release[1]()
				began := time.Now()
				for range 3 {
					_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
					if kvconn.OutcomeOf(err, "") != ticket.Refused || !strings.Contains(err.Error(), errSystem.Error()) {
						t.Errorf("opened: %v", err)
					}
				}
				if took := time.Since(began); took > 5*time.Second {
					t.Errorf("it was known after %v, as if nothing had failed", took)
				}
			})
		})
	}
}

// TestNobodyMeets: two ends that do not come together, as behind a firewall, are refused as
// well, whoever gives up first.
func TestNobodyMeets(t *testing.T) {
	for _, limit := range []time.Duration{200 * time.Millisecond, 2 * time.Second} {
		t.Run(limit.String(), func(t *testing.T) {
			t.Parallel()
			r, s := fakegpu.Pair(t)
			tune := func(r, s *kvconn.Config) { r.HandshakeTimeout, s.HandshakeTimeout = limit, limit }
			fakegpu.Run(t, r, s, over(t, r, s, small), tune, func(w *kvconntest.World) {
				defer r.StallLinks()()
				_, err := w.Receiver.Open(t.Context(), w.Addr, kvconn.PeerID{})
				if kvconn.OutcomeOf(err, "") != ticket.Refused || !strings.Contains(err.Error(), "join") {
					t.Errorf("opened: %v", err)
				}
			})
		})
	}
}
