package way

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
)

// gpus is a decode worker's choice among the ways to a prefill worker, both on GPUs:
// cudaipc, NCCL, pinned memory, TCP.
type gpus struct {
	*Chooser
	member *member
	fail   map[string]error         // by way
	hangs  map[string]chan struct{} // by way: opens of it end with that
	dialed []string                 // ways, in order
	said   string
}

func newGPUs(t *testing.T, setting string) *gpus {
	t.Helper()
	g := &gpus{fail: map[string]error{}, hangs: map[string]chan struct{}{}, member: &member{Peer{PeerID: kvconn.PeerID{ID: "p", Epoch: 7}, Machine: "boot/1",
		Addrs: map[string]string{"cudaipc": "cudaipc:x", "nccl": "nccl:10.0.0.1:9", "pinned": "pinned:y"}}, "10.0.0.1:9"}}
	linked := kind("nccl", false, nil)
	linked.OverNetwork = true
	kinds := []Kind{kind("cudaipc", true, nil), linked, kind("pinned", true, nil), Network(&fake{name: "tcp"})}
	g.Chooser = chooser(t, kinds, setting, opens(g.dial), g.member, func(s string) { g.said = s })
	return g
}

// lack says why this process has none of the ways, by its place.
func (g *gpus) lack(n int, why string) { g.cfg.Ways.ways[n].lacks = errors.New(why) }

type opens func(ctx context.Context, addr string) error

func (f opens) Open(ctx context.Context, addr string, _ kvconn.PeerID) (*kvconn.Session, error) {
	return nil, f(ctx, addr)
}

// dial fails as it should.
func (g *gpus) dial(ctx context.Context, addr string) error {
	name := map[string]string{"cudaipc:x": "cudaipc", "nccl:10.0.0.1:9": "nccl", "pinned:y": "pinned", "10.0.0.1:9": "tcp"}[addr]
	if name == "" {
		name = "nowhere:" + addr
	}
	g.dialed = append(g.dialed, name)
	if end := g.hangs[name]; end != nil {
		select {
		case <-end:
		case <-ctx.Done():
			return &kvconn.Error{Phase: kvconn.PhaseDial, Outcome: ticket.Cancelled, Err: ctx.Err()}
		}
	}
	return g.fail[name]
}

func (g *gpus) fetch(t *testing.T) error {
	t.Helper()
	g.dialed = nil
	_, err := g.Open(t.Context(), "10.0.0.1:9", kvconn.PeerID{ID: "p", Epoch: 7})
	return err
}

var (
	refused = &kvconn.Error{Phase: kvconn.PhaseHandshake, Outcome: ticket.Refused, Err: errors.New("no access")}
	mute    = &kvconn.Error{Phase: kvconn.PhaseDial, Outcome: ticket.Dead, Err: errors.New("connection refused")}
	silent  = &kvconn.Error{Phase: kvconn.PhaseHandshake, Outcome: ticket.Late, Err: errors.New("silent")}
)

// TestWays goes through all that can be wrong with each way, and with those behind it:
// the next one is taken, status says why none of the faster ones, each in its turn,
// and the metric why not the fastest.
func TestWays(t *testing.T) {
	type row struct {
		spoil  func(g *gpus)
		dialed string // "": it is not tried
		why    string
		reason Reason
	}
	near := []row{
		{func(*gpus) {}, "cudaipc", "", ""},
		{func(g *gpus) { g.fail["cudaipc"] = refused }, "cudaipc", "cudaipc: no access", Refused},
		{func(g *gpus) { g.fail["cudaipc"] = mute }, "cudaipc", "cudaipc: connection refused", Failed},
		{func(g *gpus) { g.lack(0, "no IPC here") }, "", "cudaipc: no IPC here", Memory},
		{func(g *gpus) { delete(g.member.Addrs, "cudaipc") }, "", "cudaipc: it does not offer it", Unoffered},
		{func(g *gpus) { g.member.Addrs["cudaipc"] = "nccl:10.0.0.1:9" }, "", "cudaipc: it does not offer it", Unoffered},
		{func(g *gpus) { g.member.Machine = "" }, "", "cudaipc: it does not offer it", Unoffered},
		{func(g *gpus) { g.member.Machine = "other/1" }, "", "cudaipc: on another machine", Apart},
		{func(g *gpus) { g.member.Machine = "boot/2" }, "", "cudaipc: of another user", User},
		{func(g *gpus) { g.member.Machine = "boot/1/net-4-f0" }, "", "cudaipc: its sockets are elsewhere: containers need one folder for both (kv.sockets)", Walled},
		{func(g *gpus) { g.cfg.Machine = "" }, "", "cudaipc: on another machine", Apart},
	}
	linked := []row{
		{func(*gpus) {}, "nccl", "", ""},
		{func(g *gpus) { g.fail["nccl"] = refused }, "nccl", "nccl: no access", Refused},
		{func(g *gpus) { g.fail["nccl"] = mute }, "nccl", "nccl: connection refused", Failed},
		{func(g *gpus) { g.lack(1, "no libnccl") }, "", "nccl: no libnccl", Memory},
		{func(g *gpus) { delete(g.member.Addrs, "nccl") }, "", "nccl: it does not offer it", Unoffered},
	}
	pinned := []row{
		{func(*gpus) {}, "pinned", "", ""},
		{func(g *gpus) { g.fail["pinned"] = refused }, "pinned", "pinned: no access", Refused},
		{func(g *gpus) { g.fail["pinned"] = mute }, "pinned", "pinned: connection refused", Failed},
		{func(g *gpus) { g.lack(2, "cannot pin") }, "", "pinned: cannot pin", Memory},
		{func(g *gpus) { delete(g.member.Addrs, "pinned") }, "", "pinned: it does not offer it", Unoffered},
	}
	for _, a := range near {
		for _, b := range linked {
			for _, c := range pinned {
				g, c := newGPUs(t, Auto), c
				for _, r := range []row{a, b, c} {
					r.spoil(g)
				}
				switch { // another machine rules both out
				case c.reason == Memory || c.reason == Unoffered:
				case g.member.Machine == "":
					c = row{nil, "", "pinned: it does not offer it", Unoffered}
				case a.reason == Apart:
					c = row{nil, "", "pinned: on another machine", Apart}
				case a.reason == User:
					c = row{nil, "", "pinned: of another user", User}
				case a.reason == Walled:
					c = row{nil, "", "pinned: its sockets are elsewhere: containers need one folder for both (kv.sockets)", Walled}
				}
				var dialed, why []string
				took, reason := "tcp", a.reason
				for n, r := range []row{a, b, c} {
					if r.dialed != "" {
						dialed = append(dialed, r.dialed)
					}
					if r.reason == "" {
						took = []string{"cudaipc", "nccl", "pinned"}[n]
						break
					}
					why = append(why, r.why)
				}
				if took == "tcp" {
					dialed = append(dialed, "tcp")
				}
				said := "p " + took
				if len(why) > 0 {
					said += " (" + strings.Join(why, "; ") + ")"
				}
				if err := g.fetch(t); err != nil || strings.Join(g.dialed, " ") != strings.Join(dialed, " ") || g.said != said {
					t.Errorf("%v, dialed %v, said %q; want %v, %q", err, g.dialed, g.said, dialed, said)
				}
				if n := testutil.ToFloat64(g.gauge.WithLabelValues(took, string(reason))); n != 1 || testutil.CollectAndCount(g.gauge) != 1 {
					t.Errorf("%s: the metric does not say %s, %q", said, took, reason)
				}
			}
		}
	}
}

// A peer that is in trouble is not asked again by a slower way.
func TestWaysEndAtTrouble(t *testing.T) {
	all := []string{"cudaipc", "nccl", "pinned", "tcp"}
	for n, name := range all {
		g := newGPUs(t, Auto)
		for _, faster := range all[:n] {
			g.fail[faster] = refused
		}
		g.fail[name] = silent
		if err := g.fetch(t); !errors.Is(err, silent) || len(g.dialed) != n+1 || g.said != "" {
			t.Errorf("%s is silent: %v after %v, said %q", name, err, g.dialed, g.said)
		}
	}
}

// Ways that have failed are left alone, longer each time, also where the fastest is
// ruled out without a try; then all are tried again, beside a request that takes the one
// that works, and the first that works is taken by the next.
func TestWaysAreTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, machine := range []string{"boot/1", "other/1"} {
			g := newGPUs(t, Auto)
			g.member.Machine = machine
			g.fail["cudaipc"], g.fail["nccl"], g.fail["pinned"] = refused, refused, mute
			faster := map[string]string{"boot/1": "cudaipc nccl pinned", "other/1": "nccl"}[machine]
			fetch := func(want string) {
				t.Helper()
				err := g.fetch(t)
				synctest.Wait()
				if err != nil || strings.Join(g.dialed, " ") != want {
					t.Errorf("%s: %v, dialed %v, want %s", machine, err, g.dialed, want)
				}
			}
			fetch(faster + " tcp")
			for _, wait := range []time.Duration{firstRetry, 2 * firstRetry, 4 * firstRetry} {
				fetch("tcp")
				time.Sleep(wait - time.Nanosecond)
				fetch("tcp")
				time.Sleep(time.Nanosecond)
				fetch("tcp " + faster)
			}
			clear(g.fail)
			g.fail["cudaipc"] = refused
			time.Sleep(lastRetry)
			fetch("tcp " + strings.TrimSuffix(faster, " pinned"))
			fetch("nccl")
			if !strings.HasPrefix(g.said, "p nccl (") {
				t.Errorf("%s: said %q", machine, g.said)
			}
			clear(g.fail)
			time.Sleep(lastRetry)
			fetch(map[string]string{"boot/1": "nccl cudaipc", "other/1": "nccl"}[machine])
			if machine == "boot/1" && g.said != "p cudaipc" {
				t.Errorf("%s: said %q", machine, g.said)
			}
		}
	})
}

// A faster way that takes its time to fail again takes no request's: one is tried at a time,
// and what it comes to counts only if no request has found out more.
func TestNoRequestWaitsForAFasterWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGPUs(t, Auto)
		g.fail["cudaipc"], g.fail["nccl"] = refused, refused
		fetch := func(want, said string) {
			t.Helper()
			began := time.Now()
			if err := g.fetch(t); err != nil || time.Since(began) > 0 {
				t.Errorf("%v after %v", err, time.Since(began))
			}
			synctest.Wait()
			if strings.Join(g.dialed, " ") != want || g.said != said {
				t.Errorf("dialed %v, said %q; want %s, %q", g.dialed, g.said, want, said)
			}
		}
		const slower = "p pinned (cudaipc: no access; nccl: no access)"
		fetch("cudaipc nccl pinned", slower)
		time.Sleep(firstRetry)
		end := make(chan struct{})
		g.hangs["nccl"] = end
		fetch("pinned cudaipc nccl", slower)
		fetch("pinned", slower)
		g.fail["pinned"] = mute
		const slowest = "p tcp (cudaipc: no access; nccl: no access; pinned: connection refused)"
		fetch("pinned tcp", slowest)
		close(end)
		synctest.Wait()
		if g.said != slowest {
			t.Errorf("said %q, want %q", g.said, slowest)
		}
		g.hangs["nccl"] = make(chan struct{})
		time.Sleep(lastRetry)
		fetch("tcp cudaipc nccl", slowest)
		g.Close() // does not wait for what hangs
		fetch("tcp", slowest)
	})
}

// A peer in trouble while a faster way is tried again says nothing of that way: it is left
// alone for longer, and the reason why it was not taken stays.
func TestTroubleBesideARequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGPUs(t, Auto)
		g.fail["cudaipc"] = refused
		for _, want := range []string{"cudaipc nccl", "nccl cudaipc"} {
			err := g.fetch(t)
			synctest.Wait()
			if err != nil || strings.Join(g.dialed, " ") != want || g.said != "p nccl (cudaipc: no access)" {
				t.Errorf("%v, dialed %v, said %q; want %s", err, g.dialed, g.said, want)
			}
			g.fail["cudaipc"] = silent
			time.Sleep(firstRetry)
		}
		if err := g.fetch(t); err != nil || len(g.dialed) != 1 {
			t.Errorf("%v, dialed %v", err, g.dialed)
		}
	})
}

// A forced way that does not lead to the peer is one error that says why, and nothing
// slower is taken.
func TestForcedWays(t *testing.T) {
	for _, setting := range []string{"cudaipc", "nccl", "pinned"} {
		g := newGPUs(t, setting)
		if err := g.fetch(t); err != nil || len(g.dialed) != 1 || g.dialed[0] != setting {
			t.Errorf("%s: %v, dialed %v", setting, err, g.dialed)
		}
		g.fail[setting] = refused
		if err := g.fetch(t); kvconn.OutcomeOf(err, "") != ticket.Incompatible || !strings.HasSuffix(err.Error(), ": kv.transport is "+setting+" here, which does not reach it: "+setting+": no access") || len(g.dialed) != 1 {
			t.Errorf("%s is refused: %v, dialed %v", setting, err, g.dialed)
		}
	}
}
